"""What a person sees in the terminal while a run goes on."""

from __future__ import annotations

import math
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

Mode = Literal["auto", "rich", "plain", "quiet"]

ONE_LINE_WIDTH = 122
"""From this width on the values stand beside the bar, below it they have a line of their own."""
SPEED_WIDTH = 138
"""From this width on there is room for the time that a step takes."""
# Sample pictures and caches being saved make single steps slow: the time left is told from many of them.
_SECONDS_OF_SPEED = 300.0
_LEFT_OUT_FIRST = ("mem", "limit", "lr", "skipped", "norm")


@dataclass(frozen=True)
class StepLine:
    """The values of one step that are worth a glance.

    Attributes:
        loss: smoothed; NaN before the first step that was not skipped.
        norm: gradient norm of the step.
        threshold: norm above which the guardian skips; infinite or NaN where there is none yet.
        learning_rate: of the first group.
        skipped: steps skipped so far.
        memory: asked when the line is shown; returns bytes, None where they are not known.
    """

    loss: float
    norm: float
    threshold: float
    learning_rate: float
    skipped: int
    memory: Callable[[], int | None] = lambda: None

    def text(self, width: int | None = None) -> str:
        """Return the values in one line, without the less important ones where there is no room for them."""
        parts = self._parts()
        for name in _LEFT_OUT_FIRST:
            if width is None or len("  ".join(parts.values())) <= width:
                break
            parts.pop(name, None)
        return "  ".join(parts.values())

    def _parts(self) -> dict[str, str]:
        memory = self.memory()
        parts = {
            "loss": f"loss {self.loss:.4f}" if math.isfinite(self.loss) else "loss -",
            "norm": f"norm {self.norm:.3g}",
            "limit": f"limit {self.threshold:.3g}" if math.isfinite(self.threshold) else "",
            "lr": f"lr {self.learning_rate:.2e}",
            "skipped": f"skipped {self.skipped}",
            "mem": f"mem {memory / 2**30:.1f} GiB" if memory is not None else "",
        }
        return {name: part for name, part in parts.items() if part}


class RunConsole(Protocol):
    """A terminal's way of showing a run."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def result(self, text: str) -> None:
        """Show a line that a quiet run shows too."""

    def begin(self, title: str, total: int, done: int = 0) -> None:
        """Start a counted phase, such as caching or training, of which ``done`` was done before."""

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        """Count steps of the phase."""

    def busy(self, with_what: str | None) -> None:
        """Show what the phase is waiting for, such as sample pictures; None when it goes on."""

    def end(self) -> None:
        """End the phase."""


class RichConsole:
    """A live bar with the time left, and the values of the step beside it or, in narrow terminals, below it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, emoji=False)
        self._progress: _Bar | None = None
        self._title = ""

    def say(self, text: str) -> None:
        for line in text.split("\n"):
            shown = hanging(line, self._console.width) if self._console.is_terminal else line
            self._console.print(shown, markup=False, emoji=False, soft_wrap=True)

    def result(self, text: str) -> None:
        self.say(text)

    def begin(self, title: str, total: int, done: int = 0) -> None:
        self.end()
        self._title = title
        self._progress = _Bar(self._console)
        self._progress.add_task(title, total=total, completed=done, line=None)
        self._progress.start()

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.advance(task, count)
            if line is not None:
                self._progress.update(task, line=line)

    def busy(self, with_what: str | None) -> None:
        if self._progress is not None:
            title = f"{self._title}: {with_what}" if with_what else self._title
            self._progress.update(self._progress.task_ids[0], description=title)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None


class _Bar(Progress):
    """One task, laid out anew for the width that the terminal has at the moment."""

    def __init__(self, console: Console) -> None:
        # Before the base class begins, which shows itself at once; made once, as a spinner turns by its own age.
        self._terminal = console
        self._before = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        self._counted = (BarColumn(bar_width=None), MofNCompleteColumn())
        super().__init__(console=console, expand=True, speed_estimate_period=_SECONDS_OF_SPEED)

    def get_renderables(self) -> Iterable[RenderableType]:
        width = self._terminal.width
        line: StepLine | None = next((task.fields["line"] for task in self.tasks), None)
        values = [] if line is None or width < ONE_LINE_WIDTH else [TextColumn(line.text() + " ", markup=False)]
        speed = [_Speed()] if width >= SPEED_WIDTH else []
        self.columns = (
            *self._before,
            *self._counted,
            *(*values, *speed, _TimeLeft()),
        )
        yield self.make_tasks_table(self.tasks)
        if line is not None and not values:
            yield Text("  " + line.text(width - 2), no_wrap=True, overflow="crop")


class _TimeLeft(ProgressColumn):
    """The time left while there is some, then the time it took."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"took {duration(task.finished_time or 0)}")
        return Text("     left" if task.time_remaining is None else f"{duration(task.time_remaining)} left")


class _Speed(ProgressColumn):
    """How long a step takes, or how many there are in a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


def hanging(line: str, width: int) -> str:
    """Break a line between words, with what follows below the text behind its label; paths stay in one piece."""
    label = re.match(r"\s*(\S+\s{2,})?", line)
    indent = " " * len(label[0]) if label and len(label[0]) < width // 2 else ""
    wrapped = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, tabsize=4
    )
    return "\n".join(wrapped)


def duration(seconds: float) -> str:
    """Return a length of time as M:SS or H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class PlainConsole:
    """One line every few seconds, for log files and terminals that cannot move the cursor."""

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        self._interval = seconds_between_lines
        self._title = ""
        self._total = self._done = self._done_before = 0
        self._started = self._last = 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def result(self, text: str) -> None:
        self.say(text)

    def begin(self, title: str, total: int, done: int = 0) -> None:
        self._title, self._total, self._done, self._done_before = title, total, done, done
        self._started = self._last = time.monotonic()

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        self._done += count
        now = time.monotonic()
        if not count or (now - self._last < self._interval and self._done < self._total):
            return
        self._last = now
        values = f"  {line.text()}" if line else ""
        print(f"{self._title} {self._done}/{self._total}{values}  {self._time(now)}", flush=True)

    def _time(self, now: float) -> str:
        taken = now - self._started
        if self._done >= self._total:
            return f"took {duration(taken)}"
        left = taken / max(1, self._done - self._done_before) * (self._total - self._done)
        return f"{duration(left)} left"

    def busy(self, with_what: str | None) -> None:
        pass

    def end(self) -> None:
        pass


class QuietConsole:
    """Results and errors only."""

    def say(self, text: str) -> None:
        pass

    def result(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, title: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, count: int = 1, line: StepLine | None = None) -> None:
        pass

    def busy(self, with_what: str | None) -> None:
        pass

    def end(self) -> None:
        pass


class SilentConsole(QuietConsole):
    """Nothing at all: for the processes that another one speaks for."""

    def result(self, text: str) -> None:
        pass


def make_console(mode: Mode) -> RunConsole:
    """Return the console for a mode.

    The live bar needs a terminal that can move its cursor (not ``TERM=dumb``); ``rich`` elsewhere, and ``auto`` where
    nobody watches, give plain lines.
    """
    if mode == "quiet":
        return QuietConsole()
    console = Console(highlight=False, emoji=False)
    watched = console.is_terminal if mode == "rich" else mode == "auto" and sys.stdout.isatty()
    return RichConsole(console) if watched and not console.is_dumb_terminal else PlainConsole()
