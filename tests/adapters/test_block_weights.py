"""Learning-rate weights by block in sd-scripts' form, against sd-scripts' own results and in their improved corners."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.adapters.block_weights import (
    block_list,
    check_weights_against_modules,
    numbered_blocks,
    parse_block_weights,
    read_part_weights,
)
from maulstick.adapters.blocks import SD_BLOCKS, SDXL_BLOCKS
from maulstick.adapters.curves import CURVES, curve_weights
from maulstick.errors import OptionError
from tests.adapters.conftest import GOLDEN

GOLDEN_WEIGHTS = json.loads((GOLDEN / "lr_weights.json").read_text())
LAYOUTS = {"sd15": SD_BLOCKS, "sdxl": SDXL_BLOCKS}
# Modules of a LoRA for SD 1.x without 3x3 convolutions.
SD_MODULES = dict.fromkeys((1, 2, 4, 5, 7, 8, 12, *range(16, 25)), 12)


def as_numbers(text: str) -> object:
    """The same value as a TOML file would give it."""
    if "," in text:
        return [float(item or 0) for item in text.split(",")]
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("convert", [str, as_numbers], ids=["text", "toml"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_every_valid_input_gives_the_weights_of_sd_scripts(family, convert):
    rows = [row for row in GOLDEN_WEIGHTS if row["family"] == family]
    assert len(rows) > 50
    for row in rows:
        lists = {name: convert(value) for name, value in row["args"].items() if name.endswith("lr_weight")}
        threshold = row["args"].get("block_lr_zero_threshold")
        weights = parse_block_weights(
            LAYOUTS[family], **lists, block_lr_zero_threshold=None if threshold is None else float(threshold)
        )
        assert (None if weights is None else list(weights)) == row["weights"], row["args"]


@pytest.mark.parametrize(("layout", "value"), [(SD_BLOCKS, "0.5"), (SD_BLOCKS, 0.5), (SDXL_BLOCKS, [0.5])])
def test_a_single_number_means_all_blocks_of_its_part(layout, value):
    for part, blocks in layout.parts.items():
        weights = parse_block_weights(layout, **{f"{part}_lr_weight": value})
        assert [index for index, weight in enumerate(weights) if weight == 0.5] == list(blocks)
        assert {weight for index, weight in enumerate(weights) if index not in blocks} == {1.0}


def test_the_threshold_drops_what_equals_it_and_reaches_parts_that_are_not_given():
    weights = parse_block_weights(SD_BLOCKS, down_lr_weight="linear+1", block_lr_zero_threshold=1.0)
    assert weights[0] == 0
    assert weights[1:12] == pytest.approx([1 + n / 11 for n in range(1, 12)])
    assert set(weights[12:]) == {0.0}
    sdxl = parse_block_weights(SDXL_BLOCKS, mid_lr_weight="2", block_lr_zero_threshold=1.0)
    assert [index for index, weight in enumerate(sdxl) if weight] == [0, 10, 11, 12, 22]


def test_a_curve_with_a_negative_base_is_cut_at_zero():
    weights = parse_block_weights(SD_BLOCKS, up_lr_weight="linear+-0.5")
    assert weights[13:] == pytest.approx([0] * 6 + [n / 11 - 0.5 for n in range(6, 12)])


@given(st.sampled_from(CURVES), st.integers(2, 60), st.floats(-2, 2))
def test_curves_are_what_they_are_called(name, count, base):
    plain, lifted = (curve_weights(text, count, "up") for text in (name, f"{name}+{base!r}"))
    assert [value + base for value in plain] == lifted
    ends = {"sine": (0, 1), "linear": (0, 1), "cosine": (1, 0), "reverse_linear": (1, 0), "zeros": (0, 0)}
    assert (plain[0], plain[-1]) == ends[name]
    ordered = sorted(plain, reverse=name in ("cosine", "reverse_linear"))
    assert plain == ordered
    middle = plain[count // 2]
    share = (count // 2) / (count - 1)
    formulas = {"sine": math.sin(math.pi / 2 * share), "cosine": math.cos(math.pi / 2 * share), "linear": share}
    formulas |= {"reverse_linear": 1 - share, "zeros": 0.0}
    assert middle == pytest.approx(formulas[name], abs=1e-12)


TWELVE = r"Expected 12 numbers with commas between them, one number for all, or a curve \(sine, cosine, linear"


@pytest.mark.parametrize(
    ("layout", "given", "message"),
    [
        (
            SD_BLOCKS,
            {"down_lr_weight": "1,1,1"},
            rf"down_lr_weight has 3 values, .*12 blocks \(IN00 to IN11\)\. {TWELVE}",
        ),
        (SD_BLOCKS, {"down_lr_weight": [0.5] * 13}, "down_lr_weight has 13 values"),
        (SD_BLOCKS, {"up_lr_weight": ","}, "up_lr_weight has 2 values, but there are 12 blocks .OUT00 to OUT11"),
        (SD_BLOCKS, {"up_lr_weight": []}, "up_lr_weight has 0 values"),
        (
            SD_BLOCKS,
            {"mid_lr_weight": "1,1,1"},
            r"mid_lr_weight has 3 values, .*one block \(MID\)\. Expected one number",
        ),
        (
            SDXL_BLOCKS,
            {"mid_lr_weight": "1,1"},
            "mid_lr_weight has 2 values, but there are 3 .*3 numbers .*or one number",
        ),
        (SDXL_BLOCKS, {"down_lr_weight": "0,0,0,0,0,0,1,1,1,1,1,1"}, "has 12 values, but there are 9 blocks"),
        (SD_BLOCKS, {"down_lr_weight": "sin"}, "'sin' is neither a number nor a curve. Did you mean 'sine'"),
        (SD_BLOCKS, {"down_lr_weight": "sine-.5"}, r"down_lr_weight = sine-\.5: .*Did you mean 'sine'"),
        (SD_BLOCKS, {"up_lr_weight": "cosine+"}, "up_lr_weight = cosine.: expected a number behind the plus"),
        (SD_BLOCKS, {"up_lr_weight": "cosine+nan"}, "expected a number behind the plus, such as cosine"),
        (SD_BLOCKS, {"up_lr_weight": "cosine+1+1"}, "expected a number behind the plus"),
        (SD_BLOCKS, {"up_lr_weight": ""}, "up_lr_weight = : '' is neither a number nor a curve"),
        (SD_BLOCKS, {"mid_lr_weight": "sine"}, "mid_lr_weight = sine: expected one number"),
        (SDXL_BLOCKS, {"mid_lr_weight": "sine"}, "mid_lr_weight = sine: expected 3 numbers .*, or one number for all"),
        (SD_BLOCKS, {"down_lr_weight": "1,1,1,1,1,1,x,1,1,1,1,1"}, "down_lr_weight: 'x' is not a number of 0 or more"),
        (SD_BLOCKS, {"down_lr_weight": "1,1,1,1,1,1,nan,1,1,1,1,1"}, "'nan' is not a number"),
        (SD_BLOCKS, {"down_lr_weight": "inf"}, "'inf' is not a number"),
        (SD_BLOCKS, {"mid_lr_weight": "-1"}, "mid_lr_weight: '-1' is not a number of 0 or more. Expected one number"),
        (SD_BLOCKS, {"mid_lr_weight": [True]}, "'True' is not a number"),
        (
            SD_BLOCKS,
            {"mid_lr_weight": "1", "block_lr_zero_threshold": -1.0},
            "block_lr_zero_threshold = -1.0: expected 0",
        ),
    ],
)
def test_what_cannot_be_meant_is_named_with_the_right_form(layout, given, message):
    with pytest.raises(OptionError, match=message):
        parse_block_weights(layout, **given)


def test_a_part_that_a_family_does_not_have():
    with pytest.raises(
        OptionError, match=r"down_lr_weight: this model has no part 'down'.*block_lr, by double, single"
    ):
        parse_block_weights(numbered_blocks({"double": 19, "single": 38}), down_lr_weight="1")


def test_weights_reach_the_modules_of_sdxl(golden_sdxl):
    """With the middle alone, sd-scripts takes the model for SD 1.x and loses the weights."""
    weights = parse_block_weights(SDXL_BLOCKS, down_lr_weight=0, mid_lr_weight="0.25", up_lr_weight="zeros")
    plain = [row for row in golden_sdxl["rows"] if row[3] == "Transformer2DModel"]
    for rows, count in ((plain, 102), (golden_sdxl["rows"], 3 + 102 + 3)):
        kept = [weights[SDXL_BLOCKS.index_of(row[0])] for row in rows if weights[SDXL_BLOCKS.index_of(row[0])]]
        assert kept == [0.25] * count


# ---------------------------------------------------------------------------------------------------------------------
# Weights and modules


def test_lists_and_curves_name_the_blocks_without_modules_in_one_line():
    weights = read_part_weights(SD_BLOCKS, {"down": "cosine", "mid": "1", "up": "0,0,0,1,1,1,1,1,1,1,1,1"})
    assert check_weights_against_modules(weights, SD_MODULES, SD_BLOCKS) == [
        "No module in IN00, IN03, IN06, IN09-IN11, OUT00-OUT02: the weights given for these blocks have no effect."
    ]


@pytest.mark.parametrize(
    ("family", "given", "blocks"),
    [
        ("sd15", {"down": "0,0,0,0,0,0,0,0,0,1,1,1"}, "IN09-IN11"),
        ("sd15", {"mid": "1", "up": "1,0,0.5,0,0,0,0,0,0,0,0,0"}, "OUT00, OUT02"),
        ("sdxl", {"mid": "1,0,1"}, "MID0, MID2"),
    ],
)
def test_a_list_whose_weights_are_all_for_blocks_without_modules_is_an_error(family, given, blocks):
    modules = SD_MODULES if family == "sd15" else dict.fromkeys((5, 6, 8, 9, 11, *range(13, 19)), 22)
    weights = read_part_weights(LAYOUTS[family], given)
    with pytest.raises(OptionError, match=rf"_lr_weight: there is no module to train in {blocks}, so a weight there"):
        check_weights_against_modules(weights, modules, LAYOUTS[family])


def test_ones_everywhere_say_nothing():
    weights = read_part_weights(SD_BLOCKS, {"down": "1", "mid": "1", "up": ",".join(["1"] * 12)})
    assert check_weights_against_modules(weights, {12: 12}, SD_BLOCKS) == []


def test_one_number_for_a_part_says_nothing_about_single_blocks():
    weights = read_part_weights(SD_BLOCKS, {"down": "0.5", "mid": "0"})
    assert check_weights_against_modules(weights, SD_MODULES, SD_BLOCKS) == []


def test_blocks_are_named_by_ranges_within_a_part():
    assert block_list([24, 13, 12, 11, 10], SD_BLOCKS) == "IN10-IN11, MID, OUT00, OUT11"
    assert block_list([], SD_BLOCKS) == ""
    assert block_list(range(57), numbered_blocks({"double": 19, "single": 38})) == (
        "double.0-double.18, single.0-single.37"
    )
