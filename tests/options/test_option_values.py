"""Values: TOML to field types, steps and sizes given in several ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.errors import OptionError
from maulstick.options.dataset_config import parse_resolution
from maulstick.options.values import convert_toml_value, option_types, parse_steps

WHERE = "run.toml, section [a]"


@pytest.mark.parametrize(
    "text, total, steps",
    [
        ("0", 1000, 0),
        ("500", 1000, 500),
        ("1", 1000, 1),
        ("0.1", 1600, 160),
        ("10%", 1600, 160),
        ("0.29", 100, 29),  # in binary floating point 28.999999999999996
        ("5e-2", 100, 5),
        ("2.5%", 100, 2),
        ("100%", 77, 77),
        (" 7 ", 77, 7),
        ("0%", 77, 0),
    ],
)
def test_steps_are_read_as_number_fraction_or_share(text: str, total: int, steps: int) -> None:
    assert parse_steps(text, total) == steps


@pytest.mark.parametrize("text", ["1.0", "1.5", "-1", "-5%", "101%", "ten", "", "%", "nan", "inf", "1e3", "10 %%"])
def test_steps_that_could_mean_anything_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="lr_warmup_steps = "):
        parse_steps(text, 1000)


@given(st.integers(0, 100), st.integers(0, 10**6))
def test_a_share_and_its_fraction_are_the_same_number_of_steps(percent: int, total: int) -> None:
    if percent < 100:
        assert parse_steps(f"{percent}%", total) == parse_steps(f"{percent / 100}", total)
    assert 0 <= parse_steps(f"{percent}%", total) <= total


@pytest.mark.parametrize("text, size", [("512", (512, 512)), ("512,768", (512, 768)), ("640, 384", (640, 384))])
def test_resolutions(text: str, size: tuple[int, int]) -> None:
    assert parse_resolution(text) == size


@pytest.mark.parametrize("text", ["512x512", "0", "512,512,512", "-64", "", "big"])
def test_other_resolutions_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="resolution"):
        parse_resolution(text)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("resolution", 512, "512"),
        ("resolution", "512,768", "512,768"),
        ("resolution", [512, 768], "512,768"),
        ("lr_warmup_steps", 100, "100"),
        ("lr_warmup_steps", 0.05, "0.05"),
        ("lr_warmup_steps", "10%", "10%"),
        ("learning_rate", "1e-4", 1e-4),
        ("learning_rate", 1, 1.0),
        ("network_dim", "16", 16),
        ("network_dim", 16.0, 16),
        ("text_encoder_lr", 5e-5, [5e-5]),
        ("text_encoder_lr", [5e-5, 1e-5], [5e-5, 1e-5]),
        ("text_encoder_lr", "5e-5", [5e-5]),
        ("max_token_length", 225, 225),
        ("max_token_length", "150", 150),
        ("mixed_precision", "bf16", "bf16"),
        ("output_dir", "out", Path("out")),
        ("v2", True, True),
        ("network_args", ["conv_dim=4"], ["conv_dim=4"]),
    ],
)
def test_toml_values_get_the_type_of_their_field(name: str, value: object, expected: object) -> None:
    converted = convert_toml_value(name, value, WHERE)
    assert converted == expected
    assert type(converted) is type(expected) or isinstance(converted, Path)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("v2", "true", 'v2 = "true" (run.toml, section [a]): expected true or false, without quotes.'),
        ("v2", 1, "v2 = 1 (run.toml, section [a]): expected true or false, without quotes."),
        ("network_dim", 8.5, "network_dim = 8.5 (run.toml, section [a]): expected a whole number."),
        ("network_dim", True, "network_dim = true (run.toml, section [a]): expected a whole number."),
        ("learning_rate", "fast", 'learning_rate = "fast" (run.toml, section [a]): expected a number.'),
        ("learning_rate", float("nan"), "learning_rate = nan (run.toml, section [a]): expected a number."),
        ("output_name", 7, "output_name = 7 (run.toml, section [a]): expected text in quotes."),
        ("output_dir", ["a"], 'output_dir = ["a"] (run.toml, section [a]): expected a path in quotes.'),
        ("max_token_length", 76, "max_token_length = 76 (run.toml, section [a]): expected one of 75, 150, 225."),
        (
            "network_args",
            "conv_dim=4",
            'network_args = "conv_dim=4" (run.toml, section [a]): expected a list of texts such as '
            '["key=value", "key=value"].',
        ),
        (
            "mixed_precision",
            "bf61",
            "mixed_precision = \"bf61\" (run.toml, section [a]): expected one of no, fp16, bf16. Did you mean 'bf16'?",
        ),
        ("resolution", [512, "wide"], 'resolution = [512, "wide"] (run.toml, section [a]): expected a whole number.'),
    ],
)
def test_other_types_are_refused_with_name_place_value_and_expectation(name: str, value: object, message: str) -> None:
    with pytest.raises(OptionError) as error:
        convert_toml_value(name, value, WHERE)
    assert str(error.value) == message


def test_every_option_has_a_type_that_can_be_converted() -> None:
    examples = {
        bool: True,
        int: 75,
        float: 0.5,
        str: "cosine",
        Path: "p",
        list[str]: ["a=1"],
        list[float]: [0.5],
        list[Path]: ["p"],
    }
    for name, hint in option_types().items():
        value = examples.get(hint, getattr(hint, "__args__", (None,))[0])
        assert convert_toml_value(name, value, WHERE) is not None
