"""``DeviceGuard``: the same decisions as ``GradientGuard``, without the host ever waiting for the device."""

from __future__ import annotations

import copy
import json
import math
import random

import pytest
import torch

from maulstick.guard import GradientGuard, GuardError, guarded_step, preset
from maulstick.guard.device import DeviceGuard


def fused() -> tuple[torch.nn.Parameter, torch.nn.Parameter, torch.optim.Optimizer]:
    one, two = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    return one, two, torch.optim.AdamW([{"params": [one]}, {"params": [two]}], lr=0.1, fused=True)


def gradients(seed: int, steps: int) -> list[float]:
    """A healthy run with spikes, NaN, inf, a zero, a burst, and a lasting change of level."""
    source = random.Random(seed)
    sizes = [math.exp(0.3 * source.gauss(0, 1)) * (200.0 if step >= 260 else 1.0) for step in range(steps)]
    for step in source.sample(range(25, steps), 30):
        sizes[step] *= source.choice([1e3, 40.0, math.nan, math.inf, 0.0])
    for step in range(120, 150):
        sizes[step] *= 60
    return sizes


def put(size: float, one: torch.nn.Parameter, two: torch.nn.Parameter, scale: float = 1.0) -> None:
    one.grad, two.grad = (
        torch.full((3,), size) * scale,
        torch.full((2,), size / 2 if math.isfinite(size) else 1.0) * scale,
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_it_decides_and_steps_like_the_host(seed: int, with_scaler: bool):
    host, device = GradientGuard.from_preset("steady"), DeviceGuard(device="cpu")
    a, b, host_optimizer = fused()
    c, d, optimizer = fused()
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=30) if with_scaler else None for _ in "ab"]
    want, got = [], []
    for step, size in enumerate(gradients(seed, 420)):
        scale = scalers[0].scale(torch.ones(())).item() if with_scaler else 1.0
        put(size, a, b, scale)
        outcome = guarded_step(host, host_optimizer, loss=0.5, scaler=scalers[0], max_grad_norm=1.0, images=[str(step)])
        want.append(outcome.verdict)
        if with_scaler:
            scalers[1].scale(torch.ones(()))
        put(size, c, d, scale)
        device.step(optimizer, loss=0.5, scaler=scalers[1], max_grad_norm=1.0, images=[str(step)])
        if step % 37 == 36:
            got += device.flush()
            state = json.loads(json.dumps(device.state_dict()))
            device = DeviceGuard(device="cpu")
            device.load_state_dict(state)
    got += device.flush()
    assert device.flush() == []
    assert [each.skip for each in got] == [each.skip for each in want]
    assert 60 < sum(each.skip for each in want) < 170
    assert {each.reason.value for each in got} == {"accepted", "spike", "nan", "inf", "level_shift"}
    assert [repr(each.describe()) for each in got] == [repr(each.describe()) for each in want]
    for one, two in ((a, c), (b, d)):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    if with_scaler:
        assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("maker", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_skip_leaves_weights_and_moments_alone(maker: type[torch.optim.Optimizer]):
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = maker([parameter], lr=0.1, fused=True)
    guard = DeviceGuard(device="cpu", names=[("the weight", parameter)])
    for _ in range(25):
        parameter.grad = torch.full((4,), 0.1)
        guard.step(optimizer)
    for bad in (math.nan, math.inf, 1e4):
        before = copy.deepcopy((parameter.detach(), optimizer.state_dict()["state"]))
        parameter.grad = torch.tensor([0.1, bad, 0.1, 0.1])
        guard.step(optimizer)
        torch.testing.assert_close((parameter.detach(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)
        assert not hasattr(optimizer, "found_inf")
    verdicts = guard.flush()
    assert [each.skip for each in verdicts] == [False] * 25 + [True] * 3
    assert [each.bad_tensor for each in verdicts[25:]] == ["the weight", "the weight", None]
    assert guard.judge.observed == 28


def test_the_host_never_reads_before_flush(monkeypatch: pytest.MonkeyPatch):
    one, two, optimizer = fused()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    guard = DeviceGuard(device="cpu")
    put(1.0, one, two, scaler.scale(torch.ones(())).item())
    guard.step(optimizer, loss=torch.tensor(0.5), scaler=scaler, max_grad_norm=1.0)

    def refuse(*_: object) -> None:
        raise AssertionError("the host read a tensor")

    put(math.nan, one, two, 256.0)
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            patched.setattr(torch.Tensor, name, refuse)
        guard.step(optimizer, loss=torch.tensor(0.5), scaler=scaler, max_grad_norm=1.0)
    assert [each.skip for each in guard.flush()] == [False, True]
    assert scaler.get_scale() == 128.0


def test_the_scale_has_a_floor():
    one, two, optimizer = fused()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    guard = DeviceGuard(device="cpu")
    scaler.scale(torch.ones(()))
    for _ in range(30):
        put(math.nan, one, two)
        guard.step(optimizer, scaler=scaler)
    assert scaler.get_scale() == 2.0**-10
    assert guard.flush()[-1].escalate


def test_tensors_without_gradient_do_not_shift_the_names():
    one, two, optimizer = fused()
    guard = DeviceGuard(device="cpu", names=[("one", one), ("two", two)])
    two.grad = torch.tensor([math.nan, 0.0])
    guard.step(optimizer)
    assert guard.flush()[0].bad_tensor == "two"


def test_what_it_cannot_do_is_refused():
    one, _, _ = fused()
    with pytest.raises(GuardError, match="not fused"):
        DeviceGuard(device="cpu").step(torch.optim.SGD([one], lr=0.1))
    with pytest.raises(GuardError, match="mode steady only"):
        DeviceGuard(preset("stable"), device="cpu")
    with pytest.raises(GuardError, match="adapt"):
        DeviceGuard(preset("steady", when_stuck="hand_over"), device="cpu")
    one, two, optimizer = fused()
    guard = DeviceGuard(device="cpu")
    put(1.0, one, two)
    guard.step(optimizer)
    with pytest.raises(GuardError, match=r"flush\(\) before"):
        guard.state_dict()
