"""The table of outcomes: every test adds a row to its report, and the end of the session shows them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.trials import Outcome

PROPERTY = "fault_row"
HEAD = ("fault", "what must happen", "with guard and rescue", "without")
WIDTHS = (36, 54, 58, 34)
AddRow = Callable[..., None]


def described(outcome: Outcome | None, fault_free: Outcome | None, *, counts: bool) -> str:
    """Return one cell: skips and rescues, how the run ended, its file, and its loss over the fault-free run's."""
    if outcome is None:
        return "the same"
    counted = f"{outcome.skipped} skipped, {outcome.rescues} rescues, " if counts else ""
    file = {True: "finite", False: "NOT finite", None: "NO file"}[outcome.finite]
    ratio = "" if fault_free is None or math.isinf(outcome.loss) else f", loss x {outcome.loss / fault_free.loss:.3f}"
    return f"{counted}ended {outcome.ended} at {outcome.step}, {file}{ratio}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of the table."""
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, WIDTHS, strict=True)) for row in (HEAD, *rows)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the rows of all reports. With several workers too, because properties travel with the reports."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    rows = [value for each in reports for name, value in getattr(each, "user_properties", ()) if name == PROPERTY]
    if rows:
        terminalreporter.section("Faults planted in a run on the quickstart's model, and what came of them")
        for line in table(rows):
            terminalreporter.write_line(line)
