"""The gradient log: format, flushing, resuming, and what is left after a crash."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from maulstick.guard import (
    GradientGuard,
    GradientLog,
    GuardError,
    gradient_log_path,
    read_gradient_log,
    scaled_by,
    unscaled_from,
)
from maulstick.guard.log import LogRow

HEADER = "Epoch,Step,Gradient Norm,Threshold,Loss,ThreshOff\n"


def row(step: int, epoch: int = 0, **fields: float) -> LogRow:
    values = {"norm": 0.5, "threshold": 200000.0, "loss": 0.25, "threshold_off": False, **fields}
    return LogRow(epoch=epoch, step=step, **values)


def test_names():
    assert gradient_log_path("out", "my style") == Path("out/gradient_logs+my style.txt")
    assert gradient_log_path("out", None).name == gradient_log_path("out", "").name == "gradient_logs+last.txt"


def test_the_format_to_the_byte(tmp_path: Path):
    path = tmp_path / "new folder" / "log.txt"
    with GradientLog(path, scale=True, cosine=True) as log:
        assert path.read_bytes() == HEADER[:-1].encode() + b",Scale,CosineSim\n"
        log.write_row(row(0, norm=math.nan, threshold=math.nan, threshold_off=True, scale=65536.0, loss=math.inf))
        log.write_row(row(1, norm=1e22, threshold=1e-7, scale=2.0, cosine=-0.125))
    lines = path.read_bytes().decode().split("\n")
    assert lines[1:] == ["0,0,nan,nan,inf,1,65536.0,nan", "0,1,1e+22,1e-07,0.25,0,2.0,-0.125", ""]
    assert read_gradient_log(path)[1] == row(1, norm=1e22, threshold=1e-7, scale=2.0, cosine=-0.125)


def test_rows_are_held_until_a_step_that_divides_by_a_hundred(tmp_path: Path):
    path = tmp_path / "log.txt"
    on_disk = {}
    with GradientLog(path, scale=False, cosine=False) as log:
        for epoch in (0, 1):
            for step in range(150):
                log.write_row(row(step, epoch))
                on_disk[epoch, step] = path.read_text().count("\n") - 1
    assert [on_disk[key] for key in ((0, 0), (0, 1), (0, 99), (0, 100), (0, 149))] == [1, 1, 1, 101, 101]
    assert [on_disk[key] for key in ((1, 0), (1, 1), (1, 100), (1, 149))] == [151, 151, 251, 251]
    assert len(read_gradient_log(path)) == 300


def test_steady_logs_in_the_units_of_the_original(tmp_path: Path):
    """Norm and threshold are multiplied by the scale whatever the mode judges, so one reader fits all."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    guard = GradientGuard.from_preset("steady")
    with GradientLog(tmp_path / "log.txt", scale=True, cosine=False) as log:
        for step in range(30):
            parameter.grad = torch.full((4,), 0.25)
            log.write(0, step, guard.observe([parameter], loss=0.5, scale=unscaled_from(1024.0)))
        parameter.grad = torch.full((4,), 0.25 * 1024)
        log.write(0, 30, guard.observe([parameter], loss=0.5, scale=scaled_by(1024.0)))
    rows = read_gradient_log(tmp_path / "log.txt")
    assert {each.norm for each in rows} == {512.0}
    assert {each.true_norm for each in rows} == {0.5}
    assert rows[0].threshold == math.inf
    assert rows[30].threshold == pytest.approx(512 * 12)
    assert not any(each.threshold_off for each in rows)


def test_a_resumed_log_appends_and_ends_like_an_uninterrupted_one(tmp_path: Path):
    whole, cut = tmp_path / "whole.txt", tmp_path / "cut.txt"
    with GradientLog(whole, scale=False, cosine=False) as log:
        for step in range(250):
            log.write_row(row(step, norm=float(step)))
    first = GradientLog(cut, scale=False, cosine=False)
    for step in range(180):
        first.write_row(row(step, norm=float(step)))
        if step == 129:
            state = first.state_dict()
            assert len(read_gradient_log(cut)) == 130
    first.close()
    first.close()
    with cut.open("ab") as file:
        file.write(b"0,180,18")
    with GradientLog(cut, scale=False, cosine=False, keep_rows=state["rows"]) as log:
        assert len(read_gradient_log(cut)) == log.rows == 130
        for step in range(130, 250):
            log.write_row(row(step, norm=float(step)))
    assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("left", ["", HEADER[:-1], HEADER, HEADER + "0,0,1.0,2.0,3.0,0\n0,1,1.", None])
def test_resuming_from_what_a_crash_left(tmp_path: Path, left: str | None):
    path = tmp_path / "log.txt"
    if left is not None:
        path.write_text(left, newline="")
    if left == "":
        with pytest.raises(GuardError, match="columns"):
            GradientLog(path, scale=False, cosine=False, keep_rows=5)
        return
    with GradientLog(path, scale=False, cosine=False, keep_rows=5) as log:
        log.write_row(row(7))
    rows = read_gradient_log(path)
    assert [each.step for each in rows] == ([0, 7] if left and "3.0" in left else [7])


def test_resuming_with_other_columns_is_refused(tmp_path: Path):
    path = tmp_path / "log.txt"
    GradientLog(path, scale=True, cosine=False).close()
    with pytest.raises(GuardError, match="same precision and log options"):
        GradientLog(path, scale=False, cosine=False, keep_rows=0)
    GradientLog(path, scale=False, cosine=False).close()
    assert path.read_text() == HEADER


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column 'Epoch'"),
        ("a,b\n1,2\n", "no column 'Epoch'"),
        (HEADER.replace(",Loss", "") + "0,0,1,1,0\n", "no column 'Loss'"),
        (HEADER + "0,0,1.0,2.0,0\n", "line 2: 5 values for 6 columns"),
        (HEADER + "0,0,1.0,2.0,0.1,0\n0,one,1.0,2.0,0.1,0\n", "line 3: not a row"),
    ],
)
def test_files_that_are_no_log_are_refused(tmp_path: Path, text: str, words: str):
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(GuardError, match=words):
        read_gradient_log(path)


SCRIPT = """
    import os, signal, sys, time
    from maulstick.guard.log import GradientLog, LogRow
    log = GradientLog(sys.argv[1], scale=False, cosine=False)
    def rows(first, last):
        for step in range(first, last):
            log.write_row(LogRow(0, step, 1.0, 2.0, 0.5, False))
    {ending}
"""
ENDINGS = {
    "exception": ("rows(0, 57); raise KeyError('x')", 1),
    "exit": ("rows(0, 57); sys.exit(3)", 3),
    "in_a_with_block": ("with log: rows(0, 57); raise KeyboardInterrupt", 130),
    "sigterm": ("with log.flushed_on(signal.SIGTERM): rows(0, 57); os.kill(os.getpid(), signal.SIGTERM)", -15),
    "sigterm_while_writing": (
        "append = log.path.open\n"
        "    class Path(type(log.path)):\n"
        "        def open(self, *a, **k):\n"
        "            os.kill(os.getpid(), signal.SIGTERM); return super().open(*a, **k)\n"
        "    with log.flushed_on(signal.SIGTERM):\n"
        "        rows(0, 1); rows(1, 57); log.path = Path(log.path); log.flush()",
        -15,
    ),
    "earlier_handler": (
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(9))\n"
        "    with log.flushed_on(signal.SIGTERM): rows(0, 57); os.kill(os.getpid(), signal.SIGTERM)",
        9,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_rest_is_written_however_the_run_ends(tmp_path: Path, ending: str):
    code, status = ENDINGS[ending]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT.format(ending=code)), str(tmp_path / "log.txt")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode in (status, -signal.SIGINT if status == 130 else status), done.stderr.decode()
    assert [each.step for each in read_gradient_log(tmp_path / "log.txt")] == list(range(57))
