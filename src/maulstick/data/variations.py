"""What can differ each time an image comes up, besides mirroring: the place of its crop, and its colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from maulstick.data.buckets import Placement
from maulstick.data.findings import Finding, Severity
from maulstick.data.records import ImageRecord

Crop = tuple[int, int, int, int]

COLOUR_CHANCE = 0.5
MOST_HUE = 16 / 360
"""Part of the circle of hues: sd-scripts turns by up to 8 of OpenCV's 180 steps."""
MOST_CHANGE = 0.05
"""Of saturation, brightness and contrast, as factors around 1: sd-scripts' gamma is from 0.95 to 1.05."""


@dataclass(frozen=True)
class ColourChange:
    """A change of all colours of an image. ``hue`` is a part of the circle; the others are factors."""

    hue: float
    saturation: float
    brightness: float
    contrast: float

    def applied(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return changed pixels, uint8 (height, width, 3)."""
        hue, saturation, value = Image.fromarray(pixels).convert("HSV").split()
        turned = (np.asarray(hue).astype(np.int16) + round(256 * self.hue)) % 256
        image = Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), saturation, value)).convert("RGB")
        for enhance, factor in (
            (ImageEnhance.Color, self.saturation),
            (ImageEnhance.Brightness, self.brightness),
            (ImageEnhance.Contrast, self.contrast),
        ):
            image = enhance(image).enhance(factor)
        return np.array(image, dtype=np.uint8)


def drawn_crop(placement: Placement, rng: Random) -> Crop:
    """Return a crop of the bucket's size from any place of the resized image, all equally likely."""
    (width, height), (whole_width, whole_height) = placement.bucket, placement.resized
    left = int(rng.random() * (whole_width - width + 1))
    top = int(rng.random() * (whole_height - height + 1))
    return left, top, left + width, top + height


def drawn_colours(rng: Random) -> ColourChange | None:
    """Return a change of colours, or none, with equal chances."""
    if rng.random() >= COLOUR_CHANCE:
        return None
    hue, *factors = (2 * rng.random() - 1 for _ in range(4))
    return ColourChange(MOST_HUE * hue, *(1 + MOST_CHANGE * factor for factor in factors))


def crop_findings(images: Sequence[ImageRecord]) -> list[Finding]:
    """Return which folders ask for random crops of images that all fit their buckets without any."""
    findings = []
    by_subset: dict[int, list[ImageRecord]] = {}
    for image in images:
        if image.subset.random_crop:
            by_subset.setdefault(id(image.subset), []).append(image)
    for records in by_subset.values():
        if all(record.placement.resized == record.placement.bucket for record in records):
            folder = records[0].subset.image_dir
            message = f"'{folder.name}': random_crop has no effect: nothing is cut off these images after resizing."
            findings.append(Finding(Severity.WARNING, "option_without_effect", (folder,), message))
    return findings
