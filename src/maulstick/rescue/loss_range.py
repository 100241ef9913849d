"""Has the loss left its range for good? Pure Python, no torch.

Losses of diffusion models vary by orders of magnitude from window to window, because the timestep does; what can be
judged is the median of many, on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from .config import RescueConfig

# For a normal distribution the standard deviation is this many median absolute deviations (1 / Phi^-1(3/4)).
MAD_TO_DEVIATION = 1.4826022185056018
# With fewer accepted losses than this share of the history, nothing is judged.
LEAST_SHARE = 4
# A state is still among the best while its level is at most this many deviations above the lowest level.
NEAR_THE_BEST = 1.0
LEAST_MARGIN = 0.1


class Level(StrEnum):
    """What the latest losses say."""

    USUAL = "usual"
    HIGH = "high"
    LEFT = "left"
    ACCEPTED = "accepted as the usual level"


class LossRange:
    """Compares the median of the latest log losses with the range of those before them.

    With m the median and s = 1.4826 * MAD of the logarithms of the last ``loss_history`` losses, the latest
    ``loss_recent`` are high when their median is above m + max(``loss_deviations`` * s, log ``loss_ratio``). When
    that has been so for ``loss_patience`` windows in a row, the loss has left its range. A loss enters the history
    when it is no longer among the latest, cut off at the upper end of the range; so a shift cannot hide itself, but a
    level that lasts is learned.

    The median of n normal values has a standard deviation of 1.25 s / sqrt(n): with 32 of them 0.22 s, and 1.5 s is
    more than six of those.
    """

    def __init__(self, config: RescueConfig) -> None:
        self.config = config
        self.history: deque[float] = deque(maxlen=config.loss_history)
        self.recent: deque[float] = deque(maxlen=config.loss_recent)
        self.high_in_a_row = 0
        self.blamed = False

    def note(self, loss: float) -> Level:
        """Take the loss of one accepted window. One without a logarithm (0, below, NaN, infinite) is passed over."""
        if not self.config.watch_loss or not (math.isfinite(loss) and loss > 0):
            return Level.HIGH if self.high_in_a_row else Level.USUAL
        top = self.top()
        if len(self.recent) == self.config.loss_recent:
            self.history.append(min(self.recent[0], math.inf if top is None else top))
        self.recent.append(math.log(loss))
        level = self.level()
        if top is None or level is None or level <= top:
            self.high_in_a_row = 0
            # With the recent losses full again and in range, going back has helped.
            self.blamed = self.blamed and level is None
            return Level.USUAL
        self.high_in_a_row += 1
        if self.high_in_a_row < self.config.loss_patience:
            return Level.HIGH
        if not self.blamed:
            return Level.LEFT
        # The weights were put back, and the loss is as high as before: it is not the weights, and not to be cured.
        self.history = deque(self.recent, maxlen=self.config.loss_history)
        self.recent.clear()
        self.high_in_a_row = 0
        self.blamed = False
        return Level.ACCEPTED

    def top(self) -> float | None:
        """The upper end of the range, as a logarithm; None while too little is known."""
        if len(self.history) < max(2, self.config.loss_history // LEAST_SHARE):
            return None
        middle, deviation = self._spread()
        return middle + max(self.config.loss_deviations * deviation, math.log(self.config.loss_ratio))

    def level(self) -> float | None:
        """The median of the latest log losses; None while there are too few."""
        return median(self.recent) if len(self.recent) == self.config.loss_recent else None

    def margin(self) -> float:
        """How far above the lowest level (as a logarithm) a state still counts as one of the best."""
        return LEAST_MARGIN if len(self.history) < 2 else max(LEAST_MARGIN, NEAR_THE_BEST * self._spread()[1])

    def went_back(self, *, blamed: bool) -> None:
        """Forget the latest losses: they belong to weights that are gone. ``blamed``: the loss was the reason."""
        self.recent.clear()
        self.high_in_a_row = 0
        self.blamed = blamed

    def _spread(self) -> tuple[float, float]:
        middle = median(self.history)
        return middle, MAD_TO_DEVIATION * median([abs(value - middle) for value in self.history])

    def state_dict(self) -> dict[str, Any]:
        """Everything later answers depend on."""
        return {
            "history": list(self.history),
            "recent": list(self.recent),
            "high_in_a_row": self.high_in_a_row,
            "blamed": self.blamed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the range that gave ``state`` stood."""
        self.history = deque(state["history"], maxlen=self.config.loss_history)
        self.recent = deque(state["recent"], maxlen=self.config.loss_recent)
        self.high_in_a_row = int(state["high_in_a_row"])
        self.blamed = bool(state["blamed"])


def median(values: Sequence[float] | deque[float]) -> float:
    """The middle value, or the mean of the two middle ones. ``values`` must not be empty nor hold NaN."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
