"""``maulstick generate``: pictures from a base model, LoRA files and an IP-Adapter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from maulstick.adapters.block_presets import read_presets
from maulstick.adapters.block_weights import BlockLayout, block_list
from maulstick.errors import OptionError
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.options.generate import GenerateOptions, OutputOptions, PictureOptions, Sampler
from maulstick.pictures.drawing import Picture, draw_pictures, refuse_samplers, refuse_sizes
from maulstick.pictures.grid import labelled_grid
from maulstick.pictures.picture_files import PictureFacts, UsedLora, write_new_picture
from maulstick.pictures.prompts import LARGEST_SEED, Prompt, check_prompts, default_prompt, parse_prompt, read_prompts
from maulstick.tools.apply_ip_adapter import apply_ip_adapter, check_choice
from maulstick.tools.apply_lora import OUTSIDE, AppliedLora, apply_loras
from maulstick.tools.block_sheet import draw_block_sheets
from maulstick.tools.lora_choice import parse_lora_choice

_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LARGEST_DRAWN_SEED = 2**32 - 1


def generate_command(options: GenerateOptions) -> int:
    """Run the command: draw, and print the path of every picture."""
    generate(options, say=print)
    return 0


def generate(options: GenerateOptions, say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Draw pictures and return their paths, that of the grid last where one was asked for.

    Args:
        say: is given one line of progress at a time.

    Raises:
        OptionError: nothing to draw, or an option is unusable.
        ModelError: the model or a LoRA file cannot be used.
    """
    prompts = _collect_prompts(options.picture)
    choices = [parse_lora_choice(text) for text in options.lora.lora]
    presets = {} if options.lora.lbw_presets is None else read_presets(options.lora.lbw_presets)
    if options.output.grid == "block" and not choices:
        raise OptionError("--grid block shows the blocks of a LoRA. Give a file with --lora, or use --grid alone.")
    check_choice(options.ip_adapter)
    if options.output.grid == "block" and options.ip_adapter.ip_adapter is not None:
        raise OptionError("--grid block shows the blocks of a LoRA. Leave --ip_adapter out, or use --grid alone.")
    device, precision = _device(options.output), options.output.precision
    if precision == "auto":
        precision = "fp16" if device.type == "cuda" else "float"
    family = load_family(options.model, device=device, dtype=_DTYPES[precision])
    refuse_samplers(family, [options.picture.sampler, *(prompt.sampler for prompt in prompts)])
    jobs = _complete(prompts, options.picture, family)
    for note in family.notes:
        say(note)
    # A run that is repeated with its seed draws the same weights.
    draw = random.Random(options.picture.seed)
    loras = apply_loras(family, choices, presets=presets, draw=draw)
    for lora in loras:
        say(_describe(lora, family.block_layout()))
    # After the LoRA: the other way round the LoRA would go into the IP-Adapter as well.
    image = apply_ip_adapter(family, options.ip_adapter)
    if image is not None:
        say(f"{options.ip_adapter.ip_adapter} at {image[1].scale:g}, looking at {image[1].image}")
    for note in dict.fromkeys(note for job in jobs for note in job.notes):
        say(note)
    facts = PictureFacts(
        model=Path(options.model.pretrained_model_name_or_path or "").stem,
        precision=precision,
        vae=Path(options.model.vae).stem if options.model.vae else None,
        clip_skip=options.model.clip_skip,
        loras=[_used(lora) for lora in loras],
        ip_adapter=None if image is None else image[1],
    )
    if options.output.grid == "block":
        return draw_block_sheets(family, loras, jobs, options, facts, say)
    pictures: list[Picture] = []
    paths: list[Path] = []

    def finished(picture: Picture) -> None:
        suffix = f"-{picture.prompt.seed}"
        paths.append(write_new_picture(picture.image, options.output.output_dir, suffix, picture.prompt, facts))
        pictures.append(picture)
        say(f"{paths[-1]}  ({len(paths)} of {len(jobs)}: {picture.prompt.text}, seed {picture.prompt.seed})")

    prompt_image = None if image is None else image[0]
    draw_pictures(family, jobs, finished, batch_size=options.picture.batch_size, image_prompt=prompt_image)
    if options.output.grid:
        paths.append(_write_grid(pictures, options, facts))
        say(str(paths[-1]))
    return paths


def _collect_prompts(options: PictureOptions) -> list[Prompt]:
    for name in ("steps", "images_per_prompt", "batch_size", "width", "height"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} is {value}; it must be at least 1.")
    if not math.isfinite(options.scale):
        raise OptionError(f"--scale is {options.scale}; it must be a finite number.")
    if options.seed is not None and not 0 <= options.seed <= LARGEST_SEED:
        raise OptionError(
            f"--seed is {options.seed}; it must be a whole number from 0 to {LARGEST_SEED}. Leave it out to draw one."
        )
    prompts = [parse_prompt(text, where="--prompt") for text in options.prompt]
    if options.prompt_file is not None:
        prompts += read_prompts(options.prompt_file)
    if not prompts:
        raise OptionError('Nothing to draw: give --prompt "a cat", or --prompt_file FILE with one prompt a line.')
    check_prompts(prompts, get_args(Sampler))
    return prompts


def _complete(prompts: Sequence[Prompt], options: PictureOptions, family: Family) -> list[Prompt]:
    """Fill in what the prompts leave open, and repeat each with the seeds of its pictures."""
    usual = default_prompt(family.native_size)
    given = parse_prompt(f"--w {options.width or usual.width} --h {options.height or usual.height}", where="--width")
    first_seed = random.randint(0, _LARGEST_DRAWN_SEED) if options.seed is None else options.seed
    defaults = replace(
        given,
        negative=options.negative_prompt,
        seed=first_seed,
        scale=options.scale,
        steps=options.steps,
        sampler=options.sampler,
    )
    whole = [prompt.completed(defaults).fitted(family.size_multiple) for prompt in prompts]
    refuse_sizes(family, whole)
    return [
        replace(prompt, seed=(prompt.seed or 0) + number)
        for prompt in whole
        for number in range(options.images_per_prompt)
    ]


def _device(options: OutputOptions) -> torch.device:
    if options.device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"--device {options.device} cannot be used here ({reason}). Try --device cpu.") from error
    return device


def _used(lora: AppliedLora) -> UsedLora:
    choice, ratios = lora.choice, lora.ratios
    return UsedLora(
        choice.path.stem,
        choice.weight,
        lora.data_hash,
        text_encoder_weight=choice.text_encoder_weight,
        unet_weight=choice.denoiser_weight,
        lbw=choice.lbw,
        lbw_values=None if ratios is None else ratios.values,
    )


def _describe(lora: AppliedLora, layout: BlockLayout) -> str:
    choice = lora.choice
    text = f"{choice.path} at {choice.weight:g}"
    if choice.text_encoder_weight is not None:
        text += f", text encoder {choice.text_encoder_weight:g}"
    if choice.denoiser_weight is not None:
        text += f", UNet {choice.denoiser_weight:g}"
    if lora.ratios is not None:
        text += f", lbw {','.join(f'{value:g}' for value in lora.ratios.values)}"
    text += f": {lora.modules} modules"
    strengths = lora.strengths(layout.names)
    acting = sum(count for place, count in lora.modules_by_place.items() if strengths[place])
    if acting < lora.modules:
        text += f", {acting} of them at a strength other than 0"
    if lora.ratios is not None:
        not_listed = [index for index in lora.ratios.not_listed if lora.modules_by_place.get(layout.names[index])]
        if not_listed:
            text += f"; {block_list(not_listed, layout)} have no place in a list of {len(lora.ratios.values)} and get 0"
        if outside := lora.modules_by_place.get(OUTSIDE):
            text += f"; {outside} are in no block and keep their strength"
    if lora.unmatched:
        text += (
            f"; {len(lora.unmatched)} have no place in this model and are left out ({', '.join(lora.unmatched[:3])})"
        )
    return text


def _write_grid(pictures: Sequence[Picture], options: GenerateOptions, facts: PictureFacts) -> Path:
    """Write a row for each prompt; the text in the file is that of the first picture."""
    per_row = options.picture.images_per_prompt
    rows = [pictures[start : start + per_row] for start in range(0, len(pictures), per_row)]
    sheet = labelled_grid(
        [[picture.image for picture in row] for row in rows],
        row_labels=[row[0].prompt.text for row in rows],
        column_labels=_column_labels(rows),
    )
    return write_new_picture(sheet, options.output.output_dir, "-grid", pictures[0].prompt, facts)


def _column_labels(rows: Sequence[Sequence[Picture]]) -> list[str]:
    """Seeds above the columns, where all rows have the same."""
    seeds = [[picture.prompt.seed for picture in row] for row in rows]
    return [f"seed {seed}" for seed in seeds[0]] if all(row == seeds[0] for row in seeds) else []
