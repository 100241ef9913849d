"""Where the gradients are: optimizers, modules, named or bare parameters, sorted into named groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import GuardError

GroupNames = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True)
class TensorGroup:
    """Parameters whose joint gradient norm is wanted under ``name``. ``names`` is None where they have none."""

    name: str
    params: Sequence[torch.Tensor]
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class GradientSource:
    """Groups of parameters to observe. Build it once with ``GradientSource.of`` when the lookup itself costs time."""

    groups: tuple[TensorGroup, ...]
    optimizers: tuple[Any, ...] = ()

    @classmethod
    def of(cls, source: Any, groups: GroupNames = None) -> GradientSource:
        """Sort ``source`` into groups.

        ``source`` is an optimizer or several (its parameter groups are the groups), a module, or parameters, bare or
        as (name, parameter) pairs (one group "all"). ``groups`` maps a parameter's name to its group's name instead.
        """
        if isinstance(source, GradientSource):
            found = source
        elif hasattr(source, "param_groups"):
            found = cls(tuple(_optimizer_groups(source, "")), (unwrap_optimizer(source),))
        elif isinstance(source, torch.Tensor):
            found = cls((TensorGroup("all", [source]),))
        elif isinstance(source, torch.nn.Module):
            found = _from_list(list(source.named_parameters()))
        elif isinstance(source, Iterable):
            found = _from_list(list(source))
        else:
            raise GuardError(f"There are no gradients in {type(source)!r}; give an optimizer, a module or parameters.")
        return found if groups is None else _regroup(found, groups)

    def gradients(self) -> tuple[list[torch.Tensor], list[int]]:
        """All gradients there are, in group order, and how many of them each group has."""
        gradients: list[torch.Tensor] = []
        counts = []
        for group in self.groups:
            before = len(gradients)
            gradients += [param.grad for param in group.params if param.grad is not None]
            counts.append(len(gradients) - before)
        return gradients, counts

    def places_with_gradient(self) -> list[int]:
        """For each of ``gradients()``, the place of its parameter among all parameters."""
        params = [param for group in self.groups for param in group.params]
        return [place for place, param in enumerate(params) if param.grad is not None]

    def name_at(self, place: int, known: Mapping[int, str]) -> str:
        """A name for the parameter at ``place``, from ``known`` (by ``id``) or from its group."""
        for group in self.groups:
            if place < len(group.params):
                if group.names is not None:
                    return group.names[place]
                return known.get(id(group.params[place]), f"tensor {place} of {group.name}")
            place -= len(group.params)
        raise IndexError(place)

    def drop(self) -> None:
        """Forget every gradient, so that an optimizer that is stepped anyway has nothing to apply."""
        for group in self.groups:
            for param in group.params:
                param.grad = None


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside the wrappers of accelerate and Lightning, which is what a GradScaler knows."""
    while hasattr(optimizer, "optimizer") and hasattr(optimizer.optimizer, "param_groups"):
        optimizer = optimizer.optimizer
    return optimizer


def _optimizer_groups(optimizer: Any, prefix: str) -> Iterable[TensorGroup]:
    for number, group in enumerate(optimizer.param_groups):
        name = group.get("name") or f"group {number}"
        yield TensorGroup(f"{prefix}{name}", group["params"], group.get("param_names"))


def _from_list(items: list[Any]) -> GradientSource:
    if items and hasattr(items[0], "param_groups"):
        prefixes = [f"optimizer {number} " for number in range(len(items))] if len(items) > 1 else [""]
        groups = [
            group for each, prefix in zip(items, prefixes, strict=True) for group in _optimizer_groups(each, prefix)
        ]
        return GradientSource(tuple(groups), tuple(unwrap_optimizer(each) for each in items))
    named = bool(items) and all(isinstance(item, tuple) and len(item) == 2 for item in items)
    params = [item[1] for item in items] if named else items
    wrong = [param for param in params if not isinstance(param, torch.Tensor)]
    if wrong:
        raise GuardError(f"Expected parameters or (name, parameter) pairs, got {type(wrong[0])!r}.")
    return GradientSource((TensorGroup("all", params, [name for name, _ in items] if named else None),))


def _regroup(source: GradientSource, group_of: Mapping[str, str] | Callable[[str], str]) -> GradientSource:
    sorted_out: dict[str, tuple[list[torch.Tensor], list[str]]] = {}
    for group in source.groups:
        if group.names is None:
            raise GuardError("Grouping by name needs names: give a module or (name, parameter) pairs.")
        for name, param in zip(group.names, group.params, strict=True):
            target = group_of(name) if callable(group_of) else group_of.get(name)
            if target is None:
                raise GuardError(f"groups has no entry for the parameter '{name}'.")
            params, names = sorted_out.setdefault(target, ([], []))
            params.append(param)
            names.append(name)
    return GradientSource(
        tuple(TensorGroup(name, params, names) for name, (params, names) in sorted_out.items()), source.optimizers
    )
