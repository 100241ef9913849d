"""Picture files with what they were drawn from in their text, as other programs read it and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from maulstick import __version__
from maulstick.files_io import atomic_write
from maulstick.pictures.prompts import Prompt

# What the web UI calls these samplers.
_WEB_UI_SAMPLERS: Mapping[str, str] = {
    "ddim": "DDIM",
    "pndm": "PLMS",
    "lms": "LMS",
    "euler": "Euler",
    "euler_a": "Euler a",
    "dpmsolver": "DPM-Solver",
    "dpmsolver++": "DPM++ 2M",
}
JSON_KEY = "maulstick"
PARAMETERS_KEY = "parameters"


@dataclass(frozen=True)
class UsedLora:
    """A LoRA as pictures name it.

    Attributes:
        data_hash: sha256 of its tensor data.
        text_encoder_weight, unet_weight: where these differ from ``weight``.
        lbw: weights by block as they were given: a preset's name or a list.
        lbw_values: the same as numbers, in the order of the LoRA Block Weight extension.
    """

    name: str
    weight: float
    data_hash: str
    text_encoder_weight: float | None = None
    unet_weight: float | None = None
    lbw: str | None = None
    lbw_values: tuple[float, ...] | None = None

    def tag(self) -> str:
        """Return it as the web UI's prompts name it: ``<lora:NAME:TE:UNET:lbw=…>``."""
        text_encoder = self.weight if self.text_encoder_weight is None else self.text_encoder_weight
        unet = self.weight if self.unet_weight is None else self.unet_weight
        parts = [f"{text_encoder:g}"] if text_encoder == unet else [f"{text_encoder:g}", f"{unet:g}"]
        if self.lbw_values is not None:
            parts.append("lbw=" + ",".join(f"{value:g}" for value in self.lbw_values))
        return f"<lora:{self.name}:{':'.join(parts)}>"


@dataclass(frozen=True)
class UsedIpAdapter:
    """An IP-Adapter as pictures name it, with its reference image's file name."""

    name: str
    scale: float
    data_hash: str
    image: str


@dataclass(frozen=True)
class PictureFacts:
    """What all pictures of one call have in common."""

    model: str
    precision: str
    vae: str | None = None
    clip_skip: int | None = None
    loras: Sequence[UsedLora] = ()
    ip_adapter: UsedIpAdapter | None = None


def parameters_text(prompt: Prompt, facts: PictureFacts) -> str:
    """Return the text that AUTOMATIC1111's web UI writes into its pictures and that other programs read.

    The prompt, a line with the negative prompt if there is one, and a line of "Name: value" pairs.
    """
    tags = "".join(f" {lora.tag()}" for lora in facts.loras)
    sampler = prompt.sampler or ""
    values: dict[str, object] = {
        "Steps": prompt.steps,
        "Sampler": _WEB_UI_SAMPLERS.get(sampler, sampler),
        "CFG scale": f"{prompt.scale:g}",
        "Seed": prompt.seed,
        "Size": f"{prompt.width}x{prompt.height}",
        "Model": facts.model,
    }
    if facts.vae:
        values["VAE"] = facts.vae
    if facts.clip_skip and facts.clip_skip > 1:
        values["Clip skip"] = facts.clip_skip
    if facts.loras:
        values["Lora hashes"] = ", ".join(f"{lora.name}: {lora.data_hash[:12]}" for lora in facts.loras)
    if facts.ip_adapter is not None:
        used = facts.ip_adapter
        values["IP-Adapter"] = f"{used.name} {used.data_hash[:12]}, {used.image}, scale {used.scale:g}"
    values["Version"] = f"maulstick {__version__}"
    lines = [prompt.text + tags]
    if prompt.negative:
        lines.append(f"Negative prompt: {prompt.negative}")
    lines.append(", ".join(f"{name}: {_quoted(str(value))}" for name, value in values.items()))
    return "\n".join(lines)


def picture_record(prompt: Prompt, facts: PictureFacts) -> dict[str, Any]:
    """Return everything that a picture was drawn from, JSON-ready."""
    return {
        "version": __version__,
        "prompt": prompt.text,
        "negative_prompt": prompt.negative,
        "width": prompt.width,
        "height": prompt.height,
        "seed": prompt.seed,
        "steps": prompt.steps,
        "scale": prompt.scale,
        "sampler": prompt.sampler,
        "model": facts.model,
        "vae": facts.vae,
        "clip_skip": facts.clip_skip,
        "precision": facts.precision,
        "ip_adapter": None if facts.ip_adapter is None else vars(facts.ip_adapter),
        "loras": [{key: value for key, value in vars(lora).items() if value is not None} for lora in facts.loras],
    }


def write_picture(image: Image.Image, path: Path, prompt: Prompt, facts: PictureFacts) -> None:
    """Write a PNG in one step, with its parameters as text."""
    text = PngInfo()
    text.add_text(PARAMETERS_KEY, parameters_text(prompt, facts))
    text.add_text(JSON_KEY, json.dumps(picture_record(prompt, facts), ensure_ascii=False))
    atomic_write(path, lambda temporary: image.save(temporary, format="PNG", pnginfo=text))


def write_new_picture(image: Image.Image, folder: Path, suffix: str, prompt: Prompt, facts: PictureFacts) -> Path:
    """Write a PNG under the next free number, ``00001SUFFIX.png``; a file that is there is never replaced."""
    path = reserve_name(folder, suffix)
    try:
        write_picture(image, path, prompt, facts)
    except BaseException:
        path.unlink()
        raise
    return path


def reserve_name(folder: Path, suffix: str) -> Path:
    """Create an empty file under the number after the highest one in the folder, and return its path.

    Two programs that draw into one folder at the same time never get the same file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = [int(match[1]) for path in folder.iterdir() if (match := re.match(r"(\d{5,})", path.name))]
    number = max(taken, default=0) + 1
    while True:
        path = folder / f"{number:05d}{suffix}.png"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return path


def _quoted(value: str) -> str:
    """The pairs are split at commas, so a value that holds one is quoted, as JSON."""
    return json.dumps(value, ensure_ascii=False) if re.search(r"[,:\n\"]", value) else value
