"""What ``maulstick probe`` found, as numbers, as JSON and as text, and the weights it suggests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from maulstick import __version__
from maulstick.tools.lora_tables import console, number
from maulstick.tools.probe_measure import GradientFacts, Trial
from maulstick.train.events import json_value

LOWEST_WEIGHT = 0.25
_WEIGHT_STEP = 0.05
_TABLE_WIDTH = 110
LEAST_SHARE = 0.01
"""A block that surely lowers the loss by less than this share of what the best block does counts as no help."""
CLEAR = 2.0
"""A change of the loss, or a signal, counts as clear from this many standard errors on."""

MEASURES = {
    "loss_change": "Mean loss of held-back draws after a short training of this block alone, minus before: the same "
    "images, noise and timesteps both times. Below 0 is better. The error is the standard error over images.",
    "gradient_norm": "Root mean square, over images and timesteps, of the norm of the loss gradient with respect to "
    "the block's base weights, estimated from the LoRA's up factors (the only ones with a gradient at the start) "
    "through its random down factors, so that rank and alpha do not count.",
    "snr": "Squared norm of the mean gradient (estimated without bias, so it may come out below 0) by the variance of "
    "the gradient of one image: how far images and timesteps agree on where to go. 1/snr images are the batch at which "
    "signal and noise are equal.",
    "seconds_per_image": "Forward and backward pass of training this block alone; rough, the fastest of few.",
}
DOES_NOT_SAY = (
    "It sees the first updates from a LoRA of zero, not the end of training: a block that starts slowly may matter "
    "later.",
    "It sees one block at a time. What blocks can do together, or in each other's place, shows only in how far the sum "
    "of the single changes is from the change of all together.",
    "It sees the training loss, not pictures: style, likeness and overfitting are not in it.",
    "It sees a few images and draws: blocks whose changes differ by less than their errors are in no sure order.",
    "The suggested weights are a rule of thumb from these numbers. No training was run to check them.",
)
RULE = (
    f"Weight = the block's lowering of the loss by that of the best block, between {LOWEST_WEIGHT:g} and 1, in steps "
    f"of {_WEIGHT_STEP:g}; 0 for a block whose lowering of the loss, even with {CLEAR:g} standard errors added, is "
    f"below {LEAST_SHARE:.0%} of the best block's, and whose gradient shows no signal (within {CLEAR:g} standard "
    "errors of nothing). Nothing is suggested where no block helps clearly or shows a signal."
)


@dataclass(frozen=True)
class BlockProbe:
    """What was measured for one block, its place among all (1 lowers the loss most) and its suggested weight."""

    index: int
    name: str
    modules: int
    parameters: int
    gradient: GradientFacts
    trial: Trial
    rank: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """All that a probe found.

    Attributes:
        blocks: those that have modules, in the order of the model.
        together: the trial update of all blocks at once.
        loss_before: mean loss of the held-back draws under the base model.
        settings: how it was measured, JSON-ready.
        notes: what the user should know about this probe.
        suggestion: entries of ``block_lr``; empty where there is nothing to suggest.
    """

    model: str
    family: str
    blocks: Sequence[BlockProbe]
    together: Trial
    loss_before: float
    settings: dict[str, Any]
    notes: Sequence[str]
    suggestion: Sequence[str]

    @property
    def ranked(self) -> list[BlockProbe]:
        """The blocks, the one that lowers the loss most first."""
        return sorted(self.blocks, key=lambda block: block.rank)

    def share_of_cost(self, block: BlockProbe) -> float:
        """Return the seconds of training this block alone by those of training all blocks."""
        return block.trial.seconds_per_image / self.together.seconds_per_image

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        result = {
            "maulstick": __version__,
            "model": self.model,
            "family": self.family,
            "settings": self.settings,
            "loss_before": self.loss_before,
            "blocks": [self._block_json(block) for block in self.blocks],
            "all_blocks": asdict(self.together) | {"parameters": sum(block.parameters for block in self.blocks)},
            "block_lr": list(self.suggestion),
            "measures": MEASURES,
            "does_not_say": DOES_NOT_SAY,
            "rule": RULE,
            "notes": self.notes,
        }
        converted: dict[str, Any] = json_value(result)
        return converted

    def _block_json(self, block: BlockProbe) -> dict[str, Any]:
        return {
            "block": block.name,
            "index": block.index,
            "modules": block.modules,
            "parameters": block.parameters,
            "rank": block.rank,
            "loss_change": block.trial.change,
            "loss_change_error": block.trial.error,
            "gradient_norm": block.gradient.norm,
            "signal": block.gradient.signal,
            "signal_error": block.gradient.signal_error,
            "noise": block.gradient.noise,
            "snr": block.gradient.snr,
            "seconds_per_image": block.trial.seconds_per_image,
            "share_of_cost": self.share_of_cost(block),
            "weight": block.weight,
        }


# ---------------------------------------------------------------------------------------------------------------------
# Ranks and weights


def ranks(trials: Sequence[Trial]) -> list[int]:
    """Return the place of each trial, 1 for the one that lowers the loss most; diverged ones come last."""
    order = sorted(range(len(trials)), key=lambda place: _gain(trials[place]), reverse=True)
    return [order.index(place) + 1 for place in range(len(trials))]


def suggested_weights(trials: Sequence[Trial], gradients: Sequence[GradientFacts]) -> list[float]:
    """Return a learning-rate weight for each block by ``RULE``; all 0 where there is nothing to suggest.

    A block is left out for what is known of it, never for what is not: few images make errors large, not weights 0.
    """
    has_signal = [gradient.signal > CLEAR * gradient.signal_error for gradient in gradients]
    best = max(map(_gain, trials))
    if not any(has_signal) and not any(_gain(trial) > CLEAR * trial.error for trial in trials):
        return [0.0] * len(trials)
    weights = []
    for trial, signal in zip(trials, has_signal, strict=True):
        gain = _gain(trial)
        may_help = math.isfinite(gain) and gain + CLEAR * trial.error >= LEAST_SHARE * best
        share = max(0.0, gain) / best if best > 0 else 0.0
        weight = max(LOWEST_WEIGHT, round(round(share / _WEIGHT_STEP) * _WEIGHT_STEP, 2))
        weights.append(weight if may_help or signal else 0.0)
    return weights


def block_lr_entries(names: Sequence[str], weights: Sequence[float]) -> list[str]:
    """Return ``block_lr`` with an entry for each block; empty where every weight is 0, which nothing could train."""
    if not any(weights):
        return []
    return [f"{name}={weight:g}" for name, weight in zip(names, weights, strict=True)]


def _gain(trial: Trial) -> float:
    """By how much the loss fell; a trial whose loss is not finite gained less than any other."""
    return -trial.change if math.isfinite(trial.change) else -math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Text


def print_report(report: ProbeReport) -> None:
    """Show the table, what it means and what not, and the suggestion."""
    out = console()
    out.print(f"{report.model}: {report.family}, loss of the held-back draws {report.loss_before:.4f}", soft_wrap=True)
    out.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("block", "loss change", "± error", "snr", "gradient norm", "parameters", "s/image", "of all", "block_lr")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for block in report.ranked:
        table.add_row(
            block.name,
            *_trial_cells(block.trial, report.loss_before),
            number(block.gradient.snr, ".3g"),
            number(block.gradient.norm, ".3g"),
            f"{block.parameters:,}",
            f"{block.trial.seconds_per_image:.3g}",
            f"{report.share_of_cost(block):.0%}",
            f"{block.weight:g}",
        )
    parameters = sum(block.parameters for block in report.blocks)
    trial = report.together
    cells = _trial_cells(trial, report.loss_before)
    table.add_row("all", *cells, "", "", f"{parameters:,}", f"{trial.seconds_per_image:.3g}", "100%", "")
    # Figures are never shortened, whatever the terminal's width.
    console(_TABLE_WIDTH).print(table)
    total = sum(block.trial.change for block in report.blocks)
    out.print(f"(sum of the single changes: {total / report.loss_before:+.3%})")
    out.print()
    for name, text in (("loss change", "loss_change"), ("snr", "snr"), ("gradient norm", "gradient_norm")):
        out.print(f"{name}: {MEASURES[text]}", soft_wrap=True)
    out.print(f"s/image: {MEASURES['seconds_per_image']}", soft_wrap=True)
    out.print()
    out.print("What this does not say:")
    for line in DOES_NOT_SAY:
        out.print(f"- {line}", soft_wrap=True)
    out.print()
    for note in report.notes:
        out.print(f"note: {note}", soft_wrap=True)
    if report.suggestion:
        out.print(RULE, soft_wrap=True)
        out.print(f"suggested: --block_lr {' '.join(report.suggestion)}", soft_wrap=True)
        out.print(f'in a file: block_lr = "{" ".join(report.suggestion)}"', soft_wrap=True)


def _trial_cells(trial: Trial, loss_before: float) -> tuple[str, str]:
    if not math.isfinite(trial.change):
        return "diverged", ""
    return f"{trial.change / loss_before:+.3%}", f"{trial.error / loss_before:.3%}"
