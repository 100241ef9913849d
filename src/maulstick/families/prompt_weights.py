"""Weights in captions and prompts, written as in the AUTOMATIC1111 web UI: ``(word)``, ``(word:1.3)``, ``[word]``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

_ROUND, _SQUARE = 1.1, 1 / 1.1
_MARK = re.compile(
    r"""
    (?P<escape> \\ [()\[\]\\]? )  # a backslash makes a bracket (or a backslash) a letter; alone it vanishes
    | (?P<open> [(\[] )
    | : \s* (?P<weight> [+-]? (?: \d+ (?: \.\d* )? | \.\d+ ) ) \s* \)
    | (?P<close> [)\]] )
    """,
    re.VERBOSE,
)

Bracket = Literal["(", "["]


@dataclass
class _Reading:
    """What has been read of a caption: its pieces, their weights, and where brackets that are still open began."""

    texts: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    opened: dict[str, list[int]] = field(default_factory=lambda: {"(": [], "[": []})
    loose: bool = False

    def add(self, text: str) -> None:
        if text:
            self.texts.append(text)
            self.weights.append(1.0)

    def close(self, bracket: Bracket, factor: float, written: str) -> None:
        """Weigh all since the last open bracket of a kind; without one, what was written are letters."""
        if not self.opened[bracket]:
            self.loose = True
            self.add(written)
            return
        for place in range(self.opened[bracket].pop(), len(self.texts)):
            self.weights[place] *= factor

    def end(self) -> None:
        """Let brackets that are still open reach to the end."""
        for bracket, factor in (("(", _ROUND), ("[", _SQUARE)):
            self.loose = self.loose or bool(self.opened[bracket])
            while self.opened[bracket]:
                self.close("(" if bracket == "(" else "[", factor, "")


def _read(caption: str) -> _Reading:
    reading, place = _Reading(), 0
    for mark in _MARK.finditer(caption):
        reading.add(caption[place : mark.start()])
        place = mark.end()
        if mark["escape"]:
            reading.add(mark["escape"][1:])
        elif mark["open"]:
            reading.opened[mark["open"]].append(len(reading.texts))
        elif mark["weight"]:
            reading.close("(", float(mark["weight"]), mark[0])
        elif mark["close"] == ")":
            reading.close("(", _ROUND, ")")
        else:
            reading.close("[", _SQUARE, "]")
    reading.add(caption[place:])
    reading.end()
    return reading


def weighted_parts(caption: str) -> list[tuple[str, float]]:
    """Return the pieces of a caption in their order, without brackets, each with its weight; neighbours differ in it.

    ``(word)`` multiplies by 1.1, ``[word]`` divides by it, ``(word:1.3)`` multiplies by 1.3; brackets may be nested.
    ``\\(``, ``\\)``, ``\\[``, ``\\]`` and ``\\\\`` are letters. A bracket that is never closed reaches to the end of
    the caption, and one that was never opened is a letter.
    """
    reading = _read(caption)
    parts: list[tuple[str, float]] = []
    for text, weight in zip(reading.texts, reading.weights, strict=True):
        if parts and parts[-1][1] == weight:
            parts[-1] = (parts[-1][0] + text, weight)
        else:
            parts.append((text, weight))
    return parts


def has_loose_brackets(caption: str) -> bool:
    """Whether a bracket of a caption is never closed, or was never opened."""
    return _read(caption).loose
