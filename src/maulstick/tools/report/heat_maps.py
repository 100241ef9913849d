"""Heat maps: norms of each block, and the loss by timestep, over the steps of a run; and the profile by timestep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from maulstick.tools.report.charts import Chart, Line
from maulstick.tools.report.downsample import short
from maulstick.tools.report.run_data import RunData, TimestepLosses

MOST_COLUMNS = 400
_DIGITS = 3
_WEIGHT_HELP = {
    "change": "Norm of what the LoRA adds to the weights of each block: where the learning went.",
    "tensors": "Norm of the trained tensors of each block.",
}

Grid = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class HeatMap:
    """``values[row][column]``; ``steps`` are the ends of the columns."""

    id: str
    title: str
    help: str
    rows: Sequence[str]
    steps: Sequence[int]
    values: Sequence[Sequence[Any]]

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def heat_maps(run: RunData) -> list[HeatMap]:
    """Return the heat maps that the run has values for."""
    maps = []
    if run.blocks:
        steps = [each.step for each in run.blocks]
        names = list(dict.fromkeys(name for each in run.blocks for name in each.gradient))
        # In the order of the network: the guard measures blocks in that of the modules, up before mid.
        order = {name: place for place, name in enumerate(run.plan.get("block_names") or [])}
        names.sort(key=lambda name: order.get(name, len(order)))
        gradients = [[each.gradient.get(name) for each in run.blocks] for name in names]
        weights = [[each.weight.get(name) for each in run.blocks] for name in names]
        help = "How strongly each block was pulled, before clipping. A stripe from top to bottom is a spike."
        maps.append(_made("gradients", "Gradient norm by block", help, names, steps, gradients, _largest))
        help = _WEIGHT_HELP.get(run.blocks[-1].weight_is, "")
        maps.append(_made("weights", "Weight norm by block", help, names, steps, weights, _last))
    if run.timesteps:
        width = run.timesteps[0].width
        alike = [each for each in run.timesteps if each.width == width]
        bins = max(len(each.loss) for each in alike)
        rows = [f"{number * width}–{(number + 1) * width - 1}" for number in range(bins)]
        grid = [[each.loss[number] if number < len(each.loss) else None for each in alike] for number in range(bins)]
        help = (
            "Mean loss of the images by timestep drawn: low timesteps are nearly clean images, high ones nearly noise."
        )
        steps = [each.step for each in alike]
        maps.append(_made("timesteps", "Loss by timestep over the run", help, rows, steps, grid, _mean))
    return maps


def profile(runs: Sequence[RunData], axes: dict[str, Sequence[int]]) -> Chart | None:
    """Return the mean loss over the timesteps: of the whole run, and of its first and last third. None without any."""
    chart = Chart(
        "profile",
        "Loss by timestep",
        "Low timesteps are nearly clean images (detail), high ones nearly noise (composition). Where the last "
        "third lies below the first, the run has learned.",
        over="timestep",
    )
    for number, run in enumerate(runs):
        if not run.timesteps:
            continue
        width = run.timesteps[0].width
        parts = {"whole run": run.timesteps}
        if len(runs) == 1 and len(run.timesteps) >= 3:
            third = len(run.timesteps) // 3
            parts |= {"first third": run.timesteps[:third], "last third": run.timesteps[-third:]}
        for hue, (name, rows) in enumerate(parts.items()):
            values = _mean_by_bin(rows)
            axes[f"{number} bins"] = [place * width + width // 2 for place in range(len(values))]
            several = len(runs) > 1
            style = "bold" if hue == 0 else "line" if hue == 1 else "dash"
            chart.lines.append(
                Line(f"{run.name}: {name}" if several else name, number, f"{number} bins", values, style, number or hue)
            )
    return chart if chart.lines else None


def _mean_by_bin(rows: Sequence[TimestepLosses]) -> list[Any]:
    bins = len(rows[0].loss)
    means = []
    for place in range(bins):
        pairs = [(each.count[place], each.loss[place]) for each in rows if len(each.loss) == bins]
        pairs = [(count, loss) for count, loss in pairs if count and loss is not None]
        images = sum(count for count, _ in pairs)
        means.append(short(sum(count * (loss or 0.0) for count, loss in pairs) / images) if images else None)
    return means


def _made(
    id: str,
    title: str,
    help: str,
    rows: Sequence[str],
    steps: Sequence[int],
    grid: Grid,
    join: Callable[[list[float]], float],
) -> HeatMap:
    size = -(-len(steps) // MOST_COLUMNS)
    starts = range(0, len(steps), size)
    ends = [steps[min(start + size, len(steps)) - 1] for start in starts]
    values = [[_joined(row[start : start + size], join) for start in starts] for row in grid]
    return HeatMap(id, title, help, rows, ends, values)


def _joined(values: Sequence[float | None], join: Callable[[list[float]], float]) -> Any:
    there = [value for value in values if value is not None]
    return short(join(there), _DIGITS) if there else None


def _largest(values: list[float]) -> float:
    """The largest finite one, so that a spike is seen; one that is not finite only where all are."""
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else values[0]


def _last(values: list[float]) -> float:
    return values[-1]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
