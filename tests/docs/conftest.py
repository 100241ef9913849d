"""Folders of small pictures with captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_pictures(folder: Path, count: int = 2, size: tuple[int, int] = (64, 64)) -> Path:
    """Make a folder of ``count`` pictures of one colour each with a square, and their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(folder.name))
    for number in range(count):
        pixels = np.full((size[1], size[0], 3), rng.integers(0, 255, 3), np.uint8)
        pixels[4 * number + 8 : 4 * number + 32, 16:48] = rng.integers(0, 255, 3)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"my_cat, sitting, number {number}")
    return folder
