"""Fewer points for a picture, without losing what sticks out of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

Column = Sequence[float | None]

FAR = 8.0
MAD_TO_DEVIATION = 1.4826


def kept_places(columns: Sequence[Column], length: int, limit: int, always: Iterable[int] = ()) -> list[int]:
    """Return which of ``length`` places to keep, about ``limit`` at most, in order.

    The places are cut into equal stretches. Of each stretch stay its first place and, for every column, the lowest and
    the highest finite value and the first that is not finite. Beyond the limit stay the first and the last place, those
    of ``always``, and of every column what lies far outside (8 deviations, as 1.4826 MAD, from the median), the
    farthest first, so that of spikes close together each is there.
    """
    if length <= limit:
        return list(range(length))
    kept = {0, length - 1, *always}
    stretches = max(1, limit // (2 * max(1, len(columns)) + 1))
    edges = [length * number // stretches for number in range(stretches + 1)]
    for column in columns:
        kept.update(_far_outside(column, limit // (2 * len(columns))))
    for start, stop in pairwise(edges):
        if start < stop:
            kept.add(start)
        for column in columns:
            kept.update(_extremes(column, start, stop))
    return sorted(kept)


def _far_outside(column: Column, most: int) -> list[int]:
    finite = [(place, value) for place, value in enumerate(column) if value is not None and math.isfinite(value)]
    if not finite:
        return []
    middle = median(value for _, value in finite)
    deviation = MAD_TO_DEVIATION * median(abs(value - middle) for _, value in finite)
    if deviation == 0:
        return []
    outside = [(abs(value - middle), place) for place, value in finite if abs(value - middle) > FAR * deviation]
    return [place for _, place in sorted(outside, reverse=True)[:most]]


def _extremes(column: Column, start: int, stop: int) -> set[int]:
    low = high = odd = -1
    for place in range(start, stop):
        value = column[place]
        if value is None:
            continue
        if not math.isfinite(value):
            odd = place if odd < 0 else odd
            continue
        # Written out, because this runs once for every value of a long run.
        if low < 0 or value < column[low]:  # type: ignore[operator]
            low = place
        if high < 0 or value > column[high]:  # type: ignore[operator]
            high = place
    return {place for place in (low, high, odd) if place >= 0}


_EXACT_BELOW = 1e7
"""Whole numbers below are written as they are: a loss scale of 131,072 is not 131,070."""


def short(value: float | None, digits: int = 5) -> float | str | None:
    """Return a value with few digits, as JSON has it: NaN and infinity are the strings of the event log."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value.is_integer() and abs(value) < _EXACT_BELOW:
        return int(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
