"""What a person sees of a run: the live bar in terminals of several widths, plain lines, or nothing."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from maulstick.train.console import (
    PlainConsole,
    QuietConsole,
    RichConsole,
    SilentConsole,
    StepLine,
    duration,
    hanging,
    make_console,
)

LINE = StepLine(0.12345, 0.5234, 2.314, 1e-4, 12, lambda: 3 * 2**29)
ESCAPE = "\x1b"


def terminal(width: int, **environment: str) -> Console:
    """A console that writes into memory as if that were a terminal."""
    usual = {"TERM": "xterm-256color"}
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=20,
        highlight=False,
        _environ=usual | environment,
    )


def screen(console: Console) -> list[str]:
    """The lines that were written last, without the codes that move the cursor or give colour."""
    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = re.split(r"\x1b\[\d*A|\x1b\[2K", text)
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", part).rstrip() for part in "\n".join(last).split("\n")]
    return [line for line in plain if line]


def bar_at(width: int, line: StepLine = LINE) -> list[str]:
    console = terminal(width)
    shown = RichConsole(console)
    shown.begin("training", 1600)
    shown.advance(120, line)
    shown.end()
    return screen(console)[-2:]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 121])
def test_a_narrow_terminal_gets_the_values_on_a_line_of_their_own(width: int) -> None:
    bar, values = bar_at(width)
    assert bar.lstrip().startswith(("⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"))
    assert "training" in bar
    assert "120/1600" in bar
    assert bar.endswith("left")
    assert max(len(bar), len(values)) <= width
    assert values.startswith("  loss 0.1235")


def test_eighty_columns_have_room_for_all_values() -> None:
    assert bar_at(80)[1] == "  loss 0.1235  norm 0.523  limit 2.31  lr 1.00e-04  skipped 12  mem 1.5 GiB"


def test_a_wide_terminal_gets_everything_on_one_line() -> None:
    bar = bar_at(140)[-1]
    assert len(bar) <= 140
    assert "120/1600 loss 0.1235  norm 0.523  limit 2.31  lr 1.00e-04  skipped 12  mem 1.5 GiB" in bar


def test_the_bar_says_what_it_waits_for() -> None:
    console = terminal(80)
    shown = RichConsole(console)
    shown.begin("training", 1600)
    shown.busy("drawing 3 of 12")
    shown.advance(120, LINE)
    shown.end()
    assert "training: drawing 3 of 12 ━" in screen(console)[-2]
    shown.begin("training", 1600)
    shown.busy("drawing 3 of 12")
    shown.busy(None)
    shown.end()
    assert "training ━" in screen(console)[-1]


def test_the_least_important_values_go_first() -> None:
    full = LINE.text()
    assert LINE.text(len(full)) == full
    assert LINE.text(len(full) - 1) == full.removesuffix("  mem 1.5 GiB")
    assert LINE.text(50) == "loss 0.1235  norm 0.523  lr 1.00e-04  skipped 12"
    assert LINE.text(20) == LINE.text(1) == "loss 0.1235"


def test_what_is_not_known_is_not_shown() -> None:
    line = replace(LINE, loss=math.nan, threshold=math.inf, memory=lambda: None)
    assert line.text() == "loss -  norm 0.523  lr 1.00e-04  skipped 12"


def test_the_time_left_of_a_resumed_run_comes_from_its_own_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = PlainConsole(seconds_between_lines=0.0)
    console.begin("training", 100, done=90)
    now = 1005.0
    console.advance(5)
    assert capsys.readouterr().out == "training 95/100  0:05 left\n"
    now = 3725.0
    console.advance(5)
    assert capsys.readouterr().out == "training 100/100  took 45:25\n"


def test_the_plain_console_shows_the_same_values_once_an_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = PlainConsole(seconds_between_lines=10.0)
    console.begin("training", 100)
    for step in range(100):
        now = step + 1.0
        console.advance(line=LINE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"training 10/100  {LINE.text()}  1:30 left"
    assert len(lines) == 10
    assert lines[-1].startswith("training 100/100")


def test_a_quiet_console_shows_results_only(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (SilentConsole(), QuietConsole(), PlainConsole()):
        console.say("a note")
        console.begin("training", 1)
        console.advance(line=LINE)
        console.end()
        console.result("saved last.safetensors")
    quiet, *plain = capsys.readouterr().out.splitlines()
    assert quiet == "saved last.safetensors"
    assert plain == ["a note", f"training 1/1  {LINE.text()}  took 0:00", "saved last.safetensors"]


def test_lengths_of_time_are_read_like_a_clock() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 61, 3599.6, 36_000)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:00:00",
        "10:00:00",
    ]


def test_texts_are_shown_as_they_are() -> None:
    console = terminal(80)
    RichConsole(console).say("[bold]/out/:cat:.safetensors" + "x" * 100)
    assert screen(console) == ["[bold]/out/:cat:.safetensors" + "x" * 100]


def test_long_lines_break_between_words_below_their_text() -> None:
    path = "/a/long/path/" + "x" * 50
    assert hanging(f"trains     unet: 278 modules, rank 16; {path} more", 40).split("\n") == [
        "trains     unet: 278 modules, rank 16;",
        f"           {path}",
        "           more",
    ]
    assert hanging("  one two", 7) == "  one\n  two"
    assert hanging("", 10) == ""
    console = terminal(40)
    RichConsole(console).say("model      /some/model  (SD 1.x, sd_v1, predicts epsilon)\nnext")
    assert screen(console) == ["model      /some/model  (SD 1.x, sd_v1,", "           predicts epsilon)", "next"]


def test_no_color_leaves_the_bar_without_colours() -> None:
    console = terminal(80, NO_COLOR="1")
    shown = RichConsole(console)
    shown.begin("training", 10)
    shown.advance(5, LINE)
    shown.end()
    codes = re.findall(r"\x1b\[([\d;]*)m", console.file.getvalue())  # type: ignore[attr-defined]
    numbers = {int(number) for code in codes for number in code.split(";") if number}
    assert not {number for number in numbers if number >= 30}


@pytest.mark.parametrize(
    ("mode", "is_terminal", "term", "expected"),
    [
        ("auto", True, "xterm", RichConsole),
        ("auto", True, "dumb", PlainConsole),
        ("auto", False, "xterm", PlainConsole),
        ("rich", True, "xterm", RichConsole),
        ("rich", True, "dumb", PlainConsole),
        ("rich", False, "xterm", PlainConsole),
        ("plain", True, "xterm", PlainConsole),
        ("quiet", True, "xterm", QuietConsole),
    ],
)
def test_the_live_bar_is_for_terminals_that_can_move_the_cursor(
    mode: str, is_terminal: bool, term: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert type(make_console(mode)) is expected  # type: ignore[arg-type]


def test_nothing_that_is_piped_holds_codes() -> None:
    """Help, errors of options and of files; in one process, as each takes a second to begin."""
    code = "import sys; from maulstick.cli import main\nfor line in sys.argv[1:]:\n    main(line.split())"
    lines = ["--help", "train --nosuch 1", "trian", "inspect /no/such/file"]
    done = subprocess.run(
        [sys.executable, "-c", code, *lines],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "NO_COLOR": "1", "FORCE_COLOR": "1"},
    )
    assert done.stderr.count("maulstick: error:") == 3
    assert "quickstart" in done.stdout
    assert ESCAPE not in done.stdout + done.stderr
