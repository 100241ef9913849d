"""Small images and a function that trains on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from maulstick.options.load import load_train_options
from maulstick.train.console import QuietConsole
from maulstick.train.run import TrainingRun
from tests.models import model_folder


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training folder: five captioned 64x64 images, repeated twice."""
    root = tmp_path_factory.mktemp("images")
    folder = root / "2_shape"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(5):
        pixels = np.full((64, 64, 3), 255, np.uint8)
        pixels[8 * number : 8 * number + 24, 16:48] = rng.integers(0, 255, 3)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a shape, number {number}, red")
    return root


@pytest.fixture
def make_run(images: Path, tmp_path: Path) -> Callable[..., TrainingRun]:
    """Return a function that makes a run of six steps with further arguments, on the smallest model unless told."""

    def make(*arguments: str, output: str = "out", version: str = "tiny", prediction: str = "epsilon") -> TrainingRun:
        usual = {
            "--pretrained_model_name_or_path": str(model_folder(version, prediction)),
            "--train_data_dir": str(images),
            "--output_dir": str(tmp_path / output),
            "--resolution": "64",
            "--train_batch_size": "2",
            "--max_train_steps": "6",
            "--learning_rate": "1e-3",
            "--network_alpha": "4",
            "--seed": "1",
        }
        given = [token for name, value in usual.items() if name not in arguments for token in (name, value)]
        return TrainingRun(load_train_options([*given, *arguments]), console=QuietConsole())

    return make
