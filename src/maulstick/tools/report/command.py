"""``maulstick report``, and the report that a run leaves by itself."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from maulstick.errors import OptionError
from maulstick.files_io import atomic_write, set_aside
from maulstick.tools.report.page import IDENTITY, as_json, identity, render
from maulstick.tools.report.read import read_run
from maulstick.tools.report.run_data import RunData
from maulstick.tools.report.verdict import headline

SEVERAL = Path("maulstick.report.html")
_HEAD_CHARACTERS = 2000


def report_command(runs: Sequence[Path], output: Path | None, json_file: Path | None) -> int:
    """Write the report of one run beside its log, or of several into this folder; print where it is."""
    for path, ending, name in ((output, ".html", "--output"), (json_file, ".json", "--json")):
        if path is not None and path.suffix.lower() != ending:
            raise OptionError(f"{name} {path} should end in {ending}.")
    read = _with_names_apart([read_run(run) for run in runs])
    for run in read:
        print(f"{run.name}: {headline(run)}")
    page = (SEVERAL if len(read) > 1 else report_path(read[0])) if output is None else output.expanduser()
    print(f"report: {page}{_aside(write_report(read, page))}")
    if json_file is not None:
        target = json_file.expanduser()
        earlier = set_aside(target)
        atomic_write(target, json.dumps(as_json(read), ensure_ascii=False, allow_nan=False) + "\n")
        print(f"JSON: {target}{_aside(earlier)}")
    return 0


def report_of_finished_run(log: Path) -> str:
    """Write the report beside the log of a run that has just ended; return a line that says where it is."""
    run = read_run(log)
    path = report_path(run)
    return f"report {path}{_aside(write_report([run], path))}"


def report_path(run: RunData) -> Path:
    """Return where the report of a run lies."""
    return run.source.with_name(f"{run.name}.report.html")


def write_report(runs: Sequence[RunData], path: Path) -> Path | None:
    """Write the page in one step. An earlier report of the same runs is replaced, anything else is set aside.

    Returns where the earlier file is now, None where there was none or it was replaced.
    """
    page = render(runs)
    earlier = None if _is_report_of(path, runs) else set_aside(path)
    atomic_write(path, page)
    return earlier


def _is_report_of(path: Path, runs: Sequence[RunData]) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        found = re.search(rf'<meta name="{IDENTITY}" content="([^"]*)">', file.read(_HEAD_CHARACTERS))
    return found is not None and html.unescape(found[1]) == identity(runs)


def _with_names_apart(runs: list[RunData]) -> list[RunData]:
    """Runs of the same name are told apart by their folders, or by number where those are alike too."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.source.resolve().parent.name}/{run.name}"
    names = [run.name for run in runs]
    for number, run in enumerate(runs, 1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    return runs


def _aside(earlier: Path | None) -> str:
    return f" (the earlier file is now {earlier.name})" if earlier else ""
