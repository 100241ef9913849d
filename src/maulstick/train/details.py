"""Norms of each block and the loss by timestep, written every so many steps; no reads from the device between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maulstick.adapters.factors import product_norm
from maulstick.adapters.lora import DEFAULT_ADAPTER, lora_modules
from maulstick.families.base import Family
from maulstick.guard.sources import GradientSource, TensorGroup
from maulstick.train.watchers import WindowDone, networks_of

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop

TIMESTEPS = 1000
BIN_WIDTH = 50
BINS = TIMESTEPS // BIN_WIDTH
OUTSIDE = "outside"
"""Name for what is trained in the denoiser and belongs to no block."""


def block_of(family: Family, name: str) -> str:
    """Return the block of a trained tensor or module, named by component and path; a text encoder is one block."""
    component, _, path = name.partition(".")
    if component != family.denoiser_naming.component:
        return component
    index = family.block_index(path)
    return OUTSIDE if index is None else family.block_names()[index]


def blocks_as_groups(family: Family, parameters: Sequence[tuple[str, nn.Parameter]]) -> GradientSource:
    """Return the parameters as the guard measures them: their order stays, and it gives each block's norm too."""
    return GradientSource(
        tuple(
            TensorGroup(block, [parameter for _, parameter in members], [name for name, _ in members])
            for block, members in (
                (block, list(run)) for block, run in groupby(parameters, lambda item: block_of(family, item[0]))
            )
        )
    )


class DetailWatcher:
    """Writes a ``blocks`` and a ``timesteps`` event every ``interval`` steps and after the last one.

    The guard has measured the blocks' gradients with the whole; norms of the weights are read once per event. Losses
    and timesteps stay on the device until then. They are those of the images on the first process.
    """

    name = "details"

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._drawn: list[tuple[Tensor, Tensor]] = []
        self._blocks: list[str] | None = None
        self._modules: list[Any] = []

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Keep the window's losses; write an event when it is due."""
        for (batch, _), (timesteps, losses) in zip(done.window, done.draws, strict=False):
            weights = [item.loss_weight for item in batch.items]
            if all(weight == 1.0 for weight in weights):
                self._drawn.append((timesteps, losses))
            elif kept := [place for place, weight in enumerate(weights) if weight > 0]:
                # Without the weight of regularisation images; one that is left out (weight 0) was not trained.
                factors = losses.new_tensor([1.0 / weights[place] for place in kept])
                self._drawn.append((timesteps[kept], losses[kept] * factors))
        step = done.step + 1
        if step % self.interval == 0 or step == loop.parts.total_steps:
            self._write_blocks(loop, step, done.outcome.verdict.group_norms)
            self._write_timesteps(loop, step)

    def before_training(self, loop: TrainingLoop) -> None:
        """Do nothing."""

    def after_training(self, loop: TrainingLoop) -> None:
        """Write the losses since the last event."""
        self._write_timesteps(loop, loop.state.step)

    def _write_blocks(self, loop: TrainingLoop, step: int, gradients: Mapping[str, float]) -> None:
        if not loop.parts.accelerator.is_main_process:
            return
        what, weights = self._weight_norms(loop)
        loop.parts.records.events.write(
            "blocks", step=step, gradient=_rounded(gradients), weight=_rounded(weights), weight_is=what
        )

    def _write_timesteps(self, loop: TrainingLoop, step: int) -> None:
        if self._drawn and loop.parts.accelerator.is_main_process:
            counts, means = by_timestep(*self._read())
            loop.parts.records.events.write("timesteps", step=step, width=BIN_WIDTH, count=counts, loss=means)
        self._drawn.clear()

    def _read(self) -> tuple[list[float], list[float]]:
        pairs = torch.stack([torch.cat([each[part].float() for each in self._drawn]) for part in (0, 1)])
        timesteps, losses = pairs.tolist()
        return timesteps, losses

    @torch.no_grad()
    def _weight_norms(self, loop: TrainingLoop) -> tuple[str, dict[str, float]]:
        """Return what is measured, and the norm for each block; one read.

        ``change``: of what a LoRA adds to the weights. ``tensors``: of the trained tensors, for other kinds.
        """
        if self._blocks is None:
            self._find_modules(loop)
        blocks = self._blocks or []
        if self._modules:
            norms = [
                product_norm(
                    module.lora_A[DEFAULT_ADAPTER].weight,
                    module.lora_B[DEFAULT_ADAPTER].weight,
                    module.lora_alpha[DEFAULT_ADAPTER] / module.r[DEFAULT_ADAPTER],
                )
                for module in self._modules
            ]
        else:
            norms = list(torch._foreach_norm([parameter for _, parameter in loop.parts.named_parameters]))
        values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
        squares = dict.fromkeys(blocks, 0.0)
        for block, value in zip(blocks, values, strict=True):
            squares[block] += value * value
        return "change" if self._modules else "tensors", {block: math.sqrt(each) for block, each in squares.items()}

    def _find_modules(self, loop: TrainingLoop) -> None:
        family = loop.parts.family
        found = [
            (block_of(family, f"{network}.{path}"), module)
            for network, root in networks_of(loop).items()
            for path, module in lora_modules(root).items()
        ]
        self._modules = [module for _, module in found]
        self._blocks = [block for block, _ in found] or [block_of(family, n) for n, _ in loop.parts.named_parameters]

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that are not written yet."""
        return {"drawn": list(self._read()) if self._drawn else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._drawn = [(torch.tensor(state["drawn"][0]), torch.tensor(state["drawn"][1]))] if state["drawn"] else []


def by_timestep(timesteps: Sequence[float], losses: Sequence[float]) -> tuple[list[int], list[float | None]]:
    """Return for each of 20 bins of 50 timesteps how many finite losses fell into it, and their mean."""
    counts, sums = [0] * BINS, [0.0] * BINS
    for timestep, loss in zip(timesteps, losses, strict=True):
        if math.isfinite(loss):
            place = min(BINS - 1, max(0, int(timestep) // BIN_WIDTH))
            counts[place] += 1
            sums[place] += loss
    means = [_short(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
    return counts, means


def _rounded(norms: Mapping[str, float]) -> dict[str, float]:
    return {name: _short(value) for name, value in norms.items()}


def _short(value: float) -> float:
    """Six digits are enough for a picture, and a long run has many of them."""
    return float(f"{value:.6g}")
