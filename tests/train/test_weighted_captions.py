"""Runs with weighted captions: the weights reach the loss, with caches and without, and odd brackets are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from maulstick.errors import OptionError
from maulstick.train.run import TrainingRun

MakeRun = Callable[..., TrainingRun]


@pytest.fixture
def captioned(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a training folder with these captions."""

    def make(*captions: str) -> Path:
        folder = tmp_path / "captioned/1_a"
        folder.mkdir(parents=True, exist_ok=True)
        for number, caption in enumerate(captions):
            Image.new("RGB", (64, 64), (40 * number, 80, 120)).save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text(caption)
        return folder.parent

    return make


def first_losses(run: TrainingRun) -> torch.Tensor:
    run.prepare()
    window, _ = next(run.loop.windows(0))
    run.loop.train_mode()
    losses = run.loop.forward(*window[0], run.loop.noise_generator(0, 0))
    losses.sum().backward()
    return losses.detach()


def test_weights_reach_the_loss_with_caches_and_with_trained_text_encoders(make_run: MakeRun, captioned) -> None:
    folder = captioned("a (shape:3)", "a (red:0.2) [thing]")
    given = ("--train_data_dir", str(folder))
    plain = first_losses(make_run(*given, output="plain"))
    trained = first_losses(make_run(*given, "--weighted_captions", output="trained"))
    unet_only = (*given, "--weighted_captions", "--network_train_unet_only")
    frozen = first_losses(make_run(*unet_only, output="frozen"))
    cached = first_losses(make_run(*unet_only, "--cache_text_encoder_outputs", output="cached"))
    torch.testing.assert_close(trained, frozen)
    torch.testing.assert_close(cached, frozen)
    assert (plain != frozen).all()


def findings(run: TrainingRun) -> dict[str, str]:
    run.prepare()
    return {finding.code: finding.message for finding in run.prepared.plan.findings}


def test_what_brackets_do_is_said(make_run: MakeRun, captioned) -> None:
    folder = captioned("a shape", "(red:1.2), thing", "(open, end", "(two, tags:1.3), c")
    given = ("--train_data_dir", str(folder), "--weighted_captions", "--network_train_unet_only")
    found = findings(make_run(*given, output="kept"))
    assert found["captions_weighted"] == "3 of 4 images have captions with weights (1.png, 2.png, 3.png)."
    assert found["brackets_unbalanced"].startswith("2.png: brackets without a partner.")
    assert "brackets_around_tags" not in found
    shuffled = findings(make_run(*given, "--shuffle_caption", output="shuffled"))
    assert shuffled["brackets_around_tags"].startswith("3.png: brackets around several tags")


def test_weights_without_any_and_in_a_resumed_run(make_run: MakeRun, captioned, tmp_path: Path) -> None:
    given = ("--train_data_dir", str(captioned("a shape")), "--network_train_unet_only", "--max_train_steps", "1")
    run = make_run(*given, "--weighted_captions", "--save_state_on_train_end", output="begun")
    assert findings(run)["option_without_effect"].startswith("weighted_captions has no effect")
    run.train()
    with pytest.raises(OptionError, match="weighted_captions = True, but weighted_captions is False now"):
        make_run(*given, "--resume", str(tmp_path / "begun/last-state"), output="more").prepare()
