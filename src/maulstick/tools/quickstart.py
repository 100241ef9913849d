"""``maulstick quickstart``: the whole main job on a small model that ships with the package, with its effect shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from maulstick.data.captions import read_caption
from maulstick.data.images import read_rgb
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.files_io import atomic_write
from maulstick.options.load import load_train_options
from maulstick.options.schema import ModelOptions
from maulstick.pictures.drawing import Picture, draw_pictures
from maulstick.pictures.grid import labelled_grid
from maulstick.pictures.prompts import Prompt, default_prompt, read_prompts
from maulstick.tools.apply_lora import apply_loras, parse_lora_choice
from maulstick.tools.report.command import report_of_finished_run
from maulstick.train.run import TrainingRun
from maulstick.train.validate import denoising_loss

ASSETS = Path(__file__).parent.parent / "assets" / "quickstart"
GRID_NAME = "before-after.png"
_GRID_CELL = 128


@dataclass(frozen=True)
class HeldOut:
    """Images of the new style that training never sees, as latents (N, C, H, W) with their captions."""

    latents: Tensor
    captions: list[str]


def run_quickstart(output_dir: Path) -> int:
    """Train a LoRA on the images that ship with Maulstick; write it, a before/after grid and the log."""
    model, images = ASSETS / "model", ASSETS / "images"
    arguments = ["--config_file", str(ASSETS / "quickstart.toml"), "--pretrained_model_name_or_path", str(model)]
    loaded = load_train_options([*arguments, "--train_data_dir", str(images), "--output_dir", str(output_dir)])
    run = TrainingRun(loaded)
    run.records.when_closed = report_of_finished_run
    say = run.console.say
    say("Maulstick's quickstart: a small Stable Diffusion 1.x model that draws Twemoji learns the OpenMoji style.")
    prepared = run.prepare()
    family = prepared.family
    held_out = read_held_out(family, ASSETS / "heldout")
    loss_before = denoising_loss(family, held_out.latents, held_out.captions)
    prompts = _complete(read_prompts(ASSETS / "prompts.txt"), family)
    before = _draw(family, prompts)
    result = run.train()
    if result.path is None or result.exit_code:
        return result.exit_code or 1
    loss_after = denoising_loss(family, held_out.latents, held_out.captions)
    # Drawn with the file just written, on a model loaded anew: what any other program would do with it.
    after = _draw_with_file(model, result.path, prompts, family.device)
    grid = _before_after_grid(before, after, prompts)
    atomic_write(output_dir / GRID_NAME, lambda path: grid.save(path, format="PNG"))
    say("")
    say(f"held-out denoising loss   before {loss_before:.4f}   after {loss_after:.4f}")
    say(f"the LoRA                  {result.path}")
    say(f"before/after pictures     {output_dir / GRID_NAME}")
    say(f"the log                   {output_dir / (loaded.options.run.output_name + '.events.jsonl')}")
    say("")
    say("The same with your own model and images:")
    say("  maulstick train --pretrained_model_name_or_path MODEL --train_data_dir IMAGES --output_dir out \\")
    say("                  --network_dim 16 --network_alpha 16 --learning_rate 1e-4 --mixed_precision bf16")
    return 0


def read_held_out(family: Family, folder: Path) -> HeldOut:
    """Read and encode a folder of images with .txt captions, all of one size."""
    paths = sorted(folder.glob("*.png"))
    pixels = [torch.from_numpy(read_rgb(path)).permute(2, 0, 1).float() / 127.5 - 1 for path in paths]
    captions = [read_caption(path.with_suffix(".txt")).lines[0] for path in paths]
    latents = torch.cat([family.encode_images(part) for part in torch.stack(pixels).split(8)])
    return HeldOut(latents, captions)


def _complete(prompts: Sequence[Prompt], family: Family) -> list[Prompt]:
    usual = replace(default_prompt(family.native_size), sampler="ddim")
    return [prompt.completed(replace(usual, seed=place)) for place, prompt in enumerate(prompts)]


def _draw(family: Family, prompts: Sequence[Prompt]) -> list[Image.Image]:
    pictures: list[Picture] = []
    draw_pictures(family, prompts, pictures.append, batch_size=len(prompts))
    return [picture.image for picture in pictures]


def _draw_with_file(model: Path, lora: Path, prompts: Sequence[Prompt], device: torch.device) -> list[Image.Image]:
    family = load_family(ModelOptions(pretrained_model_name_or_path=str(model)), device=device, dtype=torch.float32)
    apply_loras(family, [parse_lora_choice(f"{lora}:1")])
    return _draw(family, prompts)


def _before_after_grid(
    before: Sequence[Image.Image], after: Sequence[Image.Image], prompts: Sequence[Prompt]
) -> Image.Image:
    """Return two rows of pictures, a column for each prompt."""
    return labelled_grid(
        [before, after],
        row_labels=["before", "after"],
        column_labels=[prompt.text for prompt in prompts],
        cell=_GRID_CELL,
    )
