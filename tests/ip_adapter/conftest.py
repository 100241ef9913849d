"""Small images with captions, and a function that makes IP-Adapter runs on small models."""

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
from tests.image_encoders import clip_encoder, siglip_encoder
from tests.models import model_folder
from tests.sd3_models import sd3_folder
from tests.sdxl_models import sdxl_folder


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def write_images(folder: Path, count: int = 4, side: int = 32, seed: int = 0) -> None:
    """Write images 0.png, 1.png, … with captions."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a shape, number {number}")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A training folder of four 32x32 images with captions."""
    write_images(tmp_path / "images" / "1_shape")
    return tmp_path / "images"


MODELS = {
    "sd1": (model_folder, clip_encoder),
    "sdxl": (sdxl_folder, clip_encoder),
    "sd3": (lambda: sd3_folder(with_t5=False), siglip_encoder),
    "sd3-plain": (lambda: sd3_folder(with_t5=False, qk_norm=False), siglip_encoder),
}


@pytest.fixture
def make_run(images: Path, tmp_path: Path) -> Callable[..., TrainingRun]:
    """Return a function that makes a run of three steps of an IP-Adapter, with further arguments."""

    def make(*arguments: str, model: str = "sd1", output: str = "out") -> TrainingRun:
        folder, encoder = MODELS[model]
        usual = {
            "--pretrained_model_name_or_path": str(folder()),
            "--network_type": "ip_adapter",
            "--image_encoder": str(encoder()),
            "--train_data_dir": str(images),
            "--output_dir": str(tmp_path / output),
            "--resolution": "32",
            "--train_batch_size": "2",
            "--max_train_steps": "3",
            "--learning_rate": "1e-3",
            "--seed": "1",
        }
        usual |= {"--ip_adapter_tokens": "4"} if model.startswith("sd3") else {}
        given = [token for name, value in usual.items() if name not in arguments for token in (name, value)]
        switches = ["--cache_latents", "--cache_text_encoder_outputs"]
        return TrainingRun(load_train_options([*given, *switches, *arguments]), console=QuietConsole())

    return make
