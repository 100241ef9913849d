"""Learning-rate factors, step by step, against transformers', diffusers' and torch's own schedulers and formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maulstick.errors import OptionError
from maulstick.options.schedules import SCHEDULES, check_schedule
from maulstick.options.schema import NetworkOptions, OptimizerOptions, ScheduleOptions, TrainOptions
from maulstick.train.schedule import (
    SHAPES,
    Factor,
    ScheduleSettings,
    learning_rate_factor,
    schedule_settings,
    trained_rates,
)

RATE = 3e-4


def settings(total: int, *, rate: float = RATE, **schedule: Any) -> ScheduleSettings:
    """Return the settings of checked options, as a run of ``total`` windows has them."""
    options = ScheduleOptions(**schedule)
    check_schedule(options)
    return schedule_settings(TrainOptions(schedule=options, optimizer=OptimizerOptions(learning_rate=rate)), total)


def factor_of(total: int, **schedule: Any) -> Factor:
    return learning_rate_factor(settings(total, **schedule))


def stepped(make: Any, windows: int, **arguments: Any) -> list[float]:
    """Return lr / RATE of ``windows`` steps of a scheduler object on an optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = make(optimizer, **arguments)
    rates = []
    for _ in range(windows):
        rates.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        scheduler.step()
    return rates


# ---------------------------------------------------------------------------------------- the documented example


def test_linear_with_a_tenth_of_warmup_is_the_documented_formula():
    """The source's lambda: step / warmup, then (total - step) / (total - warmup)."""
    factor = factor_of(20000, lr_scheduler="linear", lr_warmup_steps="10%")
    for step in range(2000):
        assert abs(factor(step) - step / 2000) <= 1e-12
    for step in range(2000, 20001):
        assert abs(factor(step) - (20000 - step) / 18000) <= 1e-12


# ---------------------------------------------------------------------------------------- against the libraries

CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"lr_scheduler": "constant"}, "constant", {}),
    ({"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": "13"}, "constant_with_warmup", {}),
    ({"lr_scheduler": "linear", "lr_warmup_steps": "13"}, "linear", {}),
    ({"lr_scheduler": "linear"}, "linear", {}),
    ({"lr_scheduler": "cosine", "lr_warmup_steps": "13"}, "cosine", {}),
    ({"lr_scheduler": "cosine", "lr_scheduler_args": ["num_cycles=1.25"]}, "cosine", {"num_cycles": 1.25}),
    (
        {"lr_scheduler": "cosine_with_restarts", "lr_warmup_steps": "13", "lr_scheduler_num_cycles": 3},
        "cosine_with_restarts",
        {"num_cycles": 3},
    ),
    ({"lr_scheduler": "polynomial", "lr_warmup_steps": "13"}, "polynomial", {}),
    (
        {"lr_scheduler": "polynomial", "lr_scheduler_power": 2.5, "lr_scheduler_args": ["lr_end=1e-5"]},
        "polynomial",
        {"power": 2.5, "lr_end": 1e-5},
    ),
    ({"lr_scheduler": "inverse_sqrt", "lr_warmup_steps": "13"}, "inverse_sqrt", {}),
    ({"lr_scheduler": "inverse_sqrt"}, "inverse_sqrt", {}),
    (
        {"lr_scheduler": "inverse_sqrt", "lr_warmup_steps": "13", "lr_scheduler_timescale": 7},
        "inverse_sqrt",
        {"timescale": 7},
    ),
    (
        {"lr_scheduler": "cosine_with_min_lr", "lr_warmup_steps": "13", "lr_scheduler_min_lr_ratio": 0.2},
        "cosine_with_min_lr",
        {"num_cycles": 0.5, "min_lr_rate": 0.2},
    ),
    (
        {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": 0.1, "lr_scheduler_num_cycles": 3},
        "cosine_with_min_lr",
        {"num_cycles": 1.5, "min_lr_rate": 0.1},
    ),
    (
        {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": "13", "lr_decay_steps": "30"},
        "warmup_stable_decay",
        {"num_decay_steps": 30, "num_cycles": 0.5},
    ),
    *(
        (
            {
                "lr_scheduler": "warmup_stable_decay",
                "lr_warmup_steps": "13",
                "lr_decay_steps": "20%",
                "lr_scheduler_min_lr_ratio": 0.1,
                "lr_scheduler_args": [f"warmup_type={curve}", f"decay_type={curve}"],
            },
            "warmup_stable_decay",
            {"num_decay_steps": 20, "num_cycles": 0.5, "min_lr_ratio": 0.1, "warmup_type": curve, "decay_type": curve},
        )
        for curve in ("linear", "cosine", "1-sqrt")
    ),
]


@pytest.mark.parametrize("schedule, name, arguments", CASES)
def test_factors_are_those_of_transformers(schedule: dict[str, Any], name: str, arguments: dict[str, Any]) -> None:
    """Called as sd-scripts calls it, which halves num_cycles for two of them."""
    from transformers.optimization import get_scheduler

    expected = stepped(
        lambda optimizer: get_scheduler(
            name,
            optimizer,
            num_warmup_steps=int(schedule.get("lr_warmup_steps", "0")),
            num_training_steps=101,
            scheduler_specific_kwargs=arguments,
        ),
        101,
    )
    factor = factor_of(101, **schedule)
    assert [factor(window) for window in range(101)] == pytest.approx(expected, abs=1e-12, rel=0)


def test_every_schedule_that_transformers_has_is_compared() -> None:
    assert {name for _, name, _ in CASES} == set(SHAPES) - {"piecewise_constant", "rex"}


def test_piecewise_constant_is_that_of_diffusers() -> None:
    from diffusers.optimization import get_piecewise_constant_schedule

    rules = "1:10,0.1:20,2.5:47,0.005"
    factor = factor_of(60, lr_scheduler="piecewise_constant", lr_scheduler_args=[f"step_rules={rules}"])
    expected = stepped(get_piecewise_constant_schedule, 60, step_rules=rules)
    assert [factor(window) for window in range(60)] == pytest.approx(expected, abs=1e-12)
    assert [factor(window) for window in (9, 10, 19, 20, 46, 47, 999)] == [1, 0.1, 0.1, 2.5, 2.5, 0.005, 0.005]


@pytest.mark.parametrize("lowest", [None, 0.25])
def test_rex_is_its_formula(lowest: float | None) -> None:
    factor = factor_of(50, lr_scheduler="rex", lr_warmup_steps="10", lr_scheduler_min_lr_ratio=lowest)
    for window in range(10, 51):
        p = (window - 10) / 40
        value = (1 - p) / (0.1 + 0.9 * (1 - p))
        assert factor(window) == pytest.approx((lowest or 0) + (1 - (lowest or 0)) * value, abs=1e-12)


# ---------------------------------------------------------------------------------------- properties of all of them

NEEDED: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"lr_scheduler_min_lr_ratio": 0.1},
    "piecewise_constant": {"lr_scheduler_args": ["step_rules=0.5:3,1:5,0"]},
    "polynomial": {"lr_scheduler_args": ["lr_end=0"]},
}
LAST = {"constant": 1.0, "constant_with_warmup": 1.0, "cosine_with_min_lr": 0.1}
"""Where each schedule ends; the others end at 0, and inverse_sqrt at its own value."""


@given(data=st.data(), name=st.sampled_from(sorted(SHAPES)), total=st.integers(1, 400))
def test_factors_lie_between_0_and_1_and_keep_their_end(data: st.DataObject, name: str, total: int) -> None:
    schedule: dict[str, Any] = {"lr_scheduler": name, **NEEDED.get(name, {})}
    warmup = data.draw(st.integers(0, total - 1)) if SCHEDULES[name].warms_up else 0
    schedule["lr_warmup_steps"] = str(warmup)
    if name == "warmup_stable_decay":
        schedule["lr_decay_steps"] = str(data.draw(st.integers(1, total - warmup)))
    factor = factor_of(total, **schedule)
    windows = data.draw(st.permutations(range(total)))
    # In any order: a factor depends on nothing but the window.
    by_window = dict(sorted((window, factor(window)) for window in windows))
    assert all(0 <= value <= 1 for value in by_window.values())
    assert by_window == {window: factor(window) for window in range(total)}
    assert {factor(window) for window in (total, total + 1, 10 * total)} == {factor(total)}
    if name not in ("inverse_sqrt", "piecewise_constant"):
        assert factor(total) == pytest.approx(LAST.get(name, 0.0), abs=1e-12)
    if warmup:
        assert factor(0) == 0.0
        assert factor(warmup) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", sorted(name for name in SHAPES if SCHEDULES[name].warms_up))
def test_a_warmup_may_start_above_zero(name: str) -> None:
    """Windows 0 to 3 of a warm-up of 4 have 1/4 to 4/4; those after it are as they were."""
    schedule = {"lr_scheduler": name, "lr_warmup_steps": "4", **NEEDED.get(name, {})}
    if name == "warmup_stable_decay":
        schedule["lr_decay_steps"] = "5"
    plain, skipping = factor_of(20, **schedule), factor_of(20, lr_warmup_skip_zero=True, **schedule)
    assert [plain(window) for window in range(4)] == [0.0, 0.25, 0.5, 0.75]
    assert [skipping(window) for window in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [plain(window) for window in range(4, 25)] == [skipping(window) for window in range(4, 25)]


def test_a_warmup_of_one_step_is_a_lost_update_unless_it_skips_zero() -> None:
    assert factor_of(9, lr_scheduler="linear", lr_warmup_steps="1")(0) == 0.0
    assert factor_of(9, lr_scheduler="linear", lr_warmup_steps="1", lr_warmup_skip_zero=True)(0) == 1.0


# ---------------------------------------------------------------------------------------- lengths and rates


@pytest.mark.parametrize("given_as, steps", [("25", 25), ("0.1", 20), ("10%", 20), ("12.5%", 25), ("0", 0)])
def test_lengths_are_steps_fractions_or_shares(given_as: str, steps: int) -> None:
    found = settings(200, lr_scheduler="linear", lr_warmup_steps=given_as)
    assert (found.warmup_steps, found.decay_start) == (steps, steps)
    if steps:
        found = settings(200, lr_scheduler="warmup_stable_decay", lr_decay_steps=given_as)
        assert (found.decay_steps, found.decay_start) == (steps, 200 - steps)


@pytest.mark.parametrize(
    "schedule, message",
    [
        ({"lr_scheduler": "linear", "lr_warmup_steps": "100"}, "lr_warmup_steps is 100, but training has only 100"),
        (
            {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": "40%", "lr_decay_steps": "61"},
            "lr_warmup_steps is 40 and lr_decay_steps 61, together more than the 100 steps",
        ),
        (
            {"lr_scheduler": "polynomial", "lr_scheduler_args": ["lr_end=3e-4"]},
            "lr_end = 0.0003, which is not below the learning rate 0.0003",
        ),
    ],
)
def test_parts_that_do_not_fit_into_the_training(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        settings(100, **schedule)


def test_a_warmup_and_a_decay_may_fill_the_training() -> None:
    factor = factor_of(
        10,
        lr_scheduler="warmup_stable_decay",
        lr_warmup_steps="4",
        lr_decay_steps="6",
        lr_scheduler_args=["decay_type=linear"],
    )
    assert [factor(window) for window in (3, 4, 5, 7, 10)] == pytest.approx([0.75, 1.0, 5 / 6, 0.5, 0.0], abs=1e-12)


def test_the_last_rate_of_polynomial_is_a_rate_not_a_factor() -> None:
    factor = factor_of(10, lr_scheduler="polynomial", lr_scheduler_args=["lr_end=3e-5"])
    assert factor(10) * RATE == pytest.approx(3e-5, rel=1e-12)


@pytest.mark.parametrize(
    "network, optimizer, rates",
    [
        ({}, {"learning_rate": 1e-4}, {"unet": 1e-4, "text encoder": 1e-4}),
        ({}, {"unet_lr": 2e-4, "text_encoder_lr": [1e-5]}, {"unet": 2e-4, "text encoder": 1e-5}),
        ({}, {"unet_lr": 2e-4, "text_encoder_lr": [0.0]}, {"unet": 2e-4}),
        (
            {},
            {"text_encoder_lr": [1e-5, 2e-5]},
            {"unet": 1e-4, "text encoder 1": 1e-5, "text encoder 2": 2e-5},
        ),
        ({}, {"text_encoder_lr2": 3e-5}, {"unet": 1e-4, "text encoder 1": 1e-4, "text encoder 2": 3e-5}),
        ({"network_train_unet_only": True}, {}, {"unet": 1e-4}),
        ({"network_train_text_encoder_only": True}, {"text_encoder_lr": [3e-5]}, {"text encoder": 3e-5}),
    ],
)
def test_the_rates_that_are_trained(
    network: dict[str, Any], optimizer: dict[str, Any], rates: dict[str, float]
) -> None:
    options = TrainOptions(network=NetworkOptions(**network), optimizer=OptimizerOptions(**optimizer))
    assert trained_rates(options) == rates
    assert schedule_settings(options, 10).rates == tuple(sorted(set(rates.values()), reverse=True))


def test_restarts_begin_at_the_full_rate() -> None:
    factor = factor_of(40, lr_scheduler="cosine_with_restarts", lr_scheduler_num_cycles=4)
    assert [factor(window) for window in (0, 10, 20, 30)] == [1.0] * 4
    assert [factor(window) for window in (5, 15, 25, 35)] == pytest.approx([0.5] * 4, abs=1e-12)
    assert factor(9) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.9)), abs=1e-12)
