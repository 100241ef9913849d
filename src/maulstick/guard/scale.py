"""Saying whether gradients are still multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .errors import GuardError


@dataclass(frozen=True)
class LossScale:
    """A loss scale and whether the gradients at hand are still multiplied by it."""

    value: float | torch.Tensor
    still_applied: bool


def scaled_by(scale: float | torch.Tensor) -> LossScale:
    """The gradients are as the backward pass left them: still multiplied by ``scale``."""
    return LossScale(scale, still_applied=True)


def unscaled_from(scale: float | torch.Tensor) -> LossScale:
    """The loss was multiplied by ``scale``, and the gradients have been divided by it again (``unscale_``)."""
    return LossScale(scale, still_applied=False)


def read_scale(scale: Any, optimizers: Sequence[Any]) -> LossScale | None:
    """The ``LossScale`` for what a caller gave as ``scale``: None, a ``LossScale`` or a ``GradScaler``.

    A ``GradScaler`` knows itself whether it has unscaled the gradients of ``optimizers``. A bare number is refused,
    because it does not say which of the two cases it means.
    """
    if scale is None or isinstance(scale, LossScale):
        return scale
    if isinstance(scale, int | float | torch.Tensor):
        raise GuardError(
            f"scale={scale!r} does not say whether the gradients are still multiplied by it. Give "
            f"scaled_by(scale) before scaler.unscale_, unscaled_from(scale) after it, or the GradScaler itself."
        )
    if not hasattr(scale, "get_scale"):
        raise GuardError(f"scale must be scaled_by(...), unscaled_from(...) or a GradScaler, got {type(scale)!r}.")
    if not scale.is_enabled():
        return None
    return LossScale(scale_value(scale), still_applied=not _has_unscaled(scale, optimizers))


def scale_value(scaler: Any) -> float | torch.Tensor:
    """The scale of an enabled ``GradScaler``, left on its device where it is there, so that nothing is waited for."""
    tensor = scaler._get_scale_async()
    return scaler.get_scale() if tensor is None or tensor.device.type == "cpu" else tensor


def _has_unscaled(scaler: Any, optimizers: Sequence[Any]) -> bool:
    # A defaultdict: looking up an unknown optimizer would create an entry, which update() then takes for unchecked.
    states = scaler._per_optimizer_states
    known = [states[id(each)]["stage"] for each in optimizers if id(each) in states]
    stages = set(known if optimizers else [state["stage"] for state in states.values()])
    if OptState.STEPPED in stages:
        raise GuardError("observe() was called after scaler.step(): the step it should judge has been taken already.")
    if optimizers and stages and len(known) < len(optimizers):
        stages.add(OptState.READY)
    if len(stages) > 1:
        raise GuardError("The GradScaler has unscaled some of these gradients but not all; unscale every optimizer.")
    return OptState.UNSCALED in stages
