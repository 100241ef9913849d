"""The errors a user can act on. Anything else that escapes is a defect of ours."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from operator import eq
from pathlib import Path


class MaulstickError(Exception):
    """Something the user gave cannot be used; the message says what, what was expected and what to do."""


class OptionError(MaulstickError):
    """An option is unknown, malformed, contradictory or without effect."""


class DataError(MaulstickError):
    """Training data cannot be used as it lies."""


class ModelError(MaulstickError):
    """A model or adapter file cannot be used."""


def contradiction(first: str, second: str, explanation: str) -> OptionError:
    """Return the error for two options that cannot both be meant."""
    return OptionError(f"{first} and {second} contradict each other: {explanation}")


def nearest_name_hint(name: str, valid: Iterable[str]) -> str:
    """Return " Did you mean X?" for the valid name closest to ``name``, or "" when none is close."""
    close = get_close_matches(name, list(valid), n=3, cutoff=0.6)
    # Of names as close as each other ("resque": resume, rescue) the one with more letters in their places is meant.
    close.sort(key=lambda other: _likeness(name, other), reverse=True)
    return f" Did you mean '{close[0]}'?" if close else ""


def nearest_file_hint(path: Path) -> str:
    """Return " Did you mean X?" for what lies in the folder of an absent ``path`` under a similar name, or ""."""
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return nearest_name_hint(path.name, beside)


def _likeness(name: str, other: str) -> tuple[float, int]:
    return SequenceMatcher(None, other, name).ratio(), sum(map(eq, name, other))
