"""From options to a plan: open the model, read the folders, choose what is trained. ``check`` stops here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from maulstick.data.batches import BatchSchedule
from maulstick.data.captions import whole_caption
from maulstick.data.findings import Finding, Severity, names
from maulstick.data.held_back import hold_back
from maulstick.data.index import build_index
from maulstick.data.records import DatasetIndex
from maulstick.data.summary import DatasetSummary, summarize
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.families.prompt_weights import has_loose_brackets, weighted_parts
from maulstick.options.dataset_config import SubsetSpec, dataset_specs
from maulstick.options.load import LoadedOptions
from maulstick.options.schedules import schedule_name
from maulstick.options.schema import TrainOptions
from maulstick.pictures.drawing import refuse_samplers
from maulstick.train.choice import Rates, Targets
from maulstick.train.console import RunConsole, make_console
from maulstick.train.events import json_value
from maulstick.train.ip_adapter_training import IpAdapterTraining
from maulstick.train.lora_training import LoraTraining
from maulstick.train.optim import check_optimizer
from maulstick.train.plan import Plan, length_of_training
from maulstick.train.precision import DTYPES, in_fp8
from maulstick.train.processes import must_use_cpu
from maulstick.train.schedule import learning_rate_factor, schedule_settings
from maulstick.train.trains import Trains
from maulstick.train.validation import validation_seed


@dataclass
class Prepared:
    """A run that could begin: what ``check`` shows and ``train`` uses.

    Attributes:
        trains: what is trained.
    """

    options: TrainOptions
    family: Family
    index: DatasetIndex
    batches: BatchSchedule
    trains: Trains
    plan: Plan
    seed: int

    @property
    def targets(self) -> Targets:
        """Component -> modules that get LoRA; a component that gets none is not in it."""
        return self.trains.targets

    @property
    def rates(self) -> Rates:
        """Component -> learning rates of those modules."""
        return self.trains.rates


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
        objective=options.objective,
    )
    if options.sample.sample_prompts is not None:
        refuse_samplers(family, [options.sample.sample_sampler])
    index = hold_back(_read_images(specs, family, console), validation_seed(options, seed))
    index = replace(index, findings=(*index.findings, *long_captions(index, family, options.model.max_token_length)))
    if options.model.weighted_captions:
        index = replace(index, findings=(*index.findings, *weight_findings(index)))
    trains = choose_what_trains(family, options)
    trains.check_data(index)
    accumulation = options.run.gradient_accumulation_steps
    batches = BatchSchedule(index, seed, rank=rank, world=world, accumulation=accumulation)
    plan = make_plan(loaded, family, index, batches, trains, seed=seed)
    family.refuse_sizes([bucket["resolution"] for bucket in plan.buckets], "resolution: a training picture")
    batches.total_steps = plan.total_steps
    # Names and rates are refused here, before minutes of caching, not when the optimizer is built.
    check_optimizer(
        options.optimizer.optimizer_type,
        options.optimizer.optimizer_args,
        {name: rate for component in plan.components for name, rate in component.groups.items()},
    )
    learning_rate_factor(schedule_settings(options, plan.total_steps))
    return Prepared(options, family, index, batches, trains, plan, seed)


WHAT_TRAINS: Mapping[str, Callable[[Family, TrainOptions], Trains]] = {"ip_adapter": IpAdapterTraining}
"""``network_type`` -> what it trains, where that is no modules with ranks."""


def choose_what_trains(family: Family, options: TrainOptions) -> Trains:
    """Work out what the options ask to train in this model."""
    return WHAT_TRAINS.get(options.network.network_type, LoraTraining)(family, options)


def _read_images(specs: Any, family: Family, console: RunConsole) -> DatasetIndex:
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if shown == 0:
            console.begin("reading images", total)
        console.advance(done - shown)
        shown = done

    try:
        return build_index(specs, vae_scale=family.size_multiple, progress=progress)
    finally:
        console.end()


def long_captions(index: DatasetIndex, family: Family, limit: int) -> list[Finding]:
    """Name the images whose captions have more tokens than are used."""
    captions = {record.record_id: whole_caption(record) for record in index.in_use}
    counted = {caption: family.count_tokens(caption) for caption in captions.values()}
    paths = tuple(record.path for record in index.in_use if counted[captions[record.record_id]] > limit)
    if not paths:
        return []
    longest = max(counted.values())
    message = f"{names(paths)}: captions of more than {limit} tokens (longest: {longest}); the rest is cut off."
    why = "What stands behind the cut is never learned."
    longer = [str(length) for length in family.token_limits if length > limit]
    advice = f"Shorten them, or set max_token_length to {' or '.join(longer)}." if longer else "Shorten them."
    return [Finding(Severity.WARNING, "caption_too_long", paths, message, why, advice)]


def weight_findings(index: DatasetIndex) -> list[Finding]:
    """Say how many captions have weights, and name those whose brackets do not mean what they seem to."""
    captions = {record.path: (whole_caption(record), record.subset) for record in index.records}
    weighted = [path for path, (text, _) in captions.items() if any(weight != 1 for _, weight in weighted_parts(text))]
    if not weighted:
        message = "weighted_captions has no effect: no caption has a weight such as (word:1.3), (word) or [word]."
        return [Finding(Severity.WARNING, "option_without_effect", (), message)]
    message = f"{len(weighted)} of {len(captions)} images have captions with weights ({names(weighted)})."
    findings = [Finding(Severity.INFO, "captions_weighted", tuple(weighted), message)]
    loose = tuple(path for path, (text, _) in captions.items() if has_loose_brackets(text))
    if loose:
        message = f"{names(loose)}: brackets without a partner. Open ones reach to the end, closing ones are letters."
        advice = r"Close them, or write \( or \) where a letter is meant."
        findings.append(Finding(Severity.WARNING, "brackets_unbalanced", loose, message, advice=advice))
    apart = tuple(path for path, (text, subset) in captions.items() if path not in loose and _taken_apart(text, subset))
    if apart:
        message = f"{names(apart)}: brackets around several tags, which are shuffled or dropped one by one."
        why = "A tag that comes away from its bracket has another weight, and so have those behind it."
        advice = "Put every tag into brackets of its own."
        findings.append(Finding(Severity.WARNING, "brackets_around_tags", apart, message, why, advice))
    return findings


def _taken_apart(caption: str, subset: SubsetSpec) -> bool:
    """Whether tags of a caption that are moved or dropped have only one end of a bracket."""
    if not (subset.shuffle_caption or subset.caption_tag_dropout_rate or subset.token_warmup_step):
        return False
    return any(has_loose_brackets(tag) for tag in caption.split(subset.caption_separator))


def make_plan(
    loaded: LoadedOptions,
    family: Family,
    index: DatasetIndex,
    batches: BatchSchedule,
    trains: Trains,
    *,
    seed: int,
) -> Plan:
    """Put together everything that is known before the first step."""
    options = loaded.options
    steps_per_epoch = batches.steps_per_epoch
    total_steps, epochs = length_of_training(options, steps_per_epoch)
    summaries = summarize(index)
    small = in_fp8(family, options.run)
    return Plan(
        model=str(options.model.pretrained_model_name_or_path),
        family=family.name,
        base_model_version=family.base_model_version,
        prediction_type=family.prediction_type,
        resolution=summaries[0].resolution,
        further_resolutions=[summary.resolution for summary in summaries[1:]],
        images=len({record.path for record in index.records}),
        captions=sum(1 for record in index.records if record.caption_file is not None and record.captions),
        train_images=sum(dataset.num_train_images for dataset in index.datasets),
        reg_images=sum(dataset.num_reg_images for dataset in index.datasets),
        folders=_folder_rows(summaries),
        buckets=_bucket_rows(summaries),
        batch_size=max(summary.batch_size for summary in summaries),
        gradient_accumulation_steps=batches.accumulation,
        processes=batches.world,
        batches_per_epoch=batches.batches_in_all,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        total_steps=total_steps,
        warmup_steps=schedule_settings(options, total_steps).warmup_steps,
        lr_scheduler=schedule_name(options.schedule),
        optimizer=options.optimizer.optimizer_type,
        components=trains.components(),
        modules_per_block=trains.modules_per_block(),
        block_lr_weights=None if trains.block_weights is None else list(trains.block_weights),
        block_names=list(family.block_names()),
        further=trains.sentence,
        precision=options.run.mixed_precision,
        device=str(family.device),
        seed=seed,
        validation_images=[f"{image.path.parent.name}/{image.path.name}" for image in index.held_back],
        base_bytes=family.base_bytes(small),
        in_fp8=sorted(small),
        findings=list(index.findings),
        notices=[*loaded.notices, *family.notes, *trains.notes, *_unused_validation(loaded, index)],
    )


def _unused_validation(loaded: LoadedOptions, index: DatasetIndex) -> list[str]:
    """Say which options about validation do nothing where a dataset description holds no image back."""
    given = [name for name, value in vars(loaded.options.validation).items() if value is not None]
    if index.held_back or not given or loaded.options.dataset.dataset_config is None:
        return []
    verb = "has" if len(given) == 1 else "have"
    return [f"{', '.join(given)} {verb} no effect: no image is held back, see validation_split."]


def _folder_rows(summaries: list[DatasetSummary]) -> list[dict[str, Any]]:
    return [
        {
            "folder": folder.folder,
            "images": folder.images,
            "captions": folder.with_caption,
            "repeats": folder.repeats,
            "class_tokens": folder.class_tokens,
            "is_reg": folder.is_reg,
            "masks": folder.with_mask,
            "random_crop": folder.random_crop,
            "color_aug": folder.color_aug,
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

    return PartialState(cpu=must_use_cpu()).device


def check_command(loaded: LoadedOptions, as_json: bool, dry_step: bool = True) -> int:
    """Print the plan of a run and all that is found about it, without training or writing anything.

    Returns 0, or 1 where the training would fail; ``dry_step`` allows to measure on the device.
    """
    # It puts a run together, and so imports this module.
    from maulstick.train.preflight import preflight
    from maulstick.train.preflight_lines import preflight_lines

    console = make_console("quiet" if as_json else loaded.options.log.console)
    prepared = prepare(loaded, console, device=default_device(), seed=draw_seed(loaded.options))
    found = preflight(loaded, prepared, dry=dry_step)
    if as_json:
        print(json.dumps(json_value(prepared.plan.as_json() | {"preflight": found.as_json()}), indent=2))
    else:
        print("\n".join(preflight_lines(prepared.plan, found)))
    return found.exit_code
