"""Checks of single values of a dataset: each returns the value as the spec holds it, or says what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], Any]
"""Return the value as the spec holds it, or raise ValueError with what was expected."""


def boolean(value: Any) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise ValueError("true or false (without quotes)")
    return value


def text(value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise ValueError("text in quotes")
    return value


def whole_number(at_least: int) -> Check:
    """Return a check for an int of at least this."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"a whole number of at least {at_least} (without quotes)")
        return value

    return check


def share(value: Any) -> float:
    """Return a float from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1 (without quotes)")
    return float(value)


def size(value: Any) -> tuple[int, int]:
    """Return (width, height)."""
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        raise ValueError("a whole number such as 512, or [width, height] such as [512, 768]")
    return sides[0], sides[1]


_OTHER_NAMES = {"linear": "bilinear", "cubic": "bicubic"}
INTERPOLATIONS = ("lanczos", "nearest", "bilinear", "bicubic", "area", "box")
"""Filters for resizing, each under one name."""


def interpolation(value: Any) -> str:
    """Return the name of a filter for resizing."""
    name = _OTHER_NAMES.get(value, value) if isinstance(value, str) else None
    if name not in INTERPOLATIONS:
        raise ValueError(f"one of {', '.join((*INTERPOLATIONS, *_OTHER_NAMES))}")
    return name


def extension(value: Any) -> str:
    """Return a file extension with its dot."""
    ending = text(value).strip()
    if ending in ("", "."):
        raise ValueError('a file extension such as ".txt"')
    return ending if ending.startswith(".") else f".{ending}"


def fraction_or_steps(value: Any) -> float:
    """Return a number of steps, or a fraction below 1 of all steps."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("a number of steps, or a fraction below 1 of all steps (without quotes)")
    if value >= 1 and value != int(value):
        raise ValueError("a whole number of steps, or a fraction below 1 of all steps")
    return float(value)


def separator(value: Any) -> str:
    """Return text that is not empty."""
    if text(value) == "":
        raise ValueError('text that is not empty, such as ","')
    return text(value)
