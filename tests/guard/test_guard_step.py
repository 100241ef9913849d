"""``guarded_step``: the healthy order, the state of the GradScaler, deadlocks and the collapse of the scale."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maulstick.guard import GradientGuard, GuardError, guarded_step, unscaled_from

KINDS = ("good", "good", "good", "spike", "inf", "nan")
VALUES = {"good": 0.1, "spike": 50.0, "inf": math.inf, "nan": math.nan}


def scalar(value: float = 0.0) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.full((3,), value))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def put(parameter: torch.nn.Parameter, gradient: float, scaler: torch.amp.GradScaler | None = None) -> None:
    """What a backward pass leaves: the gradient times the scale."""
    scale = 1.0 if scaler is None else scaler.scale(torch.ones(())).item()
    parameter.grad = torch.full_like(parameter, gradient) * scale


def scaler_of(scale: float = 1024.0, interval: int = 4) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=60), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_scaler_ends_as_torchs_own_loop_leaves_it(kinds: list[str], interval: int):
    ours, theirs = scaler_of(interval=interval), scaler_of(interval=interval)
    parameter, optimizer = scalar()
    reference, reference_optimizer = scalar()
    guard = GradientGuard.from_preset("steady", active_from=2, window=50)
    for kind in ["good"] * 3 + kinds:
        put(parameter, VALUES[kind], ours)
        before = parameter.detach().clone()
        outcome = guarded_step(guard, optimizer, scaler=ours)
        put(reference, VALUES[kind], theirs)
        theirs.unscale_(reference_optimizer)
        theirs.step(reference_optimizer)
        theirs.update()
        assert ours.state_dict() == theirs.state_dict()
        assert outcome.stepped == (kind == "good")
        # Unscaled, or not at all: a step on scaled gradients would be a thousand times too large.
        torch.testing.assert_close(parameter.detach(), before - 0.1 if kind == "good" else before)
        assert parameter.grad is None
        assert not ours._per_optimizer_states
    assert guard.skipped == sum(kind != "good" for kind in kinds)


def test_a_healthy_run_is_left_exactly_as_it_was(model: torch.nn.Module):
    torch.manual_seed(5)
    data = torch.randn(30, 4, 6)
    plain, guarded = copy.deepcopy(model), copy.deepcopy(model)
    plain_optimizer, optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, guarded))
    guard = GradientGuard.from_preset("steady")
    for batch in data:
        for each in (plain, guarded):
            each(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        outcome = guarded_step(guard, optimizer, max_grad_norm=0.1)
        assert outcome.stepped
    for one, two in zip(plain.parameters(), guarded.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    assert guard.summary() == "30 steps judged, none skipped"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["spike", "inf", "nan"])
def test_a_skipped_step_leaves_weights_and_moments_alone(fused: bool, kind: str):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    guard, scaler = GradientGuard.from_preset("steady"), scaler_of()
    for _ in range(25):
        put(parameter, 0.1, scaler)
        assert guarded_step(guard, optimizer, scaler=scaler).stepped
    before = copy.deepcopy((parameter.detach(), optimizer.state_dict()["state"]))
    put(parameter, VALUES[kind], scaler)
    outcome = guarded_step(guard, optimizer, scaler=scaler, images=["a.png", "b.png"])
    assert outcome.skipped
    after = (parameter.detach(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    if kind == "spike":
        want = "norm 86.6 is 500x the recent median 0.173; images: a.png, b.png"
    elif kind == "nan":
        want = "the gradient is NaN in 1 of 1 tensors, first in tensor 0 of group 0; images: a.png, b.png"
    else:
        want = (
            "the gradient is infinite in 1 of 1 tensors, first in tensor 0 of group 0 (an fp16 overflow at loss scale "
            "65536); images: a.png, b.png"
        )
    assert outcome.describe() == want


def test_no_mode_hands_a_nan_to_an_optimizer_that_has_no_scaler():
    """``stable`` accepts a NaN step to keep its threshold off; only the plain modes leave the loop as it was."""
    for name, poisoned in (("stable", False), ("off", True)):
        parameter, optimizer = scalar()
        put(parameter, math.nan)
        outcome = guarded_step(GradientGuard.from_preset(name), optimizer)
        assert outcome.verdict.accept
        assert outcome.stepped == poisoned
        assert bool(parameter.isnan().any()) == poisoned


def test_deadlock_of_the_absolute_cap():
    """``stable`` with a healthy norm of 0.05: once the scale passes 2^22 the original skips every step for ever."""
    parameter, optimizer = scalar()
    guard = GradientGuard.from_preset("stable", cosine="off")
    scaler = scaler_of(2.0**16, interval=100)
    stepped, alarms, scales = [], [], []
    for _ in range(1500):
        put(parameter, 0.05 / math.sqrt(3), scaler)
        outcome = guarded_step(guard, optimizer, scaler=scaler)
        stepped.append(outcome.stepped)
        alarms += outcome.alarms
        scales.append(scaler.get_scale())
    assert max(scales) == 2.0**22
    assert 0.85 < sum(stepped[-500:]) / 500 < 1
    assert guard.judge.longest_streak <= 32
    assert "lowered to 2.09715e+06" in alarms[0]


def test_deadlock_of_the_immediate_skip():
    """``gamble`` with fp16 overflow above 2^20: the scale must fall, though every inf step is skipped at once."""
    parameter, optimizer = scalar()
    guard, scaler = GradientGuard.from_preset("gamble"), scaler_of(2.0**18, interval=50)
    stepped = []
    for _ in range(600):
        scale = scaler.get_scale()
        put(parameter, math.inf if scale > 2.0**20 else 1e-3, scaler)
        stepped.append(guarded_step(guard, optimizer, scaler=scaler).stepped)
        assert scale <= 2.0**21
    assert guard.judge.longest_streak == 1
    assert sum(stepped[-300:]) >= 290


@pytest.mark.parametrize("name", ["steady", "stable", "stable_no_threshoff", "gamble"])
def test_collapse_of_the_loss_scale(name: str):
    """After 144 overflows in a row 1/scale is inf in fp32 and torch's loop writes -inf into the weights."""
    parameter, optimizer = scalar()
    guard, scaler = GradientGuard.from_preset(name), scaler_of(2.0**16)
    alarms, escalated = [], []
    for _ in range(200):
        put(parameter, math.nan, scaler)
        outcome = guarded_step(guard, optimizer, scaler=scaler)
        alarms += outcome.alarms
        escalated.append(outcome.verdict.escalate)
    assert scaler.get_scale() == 2.0**-10
    assert any("fallen to 1" in alarm for alarm in alarms)
    assert any("its floor" in alarm for alarm in alarms)
    assert escalated.index(True) == 15
    assert len(alarms) < 40
    put(parameter, 0.5, scaler)
    assert guarded_step(guard, optimizer, scaler=scaler).stepped
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.5))


def test_torchs_own_loop_does_collapse():
    """The fault that the test above is about, so that it keeps testing something."""
    parameter, optimizer = scalar()
    scaler = scaler_of(2.0**16)
    for _ in range(144):
        put(parameter, math.nan, scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    put(parameter, 0.5, scaler)
    scaler.step(optimizer)
    assert not bool(parameter.isfinite().any())


def test_the_trap_that_the_order_avoids():
    """unscale_, skip, no update(): the next step() runs on gradients that are still scaled."""
    parameter, optimizer = scalar()
    scaler = scaler_of(65536.0)
    put(parameter, 1.0, scaler)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    put(parameter, 1.0, scaler)
    scaler.step(optimizer)
    assert parameter[0].item() == -65536.0


def test_the_trap_is_seen_when_observing_by_hand():
    parameter, optimizer = scalar()
    guard, scaler = GradientGuard.from_preset("steady"), scaler_of(65536.0)
    put(parameter, math.nan, scaler)
    scaler.unscale_(optimizer)
    assert guard.observe(optimizer, scale=scaler).skip
    put(parameter, 1.0, scaler)
    with pytest.raises(GuardError, match=r"scaler\.update\(\) was not called"):
        guard.observe(optimizer, scale=scaler)
    scaler.update()
    put(parameter, 1.0, scaler)
    scaler.unscale_(optimizer)
    verdict = guard.observe(optimizer, scale=scaler)
    assert verdict.norm == pytest.approx(math.sqrt(3))


def test_two_optimizers_get_one_decision():
    one, first = scalar()
    two, second = scalar()
    guard, scaler = GradientGuard.from_preset("steady"), scaler_of()
    for kind in ["good"] * 25 + ["nan"]:
        put(one, 0.1, scaler)
        put(two, VALUES[kind], scaler)
        outcome = guarded_step(guard, [first, second], scaler=scaler)
    assert outcome.skipped
    torch.testing.assert_close(one.detach(), torch.full((3,), -2.5))
    torch.testing.assert_close(two.detach(), torch.full((3,), -2.5))
    assert list(outcome.verdict.group_norms) == ["optimizer 0 group 0", "optimizer 1 group 0"]
    assert scaler.get_scale() == 1024.0 * 2**6 / 2


def test_a_disabled_scaler_and_a_step_without_gradients():
    parameter, optimizer = scalar()
    guard = GradientGuard.from_preset("steady")
    put(parameter, 1.0)
    outcome = guarded_step(guard, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False), loss=torch.tensor(0.5))
    assert outcome.stepped
    assert (outcome.verdict.scale, outcome.verdict.loss) == (None, 0.5)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    state = scaler.state_dict()
    outcome = guarded_step(guard, optimizer, scaler=scaler)
    assert not outcome.stepped
    assert not outcome.skipped
    assert scaler.state_dict() == state


def test_a_non_finite_loss_is_skipped_even_with_finite_gradients():
    parameter, optimizer = scalar()
    put(parameter, 0.1)
    outcome = guarded_step(GradientGuard.from_preset("steady"), optimizer, loss=torch.tensor(math.nan))
    assert outcome.skipped
    assert outcome.describe() == "the loss is nan, with a gradient norm of 0.173"
    put(parameter, 0.1)
    assert guarded_step(GradientGuard.from_preset("stable"), optimizer, loss=math.nan).stepped


class FakeDeepSpeed:
    class distributed_type:
        value = "DEEPSPEED"


def test_deepspeed_is_refused(optimizer: torch.optim.Optimizer):
    with pytest.raises(GuardError, match="DeepSpeed steps inside backward"):
        guarded_step(GradientGuard.from_preset("steady"), optimizer, accelerator=FakeDeepSpeed())


@pytest.mark.parametrize("name", ["steady", "stable", "stable_no_threshoff", "gamble"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path):
    def run(guard, optimizer, scaler, parameter, steps):
        torch.manual_seed(steps.start)
        outcomes = []
        for step in steps:
            torch.manual_seed(step)
            size = 0.1 * math.exp(0.3 * torch.randn(()).item())
            size = {240: math.nan, 241: 90.0, 255: math.inf, 270: 60.0}.get(step, size)
            put(parameter, size, scaler)
            outcome = guarded_step(guard, optimizer, scaler=scaler, max_grad_norm=0.1)
            outcomes.append((outcome.stepped, repr(outcome.verdict)))
        return outcomes

    whole = (GradientGuard.from_preset(name), *reversed(scalar()))
    whole_scaler, scaler = scaler_of(), scaler_of()
    want = run(whole[0], whole[1], whole_scaler, whole[2], range(300))
    parameter, optimizer = scalar()
    guard = GradientGuard.from_preset(name)
    got = run(guard, optimizer, scaler, parameter, range(245))
    torch.save([guard.state_dict(), scaler.state_dict(), parameter.detach()], tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    parameter, optimizer = scalar()
    parameter.data.copy_(saved[2])
    guard, scaler = GradientGuard.from_preset(name), scaler_of()
    guard.load_state_dict(saved[0])
    scaler.load_state_dict(saved[1])
    got += run(guard, optimizer, scaler, parameter, range(245, 300))
    assert got == want
    assert torch.equal(parameter, whole[2])
    assert guard.summary() == whole[0].summary()


def test_a_state_of_another_rule_is_refused():
    state = GradientGuard.from_preset("steady").state_dict()
    with pytest.raises(GuardError, match="saved in mode 'steady' and cannot continue in mode 'stable'"):
        GradientGuard.from_preset("stable").load_state_dict(state)
    with pytest.raises(GuardError, match="version"):
        GradientGuard.from_preset("steady").load_state_dict({**state, "version": 99})


def test_observing_by_hand_with_a_scaler(model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    """The order a trainer uses: unscale once, one measurement for guard, clipping and log."""
    scaler = scaler_of()
    guard = GradientGuard.from_preset("stable", names=model)
    scaler.scale(model(torch.ones(2, 6)).square().mean()).backward()
    scaler.unscale_(optimizer)
    verdict = guard.observe(optimizer, loss=0.5, scale=unscaled_from(scaler.get_scale()))
    assert verdict.logged_norm == pytest.approx(verdict.norm * 1024.0, rel=1e-6)
    assert verdict.judges_scaled
    assert verdict.describe().startswith("scaled norm ")
