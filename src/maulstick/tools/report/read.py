"""Reads an event log line by line into ``RunData``; whatever it does not know is passed over."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from maulstick.data.findings import counted
from maulstick.errors import DataError
from maulstick.tools.report.find import EVENTS_END, EXPECTED, beginning, find_log, gradient_log_of, run_name
from maulstick.tools.report.gradient_rows import add_gradient_rows, read_gradient_run
from maulstick.tools.report.run_data import (
    NORM,
    THRESHOLD,
    VALIDATION_LOSS,
    VALIDATION_OF_TRAINED,
    BlockNorms,
    Ending,
    Mark,
    Points,
    RunData,
    SampleSet,
    SavedFile,
    TimestepLosses,
)

MOST_IMAGES = 4
_MARK_EVENTS = {
    "skip": "skip",
    "rescue": "rescue",
    "gave_up": "gave_up",
    "alarm": "alarm",
    "over_fitting": "over_fitting",
    "autopsy": "autopsy",
    "autopsy_failed": "trouble",
    "save_failed": "trouble",
    "save_state_failed": "trouble",
    "sample_failed": "trouble",
    "remove_failed": "trouble",
    "tracker_failed": "trouble",
    "upload_failed": "trouble",
    "resume": "resume",
}
# The largest whole number that a float, and a browser, tells from its neighbours; a time in the year 5138.
_NO_COUNT, _NO_TIME = 2**53, 1e11
_NOT_SERIES = frozenset({"event", "time", "train/steps", "epoch", "train/skipped_steps"})


def read_run(run: Path) -> RunData:
    """Read a run from its folder, its event log or a gradient log.

    Raises:
        DataError: there is no log, or the file is none.
    """
    log = find_log(run.expanduser())
    start = beginning(log)
    if not start:
        raise DataError(f"{log} is empty: nothing was logged. {EXPECTED}")
    if start[:1] != b"{":
        if b"," not in start or log.name.endswith(EVENTS_END):
            raise DataError(f"{log} is neither an event log nor a gradient log. {EXPECTED}")
        return read_gradient_run(log)
    data = _EventReader(log).read()
    add_gradient_rows(data, gradient_log_of(log))
    return data


def number(value: Any) -> float | None:
    """Return what the event log wrote for a number; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        # JSON's whole numbers have no end; a float's have.
        return float(value) if isinstance(value, float) or abs(value) < sys.float_info.max else None
    return float(value) if value in ("nan", "inf", "-inf") else None


def whole(value: Any) -> int:
    """Return a count or a step; 0 for what can be neither."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < _NO_COUNT else 0


def moment(value: Any) -> float | None:
    """Return a time in seconds since 1970; None for what no calendar has."""
    found = number(value)
    return found if found is not None and 0 <= found < _NO_TIME else None


class _EventReader:
    def __init__(self, log: Path) -> None:
        self.log = log
        self.data = RunData(run_name(log), log)
        self._columns: dict[str, dict[int, float]] = {}
        self._events: dict[str, Callable[[Mapping[str, Any], int], None]] = {
            "start": self._start,
            "step": self._step,
            "look": self._look,
            "validation": self._validation,
            "blocks": self._blocks,
            "timesteps": self._timesteps,
            "sample": self._sample,
            "save": self._save,
            "save_state": self._save,
            "remove": self._remove,
            "finding": lambda row, step: self.data.findings.append(row),
            **dict.fromkeys(get_args(Ending), self._end),
            **dict.fromkeys(_MARK_EVENTS, self._mark),
        }

    def read(self) -> RunData:
        known = 0
        for row in self._rows():
            handle = self._events.get(str(row.get("event")))
            if handle is not None:
                known += 1
                handle(row, whole(row.get("step", row.get("train/steps"))))
        data = self.data
        if not known:
            raise DataError(f"{self.log} is not the event log of a run: no line of it is a known event. {EXPECTED}")
        for name, values in self._columns.items():
            data.series[name] = [values.get(step) for step in data.steps]
        at = {step: place for place, step in enumerate(data.steps)}
        data.marks = [self._with_norm(mark, at.get(mark.step)) for mark in data.marks]
        return data

    def _rows(self) -> Iterator[dict[str, Any]]:
        broken = lost = 0
        with self.log.open(encoding="utf-8-sig", errors="replace") as file:
            for line in file:
                try:
                    row = _plain(json.loads(line), line)
                except (ValueError, RecursionError):
                    broken += bool(line.strip())
                    continue
                # The last line of a run that was killed is cut off, which says nothing; one with others behind it does.
                lost = broken
                if isinstance(row, dict):
                    yield row
        if lost:
            lines = counted(lost, "line")
            self.data.notes.append(f"{lines} of {self.log.name} cannot be read; what stood there is missing here.")

    # --- events ------------------------------------------------------------------------------------------------------

    def _start(self, row: Mapping[str, Any], step: int) -> None:
        data = self.data
        if data.started_at is None:
            data.started_at = moment(row.get("time"))
            data.identity = f"{data.name} {row.get('time')}"
        data.ending, data.reason = "open", ""
        data.options = _mapping(row.get("options"))
        data.plan = _mapping(row.get("plan"))
        versions = {name: row[name] for name in ("maulstick", "torch") if name in row}
        data.environment = {**versions, **_mapping(row.get("environment"))}
        data.total_steps = whole(data.plan.get("total_steps")) or None
        planned = data.plan.get("findings")
        # A resumed run finds the same again.
        data.findings = [each for each in planned if isinstance(each, dict)] if isinstance(planned, list) else []

    def _step(self, row: Mapping[str, Any], step: int) -> None:
        if step <= self.data.last_step:
            return
        self.data.steps.append(step)
        self.data.ended_at = moment(row.get("time"))
        for name, value in row.items():
            if name not in _NOT_SERIES and (found := number(value)) is not None:
                self._columns.setdefault(name, {})[step] = found

    def _look(self, row: Mapping[str, Any], step: int) -> None:
        for name, value in row.items():
            if name.startswith("alarms/"):
                self.data.points.setdefault(name, Points()).add(step, number(value))

    def _validation(self, row: Mapping[str, Any], step: int) -> None:
        value = number(row.get(VALIDATION_LOSS, row.get("loss")))
        if value is not None:
            self.data.points.setdefault(VALIDATION_LOSS, Points()).add(step, value)
            if (trained := number(row.get("training_loss"))) is not None:
                self.data.points.setdefault(VALIDATION_OF_TRAINED, Points()).add(step, trained)

    def _blocks(self, row: Mapping[str, Any], step: int) -> None:
        gradient, weight = _numbers(row.get("gradient")), _numbers(row.get("weight"))
        self.data.blocks.append(BlockNorms(step, gradient, weight, str(row.get("weight_is", "change"))))

    def _timesteps(self, row: Mapping[str, Any], step: int) -> None:
        counts, losses = row.get("count"), row.get("loss")
        width = whole(row.get("width"))
        if isinstance(counts, list) and isinstance(losses, list) and len(counts) == len(losses) and width:
            images, means = [whole(count) for count in counts], [number(loss) for loss in losses]
            self.data.timesteps.append(TimestepLosses(step, width, images, means))

    def _sample(self, row: Mapping[str, Any], step: int) -> None:
        files = row.get("files")
        if isinstance(files, list):
            # Only from the run's own folder: a log must not be able to name any file of the reader's.
            places = [self.log.parent / "sample" / _last_part(str(file)) for file in files]
            found = tuple(path if path.is_file() else None for path in places)
            self.data.samples.append(SampleSet(step, str(row.get("label", "")), found))

    def _save(self, row: Mapping[str, Any], step: int) -> None:
        name = _last_part(str(row.get("file") or row.get("folder") or ""))
        path = self.log.parent / name
        size = path.stat().st_size if path.is_file() else None
        state = "there" if path.exists() else "missing"
        sha256 = row.get("sha256")
        self.data.files = [file for file in self.data.files if file.name != name]
        self.data.files.append(SavedFile(step, name, sha256 if isinstance(sha256, str) else None, state, size))

    def _remove(self, row: Mapping[str, Any], step: int) -> None:
        name = _last_part(str(row.get("file") or row.get("folder") or ""))
        for file in self.data.files:
            if file.name == name:
                file.state = "removed"

    def _mark(self, row: Mapping[str, Any], step: int) -> None:
        event = str(row["event"])
        images = row.get("images")
        names = [_last_part(str(image)) for image in images[:MOST_IMAGES]] if isinstance(images, list) else []
        text = str(row.get("text") or row.get("error") or row.get("file") or row.get("folder") or "")
        if event == "autopsy" and row.get("file"):
            text += f" (report: {_last_part(str(row['file']))})"
        reason = str(row.get("reason") or row.get("cause") or row.get("kind") or "")
        if _MARK_EVENTS[event] == "trouble":
            reason = event
        self.data.marks.append(Mark(step, _MARK_EVENTS[event], text, reason, tuple(names)))

    def _end(self, row: Mapping[str, Any], step: int) -> None:
        data = self.data
        data.ending = row["event"]
        data.ended_at = moment(row.get("time"))
        data.summary = str(row.get("summary", ""))
        data.reason = str(row.get("stopped_by") or row.get("error") or "")
        data.final_file = _last_part(str(row.get("file") or ""))

    def _with_norm(self, mark: Mark, place: int | None) -> Mark:
        if mark.kind != "skip" or place is None:
            return mark
        norm, threshold = (self.data.series.get(name, [None] * (place + 1))[place] for name in (NORM, THRESHOLD))
        return replace(mark, norm=norm, threshold=threshold)


def _plain(row: Any, line: str) -> Any:
    """Return the row without halves of characters: JSON has them for names of files that are no text; a page cannot."""
    if r"\ud" not in line.lower():
        return row
    return json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, float]:
    return {name: found for name, each in _mapping(value).items() if (found := number(each)) is not None}


def _last_part(path: str) -> str:
    """The file name, whichever system the log was written on."""
    return re.split(r"[/\\]", path)[-1]
