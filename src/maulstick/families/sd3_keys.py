"""Names and forms of SD3's single files, and what diffusers and transformers have in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from maulstick.adapters.joint_layout import swapped_halves
from maulstick.adapters.joint_names import joined_path, separate_paths
from maulstick.families.ldm_keys import UNET_PREFIX, collect, count_from_zero, third, under
from maulstick.weight_files import NamedWeights, Slot, Transform, WeightFile

TEXT_PREFIXES = {
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.clip_g.transformer.",
    "text_encoder_3": "text_encoders.t5xxl.transformer.",
}
_POSITIONS = {"pos_embed": "pos_embed.pos_embed"}
_FINAL = "final_layer.adaLN_modulation.1"
_UNUSED_TEXT = ("position_ids", "logit_scale", "embeddings.position_ids")
_PROJECTION = "text_projection.weight"


def transformer_weights(file: WeightFile) -> NamedWeights:
    """Return the transformer of an original checkpoint under diffusers' names, its projections taken apart."""
    names = under(file, UNET_PREFIX)
    blocks = count_from_zero(names, re.compile(re.escape(UNET_PREFIX) + r"joint_blocks\.(\d+)\."))
    with_swapped_rows = {_FINAL, f"joint_blocks.{blocks - 1}.context_block.adaLN_modulation.1"}

    def rename(name: str) -> Mapping[str, Transform | None]:
        if name in _POSITIONS:
            return {_POSITIONS[name]: None}
        module, _, kind = name.rpartition(".")
        path = joined_path(module)
        if path is None:
            return {}
        separate = separate_paths(path)
        if len(separate) > 1:
            return {f"{part}.{kind}": third(place) for place, part in enumerate(separate)}
        return {f"{path}.{kind}": swapped_halves if module in with_swapped_rows else None}

    return collect(file, names, rename, UNET_PREFIX)


def clip_weights(file: WeightFile, prefix: str) -> NamedWeights:
    """Return one of SD3's CLIP encoders under transformers' names, with a projection.

    Some files leave out a projection that changes nothing; it is an identity then, as in the original code.
    """
    names = [name for name in under(file, prefix) if not name.endswith(_UNUSED_TEXT)]
    found = collect(file, names, lambda name: {name.removeprefix("text_model."): None}, prefix)
    norm = found.slots.get("final_layer_norm.weight")
    if _PROJECTION in found.slots or norm is None:
        return found
    width = norm.shape[0]
    identity = Slot(norm.source, (width, width), _identity_like)
    return NamedWeights(file, {**found.slots, _PROJECTION: identity}, found.leftover)


def _identity_like(vector: Tensor) -> Tensor:
    return torch.eye(len(vector), dtype=vector.dtype)


def t5_weights(file: WeightFile, prefix: str) -> NamedWeights:
    """Return T5's encoder under transformers' names; a decoder and marks of number formats are left out."""
    unused = ("decoder.", "lm_head.", "spiece_model", "scaled_fp8", "logit_scale")
    names = [name for name in under(file, prefix) if not name.removeprefix(prefix).startswith(unused)]
    return collect(file, names, lambda name: {name: None}, prefix)
