"""Every option of the tools around a LoRA file: inspect, diff, merge, extract, resize and convert."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

SavePrecision = Literal["float", "fp16", "bf16"]
LayoutName = Literal["kohya", "diffusers", "peft", "comfyui", "instantx"]
UnetNaming = Literal["sai", "diffusers"]
ResizeRule = Literal["sv_fro", "sv_energy", "sv_ratio", "sv_cumulative"]

Json = Annotated[bool, Parameter(name="json")]


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    as_json: Json = False
    """Print one JSON object instead of tables."""
    chart: Path | None = None
    """Also write a bar chart of norm and effective rank of every block to this .png file."""
    modules: bool = False
    """List every module, not only the blocks."""
    metadata: bool = False
    """Show all of the metadata, not only what matters most."""


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    as_json: Json = False
    """Print one JSON object instead of tables."""


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    output: Path | None = None
    """File to write. Required."""
    save_precision: SavePrecision | None = None
    """Number format of what is written; without it that of what was read. Everything is computed in fp32."""
    set_aside: bool = False
    """Rename what is at --output already, instead of refusing."""


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    base: Path | None = None
    """Checkpoint to merge into: a diffusers folder or one file. Without it the LoRAs become one LoRA."""
    lbw_presets: Path | None = None
    """Preset file of the LoRA Block Weight extension (lbwpresets.txt) with further names for lbw=."""
    rank: int | None = None
    """LoRA + LoRA: cut the sum to this rank by SVD; without it the sum is exact, and its rank the sum of the ranks."""
    save: SaveOptions = field(default_factory=SaveOptions)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class ExtractOptions:
    rank: int = 16
    """Rank of Linear and 1x1 modules; the largest with --energy."""
    conv_rank: int = 0
    """Rank of 3x3 convolutions; with 0 they, and the residual blocks they are in, get no LoRA."""
    energy: float | None = None
    """Keep the smallest rank that holds this share (0 to 1) of a module's squared difference."""
    block_ranks: str | None = None
    """Ranks of single blocks instead of --rank, such as "IN04=32,MID=8,OUT11=0" (0: no LoRA there); SD3: "7=32"."""
    iterations: int = 2
    """Subspace iterations of the randomised SVD: with 2 the error is within 1 % of the best; more come nearer."""
    min_difference: float = 0.0
    """Leave out modules of which no weight differs by more than this (rounding of a half-precision file)."""
    unet_only: bool = False
    """Leave the text encoders out."""
    save: SaveOptions = field(default_factory=SaveOptions)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class ResizeOptions:
    rank: int | None = None
    """New rank; with --rule the largest one. Required."""
    conv_rank: int | None = None
    """New rank of 3x3 convolutions; without it that of the others."""
    rule: ResizeRule | None = None
    """Choose each module's rank by its singular values, with --value."""
    value: float | None = None
    """Share to keep of norm (sv_fro), its square (sv_energy), or sum (sv_cumulative); largest / smallest (sv_ratio)."""
    save: SaveOptions = field(default_factory=SaveOptions)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    to: LayoutName = "kohya"
    """Whose naming: kohya (A1111, Forge, ComfyUI, sd-scripts), diffusers, peft (writes a folder), comfyui.
    IP-Adapters: diffusers, comfyui (a nested .bin), instantx (that of SD3)."""
    unet_names: UnetNaming = "sai"
    """SDXL in kohya's naming: UNet names of the original code (as sd-scripts) or of diffusers."""
    save: SaveOptions = field(default_factory=SaveOptions)
