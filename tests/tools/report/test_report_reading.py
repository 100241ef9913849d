"""What a report reads: event logs, also torn, resumed and strange ones, and gradient logs of any program."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from maulstick.errors import DataError
from maulstick.guard.log import GradientLog, LogRow
from maulstick.tools.report.read import read_run
from tests.tools.report.made_logs import add_samples, long_run, skip_event, start_event, write_log

STEP = {"event": "step", "loss/current": 0.1, "norm/grad": 0.2, "norm/threshold": 1.0, "lr/unet": 1e-4, "epoch": 0}


def steps(*numbers: int) -> list[dict]:
    return [{**STEP, "train/steps": number, "time": number} for number in numbers]


def test_an_event_log_becomes_series_marks_and_an_ending(tmp_path: Path) -> None:
    rows = [
        start_event(3),
        *steps(1),
        {**STEP, "train/steps": 2, "norm/grad": "nan", "loss/current": "nan"},
        skip_event(2, "nan", "the gradient is NaN"),
        {"event": "look", "step": 2, "alarms/largest_weight_norm": 0.5},
        {"event": "validation", "step": 2, "loss": 0.25, "training_loss": 0.125},
        {"event": "over_fitting", "step": 2, "best_step": 1, "text": "over-fitting: it has risen"},
        *steps(3),
        {"event": "save", "step": 3, "file": "/elsewhere/made.safetensors", "sha256": "ab" * 32},
        {"event": "interrupted", "time": 9, "step": 3, "stopped_by": "SIGTERM", "file": "/elsewhere/made.safetensors"},
    ]
    run = read_run(write_log(tmp_path / "made.events.jsonl", rows))
    assert (run.name, run.steps, run.total_steps) == ("made", [1, 2, 3], 3)
    assert run.series["loss/current"][0] == 0.1
    assert math.isnan(run.series["norm/grad"][1])
    assert run.points["alarms/largest_weight_norm"].values == [0.5]
    assert (run.points["loss/validation"].steps, run.points["loss/validation"].values) == ([2], [0.25])
    assert run.points["loss/validation of trained"].values == [0.125]
    assert [mark.text for mark in run.marks if mark.kind == "over_fitting"] == ["over-fitting: it has risen"]
    mark, _ = run.marks
    assert (mark.step, mark.kind, mark.reason, mark.images, mark.threshold) == (2, "skip", "nan", ("a.png",), 1.0)
    assert (run.ending, run.reason, run.final_file) == ("interrupted", "SIGTERM", "made.safetensors")
    (file,) = run.files
    assert (file.name, file.state, file.sha256) == ("made.safetensors", "missing", "ab" * 32)
    assert run.options["train_batch_size"] == 1
    assert [finding["message"] for finding in run.findings] == ["no caption"]
    json.dumps(run.as_json(), allow_nan=False)


def test_a_torn_line_and_unknown_things_are_passed_over(tmp_path: Path) -> None:
    log = write_log(tmp_path / "made.events.jsonl", [start_event(9), {"event": "of the future", "step": 1}, *steps(1)])
    with log.open("a") as file:
        file.write('[1, 2]\n{"event": "step", "train/steps": 2, "loss/cur')
    run = read_run(tmp_path)
    assert (run.steps, run.ending) == ([1], "open")


def test_a_broken_line_costs_no_more_than_itself_and_is_told(tmp_path: Path) -> None:
    log = write_log(tmp_path / "made.events.jsonl", [start_event(3), *steps(1, 2, 3)])
    lines = log.read_text().splitlines(keepends=True)
    lines[2] = lines[2][:9] + "\0" * 5 + "\n"
    log.write_text("\ufeff" + "".join(lines) + '{"event": "st', encoding="utf-8")
    run = read_run(log)
    assert run.steps == [1, 3]
    assert run.notes == ["1 line of made.events.jsonl cannot be read; what stood there is missing here."]


def test_a_resumed_run_is_one_run_that_goes_on(tmp_path: Path) -> None:
    first = start_event(4)
    rows = [first, *steps(1, 2), {"event": "interrupted", "step": 2, "stopped_by": "Ctrl-C"}]
    alone = read_run(write_log(tmp_path / "made.events.jsonl", rows)).identity
    rows += [{**first, "time": 99}, {"event": "resume", "step": 2, "folder": "made-state"}, *steps(3, 4)]
    run = read_run(write_log(tmp_path / "made.events.jsonl", [*rows, {"event": "end", "step": 4}]))
    assert (run.steps, run.ending, run.reason) == ([1, 2, 3, 4], "end", "")
    assert [mark.kind for mark in run.marks] == ["resume"]
    assert run.identity == alone
    assert len(run.findings) == 1


def test_the_gradient_log_brings_cosine_and_the_threshold_in_true_units(tmp_path: Path) -> None:
    rows = [{**STEP, "train/steps": step, "norm/threshold": 512.0} for step in (1, 2, 3)]
    write_log(tmp_path / "made.events.jsonl", [start_event(3), *rows])
    with GradientLog(tmp_path / "gradient_logs+made.txt", scale=True, cosine=True) as log:
        for step, cosine in enumerate((math.nan, 0.5)):
            log.write_row(LogRow(0, step, 0.2 * 256, 512.0, 0.1, False, 256.0, cosine))
    run = read_run(tmp_path)
    assert run.series["norm/threshold"] == [2.0, 2.0, 512.0]
    assert run.series["cosine"] == [None, 0.5, None]
    assert run.series["train/loss_scale"] == [256.0, 256.0, None]


def test_a_gradient_log_of_another_run_is_left_out_and_named(tmp_path: Path) -> None:
    write_log(tmp_path / "made.events.jsonl", [start_event(1), *steps(1)])
    with GradientLog(tmp_path / "gradient_logs+made.txt", scale=False, cosine=True) as log:
        log.write_row(LogRow(0, 0, 7.0, 512.0, 0.1, False, None, 0.5))
    run = read_run(tmp_path)
    assert "cosine" not in run.series
    assert run.notes == ["gradient_logs+made.txt does not belong to this run's event log and was left out."]


def test_the_original_programs_log_is_a_run_too(tmp_path: Path) -> None:
    log = tmp_path / "gradient_logs+old.txt"
    rows = ["0,0,100.0,200000,0.5,0,128.0", "0,1,nan,200000,nan,0,128.0", "1,0,640.0,256.0,0.3,0,128.0"]
    log.write_text(
        "Epoch,Step,Gradient Norm,Threshold,Loss,ThreshOff,Scale\n"
        + "\n".join([*rows, "1,1,inf,nan,0.1,1,64.0"])
        + "\n"
    )
    run = read_run(log)
    assert run.from_gradient_log
    assert (run.name, run.steps) == ("old", [1, 2, 3, 4])
    assert run.series["norm/grad"][2] == 5.0
    assert run.series["norm/threshold"][2] == 2.0
    assert run.series["loss/average"] == [0.5, 0.5, 0.4, pytest.approx(0.3)]
    assert [(mark.step, mark.reason) for mark in run.marks] == [(2, "nan"), (3, "spike"), (4, "inf")]
    assert "In 1 steps the threshold was switched off" in run.notes[0]
    assert read_run(tmp_path).steps == run.steps


def test_pictures_come_from_the_run_s_own_folder_only(tmp_path: Path) -> None:
    log = long_run(tmp_path / "run", 20)
    add_samples(log, [10], ["a cat"])
    secret = tmp_path / "secret.png"
    secret.write_bytes((log.parent / "sample" / "made_step00000010_00.png").read_bytes())
    rows = log.read_text().splitlines()
    rows.insert(-1, json.dumps({"event": "sample", "step": 11, "label": "", "files": [str(secret), "../secret.png"]}))
    log.write_text("\n".join(rows) + "\n")
    first, second = read_run(log).samples
    assert [file.name for file in first.files if file] == ["made_step00000010_00.png"]
    assert second.files == (None, None)


@pytest.mark.parametrize(
    "files, asked, message",
    [
        ([], "gone", "There is no .*gone. Expected the output_dir of a run"),
        ([], "", "holds no log of a run. Expected the output_dir"),
        (
            ["a.events.jsonl", "b.events.jsonl"],
            "",
            "holds 2 runs: a.events.jsonl, b.events.jsonl. Name the one you mean",
        ),
        (["lora.safetensors"], "lora.safetensors", "neither an event log nor a gradient log|is not a gradient log"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, files: list[str], asked: str, message: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"\xff\xfe not a log")
    with pytest.raises(DataError, match=message):
        read_run(tmp_path / asked)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("made.events.jsonl", "", "is empty: nothing was logged. Expected the output_dir"),
        ("gradient_logs+made.txt", "\n", "is empty: nothing was logged. Expected the output_dir"),
        ("made.events.jsonl", "[1, 2]\n", "neither an event log nor a gradient log. Expected the output_dir"),
        ("made.report.html", "<!doctype html>", "neither an event log nor a gradient log. Expected the output_dir"),
    ],
)
def test_a_file_that_is_no_log_is_not_taken_for_a_gradient_log(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_run(tmp_path / name)


def test_a_log_that_was_set_aside_is_not_meant(tmp_path: Path) -> None:
    write_log(tmp_path / "made.events.old-1.jsonl", [start_event(1), *steps(1, 2)])
    write_log(tmp_path / "made.events.jsonl", [start_event(1), *steps(1)])
    assert read_run(tmp_path).steps == [1]
    assert read_run(tmp_path / "made.events.old-1.jsonl").steps == [1, 2]
