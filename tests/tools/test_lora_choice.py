"""``style.safetensors:0.8:te=0.5:lbw=OUTALL``: what is a name, what a weight, what an item."""

from __future__ import annotations

from pathlib import Path

import pytest

from maulstick.errors import ModelError, OptionError
from maulstick.tools.lora_choice import LoraChoice, parse_lora_choice


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("", {}),
        (":0.8", {"weight": 0.8}),
        (":0.8:te=0.5", {"weight": 0.8, "text_encoder_weight": 0.5}),
        (":te=0.5:unet=-1", {"text_encoder_weight": 0.5, "denoiser_weight": -1.0}),
        (":lbw=OUTALL", {"lbw": "OUTALL"}),
        (":lbw=1,0,R,X+0.5:0.8:x=2", {"weight": 0.8, "lbw": "1,0,R,X+0.5", "x": 2.0}),
    ],
)
def test_items_stand_behind_the_name_in_any_order(file: Path, items: str, expected: dict[str, object]) -> None:
    assert parse_lora_choice(f"{file}{items}") == LoraChoice(file, **expected)


def test_a_file_that_exists_keeps_its_whole_name(tmp_path: Path) -> None:
    odd = tmp_path / "b:te=1:0.5"
    odd.write_bytes(b"")
    assert parse_lora_choice(str(odd)) == LoraChoice(odd)
    assert parse_lora_choice(f"{odd}:2:te=3") == LoraChoice(odd, 2.0, 3.0)


def test_strengths_of_the_parts_are_the_weight_where_they_have_none_of_their_own(file: Path) -> None:
    choice = LoraChoice(file, 0.8, denoiser_weight=0.0)
    assert (choice.text_encoder_strength, choice.denoiser_strength) == (0.8, 0.0)


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        (
            ":lbv=OUTALL",
            OptionError,
            r"there is no item 'lbv='\. Did you mean 'lbw'\? There are te=, unet=, lbw= and x=",
        ),
        (":lbwe=ATTN", OptionError, "there is no item 'lbwe='"),
        (":start=3", OptionError, "there is no item 'start='"),
        (":te=1:te=2", OptionError, "'te=' stands twice"),
        (":te=strong", OptionError, "te 'strong' is not a number"),
        (":x=", OptionError, "x '' is not a number"),
        (":nan", OptionError, "weight 'nan' is not a number"),
        (":1:2", ModelError, "There is no LoRA file .*:1. Give it as FILE, FILE:WEIGHT"),
    ],
)
def test_what_cannot_be_meant_is_named(file: Path, items: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_lora_choice(f"{file}{items}")
