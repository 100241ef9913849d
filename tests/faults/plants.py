"""Faults to plant into a run that is ready to train."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from maulstick.train.run import TrainingRun
from tests.faults.trials import Plant

PLACE = 3
"""The number of the parameter that is harmed."""


def parts_of(run: TrainingRun) -> Any:
    """Return what the loop works with."""
    assert run.loop is not None
    return run.loop.parts


def bad_latents(values: Mapping[int, float]) -> Plant:
    """One value in the latents of the image of each of these windows (from 0), for all of the run."""

    def plant(run: TrainingRun) -> None:
        parts = parts_of(run)
        for window, value in values.items():
            item = parts.batches.batch(0, window).items[0]
            key = parts.latents._keys(item.record)[item.flipped]
            parts.latents._kept[key] = parts.latents._kept[key].clone()
            parts.latents._kept[key][0, 3, 3] = value

    return plant


def bad_captions(values: Mapping[int, float]) -> Plant:
    """One value in the text states of the caption of each of these windows (from 0), for all of the run."""

    def plant(run: TrainingRun) -> None:
        parts = parts_of(run)
        for window, value in values.items():
            caption = parts.batches.batch(0, window).items[0].caption
            for tensor in parts.text_states._pinned[caption].values():
                tensor.view(-1)[5] = value

    return plant


def before_windows(harms: Mapping[int, Callable[[TrainingRun], None]]) -> Plant:
    """Do harm before the windows with these numbers (from 0)."""

    def plant(run: TrainingRun) -> None:
        loop = run.loop
        assert loop is not None
        train_step = loop.train_step

        def harmed(window: Any, images: float) -> Any:
            if loop.state.step in harms:
                harms[loop.state.step](run)
            return train_step(window, images)

        loop.train_step = harmed  # type: ignore[method-assign]

    return plant


def bad_gradients(values: Mapping[int, float]) -> Plant:
    """One value in one gradient of each of these windows (from 0)."""

    def plant(run: TrainingRun) -> None:
        loop = run.loop
        assert loop is not None
        update = loop.update

        def harmed(window: Any, loss: torch.Tensor) -> Any:
            if loop.state.step in values:
                gradient = loop.parts.named_parameters[PLACE][1].grad
                assert gradient is not None
                gradient.view(-1)[1] = values[loop.state.step]
            return update(window, loss)

        loop.update = harmed  # type: ignore[method-assign]

    return plant


def bad_weight(value: float) -> Callable[[TrainingRun], None]:
    """One value in one weight."""

    def harm(run: TrainingRun) -> None:
        parts_of(run).named_parameters[PLACE][1].data.view(-1)[1] = value

    return harm


def bad_moment(name: str, value: float) -> Callable[[TrainingRun], None]:
    """One value in one moment of AdamW."""

    def harm(run: TrainingRun) -> None:
        parts = parts_of(run)
        parts.optimizer.state[parts.named_parameters[PLACE][1]][name].view(-1)[1] = value

    return harm


def loss_times(factor: float, steps: Collection[int]) -> Plant:
    """Multiply the losses of the windows with these numbers, and so their gradients."""

    def plant(run: TrainingRun) -> None:
        loop = run.loop
        assert loop is not None
        forward = loop.forward

        def harmed(*arguments: Any) -> torch.Tensor:
            return forward(*arguments) * (factor if loop.state.step in steps else 1.0)

        loop.forward = harmed  # type: ignore[method-assign]

    return plant


def loss_scale(scale: float) -> Plant:
    """Begin with a loss scale that overflows."""

    def plant(run: TrainingRun) -> None:
        scaler = parts_of(run).scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})

    return plant


def signal_at(step: int, number: signal.Signals) -> Plant:
    """Send the process a signal before a window."""
    return before_windows({step: lambda run: os.kill(os.getpid(), number)})


def image_gone(step: int, later: int) -> Plant:
    """Remove, before the window ``step``, the image of the window ``later``."""

    def remove(run: TrainingRun) -> None:
        Path(parts_of(run).batches.batch(0, later).items[0].record.path).unlink()

    return before_windows({step: remove})


def ends_when_lost(run: TrainingRun) -> None:
    """Let a run without rescue end when a weight is not finite: it stays so, and the rest would take time only."""
    loop = run.loop
    assert loop is not None

    class Watches:
        name = "ends_when_lost"

        def after_window(self, loop: Any, done: Any) -> None:
            if not all(bool(torch.isfinite(p).all()) for _, p in loop.parts.named_parameters):
                loop.state.stopped_by = "the weights are lost"

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    loop.parts.watchers = [*loop.parts.watchers, Watches()]


NAN, INF = math.nan, math.inf
