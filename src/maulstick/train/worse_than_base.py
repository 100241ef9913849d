"""Goes back when the adapter does harm: with it the base model predicts worse than without it, step after step.

A learning rate that is far too high wrecks the weights within the first steps. Every later loss is then as high as the
one before, so that neither the guardian nor the rescue, which compare a run with itself, can see anything. The base
model can: the same noise on the same images gives a loss without the adapter, and no luck of the draw lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from maulstick.rescue import StateRing
from maulstick.train.rescue import goes_back_too
from maulstick.train.watchers import WindowDone, networks_of, on_bare_networks

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop
    from maulstick.train.loop_parts import LoopParts

FIRST_LOOK, MOST_APART = 8, 256
LOOKS, RATIO = 8, 1.5
LOWERINGS, FACTOR = 3, 0.1


class WorseThanBase:
    """Looks at the windows 8, 16, 32 and so on, later at every 256th; one that is bad is followed by the next window.

    A look is one forward pass without the adapter and without gradient. When in ``LOOKS`` windows in a row the loss was
    more than ``RATIO`` times that of the base model, the weights of the last good look (or of the start) are put back,
    and training goes on with ``FACTOR`` times the learning rate, for good. After ``LOWERINGS`` of these the run ends
    instead. A window that the optimizer did not step on is passed over; the next one is looked at.

    ``went_back`` is called after every return, so that nobody keeps states of the weights that did harm.
    """

    name = "worse_than_base"

    def __init__(self, parts: LoopParts, went_back: Callable[[TrainingLoop], None]) -> None:
        store = "cpu" if parts.accelerator.device.type == "cuda" else "same"
        self.ring = StateRing(
            parts.optimizer,
            parameters=parts.named_parameters,
            scaler=parts.scaler,
            extra=goes_back_too(parts),
            keep=1,
            store=store,
        )
        self._went_back = went_back
        self._next_look = FIRST_LOOK
        self._ratios: list[float] = []
        self._lowered = 0

    def before_training(self, loop: TrainingLoop) -> None:
        """Keep the weights at the start; a resumed run has its own, and the rate it had come to."""
        if not self.ring.slots:
            self.ring.take(loop.state.step)
            self._next_look += loop.state.step
        loop.rate_scales[self.name] = FACTOR**self._lowered

    def after_training(self, loop: TrainingLoop) -> None:
        """Do nothing; the weights were put back when they were found to do harm."""

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Look at a window when it is due, and go back, or end the run, after too many bad ones in a row."""
        step = loop.state.step
        if step < self._next_look or not done.outcome.stepped or not math.isfinite(done.loss):
            return
        base = loss_without_adapter(loop, done)
        if not (math.isfinite(base) and base > 0):
            return
        if done.loss > RATIO * base:
            self._ratios.append(done.loss / base)
            if len(self._ratios) >= LOOKS and loop.state.stopped_by is None:
                self._go_back(loop)
            return
        self._ratios.clear()
        self._next_look = step + min(MOST_APART, max(FIRST_LOOK, step))
        # One window proves nothing, but a level that lasts is found out before the next good look.
        self.ring.take(step)

    def _go_back(self, loop: TrainingLoop) -> None:
        step, kept = loop.state.step, self.ring.slots[-1]
        self.ring.restore(kept)
        low, middle, high = (f"{measure(self._ratios):.3g}" for measure in (min, median, max))
        why = (
            f"with the adapter the model predicts worse than without it: in {len(self._ratios)} steps in a row its "
            f"loss was {low} to {high} times that of the base model on the same noise (median {middle})"
        )
        facts = {"step": step, "back_to": kept.step, "ratios": [round(each, 4) for each in self._ratios]}
        records = loop.parts.records
        if self._lowered == LOWERINGS:
            records.events.write("worse_than_base", **facts)
            loop.state.stopped_by = (
                f"{why}, at {FACTOR**LOWERINGS:g} times the learning rate too. "
                f"The weights are those of step {kept.step}"
            )
            return
        self._ratios.clear()
        self._lowered += 1
        self._next_look = step + FIRST_LOOK
        scale = loop.rate_scales[self.name] = FACTOR**self._lowered
        self._went_back(loop)
        text = (
            f"{why}. The learning rate is most likely too high: back to the state of step {kept.step}, and on with "
            f"{scale:g} times the rate"
        )
        records.console.say(f"step {step}: rescued: {text}")
        records.events.write(
            "rescue", **facts, cause=self.name, windows_lost=step - kept.step, text=text, lr_scale=scale
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the kept weights, and what the next looks depend on."""
        return {
            "ring": self.ring.state_dict(),
            "next_look": self._next_look,
            "ratios": list(self._ratios),
            "lowered": self._lowered,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        self.ring.load_state_dict(state["ring"])
        self._next_look, self._ratios = int(state["next_look"]), list(state["ratios"])
        self._lowered = int(state["lowered"])


def can_be_left_out(trainee: nn.Module) -> bool:
    """Whether the networks can answer without what is trained; an IP-Adapter is part of the attention it is in."""
    return any(isinstance(module, BaseTunerLayer) for module in trainee.modules())


@torch.no_grad()
def loss_without_adapter(loop: TrainingLoop, done: WindowDone) -> float:
    """Return the base model's mean loss over the window, on all processes, with the draws that the window had."""
    parts = loop.parts
    total = torch.zeros((), device=parts.accelerator.device)
    with on_bare_networks(loop), torch.random.fork_rng(devices=[]), _without_adapters(networks_of(loop)):
        for place, (batch, latents) in enumerate(done.window):
            noise = loop.noise_generator(done.step, place)
            total += loop.forward(batch, latents, noise).sum() / done.images
    mean: torch.Tensor = parts.accelerator.reduce(total, "mean")
    return float(mean)


@contextmanager
def _without_adapters(networks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let the base layers answer alone. Unlike peft's own switch it leaves alone which tensors want a gradient."""
    layers: list[Any] = [
        each for network in networks.values() for each in network.modules() if isinstance(each, BaseTunerLayer)
    ]
    before = [each._disable_adapters for each in layers]
    for each in layers:
        each._disable_adapters = True
    try:
        yield
    finally:
        for each, disabled in zip(layers, before, strict=True):
            each._disable_adapters = disabled
