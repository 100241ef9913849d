"""Two gloo processes: a fault on one of them is a fault on both, and both go back to the same state."""

from __future__ import annotations

import math
from pathlib import Path

from tests.processes import results_of_both

HERE = Path(__file__).parent


def test_both_processes_go_back_together(tmp_path: Path):
    zero, one = results_of_both(HERE / "rescue_process.py", tmp_path)
    assert zero == one
    assert all(math.isfinite(weight) for weight in zero["weights"])
    rolled_back = [(n + 1, text) for n, text in enumerate(zero["decisions"]) if "rolled_back" in text]
    assert [step for step, _ in rolled_back] == [16, 26]
    assert "back to the state of step 10" in rolled_back[0][1]
    assert "NON_FINITE_STATE" in rolled_back[1][1]
    assert "back to the state of step 21" in rolled_back[1][1]
