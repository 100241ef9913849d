"""Rescue in the trainer: goes back to a good state when a run is lost, leaves out images that lost it twice."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from maulstick.data.batches import MicroBatch
from maulstick.errors import ModelError
from maulstick.guard import GradientGuard
from maulstick.options.safety_schema import RescueOptions
from maulstick.rescue import Decision, HasState, Quarantine, RescueConfig, RescueError, Rescuer
from maulstick.train.watchers import WindowDone

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop
    from maulstick.train.loop_parts import LoopParts

MOST_IMAGES_NAMED = 500
# Of all images, how many may be left out: when more are suspects, the images are not the cause.
LARGEST_SHARE_LEFT_OUT = 0.1


def rescue_config(options: RescueOptions) -> RescueConfig:
    """Return what the options mean."""
    return RescueConfig(
        after=options.rescue_after,
        every=options.rescue_every,
        keep=options.rescue_keep,
        lr_factor=options.rescue_lr_factor,
        lr_restore_after=options.rescue_lr_restore_after,
        limit=options.rescue_limit,
    )


class RescueWatcher:
    """Takes a state of what trains every few windows, and puts one back when the run is lost.

    Counters go on forwards: schedule, order of the images and end of training are where they would have been, and the
    windows since the state that was put back are lost. So the draws of the windows to come are those they would have
    had; nothing random has to be put back. ``gone_back`` is called after every rollback.
    """

    name = "rescue"

    def __init__(self, parts: LoopParts, gone_back: Callable[[], None] = lambda: None) -> None:
        self._gone_back = gone_back
        self._names = {str(record.path) for dataset in parts.batches.index.datasets for record in dataset.records}
        self.quarantine = Quarantine(most=max(1, int(LARGEST_SHARE_LEFT_OUT * len(self._names))))
        self.rescuer = Rescuer(
            rescue_config(parts.options.rescue),
            parts.optimizer,
            parameters=parts.named_parameters,
            scaler=parts.scaler,
            extra=goes_back_too(parts),
            # Main memory has room for the copies where the GPU's has not.
            store="cpu" if parts.accelerator.device.type == "cuda" else "same",
        )
        self._recent: deque[tuple[int, list[str]]] = deque()

    def before_training(self, loop: TrainingLoop) -> None:
        """Keep the state at the start, or go on with what a resumed run has.

        Raises ModelError where it is not finite.
        """
        try:
            self.rescuer.begin(loop.state.step)
        except RescueError as error:
            raise ModelError(f"{error} Look at network_weights, or at the state that resume names.") from error
        self._tell(loop)

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Take note of one window, and act if the run is lost."""
        outcome = done.outcome
        finite = outcome.verdict.finite and math.isfinite(done.loss)
        bad = outcome.skipped or not outcome.stepped or not finite
        images = self._images(loop, done)
        self.quarantine.note(images, bad=bad, stepped=outcome.stepped)
        self._recent.append((loop.state.step, images))
        decision = self.rescuer.after_window(
            loop.state.step, bad=bad, loss=done.loss, finite=finite, check=_is_saved_next(loop)
        )
        if decision.state_is_finite:
            self.quarantine.clear()
        if decision.action == "go_on":
            self._forget_old_windows()
            if decision.text:
                loop.parts.console.say(f"step {loop.state.step}: {decision.text}")
                loop.parts.records.events.write("alarm", step=loop.state.step, text=decision.text)
        else:
            self._report(loop, decision)
        self._tell(loop)

    def after_training(self, loop: TrainingLoop) -> None:
        """Make sure that finite weights are saved, whatever the last windows did; say what was done in all."""
        parts, step = loop.parts, self.rescuer.secure()
        if step is not None:
            text = f"the weights hold NaN or infinite values; those of step {step} are saved instead"
            parts.console.say(f"step {loop.state.step}: {text}")
            parts.records.events.write("rescue", step=loop.state.step, back_to=step, cause="end_of_training", text=text)
        if self.rescuer.summary():
            parts.console.say(self.rescuer.summary())

    def begin_again(self, loop: TrainingLoop) -> None:
        """Forget every state and window: somebody else has put back what trains, and they belong to what is gone."""
        self.rescuer.begin_again(loop.state.step)
        self._recent.clear()
        self._gone_back()

    def _tell(self, loop: TrainingLoop) -> None:
        loop.rate_scales[self.name] = self.rescuer.lr_scale
        loop.left_out = self.quarantine.images

    def _report(self, loop: TrainingLoop, decision: Decision) -> None:
        if decision.cause is None:
            raise RuntimeError("whoever goes back has a cause")
        parts, step = loop.parts, loop.state.step
        lost = [images for at, images in self._recent if at > decision.to_step]
        images = list(dict.fromkeys(image for members in lost for image in members))
        left_out = self.quarantine.note_rescue(decision.cause) if decision.action == "rolled_back" else ()
        text = decision.text
        if left_out:
            text += f"; left out from here on: {', '.join(left_out)}"
        parts.records.events.write(
            "rescue" if decision.action == "rolled_back" else "gave_up",
            step=step,
            back_to=decision.to_step,
            windows_lost=decision.windows_lost,
            cause=decision.cause.value,
            text=text,
            lr_scale=decision.lr_scale,
            loss_scale=parts.scaler.get_scale() if parts.scaler.is_enabled() else None,
            images=images[:MOST_IMAGES_NAMED],
            images_in_all=len(images),
            left_out=left_out,
        )
        if decision.action == "gave_up":
            loop.state.stopped_by = (
                f"{text}. Lower the learning rate, train in bf16, or look at the images that the event log names"
            )
        else:
            parts.console.say(f"step {step}: rescued: {text}")
            self._gone_back()

    def _images(self, loop: TrainingLoop, done: WindowDone) -> list[str]:
        """Return the images of the window on all processes. Their order is a function, so that nobody has to ask."""
        parts = loop.parts
        world = parts.accelerator.num_processes
        if world == 1:
            batches = [batch for batch, _ in done.window]
        else:
            schedules = parts.batches.of_all_processes
            batches = [each.batch(done.epoch, batch.number) for each in schedules for batch, _ in done.window]
        return [name_of(item) for batch in batches for item in batch.items]

    def _forget_old_windows(self) -> None:
        oldest = self.rescuer.ring.slots[0].step
        while self._recent and self._recent[0][0] <= oldest:
            self._recent.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return the kept states, what the decisions depend on, and the images of the windows since the oldest."""
        return {
            "rescuer": self.rescuer.state_dict(),
            "quarantine": self.quarantine.state_dict(),
            "recent": [[step, list(images)] for step, images in self._recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back. Images are found again where the dataset was moved, by folder and file name."""
        self.rescuer.load_state_dict(state["rescuer"])
        place_of = {Path(name).parts[-2:]: name for name in sorted(self._names)}

        def here(name: str) -> str:
            return name if name in self._names else place_of.get(Path(name).parts[-2:], name)

        quarantine = dict(state["quarantine"])
        for part in ("refused", "trained", "images"):
            quarantine[part] = [here(name) for name in quarantine[part]]
        quarantine["strikes"] = {here(name): strikes for name, strikes in quarantine["strikes"].items()}
        self.quarantine.load_state_dict(quarantine)
        self._recent = deque((step, [here(name) for name in images]) for step, images in state["recent"])


def goes_back_too(parts: LoopParts) -> dict[str, HasState]:
    """Return what goes back together with weights and optimizer, by name."""
    average = {} if parts.average is None else {parts.average.name: parts.average}
    return {"guard": _GuardMemory(parts.guard), **average}


class _GuardMemory:
    """The guard's memory goes back with the weights, because the norms since then belong to weights that are gone.

    A divergence would otherwise stay in its window and widen the threshold, or a streak of refusals go on. What it
    has counted for the summary stays.
    """

    COUNTS = ("observed", "skipped", "longest_streak", "last_stuck_alarm")

    def __init__(self, guard: GradientGuard) -> None:
        self.guard = guard

    def state_dict(self) -> dict[str, Any]:
        return self.guard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        now = self.guard.state_dict()["judge"]
        self.guard.load_state_dict({**state, "judge": {**state["judge"], **{name: now[name] for name in self.COUNTS}}})


def _is_saved_next(loop: TrainingLoop) -> bool:
    """Whether a file or a state may be written before the next window: then weights must have been looked at."""
    state, run = loop.state, loop.parts.options.run
    at_step = run.save_every_n_steps is not None and state.step % run.save_every_n_steps == 0
    ends = state.step >= loop.parts.total_steps or state.stopped_by is not None
    at_epoch = run.save_every_n_epochs is not None and state.step_in_epoch >= loop.windows_per_epoch
    return at_step or at_epoch or ends


# ---------------------------------------------------------------------------------------- images that are left out


def name_of(item: Any) -> str:
    """Return the name under which the image of a batch item is left out."""
    return str(item.record.path)


def images_in(batch: MicroBatch, left_out: Collection[str]) -> int:
    """Return how many images of a micro-batch are trained."""
    if not left_out:
        return len(batch.items)
    return sum(name_of(item) not in left_out for item in batch.items)


def with_stand_ins(batch: MicroBatch, latents: Tensor, left_out: Collection[str]) -> tuple[MicroBatch, Tensor]:
    """Return a micro-batch with blank latents of loss weight 0 in the place of images that are left out.

    The order of all others and every draw stay as they are, and each process still makes every backward pass. A weight
    of 0 alone would not do: 0 times NaN is NaN. ``latents`` has shape (B, C, H, W) and is not changed.
    """
    places = [place for place, item in enumerate(batch.items) if name_of(item) in left_out] if left_out else []
    if not places:
        return batch, latents
    items = [replace(item, loss_weight=0.0) if place in places else item for place, item in enumerate(batch.items)]
    latents = latents.clone()
    latents[places] = 0
    return replace(batch, items=tuple(items)), latents
