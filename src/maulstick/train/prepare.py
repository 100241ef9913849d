"""From options to a plan: open the model, read the folders, choose what is trained. ``check`` stops here."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.files import assign_modules, read_lora_file
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.targets import (
    TEXT_ENCODER_CONTAINERS,
    UNET_CONV_CONTAINERS,
    LoraTarget,
    find_targets,
    plan_from_ranks,
    plan_lora,
)
from maulstick.data.batches import BatchSchedule
from maulstick.data.findings import Finding, Severity, names
from maulstick.data.index import build_index
from maulstick.data.records import DatasetIndex
from maulstick.data.summary import DatasetSummary, summarize
from maulstick.errors import OptionError
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.load import LoadedOptions
from maulstick.options.schema import TrainOptions
from maulstick.options.values import parse_steps
from maulstick.train.console import RunConsole, make_console
from maulstick.train.optim import check_optimizer
from maulstick.train.plan import (
    Plan,
    component_plan,
    component_rates,
    length_of_training,
    modules_per_block,
    plan_lines,
)
from maulstick.train.precision import DTYPES
from maulstick.train.schedule import learning_rate_factor

Targets = dict[str, list[LoraTarget]]
StartWeights = dict[str, dict[str, LoraWeights]]


@dataclass
class Prepared:
    """A run that could begin: what ``check`` shows and ``train`` uses.

    Attributes:
        targets: component -> modules that get LoRA; a component that is not trained is not in it.
        rates: component -> learning rate.
        start_weights: component -> path -> weights of ``network_weights``; empty without it.
    """

    options: TrainOptions
    family: Family
    index: DatasetIndex
    batches: BatchSchedule
    targets: Targets
    rates: dict[str, float]
    start_weights: StartWeights
    plan: Plan
    seed: int


def prepare(
    loaded: LoadedOptions, console: RunConsole, *, device: torch.device, rank: int = 0, world: int = 1, seed: int
) -> Prepared:
    """Open the model and the data and work out the plan. Nothing is trained, and nothing is written."""
    options = loaded.options
    specs = dataset_specs(options.dataset)
    family = load_family(
        options.model,
        device=device,
        dtype=DTYPES[options.run.mixed_precision],
        gradient_checkpointing=options.run.gradient_checkpointing,
    )
    index = _read_images(specs, family, console)
    index = replace(index, findings=(*index.findings, *long_captions(index, family, options.model.max_token_length)))
    targets, start_weights, rates = choose_targets(family, options)
    batches = BatchSchedule(index, seed, rank=rank, world=world)
    plan = make_plan(loaded, family, index, batches, targets, rates, seed=seed)
    # Names and rates are refused here, before minutes of caching, not when the optimizer is built.
    check_optimizer(
        options.optimizer.optimizer_type,
        options.optimizer.optimizer_args,
        {component.log_name: component.learning_rate for component in plan.components},
    )
    learning_rate_factor(options.schedule.lr_scheduler, warmup_steps=plan.warmup_steps, total_steps=plan.total_steps)
    return Prepared(options, family, index, batches, targets, rates, start_weights, plan, seed)


def _read_images(specs: Any, family: Family, console: RunConsole) -> DatasetIndex:
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if shown == 0:
            console.begin("reading images", total)
        console.advance(done - shown)
        shown = done

    try:
        return build_index(specs, vae_scale=family.vae_scale, progress=progress)
    finally:
        console.end()


def long_captions(index: DatasetIndex, family: Family, limit: int) -> list[Finding]:
    """Name the images whose captions have more tokens than are used."""
    counted = {caption: family.count_tokens(caption) for record in index.records for caption in record.captions[:1]}
    paths = tuple(record.path for record in index.records if record.captions and counted[record.captions[0]] > limit)
    if not paths:
        return []
    longest = max(counted.values())
    advice = " Shorten them, or set max_token_length to 150 or 225." if limit < 225 else " Shorten them."
    message = f"{names(paths)}: captions of more than {limit} tokens (the longest has {longest}); the rest is cut off.{advice}"
    return [Finding(Severity.WARNING, "caption_too_long", paths, message)]


def log_names_of(family: Family) -> dict[str, str]:
    """Return component name -> name in trackers."""
    names = {component: naming.log_name for component, naming in family.text_encoder_naming.items()}
    return {**names, family.denoiser_naming.component: family.denoiser_naming.log_name}


def choose_targets(family: Family, options: TrainOptions) -> tuple[Targets, StartWeights, dict[str, float]]:
    """Choose the modules that get LoRA, per component, with start weights and learning rates.

    A component whose learning rate is 0 is not trained and is not in the file.
    """
    network = options.network
    denoiser = family.denoiser_naming.component
    text_encoders = list(family.text_encoder_naming)
    denoiser_rate, text_rates = component_rates(options.optimizer, text_encoders)
    rates = {name: rate for name, rate in text_rates.items() if rate and not network.network_train_unet_only}
    if denoiser_rate and not network.network_train_text_encoder_only:
        rates[denoiser] = denoiser_rate
    if not rates:
        raise OptionError(
            "Nothing would be trained: unet_lr and text_encoder_lr (or learning_rate) leave no network a rate above 0."
        )
    networks = {name: family.denoiser if name == denoiser else family.text_encoders[name] for name in rates}
    start_weights = _read_start_weights(network.network_weights, networks, family.name)
    targets: Targets = {}
    for name, root in networks.items():
        block_of = family.block_index if name == denoiser else None
        if network.dim_from_weights:
            ranks = {
                path: (weights.rank, float(weights.rank if weights.alpha is None else weights.alpha))
                for path, weights in start_weights.get(name, {}).items()
            }
            targets[name] = plan_from_ranks(root, ranks, component=name, block_of=block_of) if ranks else []
        else:
            targets[name] = plan_lora(
                root,
                component=name,
                network_dim=network.network_dim,
                network_alpha=network.network_alpha,
                conv_dim=network.conv_dim,
                conv_alpha=network.conv_alpha,
                block_of=block_of,
            )
    targets = {name: chosen for name, chosen in targets.items() if chosen}
    return targets, start_weights, {name: rates[name] for name in targets}


def _read_start_weights(path: Path | None, networks: Mapping[str, nn.Module], family_name: str) -> StartWeights:
    if path is None:
        return {}
    file = read_lora_file(path)
    containers = TEXT_ENCODER_CONTAINERS | UNET_CONV_CONTAINERS
    paths = {name: [module.path for module in find_targets(root, containers)] for name, root in networks.items()}
    assigned = assign_modules(file, SD_KEY_NAMES.table(paths), family_name)
    foreign = [name for name in assigned.unmatched if not _belongs_to_untrained(name, networks)]
    if foreign:
        raise OptionError(
            f"network_weights: {path} holds {len(foreign)} modules that this model does not have "
            f"({', '.join(foreign[:3])}). It was made for another model."
        )
    return assigned.components


def _belongs_to_untrained(name: str, networks: Mapping[str, nn.Module]) -> bool:
    """A file for UNet and text encoder may start a run that trains one of them."""
    location = SD_KEY_NAMES.locate(name)
    return location is not None and location.component not in networks


def make_plan(
    loaded: LoadedOptions,
    family: Family,
    index: DatasetIndex,
    batches: BatchSchedule,
    targets: Targets,
    rates: Mapping[str, float],
    *,
    seed: int,
) -> Plan:
    """Put together everything that is known before the first step."""
    options = loaded.options
    accumulation = options.run.gradient_accumulation_steps
    steps_per_epoch = -(-batches.batches_per_epoch // accumulation)
    total_steps, epochs = length_of_training(options, steps_per_epoch)
    summaries = summarize(index)
    log_names = log_names_of(family)
    denoiser_targets = targets.get(family.denoiser_naming.component, [])
    return Plan(
        model=str(options.model.pretrained_model_name_or_path),
        family=family.name,
        base_model_version=family.base_model_version,
        prediction_type=family.prediction_type,
        resolution=summaries[0].resolution,
        images=len({record.path for record in index.records}),
        captions=sum(1 for record in index.records if record.captions and record.captions[0]),
        train_images=sum(dataset.num_train_images for dataset in index.datasets),
        reg_images=sum(dataset.num_reg_images for dataset in index.datasets),
        folders=_folder_rows(summaries),
        buckets=_bucket_rows(summaries),
        batch_size=max(summary.batch_size for summary in summaries),
        gradient_accumulation_steps=accumulation,
        processes=batches.world,
        batches_per_epoch=batches.batches_in_all,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        total_steps=total_steps,
        warmup_steps=parse_steps(options.schedule.lr_warmup_steps, total_steps),
        lr_scheduler=options.schedule.lr_scheduler,
        optimizer=options.optimizer.optimizer_type,
        components=[component_plan(log_names[name], rates[name], chosen) for name, chosen in targets.items()],
        modules_per_block=modules_per_block(denoiser_targets, len(family.block_names())),
        block_names=list(family.block_names()),
        precision=options.run.mixed_precision,
        device=str(family.device),
        seed=seed,
        findings=list(index.findings),
        notices=[*loaded.notices, *family.notes],
    )


def _folder_rows(summaries: list[DatasetSummary]) -> list[dict[str, Any]]:
    return [
        {
            "folder": folder.folder,
            "images": folder.images,
            "captions": folder.with_caption,
            "repeats": folder.repeats,
            "class_tokens": folder.class_tokens,
            "is_reg": folder.is_reg,
        }
        for summary in summaries
        for folder in summary.folders
    ]


def _bucket_rows(summaries: list[DatasetSummary]) -> list[dict[str, Any]]:
    return [row for summary in summaries for row in summary.as_json()["buckets"]]


def draw_seed(options: TrainOptions) -> int:
    """Return the seed that was given, or a fresh one."""
    return random.SystemRandom().randrange(2**32) if options.run.seed is None else options.run.seed


def default_device() -> torch.device:
    """Return the device a single process trains on: CUDA, Apple's MPS, or the CPU."""
    from accelerate import PartialState

    return PartialState().device


def check_command(loaded: LoadedOptions, as_json: bool) -> int:
    """Print the plan of a run without training."""
    console = make_console("quiet" if as_json else loaded.options.log.console)
    prepared = prepare(loaded, console, device=default_device(), seed=draw_seed(loaded.options))
    if as_json:
        print(json.dumps(prepared.plan.as_json(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(plan_lines(prepared.plan)))
    return 0
