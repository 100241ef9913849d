"""Names of modules in LoRA files: ``lora_unet_down_blocks_0_attentions_0_proj_in`` and back to module paths.

A name is a prefix for the component and the module path with every dot turned into an underscore. SDXL files use the
paths of the original (SAI) layout for the UNet, SD 1.x/2.x files those of diffusers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Location(NamedTuple):
    """A module: the component of the pipeline and the path in it."""

    component: str
    path: str


# Path components that contain underscores themselves. Everything else between underscores is a component of its own.
_COMPOUND_PARTS = (
    *("down_blocks", "up_blocks", "mid_block", "transformer_blocks", "time_emb_proj", "conv_shortcut"),
    *("proj_in", "proj_out", "to_q", "to_k", "to_v", "to_out", "conv_in", "conv_out"),
    *("time_embedding", "add_embedding", "linear_1", "linear_2"),
    *("text_model", "self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
)
_PART = re.compile("|".join(sorted(_COMPOUND_PARTS, key=len, reverse=True)) + r"|[A-Za-z0-9]+")

# Parts of a residual block, diffusers name -> name in the original layout.
_RESNET_PARTS = {
    "conv1": "in_layers_2",
    "conv2": "out_layers_3",
    "time_emb_proj": "emb_layers_1",
    "conv_shortcut": "skip_connection",
}
# Modules outside the blocks, diffusers name -> name in the original layout.
_OUTER_MODULES = {
    "conv_in": "input_blocks_0_0",
    "conv_out": "out_2",
    "time_embedding_linear_1": "time_embed_0",
    "time_embedding_linear_2": "time_embed_2",
    "add_embedding_linear_1": "label_emb_0_0",
    "add_embedding_linear_2": "label_emb_0_2",
}
_RESNET_PARTS_BACK = {original: part for part, original in _RESNET_PARTS.items()}
_OUTER_MODULES_BACK = {original: module for module, original in _OUTER_MODULES.items()}


def to_original_layout(underscored: str, *, attention_in_first_up_block: bool = True) -> str:
    """Turn an underscored diffusers UNet path into the original layout's; unchanged when it follows no rule.

    ``attention_in_first_up_block`` is true for SDXL; SD 1.x/2.x have none there, which moves that block's upsampler.
    """
    if underscored in _OUTER_MODULES:
        return _OUTER_MODULES[underscored]
    match = re.fullmatch(r"(down|up)_blocks_(\d+)_(resnets|attentions|downsamplers|upsamplers)_(\d+)_(.+)", underscored)
    if match:
        direction, level, role, position, tail = match[1], int(match[2]), match[3], int(match[4]), match[5]
        first = 1 + 3 * level if direction == "down" else 3 * level
        name = "input_blocks" if direction == "down" else "output_blocks"
        if role == "resnets" and tail in _RESNET_PARTS:
            return f"{name}_{first + position}_0_{_RESNET_PARTS[tail]}"
        if role == "attentions":
            return f"{name}_{first + position}_1_{tail}"
        if role == "downsamplers" and direction == "down" and tail == "conv":
            return f"{name}_{first + 2}_0_op"
        if role == "upsamplers" and direction == "up" and tail == "conv":
            place = 2 if level > 0 or attention_in_first_up_block else 1
            return f"{name}_{first + 2}_{place}_conv"
    match = re.fullmatch(r"mid_block_(resnets|attentions)_(\d+)_(.+)", underscored)
    if match:
        role, position, tail = match[1], int(match[2]), match[3]
        if role == "resnets" and tail in _RESNET_PARTS:
            return f"middle_block_{2 * position}_{_RESNET_PARTS[tail]}"
        if role == "attentions" and position == 0:
            return f"middle_block_1_{tail}"
    return underscored


def from_original_layout(underscored: str) -> str:
    """Turn an underscored UNet path of the original layout into diffusers'; unchanged when it follows no rule."""
    if underscored in _OUTER_MODULES_BACK:
        return _OUTER_MODULES_BACK[underscored]
    match = re.fullmatch(r"(input|output)_blocks_(\d+)_(\d)_(.+)", underscored)
    if match:
        number, place, tail = int(match[2]), int(match[3]), match[4]
        if match[1] == "input":
            (level, position), name, sampler = divmod(number - 1, 3), "down_blocks", "downsamplers"
            is_sampler, has_layers = (place, tail) == (0, "op"), level >= 0 and position < 2
        else:
            (level, position), name, sampler = divmod(number, 3), "up_blocks", "upsamplers"
            is_sampler, has_layers = place in (1, 2) and tail == "conv", True
        if is_sampler and level >= 0 and position == 2:
            return f"{name}_{level}_{sampler}_0_conv"
        if has_layers and place == 0 and tail in _RESNET_PARTS_BACK:
            return f"{name}_{level}_resnets_{position}_{_RESNET_PARTS_BACK[tail]}"
        if has_layers and place == 1:
            return f"{name}_{level}_attentions_{position}_{tail}"
    match = re.fullmatch(r"middle_block_([012])_(.+)", underscored)
    if match:
        number, tail = int(match[1]), match[2]
        if number == 1:
            return f"mid_block_attentions_0_{tail}"
        if tail in _RESNET_PARTS_BACK:
            return f"mid_block_resnets_{number // 2}_{_RESNET_PARTS_BACK[tail]}"
    return underscored


def _dotted(underscored: str) -> str | None:
    """Find the dots of an underscored path again; ``None`` when it is not made of the parts we know."""
    parts: list[str] = []
    position = 0
    while position < len(underscored):
        match = _PART.match(underscored, position)
        if match is None or (match.end() < len(underscored) and underscored[match.end()] != "_"):
            return None
        parts.append(match.group())
        position = match.end() + 1
    return ".".join(parts) if parts and not underscored.endswith("_") else None


@dataclass(frozen=True)
class KeyNames:
    """How one family names its modules in LoRA files.

    ``prefixes`` maps component -> prefix, ``read_prefixes`` further prefixes that other programs write;
    ``original_layout`` says whether the UNet is written in the original layout's names; ``read_by_diffusers`` whether
    diffusers' loader knows these names.
    """

    prefixes: Mapping[str, str]
    read_prefixes: Mapping[str, str]
    original_layout: bool
    read_by_diffusers: bool = True

    def name(self, component: str, path: str) -> str:
        """The module's name in a file, without ``.lora_down.weight``."""
        prefix = self.prefixes[component]
        if component.startswith("text_encoder"):
            # Newer versions of transformers have no `text_model` level in CLIPTextModel; every reader expects it.
            path = path if path.startswith("text_model.") else f"text_model.{path}"
        underscored = path.replace(".", "_")
        if self.original_layout and not component.startswith("text_encoder"):
            underscored = to_original_layout(underscored)
        return f"{prefix}_{underscored}"

    def locate(self, name: str) -> Location | None:
        """Component and path of a name in a file, without a model at hand; ``None`` for a name of another scheme.

        UNet paths are diffusers', text-encoder paths begin with ``text_model.``. Both UNet layouts are understood.
        """
        prefixes = {prefix: component for component, prefix in self.prefixes.items()} | dict(self.read_prefixes)
        # The longest first: lora_te1_ must not be taken for lora_te with a path that begins with "1".
        for prefix in sorted(prefixes, key=len, reverse=True):
            if name.startswith(f"{prefix}_"):
                path = _dotted(from_original_layout(name.removeprefix(f"{prefix}_")))
                return None if path is None else Location(prefixes[prefix], path)
        return None

    def table(self, paths: Mapping[str, Iterable[str]]) -> dict[str, Location]:
        """Name -> module for the modules of a model at hand (component -> paths), in every naming we read.

        Exact where ``locate`` has to guess, and gives the paths as this model has them.
        """
        found: dict[str, Location] = {}
        for component, component_paths in paths.items():
            others = [prefix for prefix, owner in self.read_prefixes.items() if owner == component]
            for path in component_paths:
                own = self.name(component, path)
                location = Location(component, path)
                tail = own.removeprefix(self.prefixes[component])
                for prefix in (self.prefixes[component], *others):
                    found[prefix + tail] = location
                if not component.startswith("text_encoder"):
                    underscored = path.replace(".", "_")
                    prefix = self.prefixes[component]
                    original = to_original_layout(underscored, attention_in_first_up_block=self.original_layout)
                    found[f"{prefix}_{underscored}"] = found[f"{prefix}_{original}"] = location
        return found


SD_KEY_NAMES = KeyNames(
    prefixes={"unet": "lora_unet", "text_encoder": "lora_te"},
    read_prefixes={"lora_te1": "text_encoder"},
    original_layout=False,
)

SDXL_KEY_NAMES = KeyNames(
    prefixes={"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
    read_prefixes={},
    original_layout=True,
)
