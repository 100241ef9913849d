"""Stops a run that is mostly skipping: what it still learns is not what was planned, and its schedule runs on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maulstick.guard.policies import Reason
from maulstick.train.watchers import WindowDone

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop

FEWEST_WINDOWS, MOST_WINDOWS = 20, 200

_IN_WORDS = {
    Reason.NAN: "a NaN gradient",
    Reason.INF: "an infinite gradient",
    Reason.SPIKE: "a gradient norm out of the ordinary",
    Reason.LOSS: "a loss that is not finite",
}
_ADVICE = {
    Reason.NAN: "Look for bad data, lower the learning rate, or train in bf16",
    Reason.INF: "Train in bf16, or lower the learning rate",
    Reason.SPIKE: "Lower the learning rate, or make batches larger with gradient_accumulation_steps; `maulstick "
    "replay` shows on the gradient log what another grad_norm_mode would have skipped",
    Reason.LOSS: "Look for bad data, lower the learning rate, or train in bf16",
}


def windows_judged(total_steps: int) -> int:
    """Return how many of the last windows are looked at: a tenth of training, at least 20 and at most 200."""
    return max(FEWEST_WINDOWS, min(MOST_WINDOWS, total_steps // 10))


class SkipBudget:
    """A watcher that ends the run when more than a share of the last windows moved no weight.

    Nothing is judged before as many windows were seen as are judged (``windows_judged``), so that the first steps of
    the guard and of the loss scale cannot end a run. A window is lost when the optimizer did not step: because the
    guard skipped it, or because its gradient was not finite. All processes see the same windows, and decide alike.
    With ``beside_rescue`` an unbroken row of lost windows is the rescue's matter: it is judged when the row has ended.
    """

    name = "skip_budget"

    def __init__(self, max_skipped_fraction: float, total_steps: int, *, beside_rescue: bool = False) -> None:
        self.beside_rescue = beside_rescue
        self.max_skipped_fraction = max_skipped_fraction
        self._recent: deque[Reason | None] = deque(maxlen=windows_judged(total_steps))
        self._row_was_rescued = False

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Count the window; set ``stopped_by`` when too many of the last ones were lost."""
        recent = self._recent
        why = _why_lost(done)
        if self._row_was_rescued and why is not None:
            return
        self._row_was_rescued = False
        recent.append(why)
        if len(recent) < (recent.maxlen or 0) or (self.beside_rescue and recent[-1] is not None):
            return
        lost = Counter(reason for reason in recent if reason is not None)
        if lost.total() <= self.max_skipped_fraction * len(recent):
            return
        if loop.state.stopped_by is None:
            loop.state.stopped_by = self._sentence(lost, len(recent))
        # Whoever goes on from here, with other options, begins a new count.
        recent.clear()

    def forget(self) -> None:
        """Begin a new count: the windows so far belong to weights that are gone, and so does the rest of their row."""
        self._recent.clear()
        self._row_was_rescued = True

    def _sentence(self, lost: Counter[Reason], windows: int) -> str:
        by_count = sorted(lost.items(), key=lambda item: (-item[1], item[0]))
        counted = ", ".join(f"{count} for {_IN_WORDS[reason]}" for reason, count in by_count)
        return (
            f"{lost.total()} of the last {windows} steps were skipped ({counted}), more than max_skipped_fraction = "
            f"{self.max_skipped_fraction:g} allows. {_ADVICE[by_count[0][0]]}; max_skipped_fraction = 1 never stops"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the windows that count, oldest first: the reason of each lost one, None for the others."""
        recent = [None if reason is None else str(reason) for reason in self._recent]
        return {"recent": recent, "row_was_rescued": self._row_was_rescued}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back; where fewer windows are judged now, the last ones count."""
        self._recent.clear()
        self._recent.extend(None if reason is None else Reason(reason) for reason in state["recent"])
        self._row_was_rescued = bool(state.get("row_was_rescued", False))


def _why_lost(done: WindowDone) -> Reason | None:
    verdict = done.outcome.verdict
    if done.outcome.stepped:
        return None
    if verdict.finite or verdict.reason in _IN_WORDS:
        return verdict.reason if verdict.skip else None
    # The mode let a NaN or infinite gradient pass, and the step was left out all the same.
    return Reason.INF if verdict.norm == float("inf") else Reason.NAN
