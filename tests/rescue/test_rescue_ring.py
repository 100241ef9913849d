"""The ring of states: restored to the bit, shared with nothing, and no larger than promised."""

from __future__ import annotations

import io
import math

import pytest
import torch

from maulstick.rescue import RandomState, RescueError, StateRing
from tests.rescue.conftest import Toy, everything

OPTIMIZERS = [
    ("AdamW",),
    ("AdamW", "fused=False"),
    ("AdamW", "amsgrad=True", "fused=False"),
    ("SGD", "momentum=0.9"),
    ("SGD",),
    ("Adafactor",),
    ("Lion",),
    ("AdamWScheduleFree",),
    ("Prodigy",),
    ("ProdigyPlusScheduleFree",),
    ("DAdaptAdam",),
]


@pytest.mark.parametrize("chosen", OPTIMIZERS, ids=" ".join)
def test_a_state_comes_back_to_the_bit_and_goes_on_as_before(chosen):
    toy = Toy(*chosen)
    for number in range(4):
        toy.step(number)
    ring = StateRing(toy.optimizer, parameters=toy.model)
    ring.take(4)
    taken = everything(toy)
    first = [toy.step(number) for number in range(4, 9)]
    moved = everything(toy)
    assert moved != taken
    for parameter in toy.model.parameters():
        parameter.data.fill_(math.nan)
        for value in toy.optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(math.nan)
    ring.restore(ring.slots[0])
    assert everything(toy) == taken
    assert [toy.step(number) for number in range(4, 9)] == first
    assert everything(toy) == moved
    # The copy was not trained along.
    ring.restore(ring.slots[0])
    assert everything(toy) == taken


@pytest.mark.parametrize("chosen", OPTIMIZERS, ids=" ".join)
def test_a_state_from_before_the_first_step_has_no_optimizer_state(chosen):
    toy = Toy(*chosen)
    ring = StateRing(toy.optimizer, parameters=toy.model)
    ring.take(0)
    taken = everything(toy)
    first = [toy.step(number) for number in range(3)]
    ring.restore(ring.slots[0])
    assert everything(toy) == taken
    assert [toy.step(number) for number in range(3)] == first


def test_a_restored_state_and_the_copy_share_no_memory():
    toy = Toy("SGD", "momentum=0.9")
    ring = StateRing(toy.optimizer)
    ring.take(0)
    toy.step(0)
    ring.take(1)
    one = everything(toy)
    toy.optimizer.state.clear()
    # The optimizer's state is made anew here, from the copy.
    ring.restore(ring.slots[1])
    held = {buffer.untyped_storage().data_ptr() for slot in ring.slots for buffer in slot.packed.tensors}
    live = [*toy.model.parameters(), *(value for each in toy.optimizer.state.values() for value in each.values())]
    assert len(live) == 8
    assert not held & {each.untyped_storage().data_ptr() for each in live}
    toy.step(1)
    ring.restore(ring.slots[1])
    assert everything(toy) == one


def test_the_learning_rate_belongs_to_the_schedule():
    toy = Toy()
    ring = StateRing(toy.optimizer)
    toy.optimizer.param_groups[0]["lr"] = 0.5
    ring.take(0)
    toy.optimizer.param_groups[0]["lr"] = 0.25
    toy.optimizer.param_groups[0]["weight_decay"] = 9.0
    ring.restore(ring.slots[0])
    assert toy.optimizer.param_groups[0]["lr"] == 0.25
    assert toy.optimizer.param_groups[0]["weight_decay"] == 0.01


def test_scaler_random_numbers_and_others_go_back_too():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    class Average:
        def __init__(self):
            self.values = {"a": torch.ones(3), "count": 1}

        def state_dict(self):
            return self.values

        def load_state_dict(self, state):
            self.values = state

    toy, average = Toy(), Average()
    ring = StateRing(toy.optimizer, scaler=scaler, extra={"average": average, "random": RandomState()})
    ring.take(0)
    drawn = torch.rand(3)
    average.values["a"].fill_(7.0)
    average.values["count"] = 2
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    for _ in range(2):
        ring.restore(ring.slots[0])
        assert scaler.get_scale() == 1024.0
        assert average.values["a"].tolist() == [1.0] * 3
        assert average.values["count"] == 1
        assert torch.equal(torch.rand(3), drawn)
        # What was handed out belongs to the receiver: changing it must not reach the copy.
        average.values["a"].fill_(9.0)


def test_gradients_do_not_outlive_a_restored_state():
    toy = Toy()
    ring = StateRing(toy.optimizer)
    ring.take(0)
    for parameter in toy.model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    ring.restore(ring.slots[0])
    assert all(parameter.grad is None for parameter in toy.model.parameters())


def test_the_ring_keeps_the_newest_and_the_best_in_little_memory():
    toy = Toy()
    ring = StateRing(toy.optimizer, keep=3)
    ring.take(0, best=True)
    for number in range(1, 12):
        toy.step(number)
        ring.take(number, best=number == 4)
        if number == 4:
            at_four = toy.weights()
    assert [slot.step for slot in ring.slots] == [9, 10, 11]
    assert ring.best.step == 4
    # AdamW: two moments as large as the weights, and one counter for each of four tensors; 64-byte alignment.
    one = 3 * toy.bytes_of_weights() + 4 * 4 + 16 * 64
    assert 4 * 3 * toy.bytes_of_weights() <= ring.bytes_held <= 4 * one
    ring.restore(ring.best)
    assert torch.equal(toy.weights(), at_four)


def test_going_back_again_without_getting_on_goes_further_back():
    toy = Toy()
    ring = StateRing(toy.optimizer, keep=3)
    for number in (10, 20, 30):
        ring.take(number)
    gone_to = []
    for _ in range(4):
        slot = ring.newest_before(35)
        ring.go_back_to(slot)
        gone_to.append(slot.step)
    assert gone_to == [30, 20, 10, 10]
    assert ring.slots[0].used == 2
    ring.take(40)
    assert [(slot.step, slot.used) for slot in ring.slots] == [(10, 0), (40, 0)]
    assert ring.newest_before(39).step == 10
    assert ring.newest_before(45).step == 40
    for number in (50, 60, 70):
        ring.take(number)
    # What was given back is used again: never more than three and the best.
    assert ring.bytes_held <= 4 * (toy.bytes_of_weights() + 16 * 64)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "moment", "one-element", "group"])
def test_everything_non_finite_is_seen(value, where):
    toy = Toy("Prodigy")
    toy.step(0)
    ring = StateRing(toy.optimizer)
    weight = toy.model[2].weight
    assert ring.live_is_finite()
    if where == "weight":
        weight.data[1, 3] = value
    elif where == "moment":
        toy.optimizer.state[weight]["exp_avg_sq"][1, 3] = value
    elif where == "one-element":
        toy.optimizer.state[weight]["exp_avg_sq"] = torch.tensor(value)
    else:
        # Prodigy's growth_rate is infinite by default: only NaN is a fault in a plain number.
        assert toy.optimizer.param_groups[0]["growth_rate"] == math.inf
        toy.optimizer.param_groups[0]["d"] = math.nan
    assert not ring.live_is_finite()
    assert ring.weights_are_finite() == (where != "weight")


def test_huge_values_whose_squares_overflow_are_finite():
    toy = Toy()
    toy.model[0].weight.data.fill_(1e30)
    assert StateRing(toy.optimizer).live_is_finite()
    toy.model[0].weight.data[0, 0] = math.inf
    assert not StateRing(toy.optimizer).live_is_finite()


@pytest.mark.parametrize("store", ["same", "cpu"])
def test_a_saved_ring_holds_the_same_states(store):
    toy = Toy("AdamW", "amsgrad=True")
    ring = StateRing(toy.optimizer, parameters=toy.model, keep=2, store=store)
    ring.take(0, best=True)
    for number in (1, 2, 3):
        toy.step(number)
        ring.take(number, level=-1.0 * number)
    ring.slots[1].used = 1
    states = {}
    for slot in (*ring.slots, ring.best):
        ring.restore(slot)
        states[slot.step] = everything(toy)
    file = io.BytesIO()
    torch.save(ring.state_dict(), file)
    file.seek(0)

    other = Toy("AdamW", "amsgrad=True")
    loaded = StateRing(other.optimizer, parameters=other.model, keep=2, store=store)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert [(slot.step, slot.level, slot.used) for slot in loaded.slots] == [(2, -2.0, 0), (3, -3.0, 1)]
    for slot in (*loaded.slots, loaded.best):
        loaded.restore(slot)
        assert everything(other) == states[slot.step]


def test_what_cannot_be_kept_is_refused():
    toy = Toy()
    with pytest.raises(RescueError, match="'same' or 'cpu'"):
        StateRing(toy.optimizer, store="disk")
    with pytest.raises(RescueError, match="no parameter requires a gradient"):
        StateRing(toy.optimizer, parameters=[])
    ring = StateRing(toy.optimizer, parameters=toy.model)
    ring.take(0)
    with pytest.raises(RescueError, match="other parameters"):
        StateRing(toy.optimizer, parameters=list(toy.model.named_parameters())[:2]).load_state_dict(ring.state_dict())


def test_a_frozen_base_is_not_kept():
    toy = Toy()
    base = torch.nn.Linear(100, 100).requires_grad_(False)
    both = torch.nn.ModuleList([base, toy.model])
    ring = StateRing(toy.optimizer, parameters=both)
    ring.take(0)
    assert len(ring.parameters) == 4
    assert ring.bytes_held < 100 * 100 * 4
