"""The last good states of what trains: parameters, optimizer, loss scaler and whatever else has a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .config import RescueError
from .extra import HasState
from .packed import PackedState, all_finite, plain

# What the schedule owns: it goes on counting forwards, so its learning rate is not put back.
NOT_KEPT = ("params", "lr", "initial_lr")


@dataclass(eq=False)
class Slot:
    """One state in the ring.

    ``step`` is the number of windows that were done when it was taken, ``level`` the logarithm of the smoothed loss
    (None where it was not known yet), ``used`` how often the run has gone back to it since the newest was taken.
    """

    packed: PackedState
    step: int = 0
    level: float | None = None
    used: int = 0


class StateRing:
    """Copies of the last ``keep`` states, and of the best one besides them.

    ``parameters`` are (name, parameter) pairs, a module, or None for all parameters of the optimizers; only what
    requires a gradient is kept. ``extra`` are further things to put back together with them, by name. ``store`` is
    "same" (copies lie on the device of the original) or "cpu". Memory: at most ``keep`` + 1 copies.

    The optimizer's learning rate (``lr``, ``initial_lr``) is neither kept nor put back: it belongs to the schedule.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        parameters: Any = None,
        scaler: Any = None,
        extra: Mapping[str, HasState] | None = None,
        keep: int = 3,
        store: str = "same",
    ) -> None:
        if store not in ("same", "cpu"):
            raise RescueError(f"store = {store!r}: expected 'same' or 'cpu'.")
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self.optimizers = [_unwrap(each) for each in given]
        self.parameters = dict(_named(parameters, self.optimizers))
        if not self.parameters:
            raise RescueError("There is nothing to keep: no parameter requires a gradient.")
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.extra = dict(extra or {})
        self.keep = keep
        self.store = store
        self.slots: list[Slot] = []
        self.best: Slot | None = None
        self._spare: list[Slot] = []

    @property
    def bytes_held(self) -> int:
        """Size of all copies."""
        held = {id(slot): slot for slot in [*self.slots, *self._spare, *([self.best] if self.best else [])]}
        return sum(slot.packed.bytes_held for slot in held.values())

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    def live_is_finite(self) -> bool:
        """Whether parameters and optimizer state (of this process) are free of NaN and infinity; one host read."""
        return all_finite([list(self.parameters.values()), *map(_optimizer_state, self.optimizers)])

    def weights_are_finite(self) -> bool:
        """Whether the parameters (of this process) are free of NaN and infinity."""
        return all_finite(list(self.parameters.values()))

    def take(self, step: int, *, level: float | None = None, best: bool = False) -> None:
        """Keep the state as it is now, as the newest and, if said so, as the best one."""
        if len(self.slots) == self.keep:
            self._free(self.slots.pop(0))
        slot = self._spare.pop() if self._spare else Slot(PackedState(self.store))
        slot.step, slot.level, slot.used = step, level, 0
        slot.packed.take(
            {
                "parameters": list(self.parameters.values()),
                "optimizers": [_optimizer_state(each) for each in self.optimizers],
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "extra": {name: each.state_dict() for name, each in self.extra.items()},
            }
        )
        for earlier in self.slots:
            # The run has got on from there: they are as good as ever.
            earlier.used = 0
        self.slots.append(slot)
        if best:
            self._set_best(slot)

    def newest_before(self, step: int) -> Slot:
        """The newest state that is not younger than ``step`` and was not gone back to yet, else the oldest one."""
        candidates = [slot for slot in self.slots if slot.step <= step and not slot.used]
        return candidates[-1] if candidates else self.slots[0]

    def go_back_to(self, slot: Slot) -> None:
        """Put a state back, bit for bit; states that are younger are forgotten, and gradients cleared."""
        self.restore(slot)
        slot.used += 1
        while self.slots and self.slots[-1] is not slot and slot in self.slots:
            self._free(self.slots.pop())

    def forget(self) -> None:
        """Hold no state any more; their memory is kept for those to come."""
        if self.best is not None and self.best not in self.slots:
            self._spare.append(self.best)
        self._spare += self.slots
        self.slots, self.best = [], None

    @torch.no_grad()
    def restore(self, slot: Slot) -> None:
        """Put the values of a state back into what trains."""
        held = slot.packed.unpack(own=False)
        live = [plain(each) for each in self.parameters.values()]
        torch._foreach_copy_(live, held["parameters"])
        state = slot.packed.unpack()
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            _restore_optimizer(optimizer, saved)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, each in self.extra.items():
            each.load_state_dict(state["extra"][name])
        for parameter in self.parameters.values():
            parameter.grad = None

    def _set_best(self, slot: Slot) -> None:
        before, self.best = self.best, slot
        if before is not None and before is not slot and before not in self.slots:
            self._spare.append(before)

    def _free(self, slot: Slot) -> None:
        if slot is not self.best:
            self._spare.append(slot)

    def state_dict(self) -> dict[str, Any]:
        """All states, as plain values and CPU tensors of their own."""
        slots = list(self.slots)
        if self.best is not None and self.best not in slots:
            slots.append(self.best)
        return {
            "names": list(self.parameters),
            "in_ring": len(self.slots),
            "best": None if self.best is None else slots.index(self.best),
            "slots": [
                {"step": each.step, "level": each.level, "used": each.used, "packed": each.packed.state_dict()}
                for each in slots
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the states of the ring that gave ``state``.

        Raises ``RescueError`` if other parameters trained there.
        """
        if list(state["names"]) != list(self.parameters):
            raise RescueError("These states were taken of other parameters; the run was set up differently.")
        slots = []
        for saved in state["slots"]:
            slot = Slot(PackedState(self.store), saved["step"], saved["level"], saved["used"])
            slot.packed.load_state_dict(saved["packed"], self.device)
            slots.append(slot)
        self.slots = slots[: state["in_ring"]][-self.keep :]
        self.best = None if state["best"] is None else slots[state["best"]]
        self._spare = []


def _named(parameters: Any, optimizers: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if parameters is None:
        pairs: Iterable[tuple[str, torch.Tensor]] = (
            (f"{number}.{group_number}.{place}", parameter)
            for number, optimizer in enumerate(optimizers)
            for group_number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        )
    elif isinstance(parameters, torch.nn.Module):
        pairs = parameters.named_parameters()
    else:
        pairs = parameters
    return ((name, parameter) for name, parameter in pairs if parameter.requires_grad)


def _unwrap(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper such as accelerate's."""
    while hasattr(optimizer, "optimizer") and hasattr(optimizer.optimizer, "param_groups"):
        optimizer = optimizer.optimizer
    return optimizer


def _ordered(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    """What the optimizer holds now, with the places of parameters for keys. Tensors are the live ones."""
    # Many optimizers make their state in the first step: those parameters are simply not there.
    place_of = {parameter: place for place, parameter in enumerate(_ordered(optimizer))}
    return {
        "state": [[place_of.get(key, key), dict(values)] for key, values in optimizer.state.items()],
        "groups": [{key: value for key, value in g.items() if key not in NOT_KEPT} for g in optimizer.param_groups],
    }


def _restore_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    parameters = _ordered(optimizer)
    wanted = {parameters[key] if isinstance(key, int) else key: values for key, values in saved["state"]}
    for key in [key for key in optimizer.state if key not in wanted]:
        del optimizer.state[key]
    for key, values in wanted.items():
        _restore_values(optimizer.state[key], values)
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        _restore_values(group, values, keep=NOT_KEPT)


def _restore_values(live: dict[str, Any], saved: Mapping[str, Any], keep: Sequence[str] = ()) -> None:
    for key in [key for key in live if key not in saved and key not in keep]:
        del live[key]
    for key, value in saved.items():
        before = live.get(key)
        if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and _fits(before, value):
            # In place: others, such as a captured graph, may hold this very tensor.
            plain(before).copy_(value)
        else:
            live[key] = value


def _fits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    live = plain(live)
    return live.shape == saved.shape and live.dtype == saved.dtype
