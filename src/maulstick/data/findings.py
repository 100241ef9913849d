"""What is noticed about the data before and while training: one kind of message for the terminal and for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Severity(StrEnum):
    """error: something given is not used although it was surely meant to be; warning: used, or not, in a way that may
    surprise; info: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One thing found, and what will happen to it.

    Attributes:
        code: fixed name of this kind of finding, for programs that read the JSON.
        paths: every file or folder concerned; the message names the first few.
        message: what was found and what will happen; what to do too, where ``advice`` is empty.
        why: why it matters; empty where the message says it.
        advice: what to set or to do.
    """

    severity: Severity
    code: str
    paths: tuple[Path, ...]
    message: str
    why: str = ""
    advice: str = ""

    @property
    def text(self) -> str:
        """All of it in one line."""
        return " ".join(part for part in (self.message, self.why, self.advice) if part)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return {
            "severity": self.severity.value,
            "code": self.code,
            "paths": [str(path) for path in self.paths],
            "message": self.message,
            "why": self.why,
            "advice": self.advice,
        }


_NAMES_SHOWN = 5


def names(paths: Sequence[Path | str]) -> str:
    """Return the file names as a list for a message; from the sixth on they are counted only."""
    shown = ", ".join(path.name if isinstance(path, Path) else path for path in paths[:_NAMES_SHOWN])
    rest = len(paths) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Return "1 image" or "3 images"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with errors first; within a severity their order stays."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))
