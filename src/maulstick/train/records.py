"""Everything a run writes down while it goes on: events, the gradient log, trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maulstick.adapters.files import file_hash
from maulstick.errors import OptionError
from maulstick.files_io import set_aside
from maulstick.guard import GradientGuard
from maulstick.guard.log import GradientLog, gradient_log_path
from maulstick.guard.verdict import Verdict
from maulstick.options.schema import TrainOptions, flat_values
from maulstick.train.console import RunConsole
from maulstick.train.events import EventLog, NoLog
from maulstick.train.kept_logs import bring_back
from maulstick.train.trackers import Trackers, check_trackers, open_trackers


class RunRecords:
    """The records of one run, on the process that writes (``writes``); on the others nothing happens.

    No failing write ends the run: the console is told, and what cannot be written now is kept for later.
    ``when_closed`` is called with the event log when that is complete, also after a failed run; it makes something of
    it (a report), and returns a line for the console. Nothing that goes wrong there ends the run either.
    """

    def __init__(self, options: TrainOptions, output_dir: Path, console: RunConsole, *, writes: bool) -> None:
        self.options = options
        self.output_dir = output_dir
        self.console = console
        self.writes = writes
        self.started_at = time.time()
        self.events: EventLog | NoLog = NoLog()
        self.trackers = Trackers()
        self.gradient_log: GradientLog | None = None
        self.when_closed: Callable[[Path], str | None] | None = None
        self._gradient_log_fails = False

    def check(self) -> None:
        """Make sure that there is a folder to write into and that the trackers are installed, before any work is done.

        Raises:
            OptionError: output_dir cannot be written, or a tracker's package is missing.
        """
        check_trackers(self.options.log)
        if not self.writes:
            return
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            probe = self.output_dir / ".maulstick-probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OptionError(
                f"output_dir: {self.output_dir} cannot be written ({error.strerror or error}). Name a folder that can."
            ) from error

    def open(self, guard: GradientGuard, kept: Mapping[str, Any] | None = None) -> None:
        """Begin the files; those of an earlier run of the same name are set aside.

        A resumed run gives what ``state()`` returned: its files begin with what was written up to there.
        """
        if not self.writes:
            return
        kept = kept or {}
        name = self.options.run.output_name
        path = self.output_dir / f"{name}.events.jsonl"
        self.events = EventLog(
            path,
            self.console.say,
            keep_bytes=kept.get("events_bytes", 0),
            keep_sha256=kept.get("events_sha256"),
        )
        if guard.config.log:
            path = gradient_log_path(self.output_dir, name)
            rows = self._kept_gradient_rows(path, kept)
            scale = self.options.run.mixed_precision == "fp16"
            self.gradient_log = GradientLog(path, scale=scale, cosine=guard.config.cosine != "off", keep_rows=rows)
        self.trackers = open_trackers(
            self.options.log,
            output_dir=self.output_dir,
            output_name=name,
            started_at=self.started_at,
            config={key: str(value) for key, value in flat_values(self.options).items()},
            say=self._tell_of_trackers,
        )

    def _kept_gradient_rows(self, path: Path, kept: Mapping[str, Any]) -> int | None:
        """Let the gradient log hold the rows that a resumed run goes on from; return how many, None for a new log."""
        rows: int | None = kept.get("gradient_rows")
        if rows is None:
            set_aside(path)
            return None

        def with_header(content: bytes) -> bytes:
            return b"".join(content.splitlines(keepends=True)[: rows + 1])

        return None if bring_back(path, with_header, kept.get("gradient_sha256")) is None else rows

    def step(self, values: Mapping[str, float], *, step: int, epoch: int, seconds: float) -> None:
        """Record one step's values in the event log and the trackers."""
        self.events.write("step", **{"train/steps": step, "epoch": epoch, **values, "seconds": round(seconds, 4)})
        self.trackers.log(values, step=step, epoch=epoch)

    def epoch(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Record values of an epoch, counted from 1, that ended with this step."""
        self.events.write("epoch", step=step, epoch=epoch, **values)
        self.trackers.log_epoch(values, step=step, epoch=epoch)

    def samples(self, files: Sequence[Path], prompts: Sequence[str], *, step: int, label: str) -> None:
        """Record pictures that were drawn, one for each prompt."""
        self.events.write("sample", step=step, label=label, files=list(files))
        self.trackers.log_samples(list(zip(files, prompts, strict=True)), step=step)

    def track(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Send values that are not there in every step to the trackers."""
        self.trackers.log(values, step=step, epoch=epoch)

    def gradient(self, epoch: int, step_in_epoch: int, verdict: Verdict) -> None:
        """Add a row to the gradient log."""
        if self.gradient_log is None:
            return
        try:
            self.gradient_log.write(epoch, step_in_epoch, verdict)
        except OSError as error:
            self._tell_of_gradient_log(error)

    def state(self) -> dict[str, Any]:
        """Return how far the files are written, with their checksums, for a run that goes on from here."""
        length, checksum = self.events.written()
        state: dict[str, Any] = {"events_bytes": length, "events_sha256": checksum}
        if self.gradient_log is not None:
            try:
                state["gradient_rows"] = self.gradient_log.state_dict()["rows"]
                state["gradient_sha256"] = file_hash(self.gradient_log.path)
            except OSError as error:
                self._tell_of_gradient_log(error)
        return state

    def close(self, event: str, **fields: Any) -> None:
        """Write the last event and close everything."""
        self.events.write(event, seconds=round(time.time() - self.started_at, 2), **fields)
        # What they send last may take a while, and what is to be said of them belongs into the event log.
        self.trackers.finish()
        self.events.close()
        if self.gradient_log is not None:
            try:
                self.gradient_log.close()
            except OSError as error:
                self._tell_of_gradient_log(error)
        if self.when_closed is not None and isinstance(self.events, EventLog):
            try:
                line = self.when_closed(self.events.path)
            except Exception as error:  # whatever it is, the run is over and its files are there
                line = f"no report was written ({type(error).__name__}: {error})"
            if line:
                self.console.say(line)

    def _tell_of_trackers(self, text: str) -> None:
        self.console.say(text)
        self.events.write("tracker_failed", text=text)

    def _tell_of_gradient_log(self, error: OSError) -> None:
        if not self._gradient_log_fails and self.gradient_log is not None:
            self.console.say(f"{self.gradient_log.path} cannot be written ({error.strerror or error})")
        self._gradient_log_fails = True
