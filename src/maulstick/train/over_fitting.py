"""Whether a run learns its images by heart: worse on images that it never sees, better on those that it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RISES, RISE = 3, 1.01
CLEARLY_ABOVE, TIMES = 1.05, 2


@dataclass(frozen=True)
class Measured:
    """One validation. Losses are means over fixed images, noise and timesteps, so that only the weights differ.

    Attributes:
        step: after so many steps; 0 is before the first.
        loss: on images that are held back.
        training_loss: on as many that are trained.
    """

    step: int
    loss: float
    training_loss: float


@dataclass(frozen=True)
class OverFitting:
    """What was found: the best validation, the last one, and what the loss did since, in words."""

    best: Measured
    now: Measured
    how: str


def best_of(history: Sequence[Measured]) -> Measured | None:
    """Return the validation with the lowest loss, the first of equals; None where no loss is finite."""
    return min(_finite(history), key=lambda each: each.loss, default=None)


def over_fitting(history: Sequence[Measured]) -> OverFitting | None:
    """Return what speaks for over-fitting at the end of ``history``; None where nothing does.

    The loss on training images must be below that of the best validation, and the validation loss must have risen in
    each of the last ``RISES`` validations, to more than ``RISE`` times its minimum, or have been above
    ``CLEARLY_ABOVE`` times its minimum in the last ``TIMES``.
    """
    finite = _finite(history)
    best = best_of(finite)
    if best is None:
        return None
    since = finite[finite.index(best) :]
    now = since[-1]
    if now.training_loss >= best.training_loss:
        return None
    rises = 0
    while rises < len(since) - 1 and since[-1 - rises].loss > since[-2 - rises].loss:
        rises += 1
    if rises >= RISES and now.loss > RISE * best.loss:
        return OverFitting(best, now, f"has risen {rises} times in a row")
    if len(since) > TIMES and all(each.loss > CLEARLY_ABOVE * best.loss for each in since[-TIMES:]):
        return OverFitting(best, now, f"stays more than {CLEARLY_ABOVE - 1:.0%} above its lowest value")
    return None


def _finite(history: Sequence[Measured]) -> list[Measured]:
    return [each for each in history if math.isfinite(each.loss) and math.isfinite(each.training_loss)]
