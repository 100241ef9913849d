"""The table of outcomes: every test adds a row to its report, and the end of the session shows them all."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.trials import Outcome

PROPERTY = "fault_row"
HEAD = ("fault", "what must happen", "ended", "step", "skips", "back", "adapter", "ended", "step", "adapter")
WIDTHS = (34, 46, 10, 4, 5, 4, 10, 10, 4, 10)
TITLE = "Faults planted in a run on the quickstart's model, and what came of them"
LEGEND = textwrap.wrap(
    "Left: with guard and rescue; right: the same without (=: they have no part in it). ended: the exit code, or the "
    "error that ended the run. skips: steps that were left out. back: how often the run went back to an earlier state. "
    "adapter: held-out loss of the last file, over that of the fault-free run of the same length.",
    width=120,
)
AddRow = Callable[..., None]


def cells(outcome: Outcome, fault_free: Outcome | None) -> dict[str, str]:
    """Return what the table says about a run."""
    adapter = {True: "finite", False: "NOT FINITE", None: "none"}[outcome.finite]
    if outcome.finite and fault_free is not None and math.isfinite(outcome.loss):
        adapter = f"x {outcome.loss / fault_free.loss:.3f}"
    return {
        "ended": outcome.ended,
        "step": str(outcome.step),
        "skips": str(outcome.skipped),
        "back": str(outcome.rescues),
        "adapter": adapter,
    }


def row(
    fault: str, must: str, outcome: Outcome, bare: Outcome | None = None, fault_free: Outcome | None = None
) -> tuple[str, ...]:
    """Return a row; ``bare`` is None where guard and rescue have no part in the matter."""
    without = {"ended": "="} if bare is None else cells(bare, fault_free)
    bare_cells = (without.get(name, "") for name in ("ended", "step", "adapter"))
    return (fault, must, *cells(outcome, fault_free).values(), *bare_cells)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of the table; a long text goes on in the next line."""
    rule = ["-" * width for width in WIDTHS]
    lines = [_line(HEAD), _line(rule)]
    for each in rows:
        columns = [textwrap.wrap(cell, width) for cell, width in zip(each, WIDTHS, strict=True)]
        lines += [_line(parts) for parts in zip_longest(*columns, fillvalue="")]
    return [*lines, "", *LEGEND]


def _line(parts: Sequence[str]) -> str:
    padded = [f"{part:<{width}}" for part, width in zip(parts, WIDTHS, strict=True)]
    return f"{'  '.join(padded[:2])} | {'  '.join(padded[2:7])} | {'  '.join(padded[7:])}".rstrip()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the rows of all reports. With several workers too, because properties travel with the reports."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    found = [value for each in reports for name, value in getattr(each, "user_properties", ()) if name == PROPERTY]
    if found:
        terminalreporter.section(TITLE)
        # In the order of the tests, which workers end in any other.
        for line in table([one_row for _, one_row in sorted(found)]):
            terminalreporter.write_line(line)
