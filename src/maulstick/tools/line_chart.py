"""Curves over the steps of a run as a PNG, drawn with Pillow alone."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from maulstick.files_io import atomic_write

BACKGROUND, INK, FAINT, GRID = "#ffffff", "#1f2328", "#6b737c", "#e3e6ea"
COLOURS = ("#3b6fb6", "#c0672b", "#3d8b5f", "#8b4fa8", "#b23a5b", "#7a7a1f")
WIDTH, HEIGHT = 900, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 122, 52
MARK_HEIGHT = 16
SCALE, SMOOTHING = 2, 2


@dataclass(frozen=True)
class Curve:
    """A line: its name in the legend, and its value at each step."""

    name: str
    value: Callable[[int], float]


@dataclass(frozen=True)
class Mark:
    """A dotted upright line at a step, with a few words beside it."""

    step: int
    text: str


def draw_curves(
    title: str, subtitle: str, curves: Sequence[Curve], steps: int, path: Path, *, marks: Sequence[Mark] = ()
) -> None:
    """Write a PNG with the curves over steps 0 to ``steps - 1``, from 0 upwards."""
    at = _sampled_steps(steps)
    values = [[curve.value(step) for step in at] for curve in curves]
    step_size = nice_step(max((max(line) for line in values), default=0.0), 5)
    ceiling = step_size * max(1, math.ceil(max(max(line) for line in values) / step_size - 1e-9))
    canvas = _Canvas(WIDTH, HEIGHT)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / ceiling

    canvas.text(LEFT - 60, 14, title, size=18)
    canvas.text(LEFT - 60, 40, subtitle, size=13, colour=FAINT)
    for tick in range(round(ceiling / step_size) + 1):
        height = y(tick * step_size)
        canvas.line([(LEFT, height), (WIDTH - RIGHT, height)], INK if tick == 0 else GRID)
        canvas.text(LEFT - 8, height, f"{tick * step_size:g}", size=12, colour=FAINT, anchor="rm")
    for tick in range(0, steps + 1, round(max(1.0, nice_step(steps, 6)))):
        canvas.text(x(tick), HEIGHT - BOTTOM + 8, f"{tick}", size=12, colour=FAINT, anchor="ma")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 24, "step", size=12, colour=FAINT, anchor="ma")
    for place, mark in enumerate(marks):
        # Neighbours write one above the other, and those near the right edge to their left.
        top = TOP - 8 - MARK_HEIGHT * (1 + place % 2)
        canvas.dotted(x(mark.step), top, HEIGHT - BOTTOM, FAINT)
        anchor, shift = ("ra", -5) if mark.step > 0.7 * steps else ("la", 5)
        canvas.text(x(mark.step) + shift, top, mark.text, size=12, colour=FAINT, anchor=anchor)
    for place, line in enumerate(values):
        points = [(x(step), y(value)) for step, value in zip(at, line, strict=True)]
        canvas.line(points, COLOURS[place % len(COLOURS)], width=2)
    _draw_legend(canvas, [curve.name for curve in curves])
    content = io.BytesIO()
    # A few dozen shades are enough for lines, at a third of the bytes.
    canvas.finished().quantize(64).save(content, "PNG", optimize=True)
    atomic_write(path, content.getvalue())


def _sampled_steps(steps: int) -> list[int]:
    """Every step, or about two a pixel; always the first and the last one."""
    stride = max(1, steps // (2 * SCALE * WIDTH))
    return sorted({*range(0, steps, stride), max(0, steps - 1)})


def _draw_legend(canvas: _Canvas, names: Sequence[str]) -> None:
    x = float(LEFT - 60)
    for place, name in enumerate(names):
        canvas.line([(x, 70), (x + 18, 70)], COLOURS[place % len(COLOURS)], width=3)
        canvas.text(x + 24, 70, name, size=13, anchor="lm")
        x += 24 + canvas.width_of(name, 13) + 22


def nice_step(largest: float, ticks: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that gives about so many ticks."""
    if not largest > 0:
        return 1.0
    rough = largest / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


class _Canvas:
    """Drawing in points; the picture has ``SCALE`` pixels a point, and lines are smoothed."""

    def __init__(self, width: int, height: int) -> None:
        self._zoom = SCALE * SMOOTHING
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

    def dotted(self, x: float, top: float, bottom: float, colour: str) -> None:
        for start in range(round(top), round(bottom), 7):
            self.line([(x, start), (x, min(bottom, start + 3))], colour)

    def finished(self) -> Image.Image:
        return self._image.reduce(SMOOTHING)
