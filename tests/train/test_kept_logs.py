"""Logs of a resumed run: its own beginning is found by its checksum, and no other run's log is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from maulstick.guard import GradientGuard
from maulstick.guard.log import GradientLog, LogRow, gradient_log_path
from maulstick.options.check import guard_config
from maulstick.options.load import load_train_options
from maulstick.train.console import QuietConsole
from maulstick.train.events import EventLog, read_events
from maulstick.train.records import RunRecords


def log_of(path: Path, run: str, rows: int, **kept) -> EventLog:
    log = EventLog(path, **kept)
    for number in range(rows):
        log.write("step", run=run, number=number)
    return log


def runs_in(path: Path) -> str:
    return "".join(event["run"] for event in read_events(path))


def test_a_log_goes_on_where_the_state_knew_it(tmp_path):
    path, told = tmp_path / "a.events.jsonl", []
    first = log_of(path, "a", 3)
    kept = {"keep_bytes": first.size(), "keep_sha256": first.sha256()}
    first.write("step", run="x", number=3)
    first.close()
    again = log_of(path, "A", 2, on_trouble=told.append, **kept)
    again.close()
    assert (runs_in(path), runs_in(tmp_path / "a.events.old-1.jsonl"), told) == ("aaaAA", "aaax", [])
    assert again.sha256() != kept["keep_sha256"]


def test_the_log_of_another_run_of_the_name_is_set_aside_whole(tmp_path):
    path = tmp_path / "a.events.jsonl"
    first = log_of(path, "a", 3)
    kept = {"keep_bytes": first.size(), "keep_sha256": first.sha256()}
    first.close()
    log_of(path, "b", 5).close()
    log_of(path, "A", 1, **kept).close()
    assert runs_in(path) == "aaaA"
    assert [runs_in(tmp_path / f"a.events.old-{number}.jsonl") for number in (1, 2)] == ["aaa", "bbbbb"]


def test_a_log_that_is_gone_is_said_and_a_new_one_begun(tmp_path):
    path, told = tmp_path / "a.events.jsonl", []
    log_of(path, "b", 2).close()
    log_of(path, "A", 1, on_trouble=told.append, keep_bytes=40, keep_sha256="0" * 64).close()
    assert (runs_in(path), runs_in(tmp_path / "a.events.old-1.jsonl")) == ("A", "bb")
    assert told == [f"{path} is not the log that the resumed run had written; it is set aside, and a new one begun"]
    log_of(tmp_path / "new" / "a.events.jsonl", "A", 1, on_trouble=told.append, keep_bytes=40, keep_sha256="0" * 64)
    assert len(told) == 1


def test_a_state_without_checksums_takes_the_log_as_it_lies(tmp_path):
    path = tmp_path / "a.events.jsonl"
    first = log_of(path, "a", 2)
    size = first.size()
    first.write("step", run="x", number=2)
    first.close()
    log_of(path, "A", 1, keep_bytes=size).close()
    assert (runs_in(path), runs_in(tmp_path / "a.events.old-1.jsonl")) == ("aaA", "aax")


@pytest.fixture
def records(tmp_path: Path):
    """A function that opens the records of a run, and writes gradient norms into them."""
    (tmp_path / "images").mkdir()
    given = ["--pretrained_model_name_or_path", "m", "--train_data_dir", str(tmp_path / "images"), "--grad_norm_log"]
    options = load_train_options([*given, "--output_dir", str(tmp_path), "--max_train_steps", "9"]).options
    config = replace(guard_config(options)[0], log=True)

    def opened(norms: list[float], kept: dict | None = None) -> RunRecords:
        made = RunRecords(options, tmp_path, QuietConsole(), writes=True)
        made.open(GradientGuard(config), kept)
        assert isinstance(made.gradient_log, GradientLog)
        for step, norm in enumerate(norms):
            made.gradient_log.write_row(LogRow(0, step, norm, 9.0, 0.5, False))
        return made

    return opened


def norms_in(path: Path) -> list[str]:
    return [line.split(",")[2] for line in path.read_text().splitlines()[1:]]


def test_the_gradient_log_of_another_run_is_set_aside_whole(records, tmp_path):
    path = gradient_log_path(tmp_path, "last")
    first = records([1.0, 2.0])
    kept = first.state()
    first.close("end")
    records([3.0, 4.0, 5.0]).close("end")
    again = records([6.0], kept)
    assert again.state()["gradient_rows"] == 3
    again.close("end")
    assert norms_in(path) == ["1.0", "2.0", "6.0"]
    assert norms_in(path.with_name("gradient_logs+last.old-2.txt")) == ["3.0", "4.0", "5.0"]
    assert [event["event"] for event in read_events(tmp_path / "last.events.jsonl")] == ["end"]
