"""The readable form of weights by block: parts, numbers, ranges, names, presets."""

from __future__ import annotations

import pytest

from maulstick.adapters.block_table import read_block_table
from maulstick.adapters.block_weights import check_weights_against_modules, numbered_blocks, parse_block_weights
from maulstick.adapters.blocks import SD_BLOCKS, SDXL_BLOCKS
from maulstick.errors import OptionError

SD_MODULES = dict.fromkeys((1, 2, 4, 5, 7, 8, 12, *range(16, 25)), 12)
FLUX = numbered_blocks({"double": 19, "single": 38})


def values(*entries, layout=SD_BLOCKS, threshold=None):
    return read_block_table(layout, entries, threshold).values


def test_parts_ranges_and_curves_together():
    weights = values("down.4-5=0.5", "mid=0", "up=sine")
    expected = parse_block_weights(
        SD_BLOCKS, down_lr_weight=[1, 1, 1, 1, 0.5, 0.5, 1, 1, 1, 1, 1, 1], up_lr_weight="sine"
    )
    assert weights == (*expected[:12], 0.0, *expected[13:])


def test_a_part_of_its_own_equals_sd_scripts_form():
    for value in ("0.25", "reverse_linear+0.5", "0,1,2,3,4,5,6,7,8,9,10,11"):
        assert values(f"up={value}") == parse_block_weights(SD_BLOCKS, up_lr_weight=value)
    assert values("mid=0.1,0.2,0.3", layout=SDXL_BLOCKS) == parse_block_weights(
        SDXL_BLOCKS, mid_lr_weight="0.1,0.2,0.3"
    )


@pytest.mark.parametrize("key", ["up.3", "up.3-3", "OUT03", "block.16", "block.16-16"])
def test_every_way_to_name_a_block(key):
    assert values(f"{key}=0.5") == tuple(0.5 if index == 16 else 1.0 for index in range(25))


def test_a_curve_runs_over_the_range_it_is_given_for():
    assert values("up.6-8=linear")[19:22] == (0.0, 0.5, 1.0)
    assert values("up.6-8=0.1,0.2,0.3")[18:23] == (1.0, 0.1, 0.2, 0.3, 1.0)


def test_other_means_every_block_that_is_not_named():
    assert values("other=0", "up.6-11=1", "mid=0.5") == (0.0,) * 12 + (0.5,) + (0.0,) * 6 + (1.0,) * 6
    # The embeddings and the output layers of SDXL are in no part.
    sdxl = values("other=0", "mid.1=1", layout=SDXL_BLOCKS)
    assert [index for index, weight in enumerate(sdxl) if weight] == [0, 11, 22]


def test_the_threshold_counts_here_too():
    assert values("up.6-8=0.1,0.2,0.3", threshold=0.2)[19:22] == (0.0, 0.0, 0.3)


def test_families_whose_parts_are_plain_rows():
    weights = values("double=0", "single.30-37=0.5", layout=FLUX)
    assert weights == (0.0,) * 19 + (1.0,) * 30 + (0.5,) * 8
    assert values("block.18-19=0", layout=FLUX)[17:21] == (1.0, 0.0, 0.0, 1.0)


def test_presets_are_training_maps():
    weights = read_block_table(SD_BLOCKS, ["OUTALL"])
    assert [index for index, weight in enumerate(weights.values) if weight == 1.0] == list(range(16, 25))
    assert weights.text_encoder == 1.0
    half = read_block_table(SD_BLOCKS, ["ALL0.5"])
    assert (half.text_encoder, half.values[12]) == (0.5, 0.5)
    assert check_weights_against_modules(half, SD_MODULES, SD_BLOCKS) == []
    with_convolutions = dict.fromkeys(range(1, 25), 12)
    assert check_weights_against_modules(half, with_convolutions, SD_BLOCKS) == [
        "block_lr: the list has no value for IN03, IN06, IN09-IN11, OUT00-OUT02, which means 0: their modules are left "
        "out."
    ]
    listed = read_block_table(SD_BLOCKS, ["0," + ",".join(["1"] * 12) + ",0.5" + ",0" * 12])
    assert (listed.text_encoder, listed.values) == (0.0, (1.0,) * 12 + (0.5,) + (0.0,) * 12)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["dwon=1"], "'dwon' names no block. Did you mean 'down'.*Expected block, down, mid, up, other"),
        (["down.x=1"], "'down.x' names no block"),
        (["IN12=1"], "'IN12' names no block. Did you mean 'IN1"),
        (["down.12=1"], "'down.12' names a block that is not there: down has the blocks 0 to 11"),
        (["down.10-12=1"], "'down.10-12' names a block that is not there"),
        (["down.5-4=1"], "'down.5-4' runs backwards. Write down.4-5"),
        (["down=1", "IN04=0"], "IN04 is named by 'down' and by 'IN04'. Name each block once"),
        (["down.1-4=1", "down.4-5=0"], "IN04 is named by 'down.1-4' and by 'down.4-5'"),
        (["mid=sine"], 'block_lr "mid" = sine: a curve needs at least two blocks. Give a number'),
        (["up.1-3=1,2"], 'block_lr "up.1-3" has 2 values, but there are 3 blocks .OUT01 to OUT03'),
        (["up=cosin"], "'cosin' is neither a number nor a curve. Did you mean 'cosine'"),
        (["up=-1"], "block_lr \"up\": '-1' is not a number of 0 or more"),
        (["up", "down=1"], "block_lr 'up': expected KEY=VALUE, such as down.0-1=0.5 other=0, or a preset's name alone"),
        (["other=0", "other=1"], "'other' stands twice"),
        (["other=0", "block=1"], "'other' means no block"),
        (["other=sine"], 'block_lr "other" = sine: a curve needs at least two blocks'),
        (["OUTAL"], "block_lr: there is no preset 'OUTAL'. Did you mean 'OUTALL'.*Presets: NONE, ALL, INS"),
        (["1,1,1"], "block_lr has 3 values; expected 17 or 26 for SD"),
        (["R" + ",1" * 16], "'R' is drawn anew for pictures; training needs numbers"),
        (["X" + ",1" * 16], "'X' is drawn anew"),
        (["1,-1" + ",1" * 15], "block_lr: -1 is negative, but it multiplies a learning rate"),
    ],
)
def test_what_cannot_be_meant_is_named(entries, message):
    with pytest.raises(OptionError, match=message):
        read_block_table(SD_BLOCKS, entries)


def test_a_family_without_presets_does_not_offer_any():
    with pytest.raises(OptionError, match=r"expected KEY=VALUE, such as double\.0-1=0\.5 other=0\.$"):
        read_block_table(FLUX, ["up", "down=1"])
    with pytest.raises(OptionError, match=r"there is no preset 'OUTALL'. Expected a list"):
        read_block_table(FLUX, ["OUTALL"])
    with pytest.raises(OptionError, match=r"are for SD 1.x, SD 2.x and SDXL"):
        read_block_table(FLUX, ["1" + ",1" * 16])


# ---------------------------------------------------------------------------------------------------------------------
# Weights and modules


@pytest.mark.parametrize("key", ["down.0", "IN10", "down.9-11", "block.13-15"])
def test_a_weight_on_blocks_that_have_no_module_is_an_error(key):
    weights = read_block_table(SD_BLOCKS, [f"{key}=0.5"])
    with pytest.raises(
        OptionError, match=rf'block_lr "{key}": there is no module to train in .*with modules: IN01-IN02, IN04-'
    ):
        check_weights_against_modules(weights, SD_MODULES, SD_BLOCKS)


@pytest.mark.parametrize("weight", ["0", "1"])
def test_a_weight_that_changes_nothing_there_is_a_line(weight):
    """A zero leaves nothing out, and a one is what these blocks would have anyway."""
    weights = read_block_table(SD_BLOCKS, [f"down.9-11={weight}", "mid=0.5"])
    assert check_weights_against_modules(weights, SD_MODULES, SD_BLOCKS) == [
        "No module in IN09-IN11: the weights given for these blocks have no effect."
    ]


def test_a_one_is_a_wish_where_all_else_is_zero():
    weights = read_block_table(SD_BLOCKS, ["other=0", "down.9-11=1", "up.6-11=1"])
    with pytest.raises(OptionError, match=r'block_lr "down.9-11": there is no module to train in IN09-IN11'):
        check_weights_against_modules(weights, SD_MODULES, SD_BLOCKS)


def test_a_range_that_covers_some_empty_blocks_is_a_line():
    weights = read_block_table(SD_BLOCKS, ["down.6-8=0.5"])
    assert check_weights_against_modules(weights, SD_MODULES, SD_BLOCKS) == [
        "No module in IN06: the weights given for these blocks have no effect."
    ]
