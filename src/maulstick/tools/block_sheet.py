"""What each block of a LoRA does to a picture: a sheet with every block alone, and with every block left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PIL.Image import Image

from maulstick.adapters.block_presets import BASE
from maulstick.families.base import Family
from maulstick.options.generate import GenerateOptions
from maulstick.pictures.drawing import Picture, draw_pictures
from maulstick.pictures.grid import labelled_grid
from maulstick.pictures.picture_files import PictureFacts, write_new_picture
from maulstick.pictures.prompts import Prompt
from maulstick.tools.apply_lora import OUTSIDE, AppliedLora, set_block_shares

# Wide enough to compare by eye, small enough for a row of 17 blocks.
_CELL = 256


def draw_block_sheets(
    family: Family,
    loras: Sequence[AppliedLora],
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    facts: PictureFacts,
    say: Callable[[str], None],
) -> list[Path]:
    """Draw a sheet for each prompt and write it; return the paths.

    A column for each place where the files have modules (``BASE`` is the text encoder). The upper row shows what its
    modules do alone, after a picture without any LoRA; the lower row what is left without them, after the picture with
    everything. Weights by block that were given count as well. Only the sheets are written, not their pictures.
    """
    places = _places(family, loras)
    every = [*places, OUTSIDE]
    shares = [
        dict.fromkeys(every, 0.0),
        *({place: float(place == shown) for place in every} for shown in places),
        {},
        *({left_out: 0.0} for left_out in places),
    ]
    images: list[list[Image]] = [[] for _ in prompts]
    for number, share in enumerate(shares):
        set_block_shares(family, loras, share)
        drawn: list[Picture] = []
        draw_pictures(family, prompts, drawn.append, batch_size=options.picture.batch_size)
        for row, picture in zip(images, drawn, strict=True):
            row.append(picture.image)
        say(f"blocks: {number + 1} of {len(shares)}")
    set_block_shares(family, loras)
    return [_write_sheet(row, places, prompt, options, facts, say) for row, prompt in zip(images, prompts, strict=True)]


def _places(family: Family, loras: Sequence[AppliedLora]) -> list[str]:
    """Return the places where any of the files has modules, in the order of the blocks."""
    return [name for name in (BASE, *family.block_names()) if any(lora.modules_by_place.get(name) for lora in loras)]


def _write_sheet(
    images: Sequence[Image],
    places: Sequence[str],
    prompt: Prompt,
    options: GenerateOptions,
    facts: PictureFacts,
    say: Callable[[str], None],
) -> Path:
    columns = len(places) + 1
    sheet = labelled_grid(
        [images[:columns], images[columns:]],
        row_labels=["without LoRA, then each block alone", "with LoRA, then each block left out"],
        column_labels=["", *places],
        cell=_CELL if max(images[0].size) > _CELL else None,
        title=f"{prompt.text}, seed {prompt.seed}",
    )
    path = write_new_picture(sheet, options.output.output_dir, f"-blocks-{prompt.seed}", prompt, facts)
    say(str(path))
    return path
