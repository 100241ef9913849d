"""Names of SD3's modules: diffusers' paths, those of the original code, and those in LoRA files.

The original code has one projection for query, key and value, which LoRA files name (``…_x_block_attn_qkv``);
diffusers has three. "Joined" paths are diffusers' with that one projection in their place, as diffusers itself calls it
(``to_qkv``, ``to_added_qkv``); ``families.joint_layout`` brings a model into that form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from maulstick.adapters.key_names import KeyNames, Location

# Joined path in a block -> name in the original layout: what a LoRA changes.
_BLOCK_MODULES = {
    "attn.to_qkv": "x_block.attn.qkv",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_added_qkv": "context_block.attn.qkv",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_qkv": "x_block.attn2.qkv",
    "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
}
_BLOCK_NORMS = {
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
}
_OUTER_MODULES = {
    "pos_embed.proj": "x_embedder.proj",
    "context_embedder": "context_embedder",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_SEPARATE = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
_BLOCK_PATHS = {original: path for path, original in (_BLOCK_MODULES | _BLOCK_NORMS).items()}
_OUTER_PATHS = {original: path for path, original in _OUTER_MODULES.items()}
_BLOCK_PATHS_BY_NAME = {original.replace(".", "_"): path for path, original in _BLOCK_MODULES.items()}
_OUTER_PATHS_BY_NAME = {original.replace(".", "_"): path for path, original in _OUTER_MODULES.items()}

TRANSFORMER = "transformer"
_T5 = "text_encoder_3"
_BLOCK_PATH = re.compile(r"transformer_blocks\.(\d+)\.(.+)")
_BLOCK_ORIGINAL = re.compile(r"joint_blocks\.(\d+)\.(.+)")
_BLOCK_NAME = re.compile(r"joint_blocks_(\d+)_(.+)")
_T5_NAME = re.compile(r"encoder_block_(\d+)_layer_(\d+)_(SelfAttention|DenseReluDense)_(q|k|v|o|wi_0|wi_1|wo)")
DENOISER_PREFIX = "lora_unet_"
DIFFUSERS_PREFIX = "lora_transformer_"
"""What canonical names of diffusers' separate paths begin with."""


def joint_block_index(path: str) -> int | None:
    """Return the number of the joint block that a module belongs to, by its path or its name in a file."""
    underscored = path.replace(".", "_").removeprefix(DENOISER_PREFIX).removeprefix(DIFFUSERS_PREFIX)
    match = re.match(r"(?:transformer|joint)_blocks_(\d+)_", underscored)
    return None if match is None else int(match[1])


def original_path(path: str) -> str | None:
    """Return what the original code calls a joined path; None for a path that it does not have."""
    match = _BLOCK_PATH.fullmatch(path)
    if match is None:
        return _OUTER_MODULES.get(path)
    tail = _BLOCK_MODULES.get(match[2])
    return None if tail is None else f"joint_blocks.{match[1]}.{tail}"


def joined_path(original: str) -> str | None:
    """Return the joined path of a module in the original layout, norms included; None where there is none."""
    match = _BLOCK_ORIGINAL.fullmatch(original)
    if match is None:
        return _OUTER_PATHS.get(original)
    tail = _BLOCK_PATHS.get(match[2])
    return None if tail is None else f"transformer_blocks.{match[1]}.{tail}"


def separate_paths(path: str) -> tuple[str, ...]:
    """Return diffusers' own paths for a joined one: query, key and value, or the path itself."""
    parent, _, last = path.rpartition(".")
    return tuple(f"{parent}.{name}" for name in _SEPARATE[last]) if last in _SEPARATE else (path,)


class JoinedPlace(NamedTuple):
    """Where a separate module is in the joined one of canonical name ``name``: part ``place`` of ``of`` equal ones."""

    name: str
    place: int
    of: int


def place_in_joined(separate: str) -> JoinedPlace | None:
    """Say what a canonical name of diffusers' own path (``lora_transformer_…_attn_to_q``) is part of.

    None for a module that SD3 does not have.
    """
    underscored = separate.removeprefix(DIFFUSERS_PREFIX)
    match = re.fullmatch(r"transformer_blocks_(\d+)_(.+)", underscored)
    found = (_SEPARATE_IN_BLOCK if match else _SEPARATE_OUTSIDE).get(match[2] if match else underscored)
    if found is None:
        return None
    block = f"joint_blocks_{match[1]}_" if match else ""
    return JoinedPlace(f"{DENOISER_PREFIX}{block}{found.name}", found.place, found.of)


def _places(modules: Mapping[str, str]) -> dict[str, JoinedPlace]:
    return {
        separate.replace(".", "_"): JoinedPlace(original.replace(".", "_"), place, len(parts))
        for path, original in modules.items()
        for parts in [separate_paths(f"x.{path}")]
        for place, separate in enumerate(part.removeprefix("x.") for part in parts)
    }


_SEPARATE_IN_BLOCK = _places(_BLOCK_MODULES)
_SEPARATE_OUTSIDE = _places(_OUTER_MODULES)


class JointKeyNames(KeyNames):
    """SD3's names: joined paths of the transformer in the original layout, as sd-scripts writes them, and T5's."""

    def name(self, component: str, path: str) -> str:
        prefix = self.prefixes[component]
        if component == _T5:
            return f"{prefix}_{path.replace('.', '_')}"
        if component.startswith("text_encoder"):
            return super().name(component, path)
        return f"{prefix}_{(original_path(path) or path).replace('.', '_')}"

    def locate(self, name: str) -> Location | None:
        t5 = self.prefixes[_T5]
        if name.startswith(f"{t5}_"):
            match = _T5_NAME.fullmatch(name.removeprefix(f"{t5}_"))
            return match and Location(_T5, "encoder.block.{}.layer.{}.{}.{}".format(*match.groups()))
        if not name.startswith(DENOISER_PREFIX):
            return super().locate(name)
        underscored = name.removeprefix(DENOISER_PREFIX)
        match = _BLOCK_NAME.fullmatch(underscored)
        if match is None:
            path = _OUTER_PATHS_BY_NAME.get(underscored)
        else:
            tail = _BLOCK_PATHS_BY_NAME.get(match[2])
            path = None if tail is None else f"transformer_blocks.{match[1]}.{tail}"
        return None if path is None else Location(TRANSFORMER, path)

    def table(self, paths: Mapping[str, Iterable[str]]) -> dict[str, Location]:
        return {
            self.name(component, path): Location(component, path)
            for component, component_paths in paths.items()
            for path in component_paths
        }


SD3_KEY_NAMES = JointKeyNames(
    prefixes={
        TRANSFORMER: "lora_unet",
        "text_encoder": "lora_te1",
        "text_encoder_2": "lora_te2",
        _T5: "lora_te3",
    },
    read_prefixes={},
    original_layout=False,
    read_by_diffusers=False,
)
