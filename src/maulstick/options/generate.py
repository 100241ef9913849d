"""Every option of ``maulstick generate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from maulstick.options.schema import ModelOptions

Sampler = Literal["ddim", "pndm", "lms", "euler", "euler_a", "dpmsolver", "dpmsolver++"]


@Parameter(name="*", group="Pictures")
@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    prompt: list[str] = field(default_factory=list)
    """What to draw; several are drawn one after the other. May carry --n --w --h --d --l --s behind the text."""
    prompt_file: Path | None = None
    """Text file with one prompt a line, with sd-scripts' --n --w --h --d --l --s --ss options."""
    negative_prompt: str = ""
    """What not to draw, for prompts without their own --n."""
    width: int | None = None
    """Width in pixels; without it 512, or the model's own size where that is smaller or 1024 (SDXL, SD3)."""
    height: int | None = None
    """Height in pixels; the same."""
    steps: int = 30
    """Denoising steps."""
    scale: float = 7.5
    """Guidance scale: how closely a picture follows its prompt."""
    seed: int | None = None
    """Seed of the first picture of a prompt, the next one has the next; without it one is drawn and shown."""
    sampler: Sampler = "euler"
    """Sampler."""
    images_per_prompt: int = 1
    """Pictures for each prompt."""
    batch_size: int = 1
    """Pictures drawn at once; changes speed and memory, not what is drawn."""


@Parameter(name="*", group="LoRA")
@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    lora: list[str] = field(default_factory=list)
    """LoRA file, or file:0.8 with a weight; behind it :te=0.5, :unet=1, :lbw=OUTALL weigh parts and blocks."""
    lbw_presets: Path | None = None
    """File of further presets for lbw=, as the LoRA Block Weight extension has it (lbwpresets.txt)."""


@Parameter(name="*", group="IP-Adapter")
@dataclass(frozen=True, kw_only=True)
class IpAdapterChoice:
    ip_adapter: Path | None = None
    """IP-Adapter file (.safetensors, or .bin); needs ip_image and image_encoder."""
    ip_image: Path | None = None
    """Reference image for it."""
    ip_scale: float = 1.0
    """Its strength; 1 is what Maulstick trains at, published ones are often used at 0.5 to 0.8."""
    image_encoder: Path | None = None
    """Folder of the image encoder that it was trained with."""


@Parameter(name="*", group="Output")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    output_dir: Path = Path("images")
    """Folder for the pictures; nothing in it is overwritten."""
    grid: bool | Literal["block"] = False
    """Also write one picture with all of them; `--grid block`: instead, a sheet with every block alone and left out."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["auto", "float", "fp16", "bf16"] = "auto"
    """Number format of the model; auto is fp16 on a GPU and float on a CPU."""


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """All options of one call of ``maulstick generate``."""

    model: ModelOptions = field(default_factory=ModelOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    ip_adapter: IpAdapterChoice = IpAdapterChoice()
    picture: PictureOptions = field(default_factory=PictureOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
