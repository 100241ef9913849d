"""The plan and everything that was found, as `maulstick check` prints it."""

from __future__ import annotations

import textwrap

from maulstick.data.findings import Finding, Severity
from maulstick.train.plan import Plan, plan_lines
from maulstick.train.preflight import Preflight

_WIDTH = 118
_TITLES = {Severity.ERROR: "errors", Severity.WARNING: "warnings", Severity.INFO: "notes"}


def preflight_lines(plan: Plan, found: Preflight) -> list[str]:
    """Return the lines: the plan, the schedule, what was measured, and the findings in groups."""
    lines = plan_lines(plan, with_findings=False)
    lines.append(f"schedule   {found.schedule.sparkline}")
    lines.append(f"           {found.schedule.sentence()}")
    lines += _measured_lines(plan, found)
    groups: dict[Severity, list[Finding]] = {severity: [] for severity in Severity}
    for finding in [*found.findings, *plan.findings]:
        groups[finding.severity].append(finding)
    for severity, findings in groups.items():
        notices = list(plan.notices) if severity is Severity.INFO else []
        if findings or notices:
            lines += ["", f"{_TITLES[severity]} ({len(findings) + len(notices)})"]
            lines += [line for finding in findings for line in _finding_lines(finding)]
            lines += [line for notice in notices for line in _wrapped("- ", notice)]
    if not any(groups.values()):
        lines += ["", "nothing was found that should be changed"]
    return lines


def _measured_lines(plan: Plan, found: Preflight) -> list[str]:
    lines = []
    if found.step is not None:
        step = found.step
        width, height = step.bucket
        lines.append(
            f"expected   {_seconds(step.seconds)} a step, {_duration(step.seconds * plan.total_steps)} for "
            f"{plan.total_steps} steps; {_memory(step.peak_bytes, step.memory_of)}"
        )
        what = f"{step.images} image{'s' if step.images != 1 else ''} of {width}x{height}"
        lines.append(f"           measured on one step of {what}; caching, saving and samples are not counted")
    if found.latents is not None and found.latents.images:
        sample = found.latents
        precision = "" if plan.precision == "no" else f", {sample.difference:.2%} from fp32 in {plan.precision}"
        plural = "s" if sample.images != 1 else ""
        lines.append(f"latents    {sample.images} image{plural} encoded: largest value {sample.largest:.3g}{precision}")
    if found.prediction is not None:
        probe = found.prediction
        errors = f"error as noise {probe.epsilon:.2f}, as v {probe.v_prediction:.2f}"
        lines.append(f"predicts   {errors} (1: no better than predicting nothing); trained as {plan.prediction_type}")
    return lines


def _finding_lines(finding: Finding) -> list[str]:
    lines = _wrapped("- ", finding.message)
    if finding.why:
        lines += _wrapped("    why  ", finding.why)
    if finding.advice:
        lines += _wrapped("    set  ", finding.advice)
    return lines


def _wrapped(start: str, text: str) -> list[str]:
    # Paths must stay whole, to be copied.
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} s"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"


def _memory(peak: int | None, memory_of: str) -> str:
    return f"{memory_of} unknown" if peak is None else f"{memory_of} {peak / 2**30:.2f} GiB"
