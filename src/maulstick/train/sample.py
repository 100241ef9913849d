"""Sample pictures while training, drawn with the live networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from maulstick.errors import MaulstickError
from maulstick.families.base import Family
from maulstick.families.ip_adapter import ImagePrompt
from maulstick.pictures.drawing import Picture, draw_pictures
from maulstick.pictures.picture_files import PictureFacts, write_picture
from maulstick.pictures.prompts import Prompt, default_prompt


class SampleError(MaulstickError):
    """Samples could not be drawn or written. Nothing of the training was touched; it can go on."""


def draw_samples(
    family: Family,
    prompts: Sequence[Prompt],
    *,
    sampler: str,
    output_dir: Path,
    label: str,
    seed: int,
    facts: PictureFacts,
    image_prompt: ImagePrompt | None = None,
    busy: Callable[[str | None], None] = lambda what: None,
) -> list[Path]:
    """Draw a picture for each prompt with the networks as they are now; return ``output_dir/LABEL_00.png`` and so on.

    Networks are used in place, in evaluation mode, and put back into the mode they were in; encoders that had been
    released are released again; no random state of the process is used or changed. The pictures are those that
    ``maulstick generate`` draws with the LoRA saved at this moment.

    Args:
        sampler: for prompts that name none.
        label: what the file names begin with, such as ``step00000100``.
        seed: of the first prompt where it has none of its own; the next one has the next. The same at every call of a
            run, so that pictures of one prompt differ by the training alone.
        facts: what is written into the files.
        image_prompt: reference image for the IP-Adapter that is in the denoiser.
        busy: told which picture is being drawn, and None at the end.

    Raises:
        SampleError: drawing or writing failed; the message says why.
    """
    paths: list[Path] = []

    def finished(picture: Picture) -> None:
        path = output_dir / f"{label}_{len(paths):02d}.png"
        write_picture(picture.image, path, picture.prompt, facts)
        paths.append(path)
        busy(f"drawing {min(len(paths) + 1, len(prompts))} of {len(prompts)}")

    busy(f"drawing 1 of {len(prompts)}")
    try:
        draw_pictures(family, _completed(prompts, family, sampler, seed), finished, image_prompt=image_prompt)
    except (MaulstickError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SampleError(
            f"Sample pictures for {label} failed after {len(paths)} of {len(prompts)}: {reason}"
        ) from error
    finally:
        busy(None)
        if family.device.type == "cuda":
            torch.cuda.empty_cache()
    return paths


def _completed(prompts: Sequence[Prompt], family: Family, sampler: str, seed: int) -> list[Prompt]:
    usual = replace(default_prompt(family.native_size), sampler=sampler)
    return [prompt.completed(replace(usual, seed=seed + place)) for place, prompt in enumerate(prompts)]
