"""What the names of lr_scheduler take: contradictions, what is missing or has no effect, and names that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from maulstick.errors import OptionError
from maulstick.options.load import LoadedOptions
from maulstick.options.schedules import REFUSED, SCHEDULES, parse_step_rules
from maulstick.options.values import parse_arguments
from maulstick.train.schedule import SHAPES

Load = Callable[..., LoadedOptions]

COMPLETE: dict[str, list[str]] = {
    "constant_with_warmup": ["--lr_warmup_steps", "3"],
    "inverse_sqrt": ["--lr_warmup_steps", "3"],
    "cosine_with_min_lr": ["--lr_scheduler_min_lr_ratio", "0"],
    "warmup_stable_decay": ["--lr_decay_steps", "20%"],
    "piecewise_constant": ["--lr_scheduler_args", "step_rules=1:10,0.1"],
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_schedule_loads_without_a_word(load: Load, name: str) -> None:
    loaded = load("--lr_scheduler", name, *COMPLETE.get(name, []))
    assert loaded.options.schedule.lr_scheduler == name
    assert loaded.notices == []


def test_the_schedules_of_the_options_are_those_of_training() -> None:
    assert set(SCHEDULES) == set(SHAPES)


def test_sd_scripts_names_are_schedules_or_refused() -> None:
    """transformers' names, diffusers' piecewise_constant, and adafactor."""
    from transformers.trainer_utils import SchedulerType

    theirs = {str(member.value) for member in SchedulerType} | {"piecewise_constant", "adafactor"}
    assert theirs <= set(SCHEDULES) | set(REFUSED)
    assert set(SCHEDULES) - theirs == {"rex"}
    assert not set(SCHEDULES) & set(REFUSED)


@pytest.mark.parametrize(
    "name, message",
    [
        ("cosin", "lr_scheduler = cosin: there is no such schedule. Did you mean 'cosine'?.*There are constant,"),
        ("Linear", "Did you mean 'linear'?"),
        ("adafactor", "optimizer_type = Adafactor with lr_scheduler = constant_with_warmup"),
        ("adafactor:1e-4", "lr_scheduler = adafactor:1e-4 is not supported.*optimizer_type = Adafactor"),
        ("reduce_lr_on_plateau", "Use cosine or rex"),
        ("greedy", "Use cosine or rex"),
        ("cosine_warmup_with_min_lr", "use cosine_with_min_lr"),
        ("exponential", "lr_scheduler_type = ExponentialLR"),
    ],
)
def test_names_that_do_not_exist_here(load: Load, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load("--lr_scheduler", name)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lr_scheduler", "cosine_with_min_lr"], "needs lr_scheduler_min_lr_ratio"),
        (["--lr_scheduler", "warmup_stable_decay"], "needs lr_decay_steps"),
        (["--lr_scheduler", "warmup_stable_decay", "--lr_decay_steps", "0%"], "needs lr_decay_steps"),
        (["--lr_scheduler", "piecewise_constant"], "needs its pieces: lr_scheduler_args = step_rules="),
        (
            ["--lr_scheduler", "piecewise_constant", "--lr_warmup_steps", "3"],
            "lr_scheduler = piecewise_constant and lr_warmup_steps = 3 contradict each other: it has no warm-up",
        ),
        (
            ["--lr_scheduler_type", "StepLR", "--lr_warmup_steps", "10%"],
            "lr_scheduler_type = StepLR and lr_warmup_steps = 10% contradict each other",
        ),
        (["--lr_warmup_steps", "3"], "Use lr_scheduler = constant_with_warmup, or set lr_warmup_steps to 0"),
        (["--lr_scheduler", "warmup_stable_decay", "--lr_decay_steps", "1.0"], "lr_decay_steps = 1.0: .*100% for all"),
        (["--lr_decay_steps", "half"], "lr_decay_steps = half: expected a whole number of steps"),
        (["--lr_scheduler", "linear", "--lr_scheduler_args", "power=2"], "'power' is no argument.*It takes none"),
        (
            ["--lr_scheduler", "polynomial", "--lr_scheduler_args", "power=2"],
            r"'power' is no argument of lr_scheduler = polynomial. It takes lr_end. Use the option lr_scheduler_power",
        ),
        (["--lr_scheduler", "polynomial", "--lr_scheduler_args", "lr_ned=0"], "Did you mean 'lr_end'"),
        (["--lr_scheduler", "polynomial", "--lr_scheduler_args", "lr_end"], "'lr_end' is not of the form key=value"),
        (["--lr_scheduler", "polynomial", "--lr_scheduler_args", "lr_end=low"], "lr_end = low: expected a learning"),
        (["--lr_scheduler", "polynomial", "--lr_scheduler_args", "lr_end=-1"], "lr_end = -1: expected a learning"),
        (
            ["--lr_scheduler", "cosine", "--lr_scheduler_args", "num_cycles=0"],
            "num_cycles = 0: expected a number above",
        ),
        (
            [
                "--lr_scheduler",
                "warmup_stable_decay",
                "--lr_decay_steps",
                "9",
                "--lr_scheduler_args",
                "decay_type=sqrt",
            ],
            "decay_type = sqrt: expected one of linear, cosine, 1-sqrt",
        ),
        (["--lr_scheduler_min_lr_ratio", "1.5"], "lr_scheduler_min_lr_ratio = 1.5: expected a share from 0 to 1"),
        (["--max_skipped_fraction", "1.5"], "max_skipped_fraction = 1.5: expected a share from 0 to 1"),
    ],
)
def test_what_is_missing_or_cannot_be_done(load: Load, arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(*arguments)


@pytest.mark.parametrize(
    "arguments, notice",
    [
        (["--lr_scheduler_power", "2"], "lr_scheduler_power has no effect with constant; it is for polynomial."),
        (
            ["--lr_scheduler", "linear", "--lr_decay_steps", "20%"],
            "lr_decay_steps has no effect with linear; it is for warmup_stable_decay.",
        ),
        (
            ["--lr_scheduler", "cosine", "--lr_scheduler_min_lr_ratio", "0.1"],
            "lr_scheduler_min_lr_ratio has no effect with cosine; it is for cosine_with_min_lr, warmup_stable_decay, "
            "rex.",
        ),
        (
            ["--lr_scheduler", "linear", "--lr_scheduler_timescale", "9"],
            "lr_scheduler_timescale has no effect with linear; it is for inverse_sqrt.",
        ),
        (
            [
                *("--lr_scheduler", "warmup_stable_decay", "--lr_decay_steps", "9", "--lr_scheduler_num_cycles", "3"),
                *("--lr_scheduler_args", "decay_type=linear"),
            ],
            "lr_scheduler_num_cycles has no effect with decay_type=linear; it is for a cosine.",
        ),
        (
            ["--lr_scheduler", "linear", "--lr_warmup_skip_zero"],
            "lr_warmup_skip_zero has no effect without lr_warmup_steps.",
        ),
        (
            ["--lr_scheduler", "cosine", "--lr_scheduler_type", "ConstantLR"],
            "lr_scheduler has no effect: lr_scheduler_type = ConstantLR takes its place.",
        ),
        (
            ["--lr_scheduler_type", "ConstantLR", "--lr_scheduler_power", "2"],
            "lr_scheduler_power has no effect with ConstantLR; it is for polynomial.",
        ),
        (
            ["--lr_scheduler", "inverse_sqrt"],
            "lr_scheduler = inverse_sqrt without lr_warmup_steps and lr_scheduler_timescale has a time scale of 10000 "
            "steps: the rate hardly falls before.",
        ),
        (
            [
                *("--lr_scheduler", "cosine_with_min_lr", "--lr_scheduler_min_lr_ratio", "0.1"),
                *("--lr_scheduler_num_cycles", "2"),
            ],
            "lr_scheduler_num_cycles = 2 counts half waves with cosine_with_min_lr, as in sd-scripts: an even number "
            "ends at the full rate, an odd one at the lowest.",
        ),
    ],
)
def test_what_has_no_effect_is_named(load: Load, arguments: list[str], notice: str) -> None:
    assert load(*arguments).notices == [notice]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lr_scheduler_num_cycles", "1", "--lr_scheduler_power", "1", "--lr_decay_steps", "0"],
        ["--lr_scheduler", "cosine", "--lr_scheduler_type", "", "--lr_scheduler_min_lr_ratio", "0"],
        ["--lr_scheduler_type", "StepLR", "--lr_warmup_skip_zero", "--lr_scheduler_args", "step_size=3"],
        ["--lr_scheduler", "rex", "--lr_scheduler_min_lr_ratio", "0.1"],
    ],
)
def test_what_kohya_ss_always_writes_is_silent(load: Load, arguments: list[str]) -> None:
    assert load(*arguments).notices == []


def test_step_rules() -> None:
    assert parse_step_rules("1:10,0.1:20,0.01") == [(10, 1.0), (20, 0.1), (float("inf"), 0.01)]
    assert parse_step_rules(0.5) == [(float("inf"), 0.5)]
    for wrong in ("1:10", "1:20,0.1:10,0", "1:0,1", "-1:10,1", "1:10,nan", "a:10,1", "1:1.5,1", ""):
        with pytest.raises(ValueError):
            parse_step_rules(wrong)


def test_arguments_are_literals_or_texts() -> None:
    assert parse_arguments(["a=1e-4", "b=[1, 2]", "c=linear", " d = 1:10,0.1 ", "e='x'"], "lr_scheduler_args") == {
        "a": 1e-4,
        "b": [1, 2],
        "c": "linear",
        "d": "1:10,0.1",
        "e": "x",
    }
