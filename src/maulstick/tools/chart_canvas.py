"""What all charts are drawn with: a canvas in points, the common colours, and round steps for an axis. Pillow alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

BACKGROUND, INK, FAINT, GRID = "#ffffff", "#1f2328", "#8a929b", "#e3e6ea"
SCALE = 2
"""Pixels a point."""


class Canvas:
    """Drawing in points; the picture has ``SCALE`` pixels a point.

    With ``smoothing`` it is drawn so many times larger and reduced at the end, which slanting lines need.
    """

    def __init__(self, width: int, height: int, *, smoothing: int = 1) -> None:
        self._smoothing = smoothing
        self._zoom = SCALE * smoothing
        self._image = Image.new("RGB", (width * self._zoom, height * self._zoom), BACKGROUND)
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, text: str, *, size: int, colour: str = INK, anchor: str = "la") -> None:
        font = ImageFont.load_default(size * self._zoom)
        self._draw.text((x * self._zoom, y * self._zoom), text, fill=colour, font=font, anchor=anchor)

    def width_of(self, text: str, size: int) -> float:
        return ImageFont.load_default(size * self._zoom).getlength(text) / self._zoom

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1) -> None:
        pixels = [(x * self._zoom, y * self._zoom) for x, y in points]
        if len(pixels) == 1:
            pixels = [
                (pixels[0][0] - width * self._zoom, pixels[0][1]),
                (pixels[0][0] + width * self._zoom, pixels[0][1]),
            ]
        self._draw.line(pixels, fill=colour, width=round(width * self._zoom), joint="curve")

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        self._draw.rectangle([x0 * self._zoom, y0 * self._zoom, x1 * self._zoom, y1 * self._zoom], fill=colour)

    def finished(self) -> Image.Image:
        return self._image if self._smoothing == 1 else self._image.reduce(self._smoothing)


def nice_step(span: float, ticks: int = 4) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that cuts the span into about so many."""
    if not span > 0:
        return 1.0
    rough = span / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
