"""The guardian in the trainer: modes, the gradient log, and replaying it."""

from __future__ import annotations

import csv
import json
import math

import pytest

from maulstick.cli import main
from maulstick.errors import OptionError
from maulstick.options.load import load_train_options
from maulstick.train.events import read_events
from tests.train.test_loop import UNET_ONLY, spoil_gradients_at

LOG = "gradient_logs+last.txt"


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_step_is_in_the_gradient_log(make_run, tmp_path):
    make_run(*UNET_ONLY, "--max_train_epochs", "2").train()
    rows = rows_of(tmp_path / "out" / LOG)
    assert list(rows[0]) == ["Epoch", "Step", "Gradient Norm", "Threshold", "Loss", "ThreshOff"]
    assert [(row["Epoch"], row["Step"]) for row in rows] == [(str(e), str(s)) for e in range(2) for s in range(5)]
    steps = [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if event["event"] == "step"]
    assert [float(row["Gradient Norm"]) for row in rows] == pytest.approx([step["norm/grad"] for step in steps])
    assert [float(row["Loss"]) for row in rows] == pytest.approx([step["loss/current"] for step in steps])


def test_a_preset_of_the_original_logs_scale_and_cosine_and_skips_nan_at_once(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--grad_norm_mode", "gamble", "--mixed_precision", "fp16")
    run.prepare()
    spoil_gradients_at(run, 2, math.nan)
    assert run.train().state.skipped == 1
    rows = rows_of(tmp_path / "out" / LOG)
    assert list(rows[0])[-2:] == ["Scale", "CosineSim"]
    assert [row["Gradient Norm"] == "nan" for row in rows] == [False, False, True, False, False, False]
    assert [float(row["Scale"]) for row in rows] == [65536.0] * 3 + [32768.0] * 3
    assert {row["Threshold"] for row in rows} == {"200000.0"}


def test_the_log_is_complete_when_the_run_ends_by_an_error(make_run, tmp_path):
    run = make_run(*UNET_ONLY)
    run.prepare()
    forward = run.loop.forward

    def fail_at_the_fifth(*arguments):
        if run.loop.state.step == 4:
            raise RuntimeError("gone")
        return forward(*arguments)

    run.loop.forward = fail_at_the_fifth
    with pytest.raises(RuntimeError, match="gone"):
        run.train()
    assert len(rows_of(tmp_path / "out" / LOG)) == 4


def test_off_neither_skips_nor_logs(make_run, tmp_path):
    make_run(*UNET_ONLY, "--grad_norm_mode", "off").train()
    assert not (tmp_path / "out" / LOG).exists()


def test_the_log_of_a_run_can_be_replayed(make_run, tmp_path, capsys):
    run = make_run(*UNET_ONLY, "--max_train_epochs", "6")
    run.prepare()
    spoil_gradients_at(run, 25, math.inf)
    run.train()
    assert capsys.readouterr().out == f"saved {tmp_path / 'out' / 'last.safetensors'}\n"
    log = tmp_path / "out" / LOG
    assert main(["replay", str(log), "--grad_norm_mode", "steady", "off", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["presets"]["steady"]["steps"] == 30
    assert result["presets"]["steady"]["skipped"] == [25]
    assert result["presets"]["off"]["skipped"] == []
    assert main(["replay", str(log), "--plot", str(tmp_path / "replay.png")]) == 0
    assert "steady" in capsys.readouterr().out
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


BASE = ("--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o")


def test_flags_beside_a_preset_are_ignored_and_said_so():
    loaded = load_train_options([*BASE, "--grad_norm_mode", "stable", "--skip_grad_norm_max", "5"])
    assert any("skip_grad_norm_max 5 is ignored" in notice for notice in loaded.notices)
    softened = load_train_options([*BASE, "--grad_norm_mode", "gamble", "--no-skip_nan_immediate"])
    assert softened.notices == []
    assert softened.options.guard.skip_nan_immediate is False


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--nan_inf_until_step", "100"], "'nan_inf_until_step' was removed.*grad_norm_mode"),
        (["--cap_release_step", "100"], "'cap_release_step' was removed"),
        (["--grad_cosine_log"], "needs grad_norm_log"),
        (["--nan_to_window"], "nan_to_window: without skip_grad_norm or grad_norm_log"),
        (["--skip_grad_norm", "--skip_grad_norm_max", "-1"], "skip_grad_norm_max.*above 0"),
        (["--grad_norm_mode", "stabel"], 'Did you mean "stable"'),
    ],
)
def test_flags_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        load_train_options([*BASE, *arguments])


def test_the_loss_of_a_skipped_step_stays_out_of_the_average(make_run, tmp_path):
    run = make_run(*UNET_ONLY)
    run.prepare()
    spoil_gradients_at(run, 0, math.nan)
    spoil_gradients_at(run, 3, math.nan)
    run.train()
    steps = [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if event["event"] == "step"]
    losses = [step["loss/current"] for step in steps]
    assert all(loss > 0 for loss in losses)
    trained = [losses[place] for place in (1, 2, 4, 5)]
    assert steps[0]["loss/average"] == "nan"
    assert [steps[place]["loss/average"] for place in (2, 3, 5)] == pytest.approx(
        [sum(trained[:2]) / 2, sum(trained[:2]) / 2, sum(trained) / 4]
    )
