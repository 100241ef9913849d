"""From what the user calls a run to its log."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from maulstick.errors import DataError

EVENTS_END = ".events.jsonl"
GRADIENT_LOG_START = "gradient_logs+"
_SET_ASIDE = re.compile(r"\.old-\d+\.(jsonl|txt)$")

EXPECTED = "Expected the output_dir of a run, its NAME.events.jsonl, or a gradient_logs+NAME.txt (any program's)."


def find_log(run: Path) -> Path:
    """Return the event log of a run, or its gradient log where that is all there is.

    Raises:
        DataError: there is none, or several runs are in the folder.
    """
    if run.is_file():
        return run
    if not run.exists():
        raise DataError(f"There is no {run}. {EXPECTED}")
    for pattern in (f"*{EVENTS_END}", f"{GRADIENT_LOG_START}*.txt"):
        found = sorted(path for path in run.glob(pattern) if not _SET_ASIDE.search(path.name))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found)
            raise DataError(f"{run} holds {len(found)} runs: {names}. Name the one you mean, such as {found[0]}.")
    raise DataError(f"{run} holds no log of a run. {EXPECTED}")


def run_name(log: Path) -> str:
    """Return the output_name of the run that wrote a log."""
    if log.name.endswith(EVENTS_END):
        return log.name.removesuffix(EVENTS_END)
    return log.stem.removeprefix(GRADIENT_LOG_START)


def gradient_log_of(events: Path) -> Path:
    """Return where the gradient log of the same run lies."""
    name = events.name.removesuffix(EVENTS_END)
    return events.with_name(f"{GRADIENT_LOG_START}{name}.txt")


def beginning(path: Path) -> bytes:
    """Return the first characters of a file, by which logs are told apart, so that a renamed one is read as well."""
    with path.open("rb") as file:
        return file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
