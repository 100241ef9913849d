"""Aspect-ratio buckets: which sizes there are, which one an image gets, and how it is resized and cropped for it.

Sizes are (width, height) in pixels everywhere. The rules are those of sd-scripts, so that a data set falls into the
same buckets; the places where we differ are marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, sqrt

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maulstick.data.findings import Finding, Severity
from maulstick.errors import OptionError
from maulstick.options.dataset_config import DatasetSpec

Size = tuple[int, int]

FAR_BELOW = 2.0
"""An image that must be enlarged by more than this factor is reported."""


def size_text(size: Size) -> str:
    """Return "512x768"."""
    return f"{size[0]}x{size[1]}"


@dataclass(frozen=True)
class Placement:
    """How an image of a given size is fitted into its bucket.

    Attributes:
        bucket: size of what is trained.
        resized: size of the whole image after resizing; it covers the bucket.
        crop: (left, top, right, bottom) of the bucket in the resized image: the centre.
        enlarged: factor that the image is enlarged by, below 1 where it is shrunk.
        aspect_error: bucket's width / height minus the image's.
    """

    bucket: Size
    resized: Size
    crop: tuple[int, int, int, int]
    enlarged: float
    aspect_error: float


def bucket_table(resolution: Size, min_reso: int, max_reso: int, steps: int) -> list[Size]:
    """Return the sizes images are sorted into, in ascending order.

    For every width from ``min_reso`` to ``max_reso`` in steps, the greatest height (a multiple of ``steps``, at most
    ``max_reso``) that keeps the area at most that of ``resolution``, where it is at least ``min_reso``; all of them
    turned over too; the largest square; and ``resolution`` itself. Differences from sd-scripts: ``resolution`` is there
    even where it is no multiple of ``steps``, and limits that are no multiples of ``steps`` are moved inwards to one.
    """
    area = resolution[0] * resolution[1]
    shortest = -(-min_reso // steps) * steps
    longest = max_reso // steps * steps
    table = {resolution}
    square = isqrt(area) // steps * steps
    if square:
        table.add((square, square))
    for width in range(shortest, longest + 1, steps):
        height = min(longest, area // width // steps * steps)
        if height >= shortest:
            table |= {(width, height), (height, width)}
    return sorted(table)


def centre_placement(image: Size, bucket: Size) -> Placement:
    """Return the smallest resizing that keeps the aspect ratio and covers the bucket, cropped to its centre."""
    width, height = image
    if width * bucket[1] > bucket[0] * height:  # wider than the bucket: heights match
        resized = (_rounded_ratio(width * bucket[1], height), bucket[1])
    else:
        resized = (bucket[0], _rounded_ratio(height * bucket[0], width))
    return _cropped(image, bucket, resized)


def _rounded_ratio(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _cropped(image: Size, bucket: Size, resized: Size) -> Placement:
    left, top = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    return Placement(
        bucket=bucket,
        resized=resized,
        crop=(left, top, left + bucket[0], top + bucket[1]),
        enlarged=max(resized[0] / image[0], resized[1] / image[1]),
        aspect_error=bucket[0] / bucket[1] - image[0] / image[1],
    )


class BucketChooser:
    """Chooses bucket and crop for the images of one dataset.

    Without ``enable_bucket`` the resolution is the only bucket. With ``bucket_no_upscale`` there is no table: an image
    is shrunk to the area of the resolution if it is larger, and its bucket is its size rounded down to the steps;
    ``min_bucket_reso`` and ``max_bucket_reso`` then do not apply.
    """

    def __init__(self, spec: DatasetSpec, vae_scale: int):
        """Raise OptionError where bucket sizes could not be divided by ``vae_scale`` (pixels per latent element)."""
        _check_divisible(spec, vae_scale)
        self.spec = spec
        self.table: list[Size] = []
        if not spec.enable_bucket:
            self.table = [spec.resolution]
        elif not spec.bucket_no_upscale:
            self.table = bucket_table(
                spec.resolution, spec.min_bucket_reso, spec.max_bucket_reso, spec.bucket_reso_steps
            )
        self._ratios = np.array([width / height for width, height in self.table])

    def place(self, image: Size) -> Placement | None:
        """Return where an image goes; None (no-upscale only) if it is too small or too narrow for any bucket."""
        if self.spec.enable_bucket and self.spec.bucket_no_upscale:
            return self._place_without_enlarging(image)
        if image in self.table:
            return centre_placement(image, image)
        nearest = self.table[int(np.abs(self._ratios - image[0] / image[1]).argmin())]
        if nearest[0] * self.spec.resolution[1] == nearest[1] * self.spec.resolution[0]:
            nearest = self.spec.resolution  # the same shape as a smaller bucket, where it is no multiple of the steps
        return centre_placement(image, nearest)

    def _place_without_enlarging(self, image: Size) -> Placement | None:
        width, height = image
        steps = self.spec.bucket_reso_steps
        area = self.spec.resolution[0] * self.spec.resolution[1]
        resized: Size | None = image
        if width * height > area:
            resized = _shrunk_to_area(width / height, area, steps)
        if resized is None:
            return None
        bucket = (resized[0] - resized[0] % steps, resized[1] - resized[1] % steps)
        return _cropped(image, bucket, resized) if min(bucket) > 0 else None


def _shrunk_to_area(ratio: float, area: int, steps: int) -> Size | None:
    """Return a size of about this ratio and at most this area, one side of it a multiple of ``steps``.

    Of the two ways (width or height a multiple) the one whose bucket has the nearer ratio is taken.
    """
    candidates: list[tuple[float, Size]] = []
    bucket_height = _down(sqrt(area / ratio), steps)
    bucket_width = _down(bucket_height * ratio, steps)
    if bucket_width and bucket_height:
        size = (int(bucket_height * ratio + 0.5), bucket_height)
        candidates.append((abs(bucket_width / bucket_height - ratio), size))
    bucket_width = _down(sqrt(area * ratio), steps)
    bucket_height = _down(bucket_width / ratio, steps)
    if bucket_width and bucket_height:
        size = (bucket_width, int(bucket_width / ratio + 0.5))
        candidates.append((abs(bucket_width / bucket_height - ratio), size))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _down(length: float, steps: int) -> int:
    whole = int(length + 0.5)
    return whole - whole % steps


def _check_divisible(spec: DatasetSpec, vae_scale: int) -> None:
    if spec.enable_bucket and spec.bucket_reso_steps % vae_scale:
        lower, upper = _neighbours(spec.bucket_reso_steps, vae_scale)
        raise OptionError(
            f"{spec.source}: bucket_reso_steps is {spec.bucket_reso_steps}; this model needs sizes that are multiples "
            f"of {vae_scale} pixels, so it must be one too, such as {lower or upper} or {upper}."
        )
    if spec.enable_bucket and spec.bucket_no_upscale:
        return
    for side in spec.resolution:
        if side % vae_scale:
            lower, upper = _neighbours(side, vae_scale)
            raise OptionError(
                f"{spec.source}: resolution is {size_text(spec.resolution)}; this model needs sizes that are multiples "
                f"of {vae_scale} pixels. Use {lower or upper} or {upper} instead of {side}."
            )


def _neighbours(length: int, divisor: int) -> tuple[int, int]:
    return length // divisor * divisor, -(-length // divisor) * divisor


def bucket_option_findings(spec: DatasetSpec, table: Sequence[Size]) -> list[Finding]:
    """Return what is odd about a dataset's bucket options, before any image is looked at."""
    found = []

    def warn(code: str, message: str) -> None:
        found.append(Finding(Severity.WARNING, code, (), f"{spec.source}: {message}"))

    if not spec.enable_bucket:
        if spec.bucket_no_upscale:
            warn("option_without_effect", "bucket_no_upscale has no effect without enable_bucket.")
        return found
    if spec.bucket_no_upscale:
        return found
    steps, sides = spec.bucket_reso_steps, sorted(spec.resolution)
    rest = "the only bucket is" if len(table) == 1 else "buckets are"
    left = f"{rest} {', '.join(map(size_text, table[:8]))}{' ...' if len(table) > 8 else ''}"
    if spec.min_bucket_reso > sides[0]:
        warn(
            "bucket_limits",
            f"min_bucket_reso {spec.min_bucket_reso} is above resolution {size_text(spec.resolution)}: {left}, and "
            "images of other shapes are cropped to that. Set min_bucket_reso to "
            f"{max(steps, sides[0] // 2 // steps * steps)} to have more shapes.",
        )
    if spec.max_bucket_reso < sides[1]:
        warn(
            "bucket_limits",
            f"max_bucket_reso {spec.max_bucket_reso} is below resolution {size_text(spec.resolution)}: {left}. "
            f"Set max_bucket_reso to {2 * sides[1]} to have more shapes.",
        )
    for name, value in (("min_bucket_reso", spec.min_bucket_reso), ("max_bucket_reso", spec.max_bucket_reso)):
        if value % steps:
            lower, upper = _neighbours(value, steps)
            warn(
                "bucket_limits",
                f"{name} {value} is no multiple of bucket_reso_steps {steps}: "
                f"{upper if name == 'min_bucket_reso' else lower} is used.",
            )
    return found


_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.HAMMING,
    "box": Image.Resampling.BOX,
}


def fit_to_bucket(
    pixels: NDArray[np.uint8], placement: Placement, interpolation: str | None = None
) -> NDArray[np.uint8]:
    """Resize and crop an image, uint8 (height, width, 3), or a mask (height, width), to its bucket.

    ``interpolation``: the filter, by its name in sd-scripts, in both directions.

    Without it, shrinking uses Pillow's HAMMING filter and enlarging its LANCZOS. sd-scripts shrinks by area averaging
    (OpenCV) and enlarges with LANCZOS; of Pillow's filters HAMMING comes nearest to area averaging
    over all ratios (BOX is exact at whole ratios only, and skips pixels unevenly at others).
    """
    if (pixels.shape[1], pixels.shape[0]) != placement.resized:
        shrinks = pixels.shape[1] > placement.resized[0] and pixels.shape[0] > placement.resized[1]
        usual = Image.Resampling.HAMMING if shrinks else Image.Resampling.LANCZOS
        resample = usual if interpolation is None else _FILTERS[interpolation]
        pixels = np.asarray(Image.fromarray(pixels).resize(placement.resized, resample))
    left, top, right, bottom = placement.crop
    return pixels[top:bottom, left:right].copy()
