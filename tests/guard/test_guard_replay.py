"""What-if replay: counts that a person can check by hand, deadlocks, hindsight labels, table and picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from bench.guard import stream
from maulstick.guard import GradientLog, GuardError, preset, read_gradient_log
from maulstick.guard.log import LogRow
from maulstick.guard.replay import format_replay_table, label_rows, replay
from maulstick.guard.replay_plot import plot_replay


def rows_of(norms: list[float], scale: float | None = None, loss: float = 0.1) -> list[LogRow]:
    factor = scale or 1.0
    return [LogRow(0, step, norm * factor, 2e5, loss, False, scale) for step, norm in enumerate(norms)]


def run_with_events() -> list[float]:
    norms = stream(1, 0.3, 600)
    norms[100] *= 1000
    norms[300] *= 1000
    norms[301] = math.nan
    norms[302] = math.inf
    return norms


def test_counts_and_rows():
    result = replay(rows_of(run_with_events(), scale=65536.0), ["steady", "gamble", "stable", "off"])
    assert (result["rows"], result["spikes"], result["non_finite"]) == (600, 2, 2)
    steady = result["presets"]["steady"]
    assert steady["skipped"] == [100, 300, 301, 302]
    assert steady["skipped_for"] == {"spike": 2, "nan": 1, "inf": 1}
    assert steady["healthy_lost_share"] == 0
    assert steady["effective_updates"] == 596
    assert steady["longest_streak"] == 3
    off = result["presets"]["off"]
    assert off["skipped"] == []
    assert off["spikes_let_through"] == [100, 300]
    assert off["non_finite_let_through"] == [301, 302]
    assert off["effective_updates"] == 598
    gamble = result["presets"]["gamble"]
    assert gamble["skipped_for"]["nan"] == gamble["skipped_for"]["inf"] == 1
    assert gamble["healthy_lost_share"] == pytest.approx((len(gamble["skipped"]) - 4) / 596)
    assert result["presets"]["stable"]["non_finite_let_through"] == [301, 302]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_the_scale_column_is_used():
    """A scale that doubles every 100 steps is nothing to ``steady``; without the column it is a growing norm."""
    norms = stream(2, 0.3, 800)
    scaled = [
        LogRow(0, step, norm * 2.0 ** (step // 100 * 4), 2e5, 0.1, False, 2.0 ** (step // 100 * 4))
        for step, norm in enumerate(norms)
    ]
    assert label_rows(scaled) == ["healthy"] * 800
    assert replay(scaled, ["steady"])["presets"]["steady"]["skipped"] == []
    bare = [LogRow(0, row.step, row.norm, 2e5, 0.1, False) for row in scaled]
    assert len(replay(bare, ["steady"])["presets"]["steady"]["skipped"]) > 60


def test_deadlocks_are_found():
    norms = [0.05] * 100 + [6.0] * 400
    found = replay(rows_of(norms, scale=65536.0), ["stable", "steady"])["presets"]
    assert found["stable"]["deadlocks"] == [{"first": 100, "length": 400, "to_the_end": True}]
    assert found["stable"]["effective_updates"] == 100
    assert found["steady"]["deadlocks"] == []
    assert len(found["steady"]["skipped"]) == 64
    own = preset("steady", when_stuck="hand_over")
    assert replay(rows_of(norms + [0.05] * 50), [own])["presets"]["steady"]["deadlocks"] == [
        {"first": 100, "length": 400, "to_the_end": False}
    ]


def test_labels_see_with_hindsight():
    norms = stream(3, 0.3, 500)
    shifted = [norm * (100 if place >= 250 else 1) for place, norm in enumerate(norms)]
    assert label_rows(rows_of(shifted)) == ["healthy"] * 500
    shifted[100] *= 40
    shifted[400] *= 40
    labels = label_rows(rows_of(shifted))
    assert [place for place, label in enumerate(labels) if label == "spike"] == [100, 400]
    assert label_rows(rows_of([math.nan, 0.0, 1.0])) == ["non_finite", "healthy", "healthy"]


def test_losses_of_a_log_without_losses_do_not_count():
    norms = stream(4, 0.3, 100)
    assert replay(rows_of(norms, loss=math.nan), ["steady"])["presets"]["steady"]["skipped"] == []
    rows = rows_of(norms)
    rows[50] = LogRow(0, 50, norms[50], 2e5, math.nan, False)
    assert replay(rows, ["steady"])["presets"]["steady"]["skipped_for"] == {"non_finite_loss": 1}


def test_the_table_and_the_picture(tmp_path: Path):
    rows = rows_of(run_with_events())
    result = replay(rows, ["steady", "stable"])
    text = format_replay_table(result)
    assert text.startswith("600 steps recorded: 2 spikes and 2 non-finite gradients")
    lines = text.splitlines()
    assert lines[2].startswith("| mode ")
    assert "4 (0.67%)" in lines[4]
    assert len({len(line) for line in lines[2:]}) == 1
    plot_replay(rows, result, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.size[0] == 1200
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert {(70, 110, 170), (215, 90, 30), (190, 30, 90), (190, 40, 40)} <= colours


def test_a_log_still_being_written_and_an_empty_one(tmp_path: Path):
    path = tmp_path / "log.txt"
    log = GradientLog(path, scale=False, cosine=False)
    with pytest.raises(GuardError, match="no rows yet"):
        replay(read_gradient_log(path), ["steady"])
    log.write_row(rows_of([1.0])[0])
    assert replay(read_gradient_log(path), ["stable"])["presets"]["stable"]["steps"] == 1
    log.close()
    with pytest.raises(GuardError, match="Did you mean 'stable'"):
        replay(rows_of([1.0]), ["stabel"])
