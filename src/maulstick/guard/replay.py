"""What another mode would have done on a recorded gradient log. Pure Python, no torch.

The answer is about decisions only: a run that had skipped other steps would have gone on to have other gradients.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import GuardError
from .judge import Evidence, Judge
from .log import LogRow
from .policies import MAD_TO_DEVIATION, SteadyRule, median
from .presets import GuardConfig, preset

# A run of more skips than this counts as a deadlock.
DEADLOCK_AFTER = 64
# For labelling with hindsight: how many finite rows on each side tell what was normal there.
NEIGHBOURS = 100


def replay(rows: Sequence[LogRow], presets: Iterable[str | GuardConfig]) -> dict[str, Any]:
    """Judge a recorded run again by each of ``presets``; returns data that can be written as JSON.

    ``{"rows": n, "spikes": n, "non_finite": n, "presets": {NAME: {...}}}`` where a preset has ``steps``, ``skipped``
    (row numbers from 0), ``skipped_for`` (reason -> count), ``skipped_share``, ``healthy_lost_share`` (of the steps
    that were healthy, seen with hindsight), ``spikes_let_through`` and ``non_finite_let_through`` (row numbers),
    ``effective_updates`` (accepted and finite), ``longest_streak`` and ``deadlocks`` (runs of more than 64 skips:
    ``first``, ``length``, ``to_the_end``). Row norms are taken as multiplied by the ``Scale`` column, where there is
    one.
    """
    if not rows:
        raise GuardError("The gradient log has no rows yet; there is nothing to replay.")
    configs = [each if isinstance(each, GuardConfig) else preset(each) for each in presets]
    labels = label_rows(rows)
    return {
        "rows": len(rows),
        "spikes": labels.count("spike"),
        "non_finite": labels.count("non_finite"),
        "presets": {config.name: _replay_one(rows, labels, config) for config in configs},
    }


def label_rows(rows: Sequence[LogRow]) -> list[str]:
    """Call each row "healthy", "spike" or "non_finite", judged with hindsight.

    A spike lies above median * max(12, exp(5 * 1.4826 * MAD of the logs)) of the 100 finite rows before it and the
    100 after it, in true units; a lasting change of level is therefore not one, unlike for a rule that sees only the
    past.
    """
    rule = SteadyRule()
    finite = [(i, math.log(row.true_norm)) for i, row in enumerate(rows) if _positive(row.true_norm)]
    labels = ["healthy" if math.isfinite(row.true_norm) else "non_finite" for row in rows]
    around: list[float] = []
    for place in range(min(NEIGHBOURS, len(finite))):
        insort(around, finite[place][1])
    for place, (row, log_norm) in enumerate(finite):
        if place + NEIGHBOURS < len(finite):
            insort(around, finite[place + NEIGHBOURS][1])
        if place > NEIGHBOURS:
            around.pop(bisect_left(around, finite[place - NEIGHBOURS - 1][1]))
        middle = median(around)
        deviation = MAD_TO_DEVIATION * median([abs(value - middle) for value in around])
        if log_norm > middle + max(rule.deviations * deviation, math.log(rule.least_ratio)):
            labels[row] = "spike"
    return labels


def _positive(norm: float) -> bool:
    return math.isfinite(norm) and norm > 0


def _replay_one(rows: Sequence[LogRow], labels: Sequence[str], config: GuardConfig) -> dict[str, Any]:
    judge = Judge(config)
    skipped: list[int] = []
    reasons: Counter[str] = Counter()
    # A loop that gave the guard no loss has NaN in every row.
    has_loss = not all(math.isnan(row.loss) for row in rows)
    for number, row in enumerate(rows):
        loss_is_finite = not has_loss or math.isfinite(row.loss)
        decision = judge.decide(Evidence(row.true_norm, row.norm, row.scale, loss_is_finite))
        if decision.skip:
            skipped.append(number)
            reasons[decision.reason.value] += 1
    refused = set(skipped)
    healthy = labels.count("healthy")
    lost = sum(labels[number] == "healthy" for number in skipped)
    streaks = _streaks(skipped)
    return {
        "steps": len(rows),
        "skipped": skipped,
        "skipped_for": dict(reasons),
        "skipped_share": len(skipped) / len(rows),
        "healthy_lost_share": lost / healthy if healthy else 0.0,
        "spikes_let_through": [i for i, label in enumerate(labels) if label == "spike" and i not in refused],
        "non_finite_let_through": [i for i, label in enumerate(labels) if label == "non_finite" and i not in refused],
        "effective_updates": sum(i not in refused and label != "non_finite" for i, label in enumerate(labels)),
        "longest_streak": max((length for _, length in streaks), default=0),
        "deadlocks": [
            {"first": first, "length": length, "to_the_end": first + length == len(rows)}
            for first, length in streaks
            if length > DEADLOCK_AFTER
        ],
    }


def _streaks(skipped: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, length) of every run of consecutive skips."""
    streaks: list[tuple[int, int]] = []
    for number in skipped:
        if streaks and sum(streaks[-1]) == number:
            streaks[-1] = (streaks[-1][0], streaks[-1][1] + 1)
        else:
            streaks.append((number, 1))
    return streaks


def format_replay_table(result: dict[str, Any]) -> str:
    """The result of ``replay`` as a Markdown table with a line above it that says what was in the log."""
    head = (
        f"{result['rows']} steps recorded: {result['spikes']} spikes and {result['non_finite']} non-finite "
        f"gradients, seen with hindsight\n\n"
    )
    titles = ["mode", "skipped", "healthy lost", "spikes let through", "NaN/inf let through", "updates", "deadlock"]
    table = [titles]
    for name, found in result["presets"].items():
        table.append(
            [
                name,
                f"{len(found['skipped'])} ({found['skipped_share']:.2%})",
                f"{found['healthy_lost_share']:.2%}",
                str(len(found["spikes_let_through"])),
                str(len(found["non_finite_let_through"])),
                str(found["effective_updates"]),
                _deadlock_text(found),
            ]
        )
    widths = [max(len(row[column]) for row in table) for column in range(len(titles))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return head + "\n".join(lines) + "\n"


def _deadlock_text(found: dict[str, Any]) -> str:
    if not found["deadlocks"]:
        return "none"
    last = found["deadlocks"][-1]
    if last["to_the_end"]:
        return f"from row {last['first']} to the end"
    return f"{len(found['deadlocks'])}, the longest {found['longest_streak']} steps"
