"""Small images, small data sets, and a family whose encoders are arithmetic that can be checked by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d

from maulstick.data.index import build_index
from maulstick.families.base import Family
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.schema import DatasetOptions

torch.set_num_threads(1)


def noise_pixels(width: int, height: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_image(
    path: Path, size: tuple[int, int] = (64, 64), seed: int | None = None, caption: str | None = None
) -> Path:
    """Write an image of noise; its seed comes from folder and name unless given, so that contents differ."""
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).digest()[:4], "little")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise_pixels(*size, seed)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


class FakeFamily(Family):
    """Encodes images by averaging (with a term that tells left from right), and captions by their characters."""

    latent_identity = "fake-vae-1"
    text_identity = "fake-text-1"

    def __init__(self, vae_scale: int = 8):
        self.vae_scale = vae_scale
        self.encoded: list[tuple[int, ...]] = []
        self.encoded_in_fp32: list[tuple[int, ...]] = []
        self.captions_encoded: list[list[str]] = []
        self.bad: Callable[[Tensor], bool] = lambda image: False
        self.bad_in_fp32: Callable[[Tensor], bool] = lambda image: False
        self.bad_captions: set[str] = set()

    def _latents(self, pixels: Tensor, bad: Callable[[Tensor], bool]) -> Tensor:
        pooled = avg_pool2d(pixels, self.vae_scale)
        ramp = torch.linspace(-1, 1, pixels.shape[3]).expand_as(pixels[:, :1])
        latents = torch.cat([pooled, avg_pool2d(pixels[:, :1] * ramp, self.vae_scale)], dim=1)
        for place, image in enumerate(pixels):
            if bad(image):
                latents[place, 0, 0, 0] = torch.nan
        return latents

    def encode_images(self, pixels: Tensor) -> Tensor:
        self.encoded.append(tuple(pixels.shape))
        return self._latents(pixels, self.bad)

    def encode_images_in_fp32(self, pixels: Tensor) -> Tensor:
        self.encoded_in_fp32.append(tuple(pixels.shape))
        return self._latents(pixels, self.bad_in_fp32)

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        self.captions_encoded.append(list(captions))
        rows = [[ord(letter) for letter in caption[:8].ljust(8)] for caption in captions]
        return {"text_encoder": torch.tensor(rows)}

    def count_tokens(self, caption: str) -> int:
        return len(caption)

    def encode_text(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ids = tokens["text_encoder"].float()
        states = torch.stack([ids, ids * 2], dim=-1)
        for place, caption in enumerate(self.captions_encoded[-1]):
            if caption in self.bad_captions:
                states[place, 0, 0] = torch.inf
        return {"states": states, "pooled": ids.sum(dim=1, keepdim=True)}


# What the data pipeline does not use stays abstract, and calling it would fail.
FakeFamily.__abstractmethods__ = frozenset()


@pytest.fixture
def family() -> FakeFamily:
    return FakeFamily()


@pytest.fixture
def image() -> Callable[..., Path]:
    return write_image


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., DatasetOptions]:
    """Options for images of 64 pixels below ``tmp_path / "train"``."""

    def make(**changes: object) -> DatasetOptions:
        values: dict[str, object] = {"train_data_dir": tmp_path / "train", "resolution": "64", "min_bucket_reso": 32}
        return DatasetOptions(**{**values, "max_bucket_reso": 128, "bucket_reso_steps": 8, **changes})

    return make


@pytest.fixture
def index(options):
    """Build the index of ``tmp_path / "train"`` (or what the options name)."""

    def build(**changes):
        build_arguments = {name: changes.pop(name) for name in ("verify", "progress", "vae_scale") if name in changes}
        return build_index(dataset_specs(options(**changes)), **build_arguments)

    return build


@pytest.fixture
def cats(tmp_path, image, options):
    """Four images in two buckets, mirrored at random; ``options`` may be changed."""
    for name, size in (("a", (64, 64)), ("b", (64, 64)), ("c", (80, 48)), ("d", (80, 48))):
        image(tmp_path / f"train/2_cat/{name}.png", size, caption="cat")

    def build(**changes):
        return build_index(dataset_specs(options(**{"enable_bucket": True, "flip_aug": True, **changes})))

    return build
