"""A probe from a prepared run to its report: images, draws, gradients, trial updates, suggestion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from maulstick.adapters.lora import inject_lora
from maulstick.errors import OptionError
from maulstick.options.probe import ProbeOptions
from maulstick.tools.probe_draws import DrawMaker, LossBench, Replicate, split_images, take_images
from maulstick.tools.probe_measure import GradientFacts, Trial, block_factors, measure_gradients, try_update
from maulstick.tools.probe_report import BlockProbe, ProbeReport, block_lr_entries, ranks, suggested_weights
from maulstick.train.console import RunConsole
from maulstick.train.prepare import Prepared

_FEW_IMAGES = 8


def probe_blocks(
    prepared: Prepared, probe: ProbeOptions, console: RunConsole, notes: Sequence[str] = ()
) -> ProbeReport:
    """Attach a LoRA to the denoiser, measure every block that has modules, and leave the LoRA as it started, at zero.

    Args:
        prepared: a run without weights by block and without ``network_weights``.
        notes: lines for the user to put into the report.

    Raises:
        OptionError: no module is in a block.
        ModelError: a gradient is not finite.
    """
    return _Probing(prepared, probe, console).report(notes)


class _Probing:
    """What the parts of a probe share."""

    def __init__(self, prepared: Prepared, probe: ProbeOptions, console: RunConsole) -> None:
        family, run = prepared.family, prepared.options.run
        component = family.denoiser_naming.component
        targets, rates = prepared.targets[component], prepared.rates[component]
        if probe.probe_lr is not None:
            rates = replace(rates, learning_rate=probe.probe_lr)
        self.prepared, self.probe, self.console = prepared, probe, console
        self.precision = run.mixed_precision
        self.learning_rate = rates.learning_rate
        self.outside = sum(target.block is None for target in targets)
        if self.outside == len(targets):
            raise OptionError(f"No module of the {component} is in a block, so there is nothing to compare.")
        self.images = take_images(prepared, probe.probe_images, console)
        self.learned, self.judged = split_images(self.images)
        inject_lora(family.denoiser, targets, seed=prepared.seed)
        family.denoiser.requires_grad_(False)
        self.blocks = block_factors(family, targets, rates)
        self.bench = LossBench(family, prepared.options.objective, self.precision, prepared.plan.batch_size)
        self.draws = DrawMaker(family, prepared.seed, probe.probe_timesteps)
        self.held_back: list[Replicate] = self.draws.replicates(self.judged, "held back")

    def report(self, notes: Sequence[str]) -> ProbeReport:
        gradients = self._gradients()
        before = self.bench.all_losses([draw for replicate in self.held_back for draw in replicate])
        *trials, together = self._trials(before)
        weights = suggested_weights(trials, gradients)
        rows = zip(self.blocks, gradients, trials, ranks(trials), weights, strict=True)
        names = [block.name for block in self.blocks]
        return ProbeReport(
            model=self.prepared.plan.model,
            family=self.prepared.family.name,
            blocks=[
                BlockProbe(block.index, block.name, block.modules, block.parameters, gradient, trial, rank, weight)
                for block, gradient, trial, rank, weight in rows
            ],
            together=together,
            loss_before=float(before.mean()),
            settings=self._settings(),
            notes=[*self.prepared.plan.notices, *notes, *self._remarks(weights)],
            suggestion=[] if self.outside else block_lr_entries(names, weights),
        )

    def _gradients(self) -> list[GradientFacts]:
        replicates = self.draws.replicates(self.images, "gradients")
        self.console.begin("gradients", sum(map(len, replicates)))
        try:
            return measure_gradients(self.bench, self.blocks, replicates, self.precision, self.console.advance)
        finally:
            self.console.end()

    def _trials(self, before: Tensor) -> list[Trial]:
        """Try every block alone, and all together at the end."""
        probe = self.probe
        updates = self.draws.batches(self.learned, probe.probe_steps, probe.probe_batch_size, "updates")
        trials = []
        self.console.begin("trial updates", len(self.blocks) + 1)
        try:
            for tried in [*([block] for block in self.blocks), self.blocks]:
                trials.append(try_update(self.bench, tried, updates, self.held_back, before, self.precision))
                self.console.advance()
        finally:
            self.console.end()
        return trials

    def _settings(self) -> dict[str, Any]:
        family, probe = self.prepared.family, self.probe
        return {
            "seed": self.prepared.seed,
            "device": str(family.device),
            "precision": self.precision,
            "optimizer": "Adam",
            "learning_rate": self.learning_rate,
            "updates": probe.probe_steps,
            "images_per_update": probe.probe_batch_size,
            "images_at_once": self.bench.batch_size,
            "timestep_parts": probe.probe_timesteps,
            "gradient_draws": sum(map(len, self.draws.replicates(self.images, "gradients"))),
            "held_back_draws": sum(map(len, self.held_back)),
            "learned_from": [image.name for image in self.learned],
            "judged_on": [image.name for image in self.judged],
        }

    def _remarks(self, weights: Sequence[float]) -> list[str]:
        remarks = []
        if len(self.images) < _FEW_IMAGES:
            same = " Trials are judged on the image they learn from." if self.judged is self.learned else ""
            remarks.append(f"Only {len(self.images)} images: what they agree on may be theirs alone.{same}")
        if self.precision != "no":
            remarks.append(
                f"mixed_precision = {self.precision} rounds every loss, so that small changes drown in it; a probe "
                "with mixed_precision = no sees more."
            )
        if self.outside:
            remarks.append(
                f"{self.outside} modules are in no block. They were not measured, and because of them block_lr cannot "
                "be used with these options: there is no suggestion."
            )
        elif not any(weights):
            remarks.append(
                "No block lowers the loss clearly or shows a signal: there is no suggestion. Try more images, more "
                "probe_steps or another probe_lr."
            )
        return remarks
