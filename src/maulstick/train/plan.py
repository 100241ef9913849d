"""What a run will do, worked out before anything is trained; ``check`` shows it, ``train`` begins with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maulstick.adapters.kinds import AdapterKind
from maulstick.adapters.targets import LoraTarget
from maulstick.data.findings import Finding, counted, names
from maulstick.options.schema import TrainOptions
from maulstick.train.rates import ComponentRates


@dataclass(frozen=True)
class ComponentPlan:
    """One network with an adapter: how many modules and values, and how fast they learn.

    Attributes:
        learning_rate: before weights by block and LoRA+'s ratio.
        network_type: name of the kind of adapter, for people.
        groups: name in the log -> learning rate of each parameter group.
        rank: block size of an OFT; None where modules differ, as for alpha and scale.
        scale: ``alpha / rank``, by which the update is multiplied.
        strength: what is to be said in place of that; None where nothing is.
    """

    component: str
    log_name: str
    network_type: str
    learning_rate: float
    groups: Mapping[str, float]
    modules: int
    parameters: int
    rank: int | None
    alpha: float | None
    scale: float | None
    strength: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known before the first step. Counts of images include repeats where the name says so.

    ``further`` is what is to be said about what trains besides its components; ``validation_images`` names those that
    are held back; ``base_bytes``: memory of each frozen network, ``in_fp8``: those that are kept in eight bits.
    """

    model: str
    family: str
    base_model_version: str
    prediction_type: str
    resolution: tuple[int, int]
    further_resolutions: Sequence[tuple[int, int]]
    images: int
    captions: int
    train_images: int
    reg_images: int
    folders: Sequence[Mapping[str, Any]]
    buckets: Sequence[Mapping[str, Any]]
    batch_size: int
    gradient_accumulation_steps: int
    processes: int
    batches_per_epoch: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    warmup_steps: int
    lr_scheduler: str
    optimizer: str
    components: Sequence[ComponentPlan]
    modules_per_block: Mapping[int, int]
    block_lr_weights: Sequence[float] | None
    block_names: Sequence[str]
    further: str | None
    precision: str
    device: str
    seed: int
    validation_images: Sequence[str]
    base_bytes: Mapping[str, int]
    in_fp8: Sequence[str]
    findings: Sequence[Finding]
    notices: Sequence[str]

    @property
    def images_per_step(self) -> int:
        """Images per update over all processes, where no bucket runs short."""
        return self.batch_size * self.gradient_accumulation_steps * self.processes

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready values."""
        simple = {
            name: value
            for name, value in vars(self).items()
            if name not in ("components", "findings", "modules_per_block", "resolution")
        }
        return simple | {
            "resolution": list(self.resolution),
            "images_per_step": self.images_per_step,
            "components": [vars(component) for component in self.components],
            "modules_per_block": {str(block): count for block, count in self.modules_per_block.items()},
            "findings": [finding.as_json() for finding in self.findings],
        }


def component_plan(rates: ComponentRates, targets: Sequence[LoraTarget], kind: AdapterKind) -> ComponentPlan:
    """Sum up the targets of one component."""
    ranks, alphas = {t.dim for t in targets}, {t.alpha for t in targets}
    scales = {t.alpha / t.dim for t in targets}
    rank = ranks.pop() if len(ranks) == 1 else None
    return ComponentPlan(
        component=targets[0].component,
        log_name=rates.log_name,
        network_type=kind.title,
        learning_rate=rates.learning_rate,
        groups=rates.groups(targets),
        modules=len(targets),
        parameters=sum(kind.parameter_count(target) for target in targets),
        rank=rank,
        alpha=alphas.pop() if len(alphas) == 1 else None,
        scale=scales.pop() if len(scales) == 1 else None,
        strength=kind.strength_sentence(rank),
    )


def modules_per_block(indices: Sequence[int | None], blocks: int) -> dict[int, int]:
    """Return block index -> number of modules, for every block of the family, from the block of each module."""
    counted = Counter(indices)
    return {block: counted.get(block, 0) for block in range(blocks)}


def length_of_training(options: TrainOptions, steps_per_epoch: int) -> tuple[int, int]:
    """Return (steps, epochs); ``max_train_epochs`` takes the place of ``max_train_steps``, as in sd-scripts."""
    if options.run.max_train_epochs is not None:
        return options.run.max_train_epochs * steps_per_epoch, options.run.max_train_epochs
    return options.run.max_train_steps, math.ceil(options.run.max_train_steps / steps_per_epoch)


def alpha_sentence(component: ComponentPlan) -> str:
    """Say what alpha does at this rank, or what the kind of adapter has instead."""
    if component.strength is not None:
        return component.strength
    if component.scale is None or component.rank is None:
        return "alpha and rank differ between modules"
    text = f"alpha {component.alpha:g} at rank {component.rank} multiplies what is learned by {component.scale:g}"
    if component.scale < 1:
        text += f" (network_alpha = {component.rank} would be 1)"
    return text


def groups_sentence(component: ComponentPlan) -> str:
    """Say how the learning rates of the groups differ from that of the whole; nothing where there is one group."""
    if len(component.groups) == 1:
        return ""
    rates = component.groups.values()
    return f" (from {min(rates):g} to {max(rates):g} in {len(rates)} groups)"


def base_sentence(plan: Plan) -> str:
    """Say how much memory the frozen networks take."""
    parts = [
        f"{name} {size / 1e9:.3g} GB" + (" in 8 bits" if name in plan.in_fp8 else "")
        for name, size in plan.base_bytes.items()
    ]
    return f"{', '.join(parts)}, frozen"


def weights_sentence(weights: Sequence[float], names: Sequence[str]) -> str:
    """List the weights by block, neighbours of equal weight as a range."""
    runs: list[list[int]] = []
    for index, weight in enumerate(weights):
        if runs and weight == weights[runs[-1][0]]:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = []
    for run in runs:
        name = names[run[0]] if len(run) == 1 else f"{names[run[0]]}-{names[run[-1]]}"
        parts.append(f"{name} {weights[run[0]]:.3g}")
    return ", ".join(parts)


def plan_lines(plan: Plan, *, with_findings: bool = True) -> list[str]:
    """Return the plan as lines of plain text; ``with_findings`` adds what was found, and the notices."""
    sizes = ", ".join(f"{width}x{height}" for width, height in [plan.resolution, *plan.further_resolutions])
    lines = [
        f"model      {plan.model}  ({plan.family}, {plan.base_model_version}, predicts {plan.prediction_type})",
        f"data       {plan.images} images, {plan.captions} captions; {plan.train_images} per epoch with repeats"
        + (f" + {plan.reg_images} regularisation images" if plan.reg_images else ""),
    ]
    lines += [
        f"           {folder['folder']}: {folder['images']} images x {folder['repeats']}"
        + (f", {folder['masks']} with masks" if folder["masks"] else "")
        + (", random crops" if folder["random_crop"] else "")
        + (", random colours" if folder["color_aug"] else "")
        + (" (regularisation)" if folder["is_reg"] else "")
        for folder in plan.folders
    ]
    if plan.validation_images:
        count = f"{len(plan.validation_images)} images held back, never trained"
        lines.append(f"validates  {count}: {names(plan.validation_images)}")
    shown = ", ".join(f"{b['resolution'][0]}x{b['resolution'][1]}: {b['count']}" for b in plan.buckets[:12])
    more = f" and {len(plan.buckets) - 12} more" if len(plan.buckets) > 12 else ""
    lines.append(f"sizes      {sizes}; " + (f"buckets {shown}{more}" if len(plan.buckets) > 1 else f"all {shown}"))
    lines.append(
        f"length     {plan.total_steps} steps of {plan.images_per_step} images = {counted(plan.epochs, 'epoch')} of "
        f"{counted(plan.steps_per_epoch, 'step')}"
    )
    for component in plan.components:
        lines.append(
            f"trains     {component.component}: {component.modules} modules ({component.network_type}), "
            f"{component.parameters:,} values, "
            f"learning rate {component.learning_rate:g}{groups_sentence(component)}; {alpha_sentence(component)}"
        )
    if plan.further:
        lines.append(f"           {plan.further}")
    blocks = " ".join(f"{plan.block_names[b]}:{n}" for b, n in plan.modules_per_block.items() if n)
    if blocks:
        lines.append(f"blocks     {blocks}")
    if plan.block_lr_weights is not None:
        lines.append(f"weights    {weights_sentence(plan.block_lr_weights, plan.block_names)}")
    warmup = f", warm-up {plan.warmup_steps} steps" if plan.warmup_steps else ""
    lines.append(f"base       {base_sentence(plan)}")
    lines.append(f"optimizer  {plan.optimizer}, {plan.lr_scheduler}{warmup}")
    lines.append(f"device     {plan.device}, precision {plan.precision}, seed {plan.seed}")
    if with_findings:
        lines += [f"note       {notice}" for notice in plan.notices]
        lines += [f"{finding.severity:<10} {finding.text}" for finding in plan.findings]
    return lines
