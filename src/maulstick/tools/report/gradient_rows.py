"""What a report takes from a gradient log: all of a run, or cosine and threshold of a known one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from maulstick.errors import DataError
from maulstick.guard.errors import GuardError
from maulstick.guard.log import LogRow, read_gradient_log
from maulstick.tools.report.find import EXPECTED, run_name
from maulstick.tools.report.run_data import COSINE, LOSS, NORM, SCALE, SMOOTH_LOSS, THRESHOLD, Mark, RunData

SMOOTHED_OVER = 100
"""Losses that the running mean is taken over, as in the trainer."""


def read_gradient_run(log: Path) -> RunData:
    """Read a run of which only the gradient log is there; steps are counted from 1 over all epochs.

    The file does not say which steps were skipped: those with a NaN or infinite norm, or above the threshold, are
    marked as ``judged``.

    Raises:
        DataError: the file is not a gradient log.
    """
    try:
        rows = read_gradient_log(log)
    except GuardError as error:
        raise DataError(str(error)) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{log} is neither an event log nor a gradient log. {EXPECTED}") from error
    # The first row tells a run from the next one of that name, and stays while the log grows.
    first = f"{rows[0].norm!r} {rows[0].loss!r}" if rows else ""
    data = RunData(run_name(log), log, from_gradient_log=True, identity=f"{run_name(log)} gradient log {first}")
    data.steps = list(range(1, len(rows) + 1))
    losses = [row.loss for row in rows]
    data.series = {LOSS: list(losses), SMOOTH_LOSS: list(_running_mean(losses)), NORM: [row.true_norm for row in rows]}
    _add_columns(data, rows)
    for step, row in zip(data.steps, rows, strict=True):
        why = _judged(row)
        if why:
            norm, threshold = row.true_norm, data.series[THRESHOLD][step - 1]
            text = "the gradient is NaN" if why == "nan" else "the gradient is infinite" if why == "inf" else ""
            text = text or f"norm {norm:.3g} is above the threshold {threshold:.3g}"
            data.marks.append(Mark(step, "judged", text, why, norm=norm, threshold=threshold))
    off = sum(row.threshold_off for row in rows)
    if off:
        data.notes.append(
            f"In {off:,} steps the threshold was switched off (ThreshOff): a NaN or infinite norm was in its window."
        )
    data.notes.append(
        "Read from a gradient log, which holds norms, thresholds and losses only, and does not say which steps were "
        "skipped: with skip_grad_norm those marked here were, save for NaN and infinity where a mode lets them pass."
    )
    return data


def add_gradient_rows(data: RunData, log: Path) -> None:
    """Add to a run what only its gradient log has; a log that does not belong to it is left out, with a note."""
    if not log.is_file():
        return
    try:
        rows = read_gradient_log(log)
    except (GuardError, UnicodeDecodeError, OSError):
        data.notes.append(f"{log.name} cannot be read and was left out.")
        return
    norms = data.series.get(NORM, [])
    if len(rows) > len(norms) or not all(_alike(row.true_norm, norm) for row, norm in zip(rows, norms, strict=False)):
        data.notes.append(f"{log.name} does not belong to this run's event log and was left out.")
        return
    _add_columns(data, rows)


def _add_columns(data: RunData, rows: Sequence[LogRow]) -> None:
    """Set threshold (true units), cosine and loss scale of the first rows; what the run has behind them stays."""

    def put(name: str, values: list[float | None]) -> None:
        data.series[name] = values + data.series.get(name, [None] * len(data.steps))[len(values) :]

    put(THRESHOLD, [row.threshold / row.scale if row.scale else row.threshold for row in rows])
    if any(row.cosine is not None for row in rows):
        # The first row has nothing to be compared with, and says NaN.
        put(COSINE, [None if row.cosine is None or math.isnan(row.cosine) else row.cosine for row in rows])
    if any(row.scale is not None for row in rows):
        put(SCALE, [row.scale for row in rows])


def _judged(row: LogRow) -> str:
    if math.isnan(row.norm):
        return "nan"
    if math.isinf(row.norm):
        return "inf"
    return "spike" if row.norm > row.threshold else ""


def _alike(first: float, second: float | None) -> bool:
    if second is None:
        return False
    if not (math.isfinite(first) and math.isfinite(second)):
        return not math.isfinite(first) and not math.isfinite(second)
    return math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-12)


def _running_mean(values: Sequence[float]) -> Sequence[float | None]:
    window: deque[float] = deque(maxlen=SMOOTHED_OVER)
    means: list[float | None] = []
    for value in values:
        if math.isfinite(value):
            window.append(value)
        means.append(sum(window) / len(window) if window else None)
    return means
