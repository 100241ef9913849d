"""The picture of a probe: one row for each block, and beside each other what was measured, drawn with Pillow alone."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from maulstick.tools.chart_canvas import FAINT, GRID, INK, Canvas, nice_step
from maulstick.tools.probe_report import ProbeReport

_LEFT, _RIGHT, _GAP = 84, 28, 34
_PANEL, _ROW, _BAR = 220, 20, 13
_TOP, _BOTTOM = 104, 66


@dataclass(frozen=True)
class Bars:
    """One column of bars: a value for each row (None: nothing known), perhaps with the half-length of an error bar."""

    title: str
    colour: str
    values: Sequence[float | None]
    errors: Sequence[float] = ()


def draw_probe(report: ProbeReport) -> bytes:
    """Return a PNG with a row for each block in the order of the model; longer bars to the right are better or more."""
    blocks, loss = report.blocks, report.loss_before
    percent = [_finite(-100 * block.trial.change / loss) for block in blocks]
    errors = [100 * block.trial.error / loss if math.isfinite(block.trial.error) else 0.0 for block in blocks]
    columns = [
        Bars("loss lowered by, in % (± error)", "#3b6fb6", percent, errors),
        Bars("signal to noise of the gradient", "#c0672b", [block.gradient.snr for block in blocks]),
        Bars("gradient norm", "#7a6aa8", [block.gradient.norm for block in blocks]),
        Bars("cost, in % of training all", "#5a8f5a", [100 * report.share_of_cost(block) for block in blocks]),
        Bars("suggested weight", "#3b6fb6", [block.weight for block in blocks] if report.suggestion else []),
    ]
    columns = [column for column in columns if column.values]
    settings = report.settings
    return draw_rows(
        "Which blocks matter, before training",
        f"{settings['updates']} updates of each block alone at learning rate {settings['learning_rate']:g}; "
        f"{len(settings['learned_from'])} images to learn from, {settings['held_back_draws']} held-back draws",
        "First updates only, each block alone, training loss only: not what long training of several blocks will do.",
        [block.name for block in blocks],
        columns,
    )


def draw_rows(title: str, subtitle: str, caution: str, labels: Sequence[str], columns: Sequence[Bars]) -> bytes:
    """Return a PNG with columns of horizontal bars over the same rows."""
    width = _LEFT + len(columns) * (_PANEL + _GAP) - _GAP + _RIGHT
    height = _TOP + len(labels) * _ROW + _BOTTOM
    canvas = Canvas(width, height)
    canvas.text(24, 14, title, size=18)
    canvas.text(24, 42, subtitle, size=13, colour=FAINT)
    canvas.text(24, height - 26, caution, size=12, colour=FAINT)
    for place, label in enumerate(labels):
        canvas.text(_LEFT - 10, _TOP + (place + 0.5) * _ROW, label, size=11, anchor="rm")
    for place, column in enumerate(columns):
        _draw_column(canvas, column, _LEFT + place * (_PANEL + _GAP), len(labels))
    content = io.BytesIO()
    canvas.finished().save(content, "PNG", optimize=True)
    return content.getvalue()


def _draw_column(canvas: Canvas, column: Bars, left: float, rows: int) -> None:
    errors = column.errors or [0.0] * rows
    known = [(value, error) for value, error in zip(column.values, errors, strict=True) if value is not None]
    highest = max([0.0, *(value + error for value, error in known)])
    lowest = min([0.0, *(value - error for value, error in known)])
    step = nice_step(highest - lowest)
    # A tenth of a step may stick out: a bar just below 0 is not worth a step to the left.
    first, last = math.floor(lowest / step + 0.1), max(1, math.ceil(highest / step - 0.1))
    bottom = _TOP + rows * _ROW

    def x(value: float) -> float:
        return left + (value / step - first) / (last - first) * _PANEL

    canvas.text(left, _TOP - 30, column.title, size=12)
    for tick in range(first, last + 1):
        canvas.box(x(tick * step), _TOP - 4, x(tick * step) + 0.5, bottom + 4, FAINT if tick == 0 else GRID)
        canvas.text(x(tick * step), bottom + 8, f"{tick * step:.4g}", size=10, colour=FAINT, anchor="ma")
    for place, (value, error) in enumerate(zip(column.values, errors, strict=True)):
        middle = _TOP + (place + 0.5) * _ROW
        if value is None:
            canvas.text(x(0) + 4, middle, "none", size=10, colour=FAINT, anchor="lm")
            continue
        start, end = sorted((x(0), x(value)))
        canvas.box(start, middle - _BAR / 2, end, middle + _BAR / 2, column.colour if value >= 0 else FAINT)
        if error:
            canvas.box(x(value - error), middle - 0.25, x(value + error), middle + 0.25, INK)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
