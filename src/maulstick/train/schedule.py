"""Learning-rate factors as pure functions of the update window; the loop multiplies each group's rate by them.

Window ``n`` counts from 0; skipped windows count too, so that a
decay always reaches its end. Past the last window every factor keeps its final value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from maulstick.errors import OptionError, nearest_name_hint

Factor = Callable[[int], float]


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class ScheduleShape:
    """One named course of the learning rate after the warm-up.

    Attributes:
        decay: maps progress after the warm-up (0 at its end, 1 at the end of training) to a factor.
        allows_warmup: whether a warm-up may stand before it.
    """

    decay: Callable[[float], float]
    allows_warmup: bool = True


SHAPES: dict[str, ScheduleShape] = {
    "constant": ScheduleShape(_constant, allows_warmup=False),
    "constant_with_warmup": ScheduleShape(_constant),
    "linear": ScheduleShape(_linear),
    "cosine": ScheduleShape(_cosine),
    # One cycle is a plain cosine; the polynomial of power 1 is the linear decay (sd-scripts' defaults for both).
    "cosine_with_restarts": ScheduleShape(_cosine),
    "polynomial": ScheduleShape(_linear),
}


def learning_rate_factor(name: str, *, warmup_steps: int, total_steps: int) -> Factor:
    """Return the factor of update window ``n`` for the named schedule.

    The warm-up is the textbook form ``n / warmup_steps``: the first window has factor 0. After it, ``linear`` is
    ``(total - n) / (total - warmup)``.

    Raises:
        OptionError: the name is unknown, or the warm-up does not fit the schedule or the length of training.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise OptionError(
            f"lr_scheduler '{name}' is unknown.{nearest_name_hint(name, SHAPES)} Known: {', '.join(SHAPES)}."
        )
    if warmup_steps and not shape.allows_warmup:
        raise OptionError(
            f"lr_scheduler '{name}' has no warm-up, but lr_warmup_steps is {warmup_steps}. "
            "Use lr_scheduler 'constant_with_warmup', or set lr_warmup_steps to 0."
        )
    if warmup_steps >= total_steps > 0 and warmup_steps > 0:
        raise OptionError(
            f"lr_warmup_steps is {warmup_steps}, but training has only {total_steps} steps: "
            "the full learning rate would never be reached."
        )

    def factor(window: int) -> float:
        window = min(window, total_steps)
        if window < warmup_steps:
            return window / warmup_steps
        return shape.decay((window - warmup_steps) / max(1, total_steps - warmup_steps))

    return factor
