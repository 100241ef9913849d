"""The healthy order of one update in a plain loop: unscale, measure, decide, clip, step or skip, update, zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import GuardError
from .guard import GradientGuard
from .scale import scale_value, unscaled_from
from .sources import GradientSource, GroupNames, unwrap_optimizer
from .verdict import Verdict


@dataclass(frozen=True)
class StepOutcome:
    """What happened in one update.

    ``stepped`` says whether the optimizer moved the weights. It is False for a skipped step, and also where the mode
    let a NaN or infinite gradient pass: those never reach the optimizer. ``clipped_by`` is the factor the gradients
    were multiplied by, or None. ``alarms`` are sentences to show a person.
    """

    verdict: Verdict
    stepped: bool
    clipped_by: float | None = None
    alarms: tuple[str, ...] = ()

    @property
    def skipped(self) -> bool:
        """Whether the guard skipped the step."""
        return self.verdict.skip

    def describe(self) -> str:
        """One sentence for a person."""
        return self.verdict.describe()


def guarded_step(
    guard: GradientGuard,
    optimizer: Any,
    *,
    loss: torch.Tensor | float | None = None,
    scaler: Any = None,
    accelerator: Any = None,
    max_grad_norm: float | None = None,
    source: Any = None,
    groups: GroupNames = None,
    images: Sequence[str] = (),
) -> StepOutcome | None:
    """Do everything that comes after ``backward()`` in one step, and return what was done.

    ``optimizer`` is one optimizer or a sequence of them (one decision for all). ``loss`` is the unscaled loss.
    ``scaler`` is the ``GradScaler`` that scaled it; with an accelerate ``accelerator`` its own is used, and None is
    returned while the accumulation window is not complete. Gradients are clipped to ``max_grad_norm`` (true units) if
    given. ``source`` and ``groups`` say what to measure, by default all parameters of the optimizers. Gradients are
    cleared at the end, after a skip too, and the scaler has then the state that torch's own loop would have left.
    """
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    layout = GradientSource.of(optimizers if source is None else source, groups)
    if accelerator is not None:
        if str(getattr(accelerator.distributed_type, "value", "")) == "DEEPSPEED":
            raise GuardError("DeepSpeed steps inside backward(), before any guard can look; use DDP or FSDP2.")
        scaler = accelerator.scaler
        if not accelerator.sync_gradients:
            guard.observe_micro_batch(layout, loss=loss, images=images)
            return None
        if guard.window.micro_batches:
            guard.observe_micro_batch(layout, loss=loss, images=images)
            loss, images = None, ()
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    bare = [unwrap_optimizer(each) for each in optimizers]
    checkable = [each for each in bare if _has_gradient(each)]
    scale = None if scaler is None else unscaled_from(scale_value(scaler))
    if scaler is not None:
        for each in checkable:
            scaler.unscale_(each)
    verdict = guard.observe(layout, loss=loss, scale=scale, images=images)
    may_step = bool(checkable) and guard.may_step(verdict)
    clipped_by = None
    if may_step and max_grad_norm is not None and verdict.finite:
        clipped_by = verdict.clip_coefficient(max_grad_norm)
        if clipped_by < 1.0:
            torch._foreach_mul_(layout.gradients()[0], clipped_by)
    if may_step:
        for each in checkable:
            each.step() if scaler is None else scaler.step(each)
    stepped = may_step and (verdict.finite or scaler is None)
    alarms = verdict.alarms
    if scaler is not None:
        if checkable:
            scaler.update()
        alarms += keep_scale_healthy(guard, scaler, verdict)
    _tell_wrappers(optimizers, stepped)
    for each in bare:
        each.zero_grad(set_to_none=True)
    return StepOutcome(verdict, stepped, clipped_by, alarms)


def keep_scale_healthy(guard: GradientGuard, scaler: Any, verdict: Verdict) -> tuple[str, ...]:
    """Do what ``scaler.update()`` alone does not, right after it; returns alarms.

    The scale is held above its floor, lowered for a dropped micro-batch as for any overflow, and lowered where a fixed
    cap refuses ordinary steps. It is read only after a step in which it can have fallen.
    """
    if verdict.finite and not verdict.dropped_micro_batches and not verdict.lower_scale:
        return ()
    config = guard.config
    before = verdict.scale if verdict.scale is not None else scaler.get_scale()
    alarms: tuple[str, ...] = ()
    if verdict.dropped_micro_batches and scaler.get_scale() >= before:
        # The gradients that are left are clean, so update() saw no overflow; but there was one.
        _set_scale(scaler, before * scaler.get_backoff_factor())
    if verdict.lower_scale:
        _set_scale(scaler, before * scaler.get_backoff_factor())
        alarms += (
            f"ordinary steps were skipped only because the loss scale had grown to {before:g}; it is lowered to "
            f"{scaler.get_scale():g}",
        )
    now = scaler.get_scale()
    if now < config.scale_floor:
        _set_scale(scaler, config.scale_floor)
        if guard.judge.non_finite_in_a_row % config.most_non_finite_in_a_row == 0:
            alarms += (
                f"the loss scale is held at {config.scale_floor:g}, its floor: the gradients overflow at any scale, "
                f"so the weights or the data are broken",
            )
    elif now <= config.scale_alarm < before:
        alarms += (
            f"the loss scale has fallen to {now:g}: overflows keep coming; look for a NaN in the weights or the data, "
            f"or train in bf16",
        )
    return alarms


def _set_scale(scaler: Any, scale: float) -> None:
    """Set the scale and begin counting clean steps anew, through the scaler's public state."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": 0})


def _has_gradient(optimizer: Any) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def _tell_wrappers(optimizers: Sequence[Any], stepped: bool) -> None:
    """Let accelerate's ``step_was_skipped`` speak of this step: a stale value freezes a prepared scheduler."""
    for each in optimizers:
        if hasattr(each, "_is_overflow"):
            each._is_overflow = not stepped
