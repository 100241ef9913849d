"""``maulstick plot-schedule``: the learning rate over a run, before it is run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from maulstick.errors import OptionError
from maulstick.files_io import set_aside
from maulstick.options.load import LoadedOptions
from maulstick.options.plot_schedule import PlotScheduleOptions
from maulstick.options.schema import TrainOptions
from maulstick.tools.line_chart import Curve, Mark, draw_curves
from maulstick.train.schedule import (
    ScheduleSettings,
    learning_rate_factor,
    schedule_settings,
    trained_rates,
)


@dataclass(frozen=True)
class PlannedRates:
    """The schedule of a run.

    Attributes:
        rates: networks that share a learning rate, joined by a comma -> that rate.
        factors: the factor of each window.
    """

    settings: ScheduleSettings
    rates: Mapping[str, float]
    factors: list[float]

    def integral(self, rate: float, power: int) -> float:
        """Return the sum over all windows of the learning rate to this power."""
        return math.fsum((rate * factor) ** power for factor in self.factors)

    def table_steps(self) -> list[int]:
        """Return the steps worth a line: tenths of the run, its ends, and where a part of the schedule begins."""
        total = len(self.factors)
        steps = {total * tenth // 10 for tenth in range(10)} | {total - 1, self.settings.warmup_steps}
        if self.settings.decay_start is not None:
            steps.add(self.settings.decay_start)
        return sorted(step for step in steps if step < total)

    def marks(self) -> list[Mark]:
        """Return where warm-up ends and decay begins, in words."""
        warmup, decay = self.settings.warmup_steps, self.settings.decay_start
        if warmup and warmup == decay:
            return [Mark(warmup, f"warm-up ends, decay begins: {warmup}")]
        marks = [Mark(warmup, f"warm-up ends: {warmup}")] if warmup else []
        return [*marks, *([Mark(decay, f"decay begins: {decay}")] if decay else [])]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready values, with the factor of every window."""
        return {
            "lr_scheduler": self.settings.name,
            "steps": len(self.factors),
            "warmup_steps": self.settings.warmup_steps,
            "decay_start": self.settings.decay_start,
            "rates": dict(self.rates),
            "sum_of_lr": {name: self.integral(rate, 1) for name, rate in self.rates.items()},
            "sum_of_squared_lr": {name: self.integral(rate, 2) for name, rate in self.rates.items()},
            "factors": self.factors,
        }


def planned_length(options: TrainOptions, steps_per_epoch: int | None) -> int:
    """Return the number of windows of the run.

    Raises:
        OptionError: it depends on the images.
    """
    epochs = options.run.max_train_epochs
    if epochs is None:
        return options.run.max_train_steps
    if steps_per_epoch is None:
        raise OptionError(
            f"max_train_epochs = {epochs}: how many steps an epoch has depends on the images. Give --steps_per_epoch "
            "(`maulstick check` shows it), or max_train_steps instead of max_train_epochs."
        )
    return epochs * steps_per_epoch


def planned_rates(options: TrainOptions, total_steps: int) -> PlannedRates:
    """Work out the learning rate of every window."""
    settings = schedule_settings(options, total_steps)
    by_rate: dict[float, list[str]] = {}
    for name, rate in trained_rates(options).items():
        by_rate.setdefault(rate, []).append(name)
    factor = learning_rate_factor(settings)
    rates = {", ".join(names): rate for rate, names in by_rate.items()}
    return PlannedRates(settings, rates, [factor(window) for window in range(total_steps)])


def plot_schedule_command(plot: PlotScheduleOptions, loaded: LoadedOptions) -> int:
    """Draw the schedule and print some of its values."""
    options, notices = loaded.options, list(loaded.notices)
    if plot.steps_per_epoch is not None and options.run.max_train_epochs is None:
        notices.append("steps_per_epoch has no effect without max_train_epochs.")
    planned = planned_rates(options, planned_length(options, plot.steps_per_epoch))
    path = plot.output.expanduser()
    earlier = set_aside(path)
    _draw(planned, path)
    if plot.as_json:
        print(json.dumps(planned.as_json() | {"file": str(path), "notices": notices}, indent=2, ensure_ascii=False))
        return 0
    for notice in notices:
        print(f"note: {notice}")
    _print_table(planned)
    print(f"drawn: {path}" + (f" (the earlier file is now {earlier.name})" if earlier else ""))
    return 0


def _draw(planned: PlannedRates, path: Any) -> None:
    factors, settings = planned.factors, planned.settings

    def curve(name: str, rate: float) -> Curve:
        return Curve(f"{name}: {rate:g}", lambda step: rate * factors[step])

    sums = "; ".join(
        f"{name}: sum of lr {planned.integral(rate, 1):.3g}, of lr^2 {planned.integral(rate, 2):.3g}"
        for name, rate in planned.rates.items()
    )
    draw_curves(
        f"{settings.name}, {len(factors)} steps",
        sums,
        [curve(name, rate) for name, rate in planned.rates.items()],
        len(factors),
        path,
        marks=planned.marks(),
    )


def _print_table(planned: PlannedRates) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("step", "factor", *planned.rates, ""):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    said = {mark.step: mark.text.rpartition(":")[0] for mark in planned.marks()}
    for step in planned.table_steps():
        factor = planned.factors[step]
        rates = [f"{rate * factor:.4g}" for rate in planned.rates.values()]
        table.add_row(f"{step}", f"{factor:.6g}", *rates, said.get(step, ""))
    for title, power in (("sum of lr", 1), ("sum of lr^2", 2)):
        table.add_row(title, "", *(f"{planned.integral(rate, power):.4g}" for rate in planned.rates.values()), "")
    console = Console(highlight=False, markup=False)
    console.print(f"{planned.settings.name}, {len(planned.factors)} steps (updates), counted from 0")
    console.print(table)
