"""From runs to charts: which lines stand together, on which axis, with how many points. All of it JSON-ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from maulstick.tools.report.downsample import kept_places, short
from maulstick.tools.report.marks import title
from maulstick.tools.report.run_data import (
    COSINE,
    LOSS,
    NORM,
    SCALE,
    SECONDS,
    SMOOTH_LOSS,
    THRESHOLD,
    VALIDATION_LOSS,
    VALIDATION_OF_TRAINED,
    Points,
    RunData,
)

MOST_STEPS, MOST_RATES, MOST_POINTS = 6000, 400, 1000
"""Points of a line, over all runs of a report: of what is measured in every step, of a rate, of sparse values."""
FEW_MARKS = 500
"""Up to so many marks, the steps beside a mark stay too."""
MOST_MARK_LETTERS = 200
_RATE, _SCALED_RATE = "lr/", "lr/d*lr/"
_EVERY_STEP = (LOSS, NORM, COSINE, SCALE, SECONDS)
_KNOWN = frozenset({*_EVERY_STEP, SMOOTH_LOSS, THRESHOLD})
_VALIDATION = {VALIDATION_LOSS: "validation", VALIDATION_OF_TRAINED: "the same on trained images"}
_POINT_TITLES = {
    "alarms/largest_weight_norm": "Largest change of a module",
    "alarms/largest_attention_logit": "Largest attention logit",
}


@dataclass(frozen=True)
class Line:
    """One line of a chart. ``style``: faint, line, bold, dash or dots; ``hue``: number of its colour; ``axis``: of its
    steps."""

    name: str
    run: int
    axis: str
    values: Sequence[Any]
    style: str = "line"
    hue: int = 0

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Chart:
    """Lines over steps (or timesteps: ``over``). ``log``: the scale to begin with; None for the page to choose."""

    id: str
    title: str
    help: str
    lines: list[Line] = field(default_factory=list)
    log: bool | None = None
    over: str = "step"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "lines": [line.as_json() for line in self.lines]}


class ChartMaker:
    """Makes all charts of a report. ``axes`` holds the steps that lines stand over, each list once."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.runs = runs
        self.axes: dict[str, Sequence[int]] = {}
        self._steps_each = max(600, MOST_STEPS // len(runs))
        self._rates_each = max(100, MOST_RATES // len(runs))
        self._kept = [self._keep(number, run) for number, run in enumerate(runs)]

    def charts(self) -> list[Chart]:
        """Return the charts that have at least one line, in the order in which they are shown."""
        made = [
            self._loss(),
            self._norm(),
            self._of(
                SCALE, "Loss scale", "What the loss is multiplied by in fp16; it halves at every overflow.", log=True
            ),
            self._of(
                COSINE,
                "Cosine of successive gradients",
                "1: each step goes on in the direction of the one before; 0: they have nothing in common; below 0: "
                "they undo each other, often a sign of a learning rate that is too high.",
            ),
            self._rates("rates", "Learning rate", _RATE),
            self._rates("scaled-rates", "Learning rate times the step size found (d x lr)", _SCALED_RATE),
            *self._from_points(),
            *self._others(),
            self._of(SECONDS, "Seconds per step", "Saving and sampling are not in it."),
        ]
        return [chart for chart in made if chart.lines]

    def marks(self) -> list[list[list[Any]]]:
        """Return for each run its marks as [step, kind, text]."""
        return [
            [[mark.step, mark.kind, f"{title(mark)}: {mark.text}"[:MOST_MARK_LETTERS]] for mark in run.marks]
            for run in self.runs
        ]

    # --- the charts --------------------------------------------------------------------------------------------------

    def _loss(self) -> Chart:
        chart = Chart(
            "loss",
            "Loss",
            "Faint: each step. Bold: mean of the last 100 steps. Single losses jump with the timesteps drawn; "
            "only the mean tells something.",
        )
        for number, run in enumerate(self.runs):
            chart.lines += self._lines(number, LOSS, "each step", style="faint")
            chart.lines += self._lines(number, SMOOTH_LOSS, "mean of 100", style="bold")
            for hue, (name, shown) in enumerate(_VALIDATION.items(), start=1):
                if name in run.points:
                    chart.lines.append(self._points_line(number, shown, run.points[name], hue=hue))
        return chart

    def _norm(self) -> Chart:
        chart = Chart(
            "norm",
            "Gradient norm and threshold",
            "A step whose norm is above the threshold is skipped. Triangles are skipped steps.",
            log=True,
        )
        for number in range(len(self.runs)):
            chart.lines += self._lines(number, NORM, "norm")
            chart.lines += self._lines(number, THRESHOLD, "threshold", style="dash", hue=1)
        return chart

    def _of(self, name: str, title: str, help: str, *, log: bool | None = None) -> Chart:
        chart = Chart(name.replace("/", "-").replace("*", ""), title, help, log=log)
        for number in range(len(self.runs)):
            chart.lines += self._lines(number, name, name.rpartition("/")[2].replace("_", " "))
        return chart

    def _rates(self, id: str, title: str, prefix: str) -> Chart:
        chart = Chart(id, title, "Blocks and networks with the same rate share a line.")
        for number, run in enumerate(self.runs):
            names = [name for name in run.series if name.startswith(prefix)]
            if prefix == _RATE:
                names = [name for name in names if not name.startswith(_SCALED_RATE)]
            alike: dict[tuple[Any, ...], list[str]] = {}
            if not names:
                continue
            axis = f"{number} {id}"
            places = kept_places(
                [run.series[name] for name in names[:3]], len(run.steps), self._rates_each, self._marked(run)
            )
            self.axes[axis] = [run.steps[place] for place in places]
            for name in names:
                values = tuple(short(run.series[name][place]) for place in places)
                alike.setdefault(values, []).append(name.removeprefix(prefix))
            for hue, (values, members) in enumerate(alike.items()):
                chart.lines.append(
                    Line(self._name(number, _joined(members)), number, axis, values, hue=self._hue(number, hue))
                )
        return chart

    def _from_points(self) -> list[Chart]:
        charts = []
        for name, heading in _POINT_TITLES.items():
            chart = Chart(name.replace("/", "-"), heading, "Looked at now and then, see alarms.")
            for number, run in enumerate(self.runs):
                if name in run.points:
                    chart.lines.append(self._points_line(number, heading.lower(), run.points[name]))
            charts.append(chart)
        return charts

    def _others(self) -> list[Chart]:
        names = dict.fromkeys(name for run in self.runs for name in run.series)
        return [self._of(name, name, "") for name in names if name not in _KNOWN and not name.startswith(_RATE)]

    # --- lines -------------------------------------------------------------------------------------------------------

    def _keep(self, number: int, run: RunData) -> list[int]:
        columns = [run.series[name] for name in _EVERY_STEP if name in run.series]
        places = kept_places(columns, len(run.steps), self._steps_each, self._marked(run))
        self.axes[str(number)] = [run.steps[place] for place in places]
        return places

    def _marked(self, run: RunData) -> list[int]:
        at = {step: place for place, step in enumerate(run.steps)}
        places = [at[mark.step] for mark in run.marks if mark.step in at]
        if len(places) <= FEW_MARKS:
            places = [near for place in places for near in (place - 1, place, place + 1)]
        return [place for place in places if 0 <= place < len(run.steps)]

    def _lines(self, number: int, series: str, name: str, *, style: str = "line", hue: int = 0) -> list[Line]:
        values = self.runs[number].series.get(series)
        if values is None or all(value is None for value in values):
            return []
        kept = [short(values[place]) for place in self._kept[number]]
        return [Line(self._name(number, name), number, str(number), kept, style, self._hue(number, hue))]

    def _points_line(self, number: int, name: str, points: Points, *, hue: int = 0) -> Line:
        places = kept_places([points.values], len(points.steps), MOST_POINTS)
        axis = f"{number} {name}"
        self.axes[axis] = [points.steps[place] for place in places]
        values = [short(points.values[place]) for place in places]
        return Line(self._name(number, name), number, axis, values, "dots", self._hue(number, hue))

    def _name(self, number: int, name: str) -> str:
        return name if len(self.runs) == 1 else f"{self.runs[number].name}: {name}"

    def _hue(self, number: int, hue: int) -> int:
        """One run: a colour for each line. Several: a colour for each run, or lines could not be told apart."""
        return hue if len(self.runs) == 1 else number


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"
