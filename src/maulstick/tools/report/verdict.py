"""How a run went, in one sentence and a word."""

from __future__ import annotations

from collections import Counter

from maulstick.data.findings import counted
from maulstick.tools.report.run_data import RunData

_SKIPPED_FOR = {"spike": "spike", "nan": "NaN", "inf": "infinite", "non_finite_loss": "without a finite loss"}


def level(data: RunData) -> str:
    """Return "good", "look" (finished, and there is something to look at) or "bad" (it did not finish)."""
    if data.from_gradient_log:
        return "look" if data.marks else "good"
    if data.ending != "end":
        return "bad"
    lost = data.count("skip") > 0.05 * max(1, len(data.steps))
    return "look" if lost or data.count("rescue") or data.count("alarm") or data.count("trouble") else "good"


def word(data: RunData) -> str:
    """Return the level in words."""
    if data.from_gradient_log:
        return "Worth a look" if data.marks else "Nothing stands out"
    if data.ending == "open":
        return "No end in the log"
    return {"good": "Went well", "look": "Worth a look", "bad": "Did not finish"}[level(data)]


def headline(data: RunData) -> str:
    """Return the verdict: how far it came, what was skipped and rescued, and the file."""
    parts = [_how_far(data), *_what_happened(data)]
    if data.final_file:
        parts.append(f"file {data.final_file}")
    return "; ".join(parts)


def _how_far(data: RunData) -> str:
    step, total = data.last_step, data.total_steps
    of_all = f"{step:,} of {total:,} steps" if total else counted_steps(step)
    if data.from_gradient_log:
        return f"{counted_steps(step)} in the gradient log"
    if data.ending == "end":
        return f"Finished {of_all}"
    if data.ending == "interrupted":
        return f"Stopped after {of_all}: {data.reason or 'no reason was logged'}"
    if data.ending == "failed":
        return f"Failed after {of_all}: {data.reason or 'no reason was logged'}"
    return f"The log ends after {of_all}, without a closing line: the run is still going on, or was killed"


def _what_happened(data: RunData) -> list[str]:
    parts = []
    skipped = Counter(_SKIPPED_FOR.get(mark.reason, mark.reason) for mark in data.marks if mark.kind == "skip")
    if skipped:
        counts = skipped.most_common()
        why = ", ".join(f"{count:,} {reason}{'s' * (reason == 'spike' and count > 1)}" for reason, count in counts)
        parts.append(f"{skipped.total():,} skipped ({why})")
    elif not data.from_gradient_log and data.steps:
        parts.append("none skipped")
    if judged := data.count("judged"):
        parts.append(f"{judged:,} NaN, infinite or above the threshold")
    for kind, name in (("rescue", "rescue"), ("alarm", "alarm")):
        if count := data.count(kind):
            parts.append(counted(count, name))
    streak = _skips_at_end(data)
    if streak >= 3 and data.ending == "end":
        parts.append(f"the last {streak} steps were all skipped, so nothing was learned in them")
    return parts


def _skips_at_end(data: RunData) -> int:
    skipped = {mark.step for mark in data.marks if mark.kind == "skip"}
    streak = 0
    while data.last_step - streak in skipped:
        streak += 1
    return streak


def counted_steps(steps: int) -> str:
    """Return "1 step" or "2,000 steps"."""
    return "1 step" if steps == 1 else f"{steps:,} steps"
