"""Scheduler classes of one's own: recorded factors are those of the class itself, and what cannot be one is refused."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from maulstick.errors import OptionError
from maulstick.options.schema import OptimizerOptions, ScheduleOptions, TrainOptions
from maulstick.train.schedule import learning_rate_factor, schedule_settings

RATE = 2e-4


def factors(name: str, *arguments: str, total: int = 30, rates: tuple[float, float] = (RATE, RATE), **more: Any):
    """Return the factors of windows 0 to ``total + 4``."""
    options = TrainOptions(
        schedule=ScheduleOptions(lr_scheduler_type=name, lr_scheduler_args=list(arguments), **more),
        optimizer=OptimizerOptions(unet_lr=rates[0], text_encoder_lr=[rates[1]]),
    )
    factor = learning_rate_factor(schedule_settings(options, total))
    return [factor(window) for window in range(total + 5)]


def stepped(make: Any, windows: int, **arguments: Any) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = make(optimizer, **arguments)
    rates = []
    for _ in range(windows):
        rates.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("CosineAnnealingWarmRestarts", {"T_0": 7, "T_mult": 2}),
        ("torch.optim.lr_scheduler.CosineAnnealingLR", {"T_max": 30, "eta_min": 1e-6}),
        ("OneCycleLR", {"max_lr": 1e-4, "total_steps": 30, "cycle_momentum": False}),
        ("StepLR", {"step_size": 10, "gamma": 0.3}),
        ("LinearLR", {"start_factor": 0.25, "total_iters": 12}),
        ("MultiStepLR", {"milestones": [4, 20]}),
    ],
)
def test_a_class_of_torch_gives_the_rates_it_gives_itself(name: str, arguments: dict[str, Any]) -> None:
    make = getattr(torch.optim.lr_scheduler, name.rpartition(".")[2])
    expected = stepped(make, 30, **arguments)
    found = factors(name, *(f"{key}={value}" for key, value in arguments.items()))
    assert found[:30] == pytest.approx(expected, abs=1e-12, rel=0)
    # Past the end the last one stays; a class may not be asked for more than it was made for.
    assert found[30:] == [found[29]] * 5


def test_a_function_that_takes_an_optimizer() -> None:
    name = "transformers.get_linear_schedule_with_warmup"
    found = factors(name, "num_warmup_steps=3", "num_training_steps=30")
    assert found[:30] == pytest.approx([n / 3 if n < 3 else (30 - n) / 27 for n in range(30)], abs=1e-12)
    skipping = factors(name, "num_warmup_steps=3", "num_training_steps=30", lr_warmup_skip_zero=True)
    assert skipping[:3] == [found[1], found[1], found[2]]
    assert skipping[3:] == found[3:]


def test_arguments_that_are_rates_need_one_rate_for_all() -> None:
    """eta_min is a rate: as a share of two different rates it is two factors."""
    arguments = ("T_max=30", "eta_min=1e-5")
    last = 1e-5 + (RATE - 1e-5) * 0.5 * (1 + math.cos(math.pi * 29 / 30))
    assert factors("CosineAnnealingLR", *arguments)[29] * RATE == pytest.approx(last, rel=1e-9)
    with pytest.raises(OptionError, match=r"groups of different rates different factors.*Train all at one"):
        factors("CosineAnnealingLR", *arguments, rates=(RATE, 1e-4))
    assert factors("CosineAnnealingLR", "T_max=30", rates=(RATE, 1e-4))[0] == 1.0


class OwnModule(ModuleType):
    """What users' own files might hold."""

    class ByGroup(LRScheduler):
        def get_lr(self) -> list[float]:
            return [base * (1 + place * self.last_epoch) for place, base in enumerate(self.base_lrs)]

    class Negative(LRScheduler):
        def get_lr(self) -> list[float]:
            return [base * (1 - 0.1 * self.last_epoch) for base in self.base_lrs]

    class Breaks(LRScheduler):
        def get_lr(self) -> list[float]:
            if self.last_epoch == 12:
                raise RuntimeError("out of steps")
            return self.base_lrs

    class Decay(LRScheduler):
        def get_lr(self) -> list[float]:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.1 if self.last_epoch == 5 else 0.01
            return self.base_lrs

    @staticmethod
    def nothing(optimizer: torch.optim.Optimizer) -> None:
        return None

    number = 3


def _needs_loss(self: LRScheduler, loss: float) -> None:
    LRScheduler.step(self)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_schedules", OwnModule("own_schedules"))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("ReduceLROnPlateau", [], "follows a validation loss"),
        ("CosineAnealingLR", [], "has no 'CosineAnealingLR'. Did you mean 'CosineAnnealingLR'?"),
        ("no_such_package.Class", [], "'no_such_package' cannot be imported.*PYTHONPATH"),
        ("torch.optim.Adam", [], "not a subclass of torch.optim.lr_scheduler.LRScheduler"),
        ("StepLR", ["step_siz=3"], "refused its arguments .*step_siz=3.*unexpected keyword argument 'step_siz'"),
        ("StepLR", ["step_size"], "lr_scheduler_args: 'step_size' is not of the form key=value"),
        ("StepLR", ["step_size=3", "step_size=4"], "lr_scheduler_args: 'step_size' is given twice"),
        ("OneCycleLR", ["max_lr=1", "total_steps=30"], "it changes betas of the optimizer.*cycle_momentum=False"),
        ("OneCycleLR", ["max_lr=1", "total_steps=9", "cycle_momentum=False"], "it failed at step 10: Tried to step 10"),
        ("OneCycleLR", ["max_lr=[1,1,2]", "total_steps=30", "cycle_momentum=False"], "refused its arguments"),
        ("own_schedules.ByGroup", [], "groups of different rates different factors .at step 1"),
        ("own_schedules.Negative", [], "the learning rate at step 11 is -2e-05"),
        ("own_schedules.Breaks", [], "it failed at step 12: out of steps"),
        ("own_schedules.Decay", [], "it changes weight_decay of the optimizer"),
        ("own_schedules.nothing", [], "it gives a NoneType, not a"),
        ("own_schedules.number", [], "neither a class nor a function"),
    ],
)
def test_what_cannot_be_a_factor_is_refused(name: str, arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        factors(name, *arguments)
    assert name in str(error.value) or "lr_scheduler_args" in str(error.value)


@pytest.mark.usefixtures("own")
def test_a_class_whose_step_wants_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hungry(torch.optim.lr_scheduler.StepLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer, 3)
            self.step = _needs_loss.__get__(self)  # type: ignore[method-assign]

    monkeypatch.setattr(sys.modules["own_schedules"], "Hungry", Hungry, raising=False)
    with pytest.raises(OptionError, match=r"its step\(\) wants loss"):
        factors("own_schedules.Hungry")


def test_recording_draws_no_random_numbers() -> None:
    before = torch.random.get_rng_state()
    factors("StepLR", "step_size=11")
    assert torch.equal(before, torch.random.get_rng_state())
