"""Norms by block and losses by timestep in the event log, and the report that a run leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from maulstick.adapters.files import file_hash, read_lora_file
from maulstick.data.batches import MicroBatch
from maulstick.tools.report.command import report_of_finished_run
from maulstick.train.console import QuietConsole
from maulstick.train.details import blocks_as_groups, by_timestep
from maulstick.train.events import read_events

UNET_ONLY = ("--network_train_unet_only",)


def events_of(folder, name):
    return [event for event in read_events(folder / "last.events.jsonl") if event["event"] == name]


def test_losses_are_sorted_into_bins_of_fifty_timesteps():
    counts, means = by_timestep([0, 49, 50, 999, 500], [1.0, 3.0, 4.0, 0.5, math.nan])
    assert (counts[0], counts[1], counts[10], counts[19]) == (2, 1, 0, 1)
    assert (means[0], means[1], means[10], means[19]) == (2.0, 4.0, None, 0.5)


def test_norms_by_block_are_those_of_the_whole(make_run, tmp_path):
    run = make_run("--log_details_every_n_steps", "3", "--text_encoder_lr", "5e-4", version="sd1")
    run.train()
    steps = {event["train/steps"]: event for event in events_of(tmp_path / "out", "step")}
    blocks = events_of(tmp_path / "out", "blocks")
    assert [event["step"] for event in blocks] == [3, 6]
    for event in blocks:
        norm = math.sqrt(sum(value**2 for value in event["gradient"].values()))
        assert norm == pytest.approx(steps[event["step"]]["norm/grad"], rel=1e-4)
        assert set(event["weight"]) == set(event["gradient"]) > {"IN01", "MID", "OUT11", "text_encoder"}
        assert event["weight_is"] == "change"
    # After the last update, what the LoRA adds to a block is what its file says.
    total = 0.0
    for name, weights in read_lora_file(tmp_path / "out" / "last.safetensors").modules.items():
        if name.startswith("lora_unet_mid_block"):
            change = weights.scale * (weights.up.flatten(1) @ weights.down.flatten(1))
            total += float(change.norm()) ** 2
    assert blocks[-1]["weight"]["MID"] == pytest.approx(math.sqrt(total), rel=1e-3)


def test_every_image_is_counted_once_with_its_loss(make_run, tmp_path):
    make_run(*UNET_ONLY, "--log_details_every_n_steps", "4").train()
    rows = events_of(tmp_path / "out", "timesteps")
    assert [row["step"] for row in rows] == [4, 6]
    losses = [step["loss/current"] for step in events_of(tmp_path / "out", "step")]
    pairs = [(count, mean) for count, mean in zip(rows[0]["count"], rows[0]["loss"], strict=True) if count]
    assert sum(count for count, _ in pairs) == 8
    assert sum(count * mean for count, mean in pairs) / 8 == pytest.approx(sum(losses[:4]) / 4, rel=1e-4)


def test_images_that_are_left_out_do_not_count(make_run, tmp_path, monkeypatch):
    run = make_run(*UNET_ONLY)
    run.prepare()
    windows = run.loop.windows

    def with_one_left_out(*arguments):
        for window, images in windows(*arguments):
            batch, latents = window[0]
            items = (replace(batch.items[0], loss_weight=0.0), *(replace(i, loss_weight=0.5) for i in batch.items[1:]))
            assert isinstance(batch, MicroBatch)
            yield [(replace(batch, items=items), latents)], images

    monkeypatch.setattr(run.loop, "windows", with_one_left_out)
    run.train()
    (row,) = events_of(tmp_path / "out", "timesteps")
    pairs = [(count, mean) for count, mean in zip(row["count"], row["loss"], strict=True) if count]
    assert sum(count for count, _ in pairs) == 6
    # Their weight of 0.5 is taken out again; the window's loss is half of theirs over both images.
    losses = [step["loss/current"] for step in events_of(tmp_path / "out", "step")]
    assert sum(count * mean for count, mean in pairs) / 6 == pytest.approx(4 * sum(losses) / 6, rel=1e-4)


@pytest.mark.slow
def test_without_the_option_nothing_is_written_and_nothing_else_changes(make_run, tmp_path):
    first = make_run(*UNET_ONLY, "--log_details_every_n_steps", "1", output="with").train().path
    second = make_run(*UNET_ONLY, "--log_details_every_n_steps", "0", output="without").train().path
    assert events_of(tmp_path / "without", "blocks") == events_of(tmp_path / "without", "timesteps") == []
    assert len(events_of(tmp_path / "with", "blocks")) == 6
    assert first.read_bytes()[-4096:] == second.read_bytes()[-4096:]


@pytest.mark.slow
def test_the_losses_of_a_resumed_run_are_all_there(make_run, tmp_path):
    options = (*UNET_ONLY, "--save_every_n_steps", "3", "--save_state")
    make_run(*options, "--log_details_every_n_steps", "6").train()
    whole = events_of(tmp_path / "out", "timesteps")
    make_run(
        *options, "--log_details_every_n_steps", "6", "--resume", str(tmp_path / "out" / "last-step00000003-state")
    ).train()
    assert events_of(tmp_path / "out", "timesteps")[0]["count"] == whole[0]["count"]


def test_the_guard_sees_the_tensors_in_their_own_order(make_run):
    run = make_run("--conv_dim", "2")
    run.prepare()
    parts = run.loop.parts
    source = blocks_as_groups(parts.family, parts.named_parameters)
    run.records.close("end", step=0)
    assert [name for group in source.groups for name in group.names] == [name for name, _ in parts.named_parameters]


# ---------------------------------------------------------------------------------------- the report of a run


def test_a_run_leaves_its_report_and_says_where_it_ran_and_what_it_saved(make_run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "last.report.html").write_text("of another run")
    run = make_run(*UNET_ONLY)
    run.records.when_closed = report_of_finished_run
    result = run.train()
    page = (tmp_path / "out" / "last.report.html").read_text()
    assert "Finished 6 of 6 steps; none skipped; file last.safetensors." in page
    assert (tmp_path / "out" / "last.report.old-1.html").read_text() == "of another run"
    (start,) = events_of(tmp_path / "out", "start")
    assert start["environment"]["torch"] == torch.__version__
    assert (start["environment"]["device"], start["environment"]["processes"]) == ("cpu", 1)
    (save,) = events_of(tmp_path / "out", "save")
    assert save["sha256"] == file_hash(result.path)
    assert save["sha256"] in page


def test_a_failed_run_has_a_report_too(make_run, tmp_path, monkeypatch):
    run = make_run(*UNET_ONLY)
    run.records.when_closed = report_of_finished_run
    run.prepare()
    monkeypatch.setattr(run.loop, "update", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert "Failed after 0 of 6 steps: ZeroDivisionError" in (tmp_path / "out" / "last.report.html").read_text()


def test_a_report_that_fails_does_not_fail_the_run(make_run, tmp_path):
    class Console(QuietConsole):
        def __init__(self):
            self.lines = []

        def say(self, text):
            self.lines.append(text)

    def fails(log):
        raise OSError("disk full")

    run = make_run(*UNET_ONLY)
    run.console = run.records.console = Console()
    run.records.when_closed = fails
    assert run.train().exit_code == 0
    assert run.console.lines[-1] == "no report was written (OSError: disk full)"
