"""One HTML file from runs: text made here, charts drawn by the script inside it. Nothing comes from the network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from maulstick import __version__
from maulstick.tools.report import sections
from maulstick.tools.report.charts import Chart, ChartMaker
from maulstick.tools.report.heat_maps import HeatMap, heat_maps, profile
from maulstick.tools.report.markup import Markup, element, joined, script_json, table, text
from maulstick.tools.report.run_data import RunData
from maulstick.tools.report.thumbnails import MOST_BYTES, MOST_PICTURES, film_of
from maulstick.tools.report.verdict import headline, level

TABLE_ROWS = 12
SCRIPTS = ("drawing.js", "charts.js", "report.js")
IDENTITY = "maulstick-run"


def render(runs: Sequence[RunData]) -> str:
    """Return the report of one run, or of several side by side."""
    maker = ChartMaker(runs)
    charts = maker.charts()
    by_timestep = profile(runs, maker.axes)
    maps = [(run, each) for run in runs for each in heat_maps(run)]
    films = [film_of(run, most_bytes=MOST_BYTES // len(runs), most_pictures=MOST_PICTURES // len(runs)) for run in runs]
    several = len(runs) > 1
    payload = {
        "runs": [{"name": run.name, "marks": marks} for run, marks in zip(runs, maker.marks(), strict=True)],
        "axes": maker.axes,
        "charts": [chart.as_json() for chart in [*charts, *([by_timestep] if by_timestep else [])]],
        "heat": [{**each.as_json(), "id": f"heat-{place}"} for place, (_, each) in enumerate(maps)],
    }
    names = ", ".join(run.name for run in runs)
    parts = {
        "identity": text(identity(runs)),
        "title": text(f"{names}: {len(runs)} runs side by side" if several else f"{names}: run report"),
        "style": _asset("report.css"),
        "scripts": joined(_asset(name) for name in SCRIPTS),
        "verdicts": joined(sections.verdict_section(run) for run in runs),
        "marks": sections.marks_section(runs),
        "charts": joined(_chart(chart, maker.axes) for chart in charts),
        "heat": _heat_section(maps, several=several),
        "profile": _chart(by_timestep, maker.axes) if by_timestep else Markup(""),
        "film": sections.film_section(runs, films),
        "rest": joined(
            make(runs)
            for make in (
                sections.data_section,
                sections.options_section,
                sections.environment_section,
                sections.files_section,
            )
        ),
        "version": text(__version__),
        "data": script_json(payload),
    }
    # In one pass, so that nothing that was put in is looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("report.html"))


def as_json(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the same as plain values, with every step."""
    return {
        "maulstick": __version__,
        "runs": [{"headline": headline(run), "level": level(run), **run.as_json()} for run in runs],
    }


def identity(runs: Sequence[RunData]) -> str:
    """Return what tells a report of these runs from one of others."""
    return " | ".join(run.identity for run in runs)


@cache
def _asset(name: str) -> Markup:
    return Markup((files("maulstick") / "assets" / "report" / name).read_text(encoding="utf-8"))


def _chart(chart: Chart, axes: dict[str, Sequence[int]]) -> Markup:
    """A place for the drawing, and the same in a table for whoever cannot see it."""
    return element(
        "figure",
        element("figcaption", element("h3", chart.title, id=f"{chart.id}-title"), element("p", chart.help)),
        element("div", class_="drawing", data_chart=chart.id),
        element("details", element("summary", "as a table"), _chart_table(chart, axes), class_="as-table"),
        class_="chart",
        aria_labelledby=f"{chart.id}-title",
    )


def _chart_table(chart: Chart, axes: dict[str, Sequence[int]]) -> Markup:
    line = next((line for line in chart.lines if line.style == "bold"), chart.lines[0])
    axis = axes[line.axis]
    places = (
        sorted({round(number * (len(axis) - 1) / (TABLE_ROWS - 1)) for number in range(TABLE_ROWS)}) if axis else []
    )
    others = [each for each in chart.lines if each.axis == line.axis]
    rows = [
        [f"{axis[place]:,}", *("" if (v := each.values[place]) is None else v for each in others)] for place in places
    ]
    return table(f"{chart.title} at some of the {chart.over}s", (chart.over, *(each.name for each in others)), rows)


def _heat_section(maps: Sequence[tuple[RunData, HeatMap]], *, several: bool) -> Markup:
    figures = []
    for place, (run, each) in enumerate(maps):
        title = f"{run.name}: {each.title}" if several else each.title
        last = [
            [row, "" if values[-1] is None else values[-1]] for row, values in zip(each.rows, each.values, strict=True)
        ]
        figures.append(
            element(
                "figure",
                element("figcaption", element("h3", title, id=f"heat-{place}-title"), element("p", each.help)),
                element("div", class_="drawing", data_heat=f"heat-{place}"),
                element(
                    "details",
                    element("summary", "as a table"),
                    table(f"{title}, at step {each.steps[-1]:,}", ("", "last value"), last),
                    class_="as-table",
                ),
                class_="chart",
                aria_labelledby=f"heat-{place}-title",
            )
        )
    return joined(figures)
