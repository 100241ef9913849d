"""Curves over the steps of a run as a PNG, drawn with Pillow alone."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from maulstick.files_io import atomic_write
from maulstick.tools.chart_canvas import GRID, INK, SCALE, Canvas, nice_step

FAINT = "#6b737c"
COLOURS = ("#3b6fb6", "#c0672b", "#3d8b5f", "#8b4fa8", "#b23a5b", "#7a7a1f")
WIDTH, HEIGHT = 900, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 122, 52
MARK_HEIGHT = 16
SMOOTHING = 2


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
    canvas = Canvas(WIDTH, HEIGHT, smoothing=SMOOTHING)

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
        _dotted(canvas, x(mark.step), top, HEIGHT - BOTTOM)
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


def _draw_legend(canvas: Canvas, names: Sequence[str]) -> None:
    x = float(LEFT - 60)
    for place, name in enumerate(names):
        canvas.line([(x, 70), (x + 18, 70)], COLOURS[place % len(COLOURS)], width=3)
        canvas.text(x + 24, 70, name, size=13, anchor="lm")
        x += 24 + canvas.width_of(name, 13) + 22


def _dotted(canvas: Canvas, x: float, top: float, bottom: float) -> None:
    for start in range(round(top), round(bottom), 7):
        canvas.line([(x, start), (x, min(bottom, start + 3))], FAINT)
