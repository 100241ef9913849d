"""Lists, presets and preset files of the LoRA Block Weight extension."""

from __future__ import annotations

import random

import pytest

from maulstick.adapters.block_presets import builtin_presets, read_presets, resolve_ratios
from maulstick.adapters.blocks import SD_BLOCKS, SDXL_BLOCKS
from maulstick.errors import OptionError

SEVENTEEN = [1, 2, 4, 5, 7, 8, 12, *range(16, 25)]
"""Block index of the positions behind BASE in a list of 17."""


def ratios(text, layout=SD_BLOCKS, presets=None, **more):
    return resolve_ratios(text, layout, presets or {}, where="lbw", **more)


def numbers(count):
    return ",".join(f"{0.1 * place:.1f}" for place in range(count))


def test_17_values_are_the_blocks_of_a_plain_lora():
    result = ratios(numbers(17))
    assert result.base == 0.0
    expected = dict(zip(SEVENTEEN, [round(0.1 * place, 1) for place in range(1, 17)], strict=True))
    assert result.blocks == tuple(expected.get(index, 0.0) for index in range(25))
    assert result.not_listed == (0, 3, 6, 9, 10, 11, 13, 14, 15)


def test_26_values_are_all_blocks_in_order():
    result = ratios(numbers(26))
    assert result.blocks == tuple(round(0.1 * place, 1) for place in range(1, 26))
    assert result.not_listed == ()


def test_12_and_20_values_are_those_of_sdxl():
    twelve = ratios(numbers(12), SDXL_BLOCKS)
    assert twelve.blocks[5:7] == (0.1, 0.2)
    assert twelve.blocks[8:10] == (0.3, 0.4)
    assert twelve.blocks[10:13] == (0.5,) * 3  # M00 is all of the middle
    assert twelve.blocks[13:19] == (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
    assert twelve.blocks[0] == twelve.blocks[22] == 1.0  # the extension has no position for them
    assert twelve.not_listed == (1, 2, 3, 4, 7, 19, 20, 21)
    twenty = ratios(numbers(20), SDXL_BLOCKS)
    assert twenty.blocks[1:10] == tuple(round(0.1 * place, 1) for place in range(1, 10))
    assert twenty.blocks[13:22] == tuple(round(0.1 * place, 1) for place in range(11, 20))
    assert twenty.not_listed == ()


def test_the_length_alone_decides_what_a_list_means():
    """A list of 17 on SDXL: OUT00-OUT02 have no position in it, as in the extension."""
    result = ratios("1" + ",1" * 16, SDXL_BLOCKS)
    assert [SDXL_BLOCKS.names[index] for index in result.not_listed] == [
        *("IN00", "IN03", "IN06", "OUT00", "OUT01", "OUT02")
    ]
    assert ratios("1" + ",1" * 11, SD_BLOCKS).blocks[1] == 0.0


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("NONE", []),
        ("INS", [1, 2, 4]),
        ("IND", [5, 7, 8]),
        ("INALL", [1, 2, 4, 5, 7, 8]),
        ("MIDD", [5, 7, 8, 12, 16, 17, 18, 19]),
        ("OUTD", [16, 17, 18, 19]),
        ("OUTS", [20, 21, 22, 23, 24]),
        ("OUTALL", list(range(16, 25))),
        ("ALL", SEVENTEEN),
    ],
)
def test_the_presets_of_the_extension(name, on):
    result = ratios(name, presets=builtin_presets(SD_BLOCKS))
    assert [index for index, ratio in enumerate(result.blocks) if ratio == 1.0] == on
    assert result.base == (0.0 if name == "NONE" else 1.0)


def test_presets_of_sdxl_divide_its_own_blocks():
    presets = builtin_presets(SDXL_BLOCKS)
    assert presets.keys() == builtin_presets(SD_BLOCKS).keys()
    on = {
        name: [SDXL_BLOCKS.names[i] for i in range(1, 22) if ratios(name, SDXL_BLOCKS, presets).blocks[i] == 1]
        for name in presets
    }
    middle = ["MID0", "MID1", "MID2"]
    assert on["INS"] + on["IND"] == on["INALL"] == ["IN04", "IN05", "IN07", "IN08"]
    assert on["OUTD"] + on["OUTS"] == on["OUTALL"] == [f"OUT0{n}" for n in range(6)]
    assert on["MIDD"] == on["IND"] + middle + on["OUTD"]
    assert on["ALL"] == on["INALL"] + middle + on["OUTALL"]


def test_a_preset_file_is_read_as_the_extension_reads_it(tmp_path):
    file = tmp_path / "lbwpresets.txt"
    lines = [
        "my presets",
        "MINE : " + ", ".join(["0.5"] * 17),
        "#OFF:" + ",".join(["1"] * 17),
        "ALSO_OFF:" + ",".join(["1"] * 17) + " # a remark",
        "SHORT:1,1,1",
        "mine:" + ",".join(["0.25"] * 26),
        "TWICE:" + ",".join(["1"] * 12),
        "TWICE:" + ",".join(["2"] * 20),
        "FLUX:" + ",".join(["1"] * 61),
        "A:B:" + ",".join(["1"] * 17),
    ]
    file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    presets = read_presets(file)
    assert list(presets) == ["MINE", "mine", "TWICE", "FLUX", "A"]
    assert ratios("MINE", presets=presets).blocks[12] == 0.5
    assert ratios("mine", presets=presets).blocks[12] == 0.25
    assert len(presets["TWICE"]) == 20
    with pytest.raises(OptionError, match=r"'B:1' is no value"):
        ratios("A", presets=presets)
    with pytest.raises(OptionError, match=r"FLUX has 61 values, which is for FLUX. Expected 17 or 26"):
        ratios("FLUX", presets=presets)


def test_files_without_presets_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("nothing here\n")
    with pytest.raises(OptionError, match=r"holds no preset. Expected lines such as OUTALL:1,0"):
        read_presets(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9:1")
    with pytest.raises(OptionError, match=r"not UTF-8"):
        read_presets(tmp_path / "latin.txt")
    with pytest.raises(OptionError, match=r"cannot be read: No such file"):
        read_presets(tmp_path / "absent.txt")


def test_random_and_relative_values():
    text = "R,U,X,X+0.25,X-0.5" + ",1" * 12
    first, again = (ratios(text, draw=random.Random(7), x=2.0) for _ in range(2))
    assert first == again
    reference = random.Random(7)
    assert first.base == round(reference.uniform(0, 1), 3)
    assert first.blocks[1] == round(reference.uniform(-0.5, 1.5), 3)
    assert (first.blocks[2], first.blocks[4], first.blocks[5]) == (2.0, 2.25, 1.5)
    drawn = [ratios("R,U" + ",1" * 15, draw=random.Random(seed)) for seed in range(400)]
    assert 0 <= min(r.base for r in drawn) < 0.05 < 0.95 < max(r.base for r in drawn) <= 1
    assert -0.5 <= min(r.blocks[1] for r in drawn) < -0.4
    assert 1.4 < max(r.blocks[1] for r in drawn) <= 1.5


@pytest.mark.parametrize("value", ["X+", "X-", "X0.5", "Xa", "r", "nan", "inf", "", "1 2"])
def test_values_that_mean_nothing_are_named(value):
    with pytest.raises(OptionError, match=r"lbw: '.*' is no value. Expected a number, R, U, X, X\+NUMBER or X-NUMBER"):
        ratios(value + ",1" * 16, draw=random.Random(0))


def test_other_lengths_and_names_are_refused():
    with pytest.raises(
        OptionError, match=r"lbw has 16 values; expected 17 or 26 for SD 1.x and 2.x, 12 or 20 for SDXL"
    ):
        ratios(",".join("1" * 16))
    with pytest.raises(OptionError, match=r"there is no preset 'outall'. .*Presets: NONE, ALL"):
        ratios("outall", presets=builtin_presets(SD_BLOCKS))
