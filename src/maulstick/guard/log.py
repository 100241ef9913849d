"""The gradient log: one CSV row per observed step, in the format of the original program. Pure Python, no torch."""

from __future__ import annotations

import atexit
import math
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from .errors import GuardError

if TYPE_CHECKING:
    from .verdict import Verdict

BASE_COLUMNS = ("Epoch", "Step", "Gradient Norm", "Threshold", "Loss", "ThreshOff")
SCALE_COLUMN = "Scale"
COSINE_COLUMN = "CosineSim"
FLUSH_EVERY = 100


@dataclass(frozen=True)
class LogRow:
    """One observed step. ``norm`` and ``threshold`` are multiplied by the loss scale, if there is one."""

    epoch: int
    step: int
    norm: float
    threshold: float
    loss: float
    threshold_off: bool
    scale: float | None = None
    cosine: float | None = None

    @property
    def true_norm(self) -> float:
        """The norm in true units."""
        return self.norm if self.scale is None or self.scale == 0 else self.norm / self.scale


def gradient_log_path(output_dir: str | Path, output_name: str | None) -> Path:
    """Where the log of a run lies; ``last`` stands for a run without a name."""
    return Path(output_dir) / f"gradient_logs+{output_name or 'last'}.txt"


class GradientLog:
    """Writes the log. Use it in a ``with`` block, or call ``close``; rows still held are written at exit as well.

    The file is created with its header at once. Rows are held back and written together after every row whose step is
    a multiple of 100, and at the end. ``keep_rows=None`` begins a new file; a resumed run gives the number of rows its
    checkpoint knew (``state_dict()["rows"]``): those are kept, later ones (of steps that will be run again) are cut
    off, and new rows are appended.
    """

    def __init__(self, path: str | Path, *, scale: bool, cosine: bool, keep_rows: int | None = None) -> None:
        self.path = Path(path)
        self.columns = BASE_COLUMNS + ((SCALE_COLUMN,) if scale else ()) + ((COSINE_COLUMN,) if cosine else ())
        self.rows = 0
        self._held: list[str] = []
        self._closed = False
        self._writing = False
        self._waiting_signals: list[int] = []
        header = ",".join(self.columns) + "\n"
        if keep_rows is not None and self.path.exists():
            self.rows = _cut_after(self.path, header, keep_rows)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(header, encoding="utf-8", newline="")
        atexit.register(self.close)

    def write(self, epoch: int, step: int, verdict: Verdict) -> None:
        """Add the row of one step. ``step`` counts from 0 in every epoch."""
        self.write_row(
            LogRow(
                epoch=epoch,
                step=step,
                norm=verdict.logged_norm,
                threshold=verdict.logged_threshold,
                loss=math.nan if verdict.loss is None else verdict.loss,
                threshold_off=verdict.threshold_off,
                scale=verdict.scale,
                cosine=verdict.cosine,
            )
        )

    def write_row(self, row: LogRow) -> None:
        """Add one row. A column the file has and the row does not is NaN (1.0 for the scale)."""
        cells = [
            str(row.epoch),
            str(row.step),
            repr(float(row.norm)),
            repr(float(row.threshold)),
            repr(float(row.loss)),
            "1" if row.threshold_off else "0",
        ]
        if SCALE_COLUMN in self.columns:
            cells.append(repr(1.0 if row.scale is None else float(row.scale)))
        if COSINE_COLUMN in self.columns:
            cells.append(repr(math.nan if row.cosine is None else float(row.cosine)))
        self._held.append(",".join(cells) + "\n")
        self.rows += 1
        if row.step % FLUSH_EVERY == 0:
            self.flush()

    def flush(self) -> None:
        """Write the rows held back."""
        if not self._held:
            return
        self._writing = True
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write("".join(self._held))
            self._held = []
        finally:
            self._writing = False
        waiting, self._waiting_signals = self._waiting_signals, []
        for number in waiting:
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Write what is left. Calling it twice does nothing more."""
        if not self._closed:
            self.flush()
            self._closed = True
            atexit.unregister(self.close)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: how many rows there are. They are written first, so that a resumed run finds them."""
        self.flush()
        return {"rows": self.rows}

    @contextmanager
    def flushed_on(self, *signals: signal.Signals) -> Iterator[GradientLog]:
        """While inside, one of ``signals`` (such as SIGTERM) writes the rows before it does what it did before.

        Only the main thread may use this.
        """
        before: dict[signal.Signals, Any] = {}

        def handler(number: int, frame: FrameType | None) -> None:
            if self._writing:
                # A signal that arrives in the middle of a write is sent again when the write is done.
                self._waiting_signals.append(number)
                return
            self.flush()
            earlier = before[signal.Signals(number)]
            if callable(earlier):
                earlier(number, frame)
            elif earlier != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        for each in signals:
            before[each] = signal.signal(each, handler)
        try:
            yield self
        finally:
            for each, earlier in before.items():
                signal.signal(each, earlier)

    def __enter__(self) -> GradientLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_gradient_log(path: str | Path) -> list[LogRow]:
    """The rows of a gradient log, ours or one the original program wrote.

    A last line that was cut short (the run was killed while writing) is left out. Raises ``GuardError`` if the file is
    not such a log.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    complete, torn = lines[:-1], lines[-1]
    if not complete and torn:
        complete = [torn]
    columns = complete[0].split(",") if complete else []
    missing = [name for name in BASE_COLUMNS if name not in columns]
    if missing:
        raise GuardError(
            f"{path} is not a gradient log: its first line has no column '{missing[0]}'. "
            f"Expected {','.join(BASE_COLUMNS)}[,{SCALE_COLUMN}][,{COSINE_COLUMN}]."
        )
    rows = []
    for number, line in enumerate(complete[1:], start=2):
        cells = line.split(",")
        if len(cells) != len(columns):
            raise GuardError(f"{path}, line {number}: {len(cells)} values for {len(columns)} columns: {line!r}.")
        rows.append(_row(dict(zip(columns, cells, strict=True)), path, number))
    return rows


def _row(cells: Mapping[str, str], path: Path, number: int) -> LogRow:
    try:
        return LogRow(
            epoch=int(cells["Epoch"]),
            step=int(cells["Step"]),
            norm=float(cells["Gradient Norm"]),
            threshold=float(cells["Threshold"]),
            loss=float(cells["Loss"]),
            threshold_off=cells["ThreshOff"] == "1",
            scale=float(cells[SCALE_COLUMN]) if SCALE_COLUMN in cells else None,
            cosine=float(cells[COSINE_COLUMN]) if COSINE_COLUMN in cells else None,
        )
    except ValueError as error:
        raise GuardError(f"{path}, line {number}: not a row of a gradient log ({error}).") from error


def _cut_after(path: Path, header: str, keep_rows: int) -> int:
    """Keep the header and at most ``keep_rows`` complete rows of an existing log; return how many rows it has then."""
    content = path.read_bytes()
    lines = content.split(b"\n")
    if lines[0].decode("utf-8") + "\n" != header:
        raise GuardError(
            f"{path} has the columns '{lines[0].decode('utf-8')}', this run writes '{header.strip()}'. Resume with the "
            f"same precision and log options, or move the old log away."
        )
    kept = lines[1:-1][:keep_rows]
    length = len(header.encode()) + sum(len(line) + 1 for line in kept)
    if length < len(content):
        os.truncate(path, length)
    elif length > len(content):
        path.write_bytes(header.encode())
    return len(kept)
