"""The parts of the page that need no drawing: verdict, marks, pictures, data, options, environment, files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from maulstick.options.check import DEFAULTS
from maulstick.tools.report.marks import KINDS, MarkRow, explanation, in_rows
from maulstick.tools.report.markup import Markup, element, image, joined, table
from maulstick.tools.report.run_data import SECONDS, Mark, RunData
from maulstick.tools.report.thumbnails import Film
from maulstick.tools.report.verdict import headline, level, word
from maulstick.train.events import json_value

MOST_ROWS = 100
MOST_PATHS = 5
SIGNS = {"good": "✓", "look": "!", "bad": "✕"}
_ORDER = ("gave_up", "rescue", "over_fitting", "alarm", "skip", "judged", "trouble", "autopsy", "resume")
_REASONS = {
    "nan": "NaN gradient",
    "inf": "infinite gradient",
    "spike": "norm out of the ordinary",
    "non_finite_loss": "loss not finite",
    "bad_windows": "too many bad steps in a row",
    "non_finite_state": "NaN in the weights",
    "loss_out_of_range": "loss gone for good",
    "worse_than_base": "worse than the base model",
    "end_of_training": "at the end",
    "save_failed": "LoRA file",
    "save_state_failed": "state",
    "sample_failed": "sample pictures",
    "remove_failed": "older file",
    "tracker_failed": "tracker",
    "upload_failed": "upload",
    "autopsy_failed": "autopsy",
    "alarms/largest_weight_norm": "weights are growing",
    "alarms/largest_attention_logit": "attention is growing",
}


def verdict_section(run: RunData) -> Markup:
    """Return the header of a run: a word, a sentence, and the facts."""
    grade = level(run)
    facts = element(
        "dl",
        *(element("div", element("dt", name), element("dd", value)) for name, value in _facts(run)),
        class_="facts",
    )
    return element(
        "article",
        element("h2", run.name),
        element(
            "p",
            element("span", SIGNS[grade], class_="sign", aria_hidden="true"),
            element("strong", f"{word(run)}. "),
            headline(run) + ".",
            class_="headline",
        ),
        facts,
        *(element("p", note, class_="note") for note in run.notes),
        class_=f"verdict {grade}",
    )


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    if run.started_at is not None:
        yield "started", time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at))
        if run.ended_at is not None:
            yield "took", duration(run.ended_at - run.started_at)
    seconds = sorted(value for value in run.series.get(SECONDS, []) if value is not None)
    if seconds:
        yield "a step", f"{seconds[len(seconds) // 2]:.3g} s"
    plan, options = run.plan, run.options
    if "model" in plan:
        yield "model", f"{_last_part(str(plan['model']))} ({plan.get('family', 'unknown family')})"
    if components := plan.get("components"):
        networks = [f"{each.get('log_name')} {each.get('modules')} modules" for each in components]
        kind = components[0].get("network_type", "LoRA")
        has_rank = options.get("network_type") != "ip_adapter"
        rank = f", rank {options.get('network_dim')}" if has_rank else ""
        yield "trained", f"{kind}{rank}: {', '.join(networks)}"
    if "train_images" in plan:
        yield "images", f"{plan.get('images')}, {plan['train_images']} an epoch, {plan.get('images_per_step')} a step"
    if "lr_scheduler" in plan:
        yield "learning", f"{plan.get('optimizer')}, {options.get('learning_rate')}, {plan['lr_scheduler']}"
    device = run.environment.get("gpu") or run.environment.get("device") or plan.get("device")
    if device:
        yield "on", f"{device}, mixed_precision {options.get('mixed_precision', 'not known')}"
    if "seed" in plan:
        yield "seed", str(plan["seed"])


def marks_section(runs: Sequence[RunData]) -> Markup:
    """Return what happened, by kind, each with what it means and what helps."""
    groups = [joined(_mark_groups(number, run, several=len(runs) > 1)) for number, run in enumerate(runs)]
    quiet = "Nothing out of the ordinary: no step was skipped, nothing was rescued."
    if all(run.from_gradient_log for run in runs):
        quiet = "Nothing out of the ordinary: no NaN, no infinity, no norm above the threshold."
    content = joined(groups) or element("p", quiet)
    return _section("What happened", content)


def _mark_groups(number: int, run: RunData, *, several: bool) -> Iterator[Markup]:
    groups: dict[tuple[str, str], list[MarkRow]] = {}
    for row in in_rows(run.marks):
        groups.setdefault((row.mark.kind, explanation(row.mark)), []).append(row)
    for (kind, why), rows in sorted(groups.items(), key=lambda item: _ORDER.index(item[0][0])):
        count = sum(row.count for row in rows)
        shown = [_mark_cells(number, row) for row in rows[:MOST_ROWS]]
        more = len(rows) - len(shown)
        name = f"{KINDS[kind]}{_reason(rows[0].mark)}"
        title = f"{run.name}: {name}" if several else name
        yield element(
            "details",
            element(
                "summary",
                element("span", class_=f"mark {kind}", aria_hidden="true"),
                element("strong", f"{count:,} × {title}"),
            ),
            element("p", why) if why else "",
            table(title, ("step", "what was seen"), shown),
            element("p", f"{more:,} more are in the charts and in the JSON.", class_="note") if more else "",
            open="" if len(rows) <= 10 else None,
            class_="group",
        )


def _reason(mark: Mark) -> str:
    if mark.kind == "alarm" and mark.reason and mark.reason not in _REASONS:
        return f": {mark.reason}"
    return f": {_REASONS[mark.reason]}" if mark.reason in _REASONS else ""


def _mark_cells(number: int, row: MarkRow) -> tuple[Any, ...]:
    steps = f"{row.first:,}" if row.count == 1 else f"{row.first:,}–{row.last:,}"
    button = element("button", steps, type="button", class_="step", data_run=number, data_step=row.first)
    text = row.mark.text
    mark = row.mark
    if mark.threshold is not None and mark.norm is not None and mark.reason == "spike" and mark.kind == "skip":
        text += f"; the threshold was {mark.threshold:.3g}"
    missing = [image for image in mark.images if image not in text]
    if missing:
        text += f"; images: {', '.join(missing)}"
    return (button, text)


def film_section(runs: Sequence[RunData], films: Sequence[Film | None]) -> Markup:
    """Return the sample pictures: a row for each prompt, steps from left to right."""
    parts = []
    for run, film in zip(runs, films, strict=True):
        if film is None:
            continue
        if len(runs) > 1:
            parts.append(element("h3", run.name))
        for place, row in enumerate(film.rows):
            prompt = film.prompts[place] or f"prompt {place + 1}"
            pictures = [
                _figure(film.sets[at].step, prompt, picture) for at, picture in enumerate(row) if picture is not None
            ]
            parts.append(element("p", prompt, class_="prompt"))
            parts.append(
                element("div", *pictures, class_="film", tabindex=0, role="group", aria_label=f"Samples: {prompt}")
            )
        if film.left_out:
            kept = f"{len(film.sets)} of {len(film.sets) + film.left_out}"
            parts.append(
                element("p", f"{kept} sets of pictures are shown, evenly spaced; all are in sample/.", class_="note")
            )
    return _section("Samples", joined(parts)) if parts else Markup("")


def _figure(step: int, prompt: str, picture: Any) -> Markup:
    drawn = image(src=picture.uri, width=picture.width, height=picture.height, alt=f"{prompt}, step {step}")
    return element(
        "figure",
        element("button", drawn, type="button", class_="picture", aria_label=f"Enlarge: {prompt}, step {step}"),
        element("figcaption", f"step {step:,}"),
    )


def data_section(runs: Sequence[RunData]) -> Markup:
    """Return folders, buckets and what was found about the data."""
    parts = []
    for run in runs:
        if len(runs) > 1 and (run.findings or run.plan.get("folders")):
            parts.append(element("h3", run.name))
        if folders := run.plan.get("folders"):
            rows = [[each.get(key) for key in ("folder", "images", "captions", "repeats")] for each in folders]
            parts.append(table("Folders", ("folder", "images", "captions", "repeats"), rows))
        if run.findings:
            parts.append(table("Findings", ("severity", "what was found"), map(_finding_cells, run.findings)))
        elif run.plan:
            parts.append(element("p", "Nothing was found wrong with the data."))
    return _section("Data", joined(parts)) if parts else Markup("")


def _finding_cells(finding: Any) -> tuple[str, str]:
    said = " ".join(str(finding.get(key) or "") for key in ("message", "why", "advice")).strip()
    paths = [_last_part(str(path)) for path in finding.get("paths") or []]
    names = ", ".join(path for path in paths[:MOST_PATHS] if path not in said)
    more = f" and {len(paths) - MOST_PATHS} more" if len(paths) > MOST_PATHS else ""
    return str(finding.get("severity", "")), f"{said} ({names}{more})" if names else said


def options_section(runs: Sequence[RunData]) -> Markup:
    """Return the options: of one run those that are not defaults, then all; of several those that differ."""
    if not any(run.options for run in runs):
        return Markup("")
    if len(runs) > 1:
        names = dict.fromkeys(name for run in runs for name in run.options)
        differ = [name for name in names if len({str(run.options.get(name)) for run in runs}) > 1]
        rows = [[name, *(shown(run.options.get(name)) for run in runs)] for name in differ]
        content = table("Options that differ", ("option", *(run.name for run in runs)), rows, class_="bare")
        return _section("Options that differ", content if rows else element("p", "None: the options are the same."))
    options = runs[0].options
    usual = json_value(DEFAULTS)
    changed = [[name, shown(value)] for name, value in options.items() if value != usual.get(name)]
    rest = [[name, shown(value)] for name, value in options.items() if value == usual.get(name)]
    return _section(
        "Options",
        joined(
            (
                table("Options that are not the default", ("option", "value"), changed, class_="pairs"),
                element(
                    "details",
                    element("summary", f"{len(rest)} options at their default"),
                    table("Options at their default", ("option", "value"), rest, class_="pairs bare"),
                ),
            )
        ),
    )


def environment_section(runs: Sequence[RunData]) -> Markup:
    """Return versions and device."""
    names = dict.fromkeys(name for run in runs for name in run.environment)
    if not names:
        return Markup("")
    head = ("", *(run.name for run in runs)) if len(runs) > 1 else ("", "")
    rows = [[name, *(shown(run.environment.get(name)) for run in runs)] for name in names]
    return _section("Environment", table("Environment", head, rows, class_="pairs bare"))


def files_section(runs: Sequence[RunData]) -> Markup:
    """Return what was saved, with hashes."""
    rows = [
        [file.name, f"{file.step:,}", _size(file.size), file.state, element("code", file.sha256 or "")]
        for run in runs
        for file in run.files
    ]
    if not rows:
        return Markup("")
    return _section("Files", table("Files", ("file", "step", "size", "now", "sha256"), rows, class_="files bare"))


def shown(value: Any) -> str:
    """Return an option's value for people."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def duration(seconds: float) -> str:
    """Return "42 s", "12 min" or "3 h 05 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f} MiB"


def _last_part(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _section(title: str, content: Markup) -> Markup:
    return element("section", element("h2", title), content)
