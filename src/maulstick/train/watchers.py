"""What looks at every window after it was trained: alarms, rescue, autopsy. The loop knows none of them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from maulstick.guard import StepOutcome
    from maulstick.train.loop import TrainingLoop
    from maulstick.train.loop_parts import Window


@dataclass(frozen=True)
class WindowDone:
    """One window after its update was made or skipped.

    Attributes:
        step: number of the window in the run, from 0; the seeds of its draws come from it.
        epoch: the epoch it belongs to, from 0.
        window: its micro-batches on this process, each with its latents.
        images: mean number of images per process in it, which its losses were divided by.
        outcome: what the guard saw and decided; the same on all processes.
        loss: mean loss over all processes; NaN where it is not known.
        draws: timesteps and losses (B,) of the images of each micro-batch on this process, on the device.
    """

    step: int
    epoch: int
    window: Window
    images: float
    outcome: StepOutcome
    loss: float
    draws: Sequence[tuple[Tensor, Tensor]] = ()


class Watcher(Protocol):
    """Sees every window, on every process, in the same order. It may say that the run ends (``state.stopped_by``).

    The gradients of the window are already cleared when it is called, and the counters stand behind the window.
    """

    name: str

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Look at one window. Whatever it decides must come out alike on all processes."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on exactly, as plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back."""


@runtime_checkable
class SeesBothEnds(Protocol):
    """A watcher that is also called before the first window and before the last save, in training mode."""

    def before_training(self, loop: TrainingLoop) -> None:
        """Look at what the run begins with; a resumed one has its state already."""

    def after_training(self, loop: TrainingLoop) -> None:
        """Put right what is about to be saved. After an error it is called on that process alone, perhaps twice."""


def networks_of(loop: TrainingLoop) -> dict[str, nn.Module]:
    """Return the networks that a step runs, by component."""
    trainee: Any = loop.parts.accelerator.unwrap_model(loop.parts.trainee)
    denoiser = loop.parts.family.denoiser_naming.component
    return {denoiser if name == "denoiser" else name: network for name, network in trainee.networks.items()}


@contextmanager
def as_saved(loop: TrainingLoop) -> Iterator[None]:
    """Give networks and optimizer the weights that a file would have, in evaluation mode, and the live ones after.

    Schedule-free optimizers change the weights by rounding each time they switch, so those are put back to the bit.
    """
    parameters = [parameter for _, parameter in loop.parts.named_parameters]
    live = [parameter.detach().clone() for parameter in parameters] if loop.parts.optimizer_has_modes else []
    loop.read_mode()
    try:
        yield
    finally:
        loop.train_mode()
        with torch.no_grad():
            for parameter, before in zip(parameters, live, strict=False):
                parameter.copy_(before)


@contextmanager
def on_bare_networks(loop: TrainingLoop) -> Iterator[None]:
    """Run without the wrapper that exchanges gradients: a process must not wait for others here."""
    wrapped = loop.parts.trainee
    loop.parts.trainee = loop.parts.accelerator.unwrap_model(wrapped)
    try:
        yield
    finally:
        loop.parts.trainee = wrapped
