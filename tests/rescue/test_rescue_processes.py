"""Two gloo processes: a fault on one of them is a fault on both, and both go back to the same state."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_both_processes_go_back_together(tmp_path: Path):
    path = os.pathsep.join(sys.path)
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "rescue_process.py"), str(tmp_path)],
            env={**os.environ, "RANK": str(rank), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        output = [each.communicate(timeout=120)[0].decode() for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0], "\n".join(output)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert zero == one
    assert all(math.isfinite(weight) for weight in zero["weights"])
    rolled_back = [(n + 1, text) for n, text in enumerate(zero["decisions"]) if "rolled_back" in text]
    assert [step for step, _ in rolled_back] == [16, 26]
    assert "back to the state of step 10" in rolled_back[0][1]
    assert "NON_FINITE_STATE" in rolled_back[1][1]
    assert "back to the state of step 21" in rolled_back[1][1]
