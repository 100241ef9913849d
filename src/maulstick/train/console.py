"""What a person sees in the terminal while a run goes on."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

Mode = Literal["auto", "rich", "plain", "quiet"]


@dataclass(frozen=True)
class StepLine:
    """The values of one step that are worth a glance."""

    loss: float
    norm: float
    learning_rate: float
    skipped: int

    def text(self) -> str:
        return f"loss {self.loss:.4f}  norm {self.norm:.3g}  lr {self.learning_rate:.2e}  skipped {self.skipped}"


class RunConsole(Protocol):
    """A terminal's way of showing a run."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def begin(self, title: str, total: int) -> None:
        """Start a counted phase, such as caching or training."""

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        """Count steps of the phase."""

    def end(self) -> None:
        """End the phase."""


class RichConsole:
    """A live bar with loss, norm, learning rate, skipped steps and the time left."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, title: str, total: int) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task(title, total=total, line="")
        self._progress.start()

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        if self._progress is not None and self._task is not None:
            if line is None:
                self._progress.update(self._task, advance=count)
            else:
                self._progress.update(self._task, advance=count, line=line.text())

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None


class PlainConsole:
    """One line every few seconds, for log files and terminals that cannot move the cursor."""

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        self._interval = seconds_between_lines
        self._title = ""
        self._total = self._done = 0
        self._started = self._last = 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._started = self._last = time.monotonic()

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < self._interval and self._done < self._total:
            return
        self._last = now
        left = (now - self._started) / max(1, self._done) * (self._total - self._done)
        values = f"  {line.text()}" if line else ""
        print(f"{self._title} {self._done}/{self._total}{values}  {left:.0f} s left", flush=True)

    def end(self) -> None:
        pass


class QuietConsole:
    """Results and errors only."""

    def say(self, text: str) -> None:
        pass

    def begin(self, title: str, total: int) -> None:
        pass

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        pass

    def end(self) -> None:
        pass


def make_console(mode: Mode) -> RunConsole:
    """Return the console for a mode; ``auto`` takes the live bar where a person watches a terminal."""
    if mode == "quiet":
        return QuietConsole()
    if mode == "rich" or (mode == "auto" and sys.stdout.isatty()):
        return RichConsole()
    return PlainConsole()
