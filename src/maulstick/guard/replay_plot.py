"""A picture of a replay: the recorded norms, and what each mode would have skipped. Needs Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .log import LogRow
from .replay import label_rows

WIDTH, HEIGHT, STRIP = 1200, 420, 26
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 34, 30
COLOURS = {"healthy": (70, 110, 170), "spike": (215, 90, 30)}
BAD_COLOUR, SKIP_COLOUR, INK, GRID = (190, 30, 90), (190, 40, 40), (40, 40, 40), (225, 225, 225)


def plot_replay(rows: Sequence[LogRow], result: dict[str, Any], path: str | Path) -> None:
    """Draw the norms of ``rows`` (true units, logarithmic) and one strip of skipped steps per preset of ``result``.

    ``result`` is what ``replay`` returned for the same rows. Spikes are orange, NaN and inf are drawn at the upper
    edge. The file type follows the name of ``path``. Needs the package ``pillow``.
    """
    from PIL import Image, ImageDraw

    presets = result["presets"]
    image = Image.new("RGB", (WIDTH, HEIGHT + STRIP * len(presets) + BOTTOM), "white")
    draw = ImageDraw.Draw(image)
    labels = label_rows(rows)
    finite = [row.true_norm for row in rows if math.isfinite(row.true_norm) and row.true_norm > 0]
    low = math.floor(math.log10(min(finite, default=0.1)))
    high = max(low + 1, math.ceil(math.log10(max(finite, default=1.0))))
    draw.text((LEFT, 10), f"gradient norm of {len(rows)} steps (true units)", fill=INK)

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (number + 0.5) / len(rows)

    def y(norm: float) -> float:
        return TOP + (HEIGHT - TOP) * (high - math.log10(norm)) / (high - low)

    for power in range(low, high + 1):
        draw.line([(LEFT, y(10.0**power)), (WIDTH - RIGHT, y(10.0**power))], fill=GRID)
        draw.text((8, y(10.0**power) - 6), f"1e{power:+d}", fill=INK)
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        if label == "non_finite":
            draw.line([(x(number), TOP), (x(number), TOP + 12)], fill=BAD_COLOUR, width=2)
        elif row.true_norm > 0:
            size = 3 if label == "spike" else 1
            centre = (x(number), y(row.true_norm))
            draw.ellipse([centre[0] - size, centre[1] - size, centre[0] + size, centre[1] + size], fill=COLOURS[label])
    for place, (name, found) in enumerate(presets.items()):
        top = HEIGHT + 10 + STRIP * place
        draw.text((8, top), f"{name[:11]}", fill=INK)
        draw.line([(LEFT, top + STRIP - 8), (WIDTH - RIGHT, top + STRIP - 8)], fill=GRID)
        for number in found["skipped"]:
            draw.line([(x(number), top), (x(number), top + STRIP - 8)], fill=SKIP_COLOUR)
    image.save(path)
