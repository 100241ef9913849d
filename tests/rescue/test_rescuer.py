"""The whole rescue on a small model: faults are put in, and the run goes on from a good state."""

from __future__ import annotations

import io
import math

import pytest
import torch

from maulstick.guard import GradientGuard, guarded_step
from maulstick.rescue import Cause, RescueConfig, RescueError, Rescuer
from tests.rescue.conftest import Toy, everything


def train(toy, rescuer, steps, *, first=0, fault=lambda step: None, guard=None, scaler=None):
    """A guarded loop; ``fault`` may return a factor for the loss, or change the toy. Returns all decisions."""
    guard = guard or GradientGuard.from_preset("steady")
    decisions = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        loss = (toy.model(torch.randn(5, 6, generator=generator)) - 1).square().mean()
        factor = fault(step)
        loss = loss if factor is None else loss * factor
        (loss if scaler is None else scaler.scale(loss)).backward()
        outcome = guarded_step(guard, toy.optimizer, loss=loss, scaler=scaler)
        bad = outcome.skipped or not outcome.stepped
        decision = rescuer.after_window(
            step + 1, bad=bad, loss=loss.item(), finite=outcome.verdict.finite and math.isfinite(loss.item())
        )
        decisions.append(decision)
        for group in toy.optimizer.param_groups:
            group["lr"] = 1e-2 * rescuer.lr_scale
        if decision.action == "gave_up":
            break
    return decisions


def acts(decisions):
    return [each for each in decisions if each.action != "go_on"]


CONFIG = RescueConfig(after=4, after_again=8, every=5, limit=3, lr_restore_after=6)


def test_a_healthy_run_is_not_touched():
    toy, plain = Toy(), Toy()
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model)
    rescuer.begin()
    assert acts(train(toy, rescuer, 40)) == []
    guard = GradientGuard.from_preset("steady")
    for step in range(40):
        loss = (plain.model(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))) - 1).square().mean()
        loss.backward()
        guarded_step(guard, plain.optimizer, loss=loss)
    assert everything(toy) == everything(plain)
    assert [slot.step for slot in rescuer.ring.slots] == [30, 35, 40]
    assert rescuer.summary() == ""


def test_a_nan_in_a_weight_is_gone_with_the_window_that_saw_it():
    toy = Toy()
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model)
    rescuer.begin()
    kept = {}

    def fault(step):
        # The forward pass of this window is over: the next one is the first to see it.
        kept[step] = toy.weights()
        if step == 12:
            toy.model[0].weight.data[2, 2] = math.nan

    [decision] = acts(train(toy, rescuer, 30, fault=fault))
    assert (decision.action, decision.cause) == ("rolled_back", Cause.NON_FINITE_STATE)
    assert (decision.from_step, decision.to_step, decision.windows_lost) == (14, 10, 4)
    assert "back to the state of step 10, learning rate x 0.5" in decision.text
    assert torch.equal(kept[14], kept[10])
    assert toy.weights().isfinite().all()
    # Six good windows later the cut was taken back.
    assert rescuer.lr_scale == 1.0
    assert rescuer.summary() == "rolled back once (1 non finite state), 4 windows lost, learning rate x 1 now"


def test_an_infinite_second_moment_is_found_before_it_is_kept():
    """It makes no gradient NaN, so only looking at the state can find it."""
    toy = Toy()
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model)
    rescuer.begin()

    def fault(step):
        if step == 12:
            toy.optimizer.state[toy.model[0].weight]["exp_avg_sq"][0, 0] = math.inf

    [decision] = acts(train(toy, rescuer, 20, fault=fault))
    assert (decision.cause, decision.from_step, decision.to_step) == (Cause.NON_FINITE_STATE, 15, 10)


def test_a_fault_that_stays_ends_with_the_best_state():
    toy = Toy()
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model)
    rescuer.begin()
    kept = {}

    def fault(step):
        kept[step] = toy.weights()
        return math.nan if step >= 22 else None

    found = acts(train(toy, rescuer, 500, fault=fault))
    assert [each.action for each in found] == ["rolled_back"] * 3 + ["gave_up"]
    assert [each.from_step for each in found] == [26, 30, 34, 38]
    # Without getting on, each goes further back.
    assert [each.to_step for each in found] == [20, 15, 10, 20]
    assert torch.equal(toy.weights(), kept[20])
    assert "after 3 rollbacks already" in found[-1].text


def test_a_fault_from_the_first_step_on_ends_with_the_start():
    toy = Toy()
    start = toy.weights()
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model)
    rescuer.begin()

    def fault(step):
        toy.model[0].weight.data[0, 0] = math.nan

    found = acts(train(toy, rescuer, 500, fault=fault))
    assert [each.from_step for each in found] == [2, 4, 6, 8]
    assert torch.equal(toy.weights(), start)


def test_a_loss_that_leaves_its_range_goes_back_to_before_it_left():
    config = RescueConfig(every=10, loss_history=40, loss_recent=8, loss_patience=8)
    toy = Toy("SGD")
    rescuer = Rescuer(config, toy.optimizer, parameters=toy.model)
    rescuer.begin()
    decisions = []
    for step in range(1, 140):
        broken = step >= 100 and not any(each.action == "rolled_back" for each in decisions)
        decisions.append(rescuer.after_window(step, bad=False, loss=3.0 if broken else 0.1 + 0.001 * (step % 7)))
    [decision] = acts(decisions)
    assert decision.cause is Cause.LOSS
    # High from the fourth of eight losses on, for eight windows: 110. It reaches back 8 + 8 windows, to 94.
    assert (decision.from_step, decision.to_step) == (110, 90)
    assert "the loss has left its range (median 3, above 0.2" in decision.text


def test_the_best_state_is_the_latest_that_is_not_clearly_worse():
    config = RescueConfig(every=1, keep=2, loss_history=16, loss_recent=4, loss_ratio=1000.0)
    rescuer = Rescuer(config, Toy().optimizer)
    rescuer.begin()
    best = []
    for step, loss in enumerate([0.2] * 8 + [0.1] * 8 + [0.104] * 8 + [0.5] * 8, 1):
        rescuer.after_window(step, bad=False, loss=loss)
        best.append(rescuer.ring.best.step)
    assert best[23] == 24
    assert best[-1] <= 26
    assert [slot.step for slot in rescuer.ring.slots] == [31, 32]


def test_the_loss_scale_comes_back_one_notch_lower_each_time():
    toy = Toy("AdamW", "fused=False")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model, scaler=scaler)
    rescuer.begin()
    scales = {}

    def fault(step):
        scales[step] = scaler.get_scale()
        return math.nan if 12 <= step < 20 else None

    found = acts(train(toy, rescuer, 30, fault=fault, scaler=scaler))
    assert [(each.from_step, each.to_step) for each in found] == [(16, 10), (20, 5)]
    # Brought down by four NaN windows each, and put back to half of what the kept states had.
    assert [scales[step] for step in (12, 15, 16, 19, 20)] == [2.0**16, 2.0**13, 2.0**15, 2.0**12, 2.0**15]
    assert scales[29] == 2.0**15


def test_a_small_loss_scale_is_not_lowered_below_one():
    toy = Toy("AdamW", "fused=False")
    for init, after in ((1.5, 1.0), (0.25, 0.25)):
        scaler = torch.amp.GradScaler("cpu", init_scale=init)
        rescuer = Rescuer(RescueConfig(after=1), toy.optimizer, scaler=scaler)
        rescuer.begin()
        assert rescuer.after_window(1, bad=True, loss=math.nan).action == "rolled_back"
        assert scaler.get_scale() == after


def test_secure_puts_finite_weights_in_place():
    toy = Toy()
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model)
    assert rescuer.secure() is None
    rescuer.begin()
    train(toy, rescuer, 6)
    assert rescuer.secure() is None
    toy.model[2].bias.data[0] = math.inf
    assert rescuer.secure() == 5
    assert toy.weights().isfinite().all()


def test_an_interrupted_run_goes_on_as_if_it_had_not_been():
    def fault(step):
        return math.nan if 12 <= step < 17 or 30 <= step < 40 else None

    whole = Toy()
    guard = GradientGuard.from_preset("steady")
    rescuer = Rescuer(CONFIG, whole.optimizer, parameters=whole.model)
    rescuer.begin()
    all_of_it = train(whole, rescuer, 45, fault=fault, guard=guard)
    assert len(acts(all_of_it)) == 3

    first, half_guard = Toy(), GradientGuard.from_preset("steady")
    half = Rescuer(CONFIG, first.optimizer, parameters=first.model)
    half.begin()
    train(first, half, 32, fault=fault, guard=half_guard)
    file = io.BytesIO()
    saved = (first.model.state_dict(), first.optimizer.state_dict(), half.state_dict(), half_guard.state_dict())
    torch.save(saved, file)
    file.seek(0)

    second, second_guard = Toy(), GradientGuard.from_preset("steady")
    rest = Rescuer(CONFIG, second.optimizer, parameters=second.model)
    model, optimizer, rescue, judged = torch.load(file, weights_only=True)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    rest.load_state_dict(rescue)
    second_guard.load_state_dict(judged)
    rest.begin(32)
    assert train(second, rest, 13, first=32, fault=fault, guard=second_guard) == all_of_it[32:]
    assert everything(second) == everything(whole)
    assert rest.judge.state_dict() == rescuer.judge.state_dict()
    with pytest.raises(RescueError, match="version 0"):
        rest.load_state_dict({**rescue, "version": 0})


def test_it_must_begin_with_a_good_state():
    toy = Toy()
    rescuer = Rescuer(CONFIG, toy.optimizer)
    with pytest.raises(RescueError, match=r"begin\(\) was not called"):
        rescuer.after_window(1, bad=False, loss=0.1)
    toy.model[0].weight.data[0, 0] = math.nan
    with pytest.raises(RescueError, match="before the first step"):
        rescuer.begin()


def test_begun_again_it_knows_neither_states_nor_losses_from_before():
    toy = Toy()
    rescuer = Rescuer(CONFIG, toy.optimizer, parameters=toy.model)
    rescuer.begin()
    train(toy, rescuer, 17)
    assert [slot.step for slot in rescuer.ring.slots] == [5, 10, 15]
    assert len(rescuer.judge.loss_range.recent) == 17
    next(toy.model.parameters()).data.fill_(0.5)
    rescuer.begin_again(17)
    assert [slot.step for slot in rescuer.ring.slots] == [17]
    assert rescuer.ring.best is rescuer.ring.slots[0]
    assert len(rescuer.judge.loss_range.recent) == 0
    held = rescuer.ring.bytes_held
    [decision] = acts(train(toy, rescuer, 4, first=17, fault=lambda step: math.nan))
    assert (decision.action, decision.to_step) == ("rolled_back", 17)
    assert bool((next(toy.model.parameters()) == 0.5).all())
    # The copies of before are used again.
    train(toy, rescuer, 12, first=21)
    assert rescuer.ring.bytes_held == held
