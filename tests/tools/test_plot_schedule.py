"""``maulstick plot-schedule``: what it draws and prints, without model and images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maulstick.cli import main
from maulstick.tools.chart_canvas import nice_step
from maulstick.tools.line_chart import COLOURS, Curve, draw_curves

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_schedule.toml"
LINEAR = ["--lr_scheduler", "linear", "--lr_warmup_steps", "10%", "--max_train_steps", "20000"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pixels_of(path: Path, colour: str) -> np.ndarray:
    """Return where a picture has about this colour, as (row, column) pairs."""
    wanted = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
    distance = np.abs(np.asarray(Image.open(path).convert("RGB")).astype(int) - wanted).max(axis=2)
    return np.argwhere(distance < 12)


def test_the_table_has_rates_marks_and_sums(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--learning_rate", "1e-5", "--text_encoder_lr", "5e-6"]
    assert main(["plot-schedule", *LINEAR, *rates]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "factor", "unet", "text", "encoder"] in lines
    assert ["0", "0", "0", "0"] in lines
    assert ["2000", "1", "1e-05", "5e-06", "warm-up", "ends,", "decay", "begins"] in lines
    assert ["11000", "0.5", "5e-06", "2.5e-06"] not in lines  # only tenths of the run have a line
    assert ["10000", "0.555556", "5.556e-06", "2.778e-06"] in lines
    # Warm-up and decay are triangles: N/2 of the rate, and N/3 of its square.
    assert ["sum", "of", "lr", "0.1", "0.05"] in lines
    assert ["sum", "of", "lr^2", "6.667e-07", "1.667e-07"] in lines
    assert lines[-1] == ["drawn:", "schedule.png"]


def test_json_has_every_factor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot-schedule", *LINEAR, "--learning_rate", "1e-5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["factors"] == [n / 2000 if n < 2000 else (20000 - n) / 18000 for n in range(20000)]
    assert found["rates"] == {"unet, text encoder": 1e-5}
    assert found["sum_of_lr"]["unet, text encoder"] == pytest.approx(0.1, rel=1e-9)
    assert found["sum_of_squared_lr"]["unet, text encoder"] == pytest.approx(2e4 / 3 * 1e-10, rel=1e-4)
    assert (found["warmup_steps"], found["decay_start"], found["file"]) == (2000, 2000, "schedule.png")


def test_the_documented_example_needs_neither_model_nor_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot-schedule", "--config_file", str(EXAMPLE), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    total, warmup = found["steps"], found["steps"] // 10
    assert found["lr_scheduler"] == "linear"
    assert found["warmup_steps"] == warmup
    expected = [n / warmup if n < warmup else (total - n) / (total - warmup) for n in range(total)]
    assert found["factors"] == pytest.approx(expected, abs=1e-12)
    assert found["notices"] == []


def test_the_picture_is_the_curve(tmp_path: Path) -> None:
    """A line over the first half at the top, then at half height: read back from the pixels."""
    path = tmp_path / "curve.png"
    draw_curves("title", "subtitle", [Curve("c", lambda step: 2.0 if step < 50 else 1.0)], 100, path)
    at = pixels_of(path, COLOURS[0])
    at = at[at[:, 0] > 200]  # below the legend
    rows = {column: at[at[:, 1] == column][:, 0].mean() for column in (400, 800, 1100, 1600)}
    assert rows[400] == rows[800]
    assert rows[1100] == rows[1600]
    bottom = 2 * (440 - 52)
    assert bottom - rows[1100] == pytest.approx((bottom - rows[400]) / 2, abs=2)


@pytest.mark.parametrize("steps", [1, 2, 7, 100_003])
def test_any_length_can_be_drawn(tmp_path: Path, steps: int) -> None:
    path = tmp_path / f"{steps}.png"
    draw_curves("t", "s", [Curve("c", lambda step: 1e-4 * (step + 1))], steps, path)
    with Image.open(path) as picture:
        assert picture.size == (1800, 880)
    assert len(pixels_of(path, COLOURS[0])) > 50


def test_each_network_has_its_line(tmp_path: Path) -> None:
    assert main(["plot-schedule", *LINEAR, "--text_encoder_lr", "5e-5", "--output", "two.png"]) == 0
    assert main(["plot-schedule", *LINEAR, "--network_train_unet_only", "--output", "one.png"]) == 0
    assert len(pixels_of(tmp_path / "two.png", COLOURS[1])) > 1000
    assert len(pixels_of(tmp_path / "one.png", COLOURS[1])) == 0


def test_an_earlier_picture_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedule.png").write_bytes(b"mine")
    assert main(["plot-schedule", *LINEAR]) == 0
    assert (tmp_path / "schedule.old-1.png").read_bytes() == b"mine"
    assert capsys.readouterr().out.endswith("drawn: schedule.png (the earlier file is now schedule.old-1.png)\n")


def test_epochs_need_the_steps_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    epochs = ["plot-schedule", "--lr_scheduler", "cosine", "--max_train_epochs", "10"]
    assert main(epochs) == 2
    assert "Give --steps_per_epoch (`maulstick check` shows it)" in capsys.readouterr().err
    assert main([*epochs, "--steps-per-epoch=30", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 300


def test_steps_per_epoch_without_epochs_is_said_to_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot-schedule", *LINEAR, "--steps_per_epoch", "3"]) == 0
    assert "note: steps_per_epoch has no effect without max_train_epochs.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--output", "curve.jpg"], "--output curve.jpg should end in .png"),
        (["--steps_per_epoch", "0"], "--steps_per_epoch 0: expected at least 1"),
        (["--steps_per_epoch", "x"], "Invalid value for --steps_per_epoch"),
        (
            ["--lr_schedular", "linear"],
            "Unknown option '--lr_schedular' (command line). Did you mean '--lr_scheduler'?",
        ),
        (["--lr_scheduler", "adafactor"], "lr_scheduler = adafactor is not supported"),
        (["--lr_scheduler", "linear", "--lr_warmup_steps", "1600"], "lr_warmup_steps is 1600, but training has only"),
    ],
)
def test_what_cannot_be_drawn(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot-schedule", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_help_shows_its_own_options_and_those_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plot-schedule", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("Usage: maulstick plot-schedule")
    assert all(f"\n  {name} " in text for name in ("--output", "--steps_per_epoch", "--json", "--lr_scheduler_power"))


@pytest.mark.parametrize("largest, ticks, step", [(1e-5, 5, 2e-6), (20000, 6, 5000), (1.0, 5, 0.2), (0.0, 5, 1.0)])
def test_ticks_are_round(largest: float, ticks: int, step: float) -> None:
    assert nice_step(largest, ticks) == pytest.approx(step)
