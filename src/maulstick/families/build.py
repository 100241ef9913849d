"""Making modules out of configs and weights, without initialising weights that are replaced anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from maulstick.errors import ModelError
from maulstick.weight_files import NamedWeights

_NAMED_IN_MESSAGE = 3

Module = TypeVar("Module", bound=nn.Module)


def build_module(
    make: Callable[[], Module], weights: NamedWeights, *, what: str, dtype: torch.dtype, device: torch.device
) -> Module:
    """Return the module that ``make`` makes, frozen, in evaluation mode, with exactly the given weights.

    The module is made without memory of its own and takes over the tensors that were read: on the CPU, weights that
    lie on disk in ``dtype`` are never copied.

    Raises:
        ModelError: the config is unusable, or a weight is missing, left over, or of another shape; names are given.
    """
    from transformers.initialization import no_init_weights

    where = weights.file.path
    try:
        # On the meta device too, working out a start for each of thousands of weights takes a third of the time.
        with torch.device("meta"), no_init_weights():
            module = make()
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        raise ModelError(f"The {what} of {where} has a config that diffusers cannot use: {error}") from error
    expected: Mapping[str, Tensor] = module.state_dict()
    weights = _with_prefix_of(expected, weights)
    _check_names_and_shapes(expected, weights, what)
    module.requires_grad_(False)
    module.load_state_dict(weights.tensors(dtype), strict=True, assign=True)
    _restore_position_ids(module, what)
    module.requires_grad_(False)
    return module.eval().to(device)


def _with_prefix_of(expected: Mapping[str, Tensor], weights: NamedWeights) -> NamedWeights:
    """transformers 4.x names a text encoder's weights ``text_model.…``; 5.x where there is a projection beside it."""
    if any(name.startswith("text_model.") for name in expected):
        return weights.renamed(lambda name: name if name in expected else f"text_model.{name}")
    return weights


def _check_names_and_shapes(expected: Mapping[str, Tensor], weights: NamedWeights, what: str) -> None:
    where = weights.file.path
    missing = [name for name in expected if name not in weights.slots]
    unexpected = [*weights.leftover, *(slot.source for name, slot in weights.slots.items() if name not in expected)]
    problems = []
    if missing:
        problems.append(f"{len(missing)} weights are missing ({_some(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} weights are left over ({_some(unexpected)})")
    if problems:
        raise ModelError(
            f"The {what} in {where} does not have the weights that it should: {' and '.join(problems)}. The file is "
            "damaged, was changed by a tool, or belongs to another kind of model."
        )
    for name, slot in weights.slots.items():
        wanted = tuple(expected[name].shape)
        if slot.shape != wanted:
            raise ModelError(
                f"The {what} in {where} does not fit its config: {slot.source} has shape {list(slot.shape)}, "
                f"expected {list(wanted)}."
            )


def _restore_position_ids(module: nn.Module, what: str) -> None:
    """Position numbers are a buffer that is not saved, so nothing has filled it."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if not buffer.is_meta:
                continue
            if name != "position_ids":
                raise ModelError(f"The {what} has a buffer '{name}' that this version of Maulstick cannot fill.")
            setattr(owner, name, torch.arange(buffer.shape[-1]).expand(tuple(buffer.shape)))


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:_NAMED_IN_MESSAGE]) + (", …" if len(names) > _NAMED_IN_MESSAGE else "")
