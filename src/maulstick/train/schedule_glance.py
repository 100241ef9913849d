"""The course of the learning rate at a glance: a line of blocks, and the sums that tell how far a run can go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maulstick.train.prepare import Prepared
from maulstick.train.schedule import learning_rate_factor, schedule_settings

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 40
_MOST_POINTS = 4000


@dataclass(frozen=True)
class ScheduleGlance:
    """The learning-rate factor over the run.

    Attributes:
        decay_start: the step in which the decay begins, None where there is none.
        factors: its values at evenly spaced steps, first to last.
        factor_sum: sum over all steps.
        rate_squared_sum: sum over all steps of the square of the highest rate of any group.
    """

    name: str
    total_steps: int
    warmup_steps: int
    decay_start: int | None
    factors: Sequence[float]
    factor_sum: float
    rate_squared_sum: float

    @property
    def sparkline(self) -> str:
        """The factors as blocks, the highest of them at full height."""
        top = max(self.factors) or 1.0
        return "".join(_BARS[min(7, int(8 * max(0.0, factor) / top))] for factor in self.factors)

    def sentence(self) -> str:
        """Say in words what the line of blocks shows."""
        middle, last = self.factors[len(self.factors) // 2], self.factors[-1]
        warmup = f"warm-up {self.warmup_steps} steps, " if self.warmup_steps else ""
        decay = "no decay" if self.decay_start is None else f"decay from step {self.decay_start} to {self.total_steps}"
        return (
            f"{self.name}: {warmup}{decay}; factor {self.factors[0]:.2g} at first, {middle:.2g} in the middle, "
            f"{last:.2g} at last; sum of lr² {self.rate_squared_sum:.2g}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "decay_start": self.decay_start,
            "factors": [round(factor, 6) for factor in self.factors],
            "factor_sum": self.factor_sum,
            "rate_squared_sum": self.rate_squared_sum,
        }


def schedule_glance(prepared: Prepared) -> ScheduleGlance:
    """Look at the schedule of a prepared run; very long ones are sampled."""
    total = prepared.plan.total_steps
    settings = schedule_settings(prepared.options, total)
    factor = learning_rate_factor(settings)
    rate = max(rate for part in prepared.plan.components for rate in part.groups.values())
    points = min(total, _MOST_POINTS)
    values = [factor(step * total // points) for step in range(points)]
    columns = min(total, _COLUMNS)
    last = max(1, columns - 1)
    return ScheduleGlance(
        name=settings.name,
        total_steps=total,
        warmup_steps=settings.warmup_steps,
        decay_start=settings.decay_start,
        factors=[factor(column * (total - 1) // last) for column in range(columns)],
        factor_sum=sum(values) * total / points,
        rate_squared_sum=sum((rate * value) ** 2 for value in values) * total / points,
    )
