"""``Rescuer``: watches a run window by window, and puts it back to a good state when it is lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from maulstick.guard.collective import Collective

from .config import RescueConfig, RescueError
from .extra import HasState
from .judge import Cause, RescueJudge
from .loss_range import Level
from .ring import Slot, StateRing

STATE_VERSION = 1
Action = Literal["go_on", "rolled_back", "gave_up"]


@dataclass(frozen=True)
class Decision:
    """What was done after one window.

    Attributes:
        action: "go_on" (nothing), "rolled_back" (an earlier state is in place), or "gave_up" (the best state is in
            place, and the loop should end and save it).
        cause: why, None for "go_on".
        text: a sentence for a person; "" for "go_on" unless the loss has a new usual level.
        from_step: number of windows done.
        to_step: number of windows that were done when the state now in place was taken.
        lr_scale: what to multiply the learning rate by from now on.
        state_is_finite: weights and optimizer state were looked at, and found finite or not; None if not looked at.
    """

    action: Action
    cause: Cause | None
    text: str
    from_step: int
    to_step: int
    lr_scale: float
    state_is_finite: bool | None

    @property
    def windows_lost(self) -> int:
        """Windows whose training is undone."""
        return self.from_step - self.to_step


class Rescuer:
    """Keeps good states, says when the run is lost, and goes back.

    ``optimizer``, ``parameters``, ``scaler``, ``extra`` and ``store`` are those of ``StateRing``. ``processes`` is
    "auto" (all processes of the default group), a process group, or None (this process alone). Every process must
    call ``after_window`` with the same numbers: a guard's verdict and the loss averaged over processes are such.
    """

    def __init__(
        self,
        config: RescueConfig,
        optimizer: Any,
        *,
        parameters: Any = None,
        scaler: Any = None,
        extra: Mapping[str, HasState] | None = None,
        store: str = "same",
        processes: Any = "auto",
    ) -> None:
        self.config = config
        self.judge = RescueJudge(config)
        self.ring = StateRing(
            optimizer, parameters=parameters, scaler=scaler, extra=extra, keep=config.keep, store=store
        )
        self.collective = Collective(processes)
        self.lowest_level = math.inf

    @property
    def lr_scale(self) -> float:
        """What to multiply the learning rate by now."""
        return self.judge.lr_scale

    def begin(self, step: int = 0) -> None:
        """Keep the state before the first window, so that there is one to go back to. Not after ``load_state_dict``.

        Raises ``RescueError`` where that state is not finite: nothing could be saved from there.
        """
        if self.ring.slots:
            return
        if not self._live_is_finite():
            raise RescueError("The weights or the optimizer's state hold NaN or infinite values before the first step.")
        self.ring.take(step, best=True)

    def begin_again(self, step: int) -> None:
        """Forget all states and losses, and keep the state as it is now: something else has put back what trains."""
        self.ring.forget()
        self.judge.begin_again()
        self.lowest_level = math.inf
        self.begin(step)

    def after_window(self, step: int, *, bad: bool, loss: float, finite: bool = True, check: bool = False) -> Decision:
        """Take note of one window, after its update and with its gradients cleared; act if the run is lost.

        Args:
            step: windows done so far, this one included.
            bad: the window was refused, or its gradient or loss was not finite.
            loss: its loss; NaN or infinity where there is none.
            finite: its gradient and loss were finite.
            check: look at weights and optimizer state now, for instance because they are about to be saved.
        """
        if not self.ring.slots:
            raise RescueError("Rescuer.begin() was not called before the first window.")
        self.judge.note(bad=bad, loss=loss, finite=finite)
        due = self.judge.snapshot_due
        state_is_finite = self._live_is_finite() if check or due or (bad and not finite) else None
        found = self.judge.cause(state_is_finite=state_is_finite is not False)
        if found is not None:
            return self._act(step, *found, state_is_finite)
        if due:
            self._take(step)
        text = ""
        if self.judge.level is Level.ACCEPTED and not bad:
            text = "going back did not bring the loss down: its level is taken as the usual one from here on"
        return Decision("go_on", None, text, step, step, self.lr_scale, state_is_finite)

    def secure(self) -> int | None:
        """Make sure, on this process alone, that the weights are finite: the last thing to do before saving them.

        Returns None where they were, and the step of the state that was put in their place otherwise.
        """
        if not self.ring.slots or self.ring.weights_are_finite():
            return None
        self.ring.restore(self.ring.slots[-1])
        return self.ring.slots[-1].step

    def _act(self, step: int, cause: Cause, why: str, state_is_finite: bool | None) -> Decision:
        if self.judge.may_give_up:
            best = self.ring.best or self.ring.slots[-1]
            self.ring.restore(best)
            text = f"{why}, after {self.judge.rescued} rollbacks already. The weights are those of step {best.step}"
            return Decision("gave_up", cause, text, step, best.step, self.lr_scale, state_is_finite)
        reach = self.judge.windows_before_cause if cause is Cause.LOSS else 0
        slot = self.ring.newest_before(step - reach)
        self.ring.go_back_to(slot)
        self._lower_loss_scale(slot)
        self.judge.note_rescue(cause, step - slot.step)
        text = f"{why}; back to the state of step {slot.step}, learning rate x {self.lr_scale:g}"
        return Decision("rolled_back", cause, text, step, slot.step, self.lr_scale, state_is_finite)

    def _take(self, step: int) -> None:
        level = self.judge.loss_range.level()
        self.lowest_level = min(self.lowest_level, math.inf if level is None else level)
        best = level is None or level <= self.lowest_level + self.judge.loss_range.margin()
        self.ring.take(step, level=level, best=best)
        self.judge.note_snapshot()

    def _lower_loss_scale(self, slot: Slot) -> None:
        """Halve the restored loss scale for every time that the run went back to this state, but not below 1.

        A scale that overflows costs one window for each halving, so nearly right is enough; the one that a streak of
        NaN has brought down is not, because it would take thousands of windows to grow again.
        """
        scaler = self.ring.scaler
        if scaler is None:
            return
        state = scaler.state_dict()
        lowered = state["scale"] * state["backoff_factor"] ** slot.used
        scale = max(lowered, min(1.0, state["scale"]))
        scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": 0})

    def _live_is_finite(self) -> bool:
        finite = self.ring.live_is_finite()
        if self.collective.size == 1:
            return finite
        flag = torch.tensor([0.0 if finite else 1.0], device=self.ring.device)
        return self.collective.sum(flag).item() == 0

    def summary(self) -> str:
        """One line for the end of a run; "" when the run never had to go back."""
        return self.judge.summary()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to decide and to go back exactly as this one: plain values and tensors."""
        return {
            "version": STATE_VERSION,
            "judge": self.judge.state_dict(),
            "ring": self.ring.state_dict(),
            "lowest_level": self.lowest_level,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the rescuer that gave ``state`` stood."""
        if state.get("version") != STATE_VERSION:
            raise RescueError(f"This rescue state has version {state.get('version')}; {STATE_VERSION} is needed.")
        self.judge.load_state_dict(state["judge"])
        self.ring.load_state_dict(state["ring"])
        self.lowest_level = float(state["lowest_level"])
