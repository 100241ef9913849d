"""How a run ended, and the exit code that says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maulstick.train.loop_parts import LoopState

EXIT_CODES = {"Ctrl-C": 130, "SIGTERM": 143}


@dataclass(frozen=True)
class RunResult:
    """How a run ended. ``path`` is the last file written, None when nothing had been trained yet."""

    path: Path | None
    state: LoopState
    skipped_summary: str

    @property
    def exit_code(self) -> int:
        """0 for a finished run, 128 + the signal's number for a stopped one, 1 for one that could not go on."""
        if self.state.stopped_by is None:
            return 0
        return EXIT_CODES.get(self.state.stopped_by, 1)
