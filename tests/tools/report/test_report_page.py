"""The page: what it says in words, that nothing in it can break out, how large it is, and which file it replaces."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from maulstick.cli import main
from maulstick.tools.report.command import write_report
from maulstick.tools.report.downsample import kept_places, short
from maulstick.tools.report.marks import explanation, in_rows
from maulstick.tools.report.page import render
from maulstick.tools.report.read import read_run
from maulstick.tools.report.run_data import Mark, RunData
from maulstick.tools.report.thumbnails import film_of
from maulstick.tools.report.verdict import headline, level
from tests.tools.report.made_logs import CLOSING_TAG, add_samples, long_run, start_event, write_log

MOST_BYTES = 3_000_000


def data_in(page: str) -> dict[str, Any]:
    """Return what the page's script draws from."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def line_in(page: str, chart: str, place: int = 0) -> dict[int, Any]:
    """Return step -> value of a line of a chart."""
    data = data_in(page)
    (found,) = [each for each in data["charts"] if each["id"] == chart]
    line = found["lines"][place]
    return dict(zip(data["axes"][line["axis"]], line["values"], strict=True))


# ---------------------------------------------------------------------------------------- in words


@pytest.mark.parametrize(
    "ending, reason, said, grade",
    [
        ("end", "", "Finished 3 of 2,000 steps; 2 skipped (1 NaN, 1 spike); 1 rescue; file x.safetensors", "look"),
        ("interrupted", "SIGTERM", "Stopped after 3 of 2,000 steps: SIGTERM; 2 skipped", "bad"),
        (
            "failed",
            "RuntimeError: out of memory",
            "Failed after 3 of 2,000 steps: RuntimeError: out of memory; ",
            "bad",
        ),
        ("open", "", "The log ends after 3 of 2,000 steps, without a closing line: the run is still going on", "bad"),
    ],
)
def test_the_verdict_in_words(ending: Any, reason: str, said: str, grade: str) -> None:
    run = RunData("x", Path("x"), ending=ending, reason=reason, total_steps=2000, steps=[1, 2, 3])
    run.final_file = "x.safetensors"
    run.marks = [Mark(1, "skip", "", "nan"), Mark(2, "skip", "", "spike"), Mark(3, "rescue", "", "bad_windows")]
    assert headline(run).startswith(said)
    assert level(run) == grade


def test_a_quiet_run_went_well_and_one_that_ends_in_skips_is_told() -> None:
    run = RunData("x", Path("x"), ending="end", total_steps=100, steps=list(range(1, 101)))
    assert (headline(run), level(run)) == ("Finished 100 of 100 steps; none skipped", "good")
    run.marks = [Mark(step, "skip", "", "nan") for step in (98, 99, 100)]
    assert "the last 3 steps were all skipped" in headline(run)


def test_skips_in_a_row_are_one_row_and_each_kind_says_which_option_helps() -> None:
    marks = [Mark(step, "skip", "", "nan") for step in (5, 6, 7, 9)]
    marks.append(Mark(5, "autopsy", ""))
    assert [(row.first, row.last, row.count) for row in in_rows(marks)] == [(5, 7, 3), (5, 5, 1), (9, 9, 1)]
    for mark, option in (
        (Mark(1, "skip", "", "nan"), "bf16"),
        (Mark(1, "skip", "", "spike"), "gradient_accumulation_steps"),
        (Mark(1, "rescue", "", "loss_out_of_range"), "rescue_lr_factor"),
        (Mark(1, "gave_up", "", "bad_windows"), "rescue_limit"),
        (Mark(1, "alarm", "", "zero weights in unet"), "unet_lr"),
        (Mark(1, "alarm", "", "alarms/largest_weight_norm"), "scale_weight_norms"),
        (Mark(1, "alarm", "", ""), "learning_rate"),
    ):
        assert option in explanation(mark)


def test_the_page_holds_marks_findings_options_environment_and_files(tmp_path: Path) -> None:
    log = long_run(tmp_path, 60, spikes={30: 41.3}, learning_rate=2e-3)
    page = render([read_run(log)])
    for said in (
        "Finished 60 of 60 steps; 1 skipped (1 spike); file made.safetensors.",
        "1 × skipped: norm out of the ordinary",
        "norm 9 is 45x the recent median 0.2; the threshold was 1.2; images: a.png",
        ">no caption (script&gt;.png)<",
        '<th scope="row">learning_rate</th><td>0.002</td>',
        '<th scope="row">python</th><td>3.11.7</td>',
    ):
        assert said in page
    assert {chart["id"] for chart in data_in(page)["charts"]} == {"loss", "norm", "rates", "seconds", "profile"}
    assert [each["title"] for each in data_in(page)["heat"]] == [
        "Gradient norm by block",
        "Weight norm by block",
        "Loss by timestep over the run",
    ]


def test_nothing_that_a_log_says_becomes_markup(tmp_path: Path) -> None:
    rows = [
        start_event(1, output_name=CLOSING_TAG, training_comment="<img src=x onerror=alert(1)>{{scripts}}"),
        {"event": "step", "train/steps": 1, "loss/current": 0.1, f"{CLOSING_TAG}": 1.0, "norm/grad": 1.0},
        {"event": "alarm", "step": 1, "kind": CLOSING_TAG, "text": CLOSING_TAG + "\u2028"},
        {"event": "failed", "step": 1, "error": CLOSING_TAG},
    ]
    page = render([read_run(write_log(tmp_path / "made.events.jsonl", rows))])
    assert page.count("</script>") == 2
    assert "<img src=x" not in page
    assert data_in(page)["runs"][0]["marks"][0][2].startswith(f"alarm: {CLOSING_TAG}"[:60])
    assert "{{scripts}}" in page  # what a log says is not looked at again
    assert not re.search(r"https?://", page)


def test_an_ip_adapter_has_no_rank(tmp_path: Path) -> None:
    rows = [start_event(1, network_type="ip_adapter")]
    rows[0]["plan"]["components"] = [{"log_name": "unet", "modules": 4, "network_type": "SD3 IP-Adapter"}]
    page = render([read_run(write_log(tmp_path / "made.events.jsonl", rows))])
    assert "<dd>SD3 IP-Adapter: unet 4 modules</dd>" in page


def test_halves_of_characters_and_impossible_numbers_do_not_keep_a_page_from_being_written(tmp_path: Path) -> None:
    """A file whose name is no text stands in the log as half a character."""
    odd = [None, -5, 1e300, 10**400, math.nan, "x"]
    rows = [
        {**start_event(3), "time": 1e300},
        *({"event": "step", "train/steps": step, "loss/current": 1.0, "time": math.inf} for step in (1, *odd, 2)),
        {"event": "timesteps", "step": 2, "width": math.nan, "count": [math.inf], "loss": [1]},
        {"event": "skip", "step": 2, "reason": "nan", "text": "images: caf\udce9.png", "images": ["caf\udce9.png"]},
        {"event": "failed", "step": 2, "error": "caf\udce9.png", "time": 10**400},
    ]
    run = read_run(write_log(tmp_path / "made.events.jsonl", rows))
    assert (run.steps, run.started_at, run.ended_at, run.reason) == ([1, 2], None, None, "caf?.png")
    write_report([run], tmp_path / "made.html")
    assert "images: caf?.png" in (tmp_path / "made.html").read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------- few points, no spike lost


def test_few_places_are_kept_and_every_extreme_among_them() -> None:
    draw = random.Random(0)
    column = [draw.gauss(0, 1) for _ in range(5000)]
    column[1234], column[1235], column[4321], column[77] = 50.0, 40.0, -50.0, math.nan
    kept = kept_places([column], 5000, 300, always=[2222])
    assert len(kept) < 450
    assert {0, 77, 1234, 1235, 2222, 4321, 4999} <= set(kept)
    assert kept == sorted(set(kept))
    assert kept_places([column[:300]], 300, 300) == list(range(300))


@pytest.mark.parametrize(
    "value, written",
    [
        (0.123456789, 0.12346),
        (1e-7, 1e-7),
        (3.0, 3),
        (131072.0, 131072),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (None, None),
    ],
)
def test_values_are_short(value: float | None, written: Any) -> None:
    assert short(value) == written


def test_twenty_thousand_steps_fit_with_every_spike(tmp_path: Path) -> None:
    draw = random.Random(1)
    unmarked = {draw.randrange(1, 20_001): 20 + 50 * draw.random() for _ in range(60)}
    log = long_run(tmp_path, 20_000, spikes=unmarked, nans=[9000, 15_000], marked=False)
    add_samples(log, range(0, 20_000, 1000), ["a cat", "a dog", "a bird"], side=160)
    page = render([read_run(log)])
    assert len(page.encode()) < MOST_BYTES
    norms = line_in(page, "norm")
    assert len(norms) < 8000
    assert {step: norms.get(step) for step in unmarked} == {step: short(norm) for step, norm in unmarked.items()}
    assert (norms[9000], norms[15_000]) == ("nan", "nan")
    assert line_in(page, "rates")[20_000] == 0


def test_a_run_of_many_skips_shows_each_of_them(tmp_path: Path) -> None:
    spikes = dict.fromkeys(range(10, 20000, 10), 30.0)
    page = render([read_run(long_run(tmp_path, 20_000, spikes=spikes, detail_every=30_000))])
    assert len(page.encode()) < MOST_BYTES
    assert set(spikes) <= set(line_in(page, "norm"))
    assert len(data_in(page)["runs"][0]["marks"]) == 1999
    assert "1,999 × skipped" in page
    assert "1,899 more are in the charts" in page


def test_pictures_are_thinned_out_until_they_fit(tmp_path: Path) -> None:
    log = long_run(tmp_path, 100)
    add_samples(log, range(0, 100, 5), ["a cat <b>", "a dog"], side=96)
    film = film_of(read_run(log), most_bytes=150_000)
    assert film is not None
    assert film.prompts == ["a cat <b>", "a dog"]
    assert 2 <= len(film.sets) < 20
    assert film.left_out == 20 - len(film.sets)
    assert (film.sets[0].step, film.sets[-1].step) == (0, 95)
    assert sum(len(picture.uri) for row in film.rows for picture in row if picture) <= 150_000
    page = render([read_run(log)])
    assert "a cat &lt;b&gt;, step 95" in page
    (log.parent / "sample" / "made_step00000000_00.png").write_bytes(b"no picture")
    assert film_of(read_run(log)).rows[0][0] is None  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------- the command


def test_the_command_writes_page_and_json_and_replaces_its_own_page_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = long_run(tmp_path, 60, spikes={30: 41.3})
    target = tmp_path / "all.json"
    assert main(["report", str(tmp_path), "--json", str(target)]) == 0
    page = tmp_path / "made.report.html"
    assert capsys.readouterr().out.splitlines() == [
        "made: Finished 60 of 60 steps; 1 skipped (1 spike); file made.safetensors",
        f"report: {page}",
        f"JSON: {target}",
    ]
    (run,) = json.loads(target.read_text())["runs"]
    assert (len(run["steps"]), run["series"]["norm/grad"][29], run["marks"][0]["step"]) == (60, 41.3, 30)
    assert main(["report", str(log)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["made.report.html"]
    rows = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps({**json.loads(rows[0]), "time": 5}), *rows[1:]]) + "\n")
    assert main(["report", str(log)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["made.report.html", "made.report.old-1.html"]
    assert "(the earlier file is now made.report.old-1.html)" in capsys.readouterr().out


def test_several_runs_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_run(tmp_path / "a", 100, learning_rate=1e-3)
    long_run(tmp_path / "b", 80, nans=[40], network_dim=32)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0
    page = Path("maulstick.report.html").read_text()
    assert [run["name"] for run in data_in(page)["runs"]] == ["a/made", "b/made"]
    (loss,) = [chart for chart in data_in(page)["charts"] if chart["id"] == "loss"]
    assert [(line["name"], line["run"], line["hue"]) for line in loss["lines"][::2]] == [
        ("a/made: each step", 0, 0),
        ("b/made: each step", 1, 1),
    ]
    assert '<th scope="row">network_dim</th><td>4</td><td>32</td>' in page
    assert '<th scope="row">learning_rate</th><td>0.001</td><td>0.0001</td>' in page
    assert '<th scope="row">train_batch_size</th>' not in page


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["report"], 'Command "report" parameter RUNS requires an argument.'),
        (["report", "gone"], "There is no gone. Expected the output_dir of a run, its NAME.events.jsonl, or a"),
        (["report", "gone", "--output", "a.htm"], "--output a.htm should end in .html."),
        (["report", "gone", "--json", "a.txt"], "--json a.txt should end in .json."),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
