"""The validation loss: always the same measure, unfelt by training, and what it says about over-fitting."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from maulstick.errors import OptionError
from maulstick.train.over_fitting import Measured, over_fitting
from maulstick.train.plan import plan_lines
from maulstick.train.run import TrainingRun
from maulstick.train.validation import ValidationWatcher, fixed_timesteps

SPLIT = ("--validation_split", "0.4")
UNET = ("--network_train_unet_only", "--cache_latents")
MakeRun = Callable[..., TrainingRun]


def events(run: TrainingRun, kind: str) -> list[dict[str, Any]]:
    assert run.options.run.output_dir is not None
    lines = (run.options.run.output_dir / "last.events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


def watcher_of(run: TrainingRun) -> ValidationWatcher:
    assert run.loop is not None
    return next(each for each in run.loop.parts.watchers if isinstance(each, ValidationWatcher))


def measured_now(run: TrainingRun) -> dict[int, list[float]]:
    assert run.loop is not None
    run.loop.train_mode()
    return watcher_of(run).measure(run.loop)


DROPS = ("--network_dropout", "0.3", "--flip_aug", "--shuffle_caption", "--caption_dropout_rate", "0.5")


@pytest.mark.parametrize(
    "further",
    [
        ("--optimizer_type", "AdamWScheduleFree", *DROPS),
        ("--ema_decay", "0.9", *UNET, "--cache_text_encoder_outputs"),
    ],
)
def test_training_is_to_the_bit_what_it_is_without_validation(
    make_run: MakeRun, images: Path, tmp_path: Path, further: tuple[str, ...]
) -> None:
    often = (*SPLIT, "--validate_every_n_steps", "1", "--max_train_steps", "3")
    run = make_run(*often, *further, output="with")
    file = run.train().path
    held_back = run.prepared.index.held_back
    assert len(held_back) == 2
    rest = tmp_path / "rest"
    shutil.copytree(images, rest)
    for image in held_back:
        (rest / "2_shape" / image.path.name).unlink()
    alone = make_run("--train_data_dir", str(rest), *often[4:], *further, output="without").train().path
    mine, others = load_file(file), load_file(alone)
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)
    found = events(run, "validation")
    assert [row["step"] for row in found] == [0, 1, 2, 3]
    assert len({row["loss"] for row in found}) == 4


def test_the_loss_is_what_the_formula_says(make_run: MakeRun) -> None:
    run = make_run(*SPLIT, *UNET[:1])
    prepared = run.prepare()
    family, image = prepared.family, prepared.index.held_back[0]
    watcher = watcher_of(run)
    found = measured_now(run)[image.record_id]
    assert run.loop is not None
    item = next(item for batch in watcher._batches for item in batch.items if item.record is image)
    assert item.caption == image.captions[0]
    latent = watcher._kept[image.record_id][1][None]
    states = family.encode_text(family.tokenize([image.captions[0]]))
    for place, timestep in enumerate(watcher.timesteps):
        noise = watcher._noise(item, latent[0], place, run.loop)
        times = timestep[None]
        # The adapter is untrained, so that this is the base model's error.
        with torch.no_grad():
            prediction = family.predict(family.add_noise(latent, noise, times), times, states)
        assert found[place] == pytest.approx(float(((prediction - noise) ** 2).mean()), rel=1e-4)


@pytest.mark.parametrize("cached", [UNET[:1], UNET])
def test_masks_count_in_the_measure_too(
    make_run: MakeRun, images: Path, tmp_path: Path, cached: tuple[str, ...]
) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    for picture in (images / "2_shape").glob("*.png"):
        mask = Image.new("L", (64, 64), 0)
        mask.paste(255, (0, 0, 64, 16))
        mask.save(masks / picture.name)
    whole = make_run(*SPLIT, *cached, output="whole")
    masked = make_run(*SPLIT, *cached, "--masked_loss", "--conditioning_data_dir", str(masks), output="masked")
    found = []
    for run in (whole, masked):
        run.prepare()
        found.append(measured_now(run))
    assert found[0].keys() == found[1].keys()
    for losses, quarters in zip(found[0].values(), found[1].values(), strict=True):
        assert all(0.05 < quarter / loss < 0.6 for loss, quarter in zip(losses, quarters, strict=True))


def test_the_measure_does_not_depend_on_batches_or_on_the_images_beside(make_run: MakeRun) -> None:
    runs = [make_run(*SPLIT, *UNET, "--train_batch_size", size, output=f"out{size}") for size in ("1", "3")]
    limit = ("--max_validation_steps", "1", "--train_batch_size", "1")
    runs.append(make_run(*SPLIT, *UNET, *limit, output="limited"))
    for run in runs:
        run.prepare()
    first, second, limited = (measured_now(run) for run in runs)
    assert first.keys() == second.keys()
    assert all(second[number] == pytest.approx(row, rel=1e-5) for number, row in first.items())
    (only,) = watcher_of(runs[2]).held_back
    assert only is runs[2].prepared.index.held_back[0]
    assert limited[only.record_id] == pytest.approx(first[only.record_id], rel=1e-5)


def test_timesteps_are_quantiles_of_the_trained_ones(make_run: MakeRun) -> None:
    family = make_run().prepare().family
    assert fixed_timesteps(family, 3).tolist() == pytest.approx([125, 375, 625, 875], abs=40)
    assert fixed_timesteps(family, 3).tolist() == fixed_timesteps(family, 3).tolist()


def test_a_resumed_run_goes_on_with_its_measurements_and_the_same_images(make_run: MakeRun, tmp_path: Path) -> None:
    common = (*SPLIT, *UNET, "--save_state", "--save_every_n_steps", "2", "--validate_every_n_steps", "1")
    whole = make_run(*common, "--max_train_steps", "4", output="whole")
    whole.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    state = str(tmp_path / "again" / "last-step00000002-state")
    again = make_run(*common, "--max_train_steps", "4", "--resume", state, output="again")
    again.train()
    rows = [[(row["step"], row["loss"]) for row in events(run, "validation")] for run in (whole, again)]
    assert rows[0] == rows[1]
    assert [each.step for each in watcher_of(again).history] == [0, 1, 2, 3, 4]
    with pytest.raises(OptionError, match=r"validation_split = 0.4, but validation_split is 0.2 now"):
        make_run("--validation_split", "0.2", *UNET, "--resume", state).prepare()
    with pytest.raises(OptionError, match="validation_seed"):
        make_run(*SPLIT, *UNET, "--validation_seed", "9", "--resume", state).prepare()


def test_what_check_trackers_and_metadata_say(make_run: MakeRun) -> None:
    run = make_run(*SPLIT, "--validation_seed", "5", "--validate_every_n_epochs", "2", "--max_train_epochs", "2", *UNET)
    sent: list[tuple[int, dict[str, float]]] = []
    prepared = run.prepare()
    run.records.track = lambda values, *, step, epoch: sent.append((step, dict(values)))  # type: ignore[method-assign]
    result = run.train()
    assert len(prepared.plan.as_json()["validation_images"]) == 2
    (line,) = [line for line in plan_lines(prepared.plan) if "held back" in line]
    assert line.startswith("validates  2 images held back, never trained: ")
    assert [step for step, _ in sent] == [0, prepared.plan.total_steps]
    last, event = sent[-1][1], events(run, "validation")[-1]
    assert last == {
        "loss/validation/epoch_average": event["loss"],
        "loss/validation/epoch_divergence": event["loss"] - event["training_loss"],
    }
    with safe_open(result.path, "pt") as file:
        metadata = file.metadata()
    assert (metadata["ss_num_validation_images"], metadata["ss_validation_split"]) == ("2", "0.4")
    assert (metadata["ss_validation_seed"], metadata["ss_num_train_images"]) == ("5", "6")


def test_an_over_fitting_run_says_so_once_and_goes_on(make_run: MakeRun) -> None:
    run = make_run(*SPLIT, *UNET, "--validate_every_n_steps", "1", "--save_every_n_steps", "2")
    run.prepare()
    watcher = watcher_of(run)
    trend = iter([(1.0, 1.0), (0.8, 0.8), (0.7, 0.7), (0.75, 0.6), (0.8, 0.5), (0.9, 0.4), (1.0, 0.3)])

    def measure(loop: Any) -> dict[int, list[float]]:
        held_back, trained = next(trend)
        return {image.record_id: [held_back] * 4 for image in watcher.held_back} | {
            image.record_id: [trained] * 4 for image in watcher.trained
        }

    watcher.measure = measure  # type: ignore[method-assign]
    assert run.train().state.step == 6
    (found,) = events(run, "over_fitting")
    assert (found["step"], found["best_step"], found["best_loss"]) == (4, 2, 0.7)
    assert Path(found["nearest_file"]).name == "last-step00000002.safetensors"
    assert "last-step00000002.safetensors (step 2)" in found["text"]


@pytest.mark.parametrize(
    ("losses", "training", "found"),
    [
        ((1.0, 0.8, 0.81, 0.82, 0.83), (1.0, 0.8, 0.7, 0.6, 0.5), "has risen 3 times in a row"),
        ((1.0, 0.8, 0.85, 0.9), (1.0, 0.8, 0.7, 0.6), "stays more than 5% above"),
        ((1.0, 1.1, 1.2), (1.0, 0.8, 0.7), "stays more than 5% above"),
        ((1.0, 0.8, 0.81, 0.82, 0.83), (1.0, 0.8, 0.81, 0.82, 0.83), None),
        ((1.0, 0.8, 0.8001, 0.8002, 0.8003), (1.0, 0.8, 0.7, 0.6, 0.5), None),
        ((1.0, 0.8, 0.9, 0.82, 0.9), (1.0, 0.8, 0.7, 0.6, 0.5), None),
        ((1.0, 0.8, math.nan, 0.7), (1.0, 0.8, 0.7, 0.6), None),
        ((1.0,), (1.0,), None),
    ],
)
def test_what_counts_as_over_fitting(losses: tuple[float, ...], training: tuple[float, ...], found: str | None) -> None:
    history = [Measured(step, *pair) for step, pair in enumerate(zip(losses, training, strict=True))]
    result = over_fitting(history)
    assert (result is None) == (found is None)
    if result is not None and found is not None:
        assert result.how.startswith(found)
        assert result.best.loss == min(losses)
