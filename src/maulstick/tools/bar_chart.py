"""A bar chart of the blocks of a LoRA as a PNG, drawn with Pillow alone."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maulstick.files_io import atomic_write
from maulstick.tools.chart_canvas import FAINT, GRID, INK, Canvas, nice_step
from maulstick.tools.inspect_lora import FileFacts

_SLOT, _BAR_SHARE = 38, 0.62
_PANEL_HEIGHT, _TITLE_HEIGHT, _LABEL_HEIGHT, _GAP = 210, 74, 26, 46
_LEFT, _RIGHT = 76, 28


@dataclass(frozen=True)
class Panel:
    """One row of bars: its title, its colour, and a value for each label (``None``: nothing there)."""

    title: str
    colour: str
    values: Sequence[float | None]


def write_block_chart(facts: FileFacts, path: Path) -> None:
    """Write norm and effective rank of every block of a LoRA as a bar chart."""
    draw_bars(
        f"{Path(facts.file).name}",
        f"{', '.join(f'{count} {kind} modules' for kind, count in facts.kinds.items())} for {facts.family}",
        [block.block for block in facts.blocks],
        [
            Panel("norm of the change", "#3b6fb6", [block.norm for block in facts.blocks]),
            Panel(
                "effective rank, mean over modules",
                "#c0672b",
                [block.effective_rank for block in facts.blocks],
            ),
        ],
        path,
    )


def draw_bars(title: str, subtitle: str, labels: Sequence[str], panels: Sequence[Panel], path: Path) -> None:
    """Write a PNG with one panel of bars under the other, over the same labels."""
    text_width = max(len(title) * 11, len(subtitle) * 8) + _LEFT
    width = max(_LEFT + _SLOT * len(labels) + _RIGHT, text_width, 420)
    height = _TITLE_HEIGHT + len(panels) * (_PANEL_HEIGHT + _LABEL_HEIGHT + _GAP)
    canvas = Canvas(width, height)
    canvas.text(_LEFT - 52, 14, title, size=18)
    canvas.text(_LEFT - 52, 40, subtitle, size=13, colour=FAINT)
    for place, panel in enumerate(panels):
        top = _TITLE_HEIGHT + place * (_PANEL_HEIGHT + _LABEL_HEIGHT + _GAP) + 24
        _draw_panel(canvas, panel, labels, top, width)
    content = io.BytesIO()
    canvas.finished().save(content, "PNG", optimize=True)
    atomic_write(path, content.getvalue())


def _draw_panel(canvas: Canvas, panel: Panel, labels: Sequence[str], top: float, width: float) -> None:
    bottom = top + _PANEL_HEIGHT
    canvas.text(_LEFT - 52, top - 26, panel.title, size=13)
    step = nice_step(max((value or 0.0 for value in panel.values), default=0.0))
    ceiling = step * max(1, math.ceil(max((value or 0.0 for value in panel.values), default=0.0) / step - 1e-9))
    for tick in range(round(ceiling / step) + 1):
        y = bottom - tick * step / ceiling * _PANEL_HEIGHT
        canvas.line([(_LEFT, y), (width - _RIGHT, y)], INK if tick == 0 else GRID)
        canvas.text(_LEFT - 8, y, f"{tick * step:g}", size=12, colour=FAINT, anchor="rm")
    for place, (label, value) in enumerate(zip(labels, panel.values, strict=True)):
        centre = _LEFT + _SLOT * (place + 0.5)
        if value:
            half = _SLOT * _BAR_SHARE / 2
            canvas.box(centre - half, bottom - value / ceiling * _PANEL_HEIGHT, centre + half, bottom - 1, panel.colour)
        canvas.text(centre, bottom + 7, label, size=10, colour=INK if value else FAINT, anchor="ma")
