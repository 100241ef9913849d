"""A state (nested dicts, lists and tuples with tensors in them) kept as a copy in one flat buffer per device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (int, float, bool, str, bytes, type(None))
# Stands for a tensor in a saved state.
MARK = "tensor number"
# Views of any dtype may begin at such places.
ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Stands in a packed state where a tensor was: its number, and the device it came from."""

    number: int
    device: torch.device


class PackedState:
    """Keeps one copy of a state; taking another one of the same shapes reuses the memory.

    ``store`` is "same" (every tensor is kept on its own device) or "cpu" (page-locked where the state is on a GPU, so
    that the copy does not hold up the device).
    """

    def __init__(self, store: str = "same") -> None:
        self.store = store
        self.skeleton: Any = None
        self.tensors: list[torch.Tensor] = []
        self._signature: list[tuple[Any, ...]] = []
        self._buffers: dict[torch.device, torch.Tensor] = {}

    @property
    def bytes_held(self) -> int:
        """Size of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, state: Any) -> None:
        """Copy a state, and forget the one held so far. Nothing of the copy is shared with ``state``."""
        live: list[torch.Tensor] = []
        self.skeleton = _without_tensors(state, live)
        signature = [(each.shape, each.dtype, each.device) for each in live]
        if signature != self._signature:
            self._allocate(live)
            self._signature = signature
        if live:
            torch._foreach_copy_(self.tensors, live, non_blocking=True)

    def unpack(self, *, own: bool = True) -> Any:
        """Return the state: with tensors of its own on the devices they came from, or (not ``own``) as it is held."""
        if not own:
            return _with_tensors(self.skeleton, lambda place: self.tensors[place.number])
        return _with_tensors(self.skeleton, lambda place: self.tensors[place.number].to(place.device, copy=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the copy as plain values and CPU tensors of their own."""
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.cuda.synchronize()
        return {
            "values": _with_tensors(self.skeleton, lambda place: {MARK: place.number}),
            "tensors": [each.to("cpu", copy=True) for each in self.tensors],
            "devices": [place.device.type for place in _places(self.skeleton)],
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Hold what ``state_dict`` returned. What came from a GPU goes to ``device`` when it is unpacked."""
        devices = [device if kind == device.type else torch.device(kind) for kind in state["devices"]]
        tensors = [each.to(home) for each, home in zip(state["tensors"], devices, strict=True)]
        self.take(_with_marks_replaced(state["values"], tensors))

    def _allocate(self, live: list[torch.Tensor]) -> None:
        # The old buffers are given back first: two of them would not have been counted on.
        self.tensors, self._buffers = [], {}
        sizes: dict[torch.device, int] = {}
        starts = []
        for each in live:
            device = self._device_for(each)
            start = sizes.get(device, 0)
            starts.append((device, start))
            sizes[device] = -(-(start + each.numel() * each.element_size()) // ALIGNMENT) * ALIGNMENT
        pinned = self.store == "cpu" and any(each.is_cuda for each in live)
        for device, size in sizes.items():
            pin = pinned and device.type == "cpu"
            self._buffers[device] = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin)
        for each, (device, start) in zip(live, starts, strict=True):
            flat = self._buffers[device][start : start + each.numel() * each.element_size()]
            self.tensors.append(flat.view(each.dtype).view(each.shape))

    def _device_for(self, tensor: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self.store == "cpu" else tensor.device


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values without history; of a sharded one this process's part."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _without_tensors(value: Any, found: list[torch.Tensor]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        found.append(plain(value))
        return Place(len(found) - 1, found[-1].device)
    if isinstance(value, dict):
        return {key: _without_tensors(item, found) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, found) for item in value)
    return copy.deepcopy(value)


def _with_tensors(value: Any, tensor_at: Callable[[Place], Any]) -> Any:
    if isinstance(value, Place):
        return tensor_at(value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensor_at) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensor_at) for item in value)
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _places(value: Any) -> Iterator[Place]:
    """The places in a skeleton, in the order of their numbers."""
    if isinstance(value, Place):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _places(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _places(item)


def _with_marks_replaced(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if MARK in value:
            return tensors[value[MARK]]
        return {key: _with_marks_replaced(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_marks_replaced(item, tensors) for item in value)
    return value


def all_finite(value: Any) -> bool:
    """Whether no tensor in a state holds NaN or infinity, and no plain number is NaN.

    An infinite plain number is a setting (a bound that is not used), so it is no fault. One pass over the tensors and
    one read by the host; only when the squares overflow are the tensors looked at one by one.
    """
    tensors: list[torch.Tensor] = []
    if not _no_nan_among(_without_tensors(value, tensors)):
        return False
    floating = [each for each in tensors if each.is_floating_point()]
    floating += [torch.view_as_real(each) for each in tensors if each.is_complex()]
    if not floating:
        return True
    double = any(each.dtype is torch.float64 for each in floating)
    norms = torch._foreach_norm(floating, 2, torch.float64 if double else torch.float32)
    devices = {norm.device for norm in norms}
    totals = [torch.stack([norm for norm in norms if norm.device == device]).sum() for device in devices]
    if all(math.isfinite(float(total)) for total in totals):
        return True
    return all(bool(each.isfinite().all()) for each in floating)


def _no_nan_among(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isnan(value)
    if isinstance(value, dict):
        return all(_no_nan_among(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_no_nan_among(item) for item in value)
    return True
