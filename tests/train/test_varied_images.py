"""Runs on images that differ each time: metadata, plan, and exact resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from maulstick.errors import OptionError
from maulstick.train.plan import plan_lines
from maulstick.train.run import TrainingRun

MakeRun = Callable[..., TrainingRun]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A training folder of three images twice as wide as what is trained."""
    folder = tmp_path / "wide/2_shape"
    folder.mkdir(parents=True)
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a shape")
    return tmp_path / "wide"


def test_a_run_with_random_crops_and_colours_resumes_exactly(make_run: MakeRun, wide: Path, tmp_path: Path) -> None:
    given = (
        *("--train_data_dir", str(wide), "--random_crop", "--color_aug", "--network_train_unet_only"),
        *("--save_state", "--save_every_n_steps", "1", "--max_train_steps", "4"),
    )
    whole = make_run(*given)
    whole.train()
    line = next(line for line in plan_lines(whole.prepared.plan) if "2_shape" in line)
    assert line.endswith("3 images x 2, random crops, random colours")
    with safe_open(tmp_path / "out/last.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["ss_random_crop"], metadata["ss_color_aug"]) == ("True", "True")
    # From the middle of an epoch into the next one.
    state = str(tmp_path / "out/last-step00000001-state")
    resumed = make_run(*given, "--resume", state, output="resumed")
    resumed.train()
    pairs = zip(whole.loop.parts.named_parameters, resumed.loop.parts.named_parameters, strict=True)
    assert all(torch.equal(one[1], other[1]) for one, other in pairs)
    without = [each for each in given if each != "--color_aug"]
    with pytest.raises(OptionError, match="the state was saved with color_aug = True, but color_aug is False now"):
        make_run(*without, "--resume", state, output="refused").prepare()


def test_without_them_the_metadata_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("--max_train_steps", "1", "--network_train_unet_only").train()
    with safe_open(tmp_path / "out/last.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["ss_random_crop"], metadata["ss_color_aug"]) == ("False", "False")
