"""When to go back, and how fast to go on afterwards: decisions from plain numbers. Pure Python, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from .config import RescueConfig
from .loss_range import Level, LossRange


class Cause(StrEnum):
    """Why a run has to go back."""

    BAD_WINDOWS = "bad_windows"
    NON_FINITE_STATE = "non_finite_state"
    LOSS = "loss_out_of_range"


class RescueJudge:
    """Counts windows, decides when a rollback is due, and keeps the factor of the learning rate.

    It must be told the same numbers on every process; then it says the same on every process.
    """

    def __init__(self, config: RescueConfig) -> None:
        self.config = config
        self.loss_range = LossRange(config)
        self.level = Level.USUAL
        self.bad_in_a_row = 0
        self.all_finite = True
        self.since_snapshot = 0
        self.good_since_rescue = 0
        self.good_since_cut = 0
        self.cuts = 0
        self.windows_lost = 0
        self.rescues: Counter[str] = Counter()

    @property
    def rescued(self) -> int:
        """How many rollbacks there have been."""
        return sum(self.rescues.values())

    @property
    def lr_scale(self) -> float:
        """What to multiply the learning rate by now."""
        return self.config.lr_factor**self.cuts

    @property
    def may_give_up(self) -> bool:
        """No rollback is left."""
        return self.rescued >= self.config.limit

    def note(self, *, bad: bool, loss: float, finite: bool) -> None:
        """Count one window."""
        self.since_snapshot += 1
        if bad:
            self.bad_in_a_row += 1
            self.all_finite = (self.all_finite or self.bad_in_a_row == 1) and finite
            self.level = Level.USUAL if self.level is Level.ACCEPTED else self.level
            return
        self.bad_in_a_row = 0
        self.good_since_rescue += 1
        self.good_since_cut += 1
        if self.cuts and self.config.lr_restore_after and self.good_since_cut >= self.config.lr_restore_after:
            self.cuts -= 1
            self.good_since_cut = 0
        self.level = self.loss_range.note(loss)

    @property
    def snapshot_due(self) -> bool:
        """A state taken now would be worth keeping, and it is time for one."""
        usual = self.level not in (Level.HIGH, Level.LEFT)
        return self.bad_in_a_row == 0 and usual and self.since_snapshot >= self.config.every

    def cause(self, *, state_is_finite: bool) -> tuple[Cause, str] | None:
        """Why the run has to go back now, with one sentence for a person; None when it need not."""
        if not state_is_finite:
            return Cause.NON_FINITE_STATE, "the weights or the optimizer's state hold NaN or infinite values"
        if self.bad_in_a_row >= self._patience():
            kind = "with a refused gradient" if self.all_finite else "with a NaN, infinite or refused gradient"
            return Cause.BAD_WINDOWS, f"{self.bad_in_a_row} windows in a row {kind}"
        if self.level is Level.LEFT:
            level, top = self.loss_range.level(), self.loss_range.top()
            found = "" if level is None or top is None else f" (median {math.exp(level):.3g}, above {math.exp(top):.3g}"
            for_windows = f" for {self.loss_range.high_in_a_row} windows)" if found else ""
            return Cause.LOSS, f"the loss has left its range{found}{for_windows}"
        return None

    def _patience(self) -> int:
        again = self.rescued > 0 and self.good_since_rescue == 0 and self.all_finite
        return max(self.config.after, self.config.after_again) if again else self.config.after

    @property
    def windows_before_cause(self) -> int:
        """How many windows ago the loss began to leave its range, those that its median reaches back to included."""
        return self.loss_range.high_in_a_row + self.config.loss_recent

    def note_snapshot(self) -> None:
        """A snapshot was taken."""
        self.since_snapshot = 0

    def note_rescue(self, cause: Cause, windows_lost: int) -> None:
        """The run was rolled back."""
        if not self.rescued or self.good_since_rescue:
            # Where nothing was trained since the last time, the learning rate had no part in this one.
            self.cuts += 1
        self.rescues[cause.value] += 1
        self.windows_lost += windows_lost
        self.bad_in_a_row = 0
        self.all_finite = True
        self.since_snapshot = 0
        self.good_since_rescue = 0
        self.good_since_cut = 0
        self.level = Level.USUAL
        self.loss_range.went_back(blamed=cause is Cause.LOSS)

    def begin_again(self) -> None:
        """Forget the windows so far, which belong to weights that are gone; what was counted and cut stays."""
        self.bad_in_a_row = self.since_snapshot = 0
        self.all_finite = True
        self.level = Level.USUAL
        self.loss_range = LossRange(self.config)

    def summary(self) -> str:
        """One line for the end of a run; "" when nothing happened."""
        if not self.rescued:
            return ""
        why = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in self.rescues.most_common())
        times = "once" if self.rescued == 1 else f"{self.rescued} times"
        return f"rolled back {times} ({why}), {self.windows_lost} windows lost, learning rate x {self.lr_scale:g} now"

    def state_dict(self) -> dict[str, Any]:
        """Everything later decisions depend on."""
        kept = {name: getattr(self, name) for name in _COUNTS}
        return {
            **kept,
            "level": self.level.value,
            "rescues": dict(self.rescues),
            "loss_range": self.loss_range.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the judge that gave ``state`` stood."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.level = Level(state["level"])
        self.rescues = Counter(state["rescues"])
        self.loss_range.load_state_dict(state["loss_range"])


_COUNTS = (
    "bad_in_a_row",
    "all_finite",
    "since_snapshot",
    "good_since_rescue",
    "good_since_cut",
    "cuts",
    "windows_lost",
)
