"""The table itself, in no time: it fits a terminal, and every cell is read in its column."""

from __future__ import annotations

import math
from pathlib import Path

from tests.faults.table import HEAD, LEGEND, WIDTHS, row, table
from tests.faults.trials import Outcome


def outcome(**given: object) -> Outcome:
    usual = {"ended": "0", "step": 28, "skipped": 0, "path": Path("a"), "finite": True, "loss": 0.2, "said": ""}
    return Outcome(**{**usual, "events": [], **given})


def test_a_row_says_how_both_runs_ended():
    fault_free = outcome()
    with_guard = outcome(skipped=2, loss=0.21, events=[{"event": "rescue"}, {"event": "step"}])
    bare = outcome(ended="1", step=9, path=None, finite=None, loss=math.inf)
    assert row("a fault", "something", with_guard, bare, fault_free) == (
        *("a fault", "something", "0", "28", "2", "1", "x 1.050", "1", "9", "none"),
    )
    assert row("a fault", "something", outcome(finite=False), None, fault_free)[6:] == ("NOT FINITE", "=", "", "")


def test_the_table_fits_a_wide_terminal_and_wraps_long_texts():
    cells = ("a fault with a name " * 3, "what must happen in many words " * 3, *HEAD[2:])
    lines = table([cells])
    assert max(map(len, lines)) <= 160
    assert [len(part) for part in lines[1].replace(" | ", "  ").split("  ")] == list(WIDTHS)
    named = [line[: WIDTHS[0]].strip() for line in lines[2 : -1 - len(LEGEND)]]
    assert " ".join(named).split() == ("a fault with a name " * 3).split()
