"""Where a measured value is heading: robust straight and exponential fits to its recent history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

LEAST_POINTS = 6
MOST_POINTS = 24
"""Pairs of points grow with the square; 24 points have 276."""
GOOD_FIT = 0.95
NEAR_ENOUGH = 0.01
"""Below this share of the limit a fit says nothing yet: every LoRA grows fast from zero at first."""
FARTHEST = 3.0
"""A crossing is believed up to this many times the length of the history ahead."""


@dataclass(frozen=True)
class Trend:
    """A fitted course.

    Attributes:
        kind: ``linear`` or ``exponential``.
        crossing: step at which the limit would be reached.
        fit: share of the spread that the fit explains, 1 for all.
    """

    kind: str
    crossing: float
    fit: float


def heading_for(steps: Sequence[float], values: Sequence[float], limit: float) -> Trend | None:
    """Return the trend that takes the values to ``limit``; None where they don't clearly head there.

    Slopes are medians over all pairs of points (Theil 1950, Sen 1968), so that single outliers do not matter. Of the
    straight and the exponential fit, the better one counts; it must explain 95 % of the absolute deviations, the values
    must already be at 1 % of the limit, and the crossing must not be farther off than three times the history's length.
    """
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value > 0 and math.isfinite(value)]
    points = points[-MOST_POINTS:]
    if len(points) < LEAST_POINTS or points[-1][1] < NEAR_ENOUGH * limit:
        return None
    xs = [step for step, _ in points]
    linear = _fit(xs, [value for _, value in points], limit, "linear")
    exponential = _fit(xs, [math.log(value) for _, value in points], math.log(limit), "exponential")
    found = [trend for trend in (linear, exponential) if trend is not None]
    best = max(found, key=lambda trend: trend.fit, default=None)
    if best is None or best.fit < GOOD_FIT or best.crossing > xs[-1] + FARTHEST * (xs[-1] - xs[0]):
        return None
    return best


def _fit(xs: Sequence[float], ys: Sequence[float], limit: float, kind: str) -> Trend | None:
    slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(zip(xs, ys, strict=True), 2))
    if slope <= 0:
        return None
    start = median(y - slope * x for x, y in zip(xs, ys, strict=True))
    middle = median(ys)
    # A few outliers must neither spoil a good fit nor hide behind it, so deviations are compared by their medians.
    spread = median(abs(y - middle) for y in ys)
    left = median(abs(y - start - slope * x) for x, y in zip(xs, ys, strict=True))
    fit = 1.0 - left / spread if spread > 0 else 0.0
    return Trend(kind, max((limit - start) / slope, xs[-1]), fit)
