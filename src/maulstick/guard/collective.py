"""The few numbers that processes must agree on before any of them decides."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .errors import GuardError


class Collective:
    """Sums over processes; does nothing where there is only one.

    ``group`` is "auto" (the default process group whenever one is initialised), a process group, or None for a guard
    that runs on one process only and must not wait for others.
    """

    def __init__(self, group: Any = "auto") -> None:
        if isinstance(group, str) and group != "auto":
            raise GuardError(f"processes must be 'auto', a process group or None, got '{group}'.")
        self.group = group

    @property
    def size(self) -> int:
        """How many processes decide together."""
        if self.group is None or not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size(self._group())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add ``values`` over all processes, in place; the result is the same to the bit everywhere."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self._group())
        return values

    def smallest(self, values: list[int], device: torch.device) -> list[int]:
        """The smallest of each number over all processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group())
        return tensor.tolist()

    def _group(self) -> Any:
        return None if self.group == "auto" else self.group
