"""From an image file to the pixels that are trained, and its mask with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maulstick.data.buckets import Placement, fit_to_bucket
from maulstick.data.images import read_colours_and_alpha, read_rgb
from maulstick.data.records import ImageRecord, Mask
from maulstick.data.variations import ColourChange, Crop
from maulstick.errors import DataError


@dataclass(frozen=True)
class View:
    """What is made of an image when it comes up."""

    record: ImageRecord
    flipped: bool = False
    crop: Crop | None = None
    colours: ColourChange | None = None

    @property
    def placement(self) -> Placement:
        """How it is resized and cropped; without a crop of its own as the record says."""
        placement = self.record.placement
        return placement if self.crop is None else replace(placement, crop=self.crop)


@dataclass(frozen=True)
class Picture:
    """Attributes:
    pixels: uint8 (H, W, 3) of the bucket's size, mirrored where the view says so.
    mask: uint8 (H, W), 255 where the loss counts in full, never mirrored; None without a mask.
    """

    pixels: NDArray[np.uint8]
    mask: NDArray[np.uint8] | None


def read_picture(view: View) -> Picture:
    """Read what is trained of an image.

    Raises DataError where a file is not the one that was checked: its caption, size and cache key may be wrong.
    """
    record, mask = view.record, view.record.mask
    content = _unchanged(record.path, record.content_hash)
    values = None
    if mask is not None and mask.channel == "alpha":
        colours, values = read_colours_and_alpha(record.path, content)
    else:
        colours = read_rgb(record.path, content)
        if mask is not None:
            values = _mask_values(mask)
    pixels = _fitted(colours, view)
    if view.colours is not None:
        pixels = view.colours.applied(pixels)
    if view.flipped:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return Picture(pixels, None if values is None else _fitted(values, view))


def read_mask(view: View) -> NDArray[np.uint8] | None:
    """Return what ``read_picture`` gives as the mask, without the picture."""
    mask = view.record.mask
    return None if mask is None else _fitted(_mask_values(mask), view)


def read_pixels(record: ImageRecord, flipped: bool) -> NDArray[np.uint8]:
    """Return the pixels of an image as its placement has it, see ``read_picture``."""
    return read_picture(View(record, flipped)).pixels


def _fitted(values: NDArray[np.uint8], view: View) -> NDArray[np.uint8]:
    return fit_to_bucket(values, view.placement, view.record.subset.resize_interpolation)


def _mask_values(mask: Mask) -> NDArray[np.uint8]:
    colours, alpha = read_colours_and_alpha(mask.path, _unchanged(mask.path, mask.content_hash))
    if mask.channel == "red":
        return np.ascontiguousarray(colours[..., 0])
    if alpha is None:
        raise RuntimeError("an image without alpha channel has no mask")
    return alpha


def _unchanged(path: Path, content_hash: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read any more ({error.strerror or error}).") from error
    if sha256(content).hexdigest() != content_hash:
        raise DataError(f"{path} has changed since it was checked at the start. Start again.")
    return content
