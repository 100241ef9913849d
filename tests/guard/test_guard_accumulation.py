"""Accumulation windows: one verdict each, the bad micro-batch named, dropped alone on request."""

from __future__ import annotations

import math

import pytest
import torch

from maulstick.guard import GradientGuard, GuardError, guarded_step


def scalar() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.zeros(3))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)


def micro(parameter: torch.nn.Parameter, gradient: float, scaler: torch.amp.GradScaler | None = None) -> None:
    scale = 1.0 if scaler is None else scaler.scale(torch.ones(())).item()
    added = torch.full_like(parameter, gradient) * scale
    parameter.grad = added if parameter.grad is None else parameter.grad + added


def test_one_verdict_for_a_window_on_the_accumulated_gradient():
    parameter, optimizer = scalar()
    guard = GradientGuard.from_preset("steady")
    norms = []
    for _ in range(3):
        for part in range(4):
            micro(parameter, 0.1)
            assert guard.observe_micro_batch(optimizer, loss=float(part))
        outcome = guarded_step(guard, optimizer)
        norms.append(outcome.verdict.norm)
        assert outcome.verdict.loss == 1.5
        assert outcome.verdict.micro_batches == 4
    assert norms == pytest.approx([0.4 * math.sqrt(3)] * 3)
    assert guard.observed == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_micro_batch_is_named_and_the_window_dropped(bad: float):
    parameter, optimizer = scalar()
    guard = GradientGuard.from_preset("steady")
    for part, gradient in enumerate((0.1, bad, 0.1, 0.1)):
        micro(parameter, gradient)
        guard.observe_micro_batch(optimizer, loss=gradient, images=[f"{part}.png"])
    outcome = guarded_step(guard, optimizer)
    assert outcome.skipped
    assert outcome.verdict.bad_micro_batch == 1
    assert outcome.verdict.images == ("1.png",)
    assert outcome.describe().endswith("; micro-batch 2 of 4; images: 1.png")
    assert parameter.abs().sum().item() == 0
    micro(parameter, 0.1)
    assert guarded_step(guard, optimizer).verdict.micro_batches == 0


@pytest.mark.parametrize("where", [0, 1, 3])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_only_the_bad_micro_batch_is_dropped_on_request(where: int, with_scaler: bool):
    """The step is the mean of the three good ones, and the scaler falls as it would have for the overflow."""
    parameter, optimizer = scalar()
    guard, scaler = GradientGuard.from_preset("steady"), scaler_of() if with_scaler else None
    for part in range(4):
        micro(parameter, math.inf if part == where else 0.3 / 4, scaler)
        kept = guard.observe_micro_batch(optimizer, loss=1.0, images=[f"{part}.png"], drop="micro_batch")
        assert kept == (part != where)
    outcome = guarded_step(guard, optimizer, scaler=scaler)
    assert outcome.stepped
    assert outcome.verdict.dropped_micro_batches == 1
    assert outcome.verdict.bad_micro_batch == where
    assert outcome.verdict.images == (f"{where}.png",)
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.3))
    if scaler is not None:
        assert scaler.state_dict()["scale"] == 512.0
        assert scaler.state_dict()["_growth_tracker"] == 0


@pytest.mark.parametrize("name", ["steady", "stable"])
def test_a_window_of_bad_micro_batches_only_is_no_step(name: str):
    parameter, optimizer = scalar()
    guard, scaler = GradientGuard.from_preset(name), scaler_of()
    for _ in range(2):
        micro(parameter, math.nan, scaler)
        assert not guard.observe_micro_batch(optimizer, drop="micro_batch")
    outcome = guarded_step(guard, optimizer, scaler=scaler)
    assert not outcome.stepped
    assert math.isnan(outcome.verdict.norm)
    assert scaler.get_scale() == 512.0
    assert parameter.abs().sum().item() == 0


def test_large_but_finite_micro_batches_are_not_dropped():
    parameter, optimizer = scalar()
    guard = GradientGuard.from_preset("off")
    micro(parameter, 1e25)
    assert guard.observe_micro_batch(optimizer, drop="micro_batch")
    assert guarded_step(guard, optimizer).stepped
    with pytest.raises(GuardError, match="drop must be"):
        guard.observe_micro_batch(optimizer, drop="batch")
