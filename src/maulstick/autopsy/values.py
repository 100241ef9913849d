"""Looking into values: tensors inside of nested outputs, their range, and their name where it is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .report import TensorFacts

_DEEPEST = 8


def tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor inside tuples, lists, mappings, dataclasses and Hugging Face outputs."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if depth > _DEEPEST:
        return
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name, None)) for field in fields(value))
    else:
        return
    for key, part in parts:
        yield from tensors_in(part, f"{name}.{key}" if name else str(key), depth + 1)


def is_checkable(tensor: Tensor) -> bool:
    """Whether the tensor can hold NaN or infinity and has values to look at."""
    return tensor.is_floating_point() and tensor.numel() > 0 and not tensor.is_meta and not tensor.is_sparse


def value_range(tensor: Tensor) -> tuple[float, float]:
    """Return (lowest, highest); both NaN where one element is. One read from the device."""
    values = tensor.detach()
    if values.element_size() < 2:
        values = values.float()
    low, high = torch.aminmax(values)
    both = torch.stack((low, high)).tolist()
    return float(both[0]), float(both[1])


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite."""
    return not is_checkable(tensor) or all(math.isfinite(bound) for bound in value_range(tensor))


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def tensor_facts(name: str, tensor: Tensor) -> TensorFacts:
    """Count and measure one tensor."""
    values = tensor.detach()
    values = values.float() if values.element_size() < 2 else values
    finite = values[torch.isfinite(values)]
    low, high = value_range(finite) if finite.numel() else (None, None)
    return TensorFacts(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        nan=int(values.isnan().sum()),
        plus_inf=int((values == math.inf).sum()),
        minus_inf=int((values == -math.inf).sum()),
        zeros=int((values == 0).sum()),
        low=low,
        high=high,
    )


Origin = Literal["weight", "buffer", "input", "optimizer state"]


@dataclass(frozen=True)
class Known:
    """A tensor that was there before the run, with what it is."""

    origin: Origin
    name: str
    tensor: Tensor


class KnownTensors:
    """Finds what a tensor is by the memory it lies in, so that views and detached tensors are recognised too."""

    def __init__(self) -> None:
        self._by_place: dict[int, Known] = {}
        self._by_storage: dict[int, Known] = {}
        self.all: list[Known] = []

    def add(self, origin: Origin, name: str, value: Any) -> None:
        """Remember every tensor inside ``value``."""
        for full_name, tensor in tensors_in(value, name):
            if tensor.is_meta or tensor.is_sparse:
                continue
            known = Known(origin, full_name, tensor)
            if tensor.numel():
                self._by_place.setdefault(tensor.data_ptr(), known)
                self._by_storage.setdefault(storage_of(tensor), known)
            self.all.append(known)

    def look_up(self, tensor: Tensor) -> Known | None:
        """Return what the tensor is, None for one that is not known."""
        return self._by_place.get(tensor.data_ptr()) or self._by_storage.get(storage_of(tensor))

    def bad(self, *origins: Origin) -> list[Known]:
        """Return those that are not finite, in the order in which they were added."""
        return [known for known in self.all if known.origin in origins and not is_finite(known.tensor)]


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory behind a tensor, the same for all its views."""
    return tensor.untyped_storage().data_ptr()
