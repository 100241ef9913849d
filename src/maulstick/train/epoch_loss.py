"""The mean loss of each epoch, which sd-scripts' trackers show as ``loss/epoch_average``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maulstick.train.watchers import WindowDone

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop


class EpochLoss:
    """Takes the mean over an epoch's steps that were not skipped, and records it when the epoch is over."""

    name = "epoch_loss"

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Add the window's loss; at the end of an epoch record the mean and begin anew."""
        if done.outcome.stepped and math.isfinite(done.loss):
            self._sum, self._count = self._sum + done.loss, self._count + 1
        if loop.state.step_in_epoch < loop.windows_per_epoch:
            return
        if self._count:
            average = {"loss/epoch_average": self._sum / self._count}
            loop.parts.records.epoch(average, step=done.step + 1, epoch=done.epoch + 1)
        self._sum, self._count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sum so far."""
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._sum, self._count = float(state["sum"]), int(state["count"])
