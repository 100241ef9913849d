"""When a run is rescued, and how: every number of it. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


class RescueError(ValueError):
    """Something given to the rescue cannot be used; the message says what, what was expected and what to do."""


@dataclass(frozen=True)
class RescueConfig:
    """The numbers of the rescue. A window is one update: taken, or skipped by a guard.

    Attributes:
        after: bad windows in a row after which the run is rolled back.
        after_again: the same for windows with finite gradients right after a rollback, before any good window. The
            weights have just been put back, so they are not the cause; a guard that learns a new level needs this time.
        every: windows between two snapshots.
        keep: snapshots in the ring; the best state is kept besides them.
        lr_factor: the learning rate is multiplied by it at every rollback, but not at one that no good window came
            before since the last.
        lr_restore_after: good windows after which one such cut is taken back; 0 never does.
        limit: rollbacks in a run; when one more is needed, the run is given up.
        watch_loss: also roll back when the loss has left its range for good, as ``LossRange`` defines it.
        loss_history: accepted losses that the range is taken from.
        loss_recent: the latest losses, whose median is compared with the range.
        loss_patience: windows in a row that this median must be out of range.
        loss_deviations: how many (robust) standard deviations of the log losses the range reaches above their median.
        loss_ratio: the range reaches at least to this multiple of the median.
    """

    after: int = 16
    after_again: int = 80
    every: int = 25
    keep: int = 3
    lr_factor: float = 0.5
    lr_restore_after: int = 200
    limit: int = 5
    watch_loss: bool = True
    loss_history: int = 256
    loss_recent: int = 32
    loss_patience: int = 32
    loss_deviations: float = 1.5
    loss_ratio: float = 2.0

    def __post_init__(self) -> None:
        for name in ("after", "after_again", "every", "keep", "limit", "loss_recent", "loss_patience"):
            self._require(name, "a whole number, at least 1", lambda value: value >= 1, whole=True)
        self._require("lr_restore_after", "a whole number, 0 or more", lambda value: value >= 0, whole=True)
        self._require("loss_history", "a whole number, at least 8", lambda value: value >= 8, whole=True)
        self._require("lr_factor", "above 0 and at most 1", lambda value: 0 < value <= 1)
        self._require("loss_deviations", "above 0", lambda value: value > 0)
        self._require("loss_ratio", "above 1", lambda value: value > 1)
        if not isinstance(self.watch_loss, bool):
            raise RescueError(f"watch_loss = {self.watch_loss!r}: expected True or False.")

    def _require(self, name: str, expected: str, holds: Callable[[float], bool], *, whole: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and holds(value)):
            raise RescueError(f"{name} = {value!r}: expected {expected}.")
