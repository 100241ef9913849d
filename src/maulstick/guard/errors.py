"""The errors of the guard library."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GuardError(ValueError):
    """Something given to the guard cannot be used; the message says what, what was expected and what to do."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the valid name closest to ``name``, or "" when none is close."""
    close = get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
