"""Names of the original (latent-diffusion) checkpoint layout, and what diffusers and transformers call the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from maulstick.weight_files import NamedWeights, Slot, Transform, WeightFile

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."
CLIP_PREFIX = "cond_stage_model.transformer."
OPEN_CLIP_PREFIX = "cond_stage_model.model."
# SDXL has two text encoders, each in the layout of its own library.
SDXL_CLIP_PREFIX = "conditioner.embedders.0.transformer."
SDXL_OPEN_CLIP_PREFIX = "conditioner.embedders.1.model."

# Input and output blocks are numbered through all levels; a level owns three numbers: two (or three) resnets, and the
# place of the down- or upsampler.
_BLOCKS_PER_LEVEL = 3

_UNET_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_UNET_OUTSIDE_BLOCKS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    # SDXL's embedding of pooled text and sizes.
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
}
_UNET_BLOCK = re.compile(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.(?:(\d+)\.)?(.+)")

_VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_VAE_LEVEL = re.compile(r"(encoder|decoder)\.(down|up)\.(\d+)\.(block\.(\d+)|downsample|upsample)\.(.+)")
_VAE_MIDDLE = re.compile(r"(encoder|decoder)\.mid\.(block|attn)_(\d+)\.(.+)")

_OPEN_CLIP_LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)")
_OPEN_CLIP_TAILS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_OPEN_CLIP_OUTSIDE_LAYERS = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
# Buffers and heads that image-text training left in the text encoder; a diffusion model uses none of them.
UNUSED_TEXT_TENSORS = frozenset(
    {
        "position_ids",
        "embeddings.position_ids",
        "text_model.embeddings.position_ids",
        "attn_mask",
        "logit_scale",
        "text_projection",
        "text_projection.weight",
    }
)


def unet_name(name: str) -> str | None:
    """Return the diffusers name of a UNet tensor named in the original layout (without its prefix), None if unknown."""
    module, _, kind = name.rpartition(".")
    if module in _UNET_OUTSIDE_BLOCKS:
        return f"{_UNET_OUTSIDE_BLOCKS[module]}.{kind}"
    match = _UNET_BLOCK.fullmatch(name)
    if match is None:
        return None
    part, number, place, tail = match[1], int(match[2]), match[3], match[4]
    if part == "middle_block":
        return _unet_middle_name(number, tail if place is None else f"{place}.{tail}")
    if place is None:
        return None
    if part == "input_blocks":
        level, layer = divmod(number - 1, _BLOCKS_PER_LEVEL)
        prefix, sampler = f"down_blocks.{level}", "downsamplers.0.conv"
    else:
        level, layer = divmod(number, _BLOCKS_PER_LEVEL)
        prefix, sampler = f"up_blocks.{level}", "upsamplers.0.conv"
    if tail in ("op.weight", "op.bias", "conv.weight", "conv.bias"):
        return f"{prefix}.{sampler}.{kind}"
    if place == "0":
        resnet = _replace_module(tail, _UNET_RESNET)
        return None if resnet is None else f"{prefix}.resnets.{layer}.{resnet}"
    return f"{prefix}.attentions.{layer}.{tail}" if place == "1" else None


def _unet_middle_name(number: int, tail: str) -> str | None:
    if number == 1:
        return f"mid_block.attentions.0.{tail}"
    resnet = _replace_module(tail, _UNET_RESNET)
    return None if resnet is None or number > 2 else f"mid_block.resnets.{number // 2}.{resnet}"


def vae_name(name: str, levels: int) -> str | None:
    """Return the diffusers name of a VAE tensor named in the original layout (without its prefix), None if unknown.

    ``levels`` is the number of resolutions: the decoder counts them the other way round.
    """
    if match := _VAE_LEVEL.fullmatch(name):
        side, direction, level, part, resnet, tail = match.groups()
        place = f"down_blocks.{level}" if direction == "down" else f"up_blocks.{levels - 1 - int(level)}"
        if resnet is None:
            return f"{side}.{place}.{part}rs.0.{tail}"
        return f"{side}.{place}.resnets.{resnet}.{tail.replace('nin_shortcut', 'conv_shortcut')}"
    if match := _VAE_MIDDLE.fullmatch(name):
        side, kind, number, tail = match.groups()
        if kind == "block":
            return f"{side}.mid_block.resnets.{int(number) - 1}.{tail}"
        attention = _replace_module(tail, _VAE_ATTENTION)
        return None if attention is None else f"{side}.mid_block.attentions.0.{attention}"
    module, _, kind = name.rpartition(".")
    if module in ("encoder.norm_out", "decoder.norm_out"):
        return f"{module[:7]}.conv_norm_out.{kind}"
    if module in ("quant_conv", "post_quant_conv") or re.fullmatch(r"(encoder|decoder)\.conv_(in|out)", module):
        return name
    return None


def unet_weights(file: WeightFile) -> NamedWeights:
    """Return the UNet of an original checkpoint under diffusers' names."""
    return collect(file, under(file, UNET_PREFIX), lambda name: _one(unet_name(name)))


def vae_weights(file: WeightFile, prefix: str = VAE_PREFIX) -> NamedWeights:
    """Return the VAE of an original checkpoint, or of a file with a VAE alone (prefix ""), under diffusers' names."""
    names = [name for name in under(file, prefix) if not name.removeprefix(prefix).startswith(("loss.", "model_ema."))]
    levels = count_from_zero(names, re.compile(re.escape(prefix) + r"encoder\.down\.(\d+)\."))

    def rename(name: str) -> Mapping[str, Transform | None]:
        target = vae_name(name, levels)
        is_matrix = target is not None and re.search(r"\.attentions\.0\.to_.+\.weight$", target) is not None
        return _one(target, _as_matrix if is_matrix else None)

    return collect(file, names, rename, prefix)


def clip_weights(file: WeightFile, prefix: str = CLIP_PREFIX) -> NamedWeights:
    """Return the CLIP text encoder of an SD 1.x checkpoint under transformers' names, without ``text_model.``."""
    names = [name for name in under(file, prefix) if name.removeprefix(prefix) not in UNUSED_TEXT_TENSORS]
    return collect(file, names, lambda name: _one(name.removeprefix("text_model.")), prefix)


def open_clip_weights(
    file: WeightFile, layers: int, prefix: str = OPEN_CLIP_PREFIX, *, with_projection: bool = False
) -> NamedWeights:
    """Return the OpenCLIP text encoder of a checkpoint under transformers' names, without ``text_model.``.

    The checkpoint's layers from number ``layers`` on are left out: SD 2.x takes its text states before the last one.
    SDXL needs the projection of the pooled text, which the others leave aside.
    """
    projection = "text_projection"

    def is_used(name: str) -> bool:
        match = _OPEN_CLIP_LAYER.fullmatch(name)
        is_unused = name in UNUSED_TEXT_TENSORS and not (with_projection and name == projection)
        return not is_unused and (match is None or int(match[1]) < layers)

    def rename(name: str) -> Mapping[str, Transform | None]:
        return _one(f"{projection}.weight", _transposed) if name == projection else _open_clip_names(name)

    names = [name for name in under(file, prefix) if is_used(name.removeprefix(prefix))]
    return collect(file, names, rename, prefix)


def _open_clip_names(name: str) -> Mapping[str, Transform | None]:
    if name in _OPEN_CLIP_OUTSIDE_LAYERS:
        return _one(_OPEN_CLIP_OUTSIDE_LAYERS[name])
    match = _OPEN_CLIP_LAYER.fullmatch(name)
    if match is None:
        return {}
    prefix, tail = f"encoder.layers.{match[1]}", match[2]
    if tail in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = tail.rpartition("_")[2]
        return {f"{prefix}.self_attn.{role}_proj.{kind}": third(place) for place, role in enumerate("qkv")}
    renamed = _replace_module(tail, _OPEN_CLIP_TAILS)
    return _one(None if renamed is None else f"{prefix}.{renamed}")


def collect(
    file: WeightFile,
    names: Iterable[str],
    rename: Callable[[str], Mapping[str, Transform | None]],
    prefix: str = UNET_PREFIX,
) -> NamedWeights:
    """Return the named tensors under new names; ``rename`` takes a name without prefix, and gives none for unknown."""
    slots: dict[str, Slot] = {}
    leftover: list[str] = []
    for name in names:
        targets = rename(name.removeprefix(prefix))
        if not targets:
            leftover.append(name)
        for target, transform in targets.items():
            shape = file.shapes[name]
            slots[target] = Slot(name, _shape_after(transform, shape), transform)
    return NamedWeights(file, slots, tuple(leftover))


def under(file: WeightFile, prefix: str) -> list[str]:
    """Return the names that begin with ``prefix``."""
    return [name for name in file.shapes if name.startswith(prefix)]


def _one(name: str | None, transform: Transform | None = None) -> Mapping[str, Transform | None]:
    return {} if name is None else {name: transform}


def _replace_module(tail: str, table: Mapping[str, str]) -> str | None:
    module, _, kind = tail.rpartition(".")
    return f"{table[module]}.{kind}" if module in table else None


def count_from_zero(names: Iterable[str], pattern: re.Pattern[str]) -> int:
    """Return how many numbers from 0 on the names have in the pattern's place."""
    return 1 + max((int(match[1]) for name in names if (match := pattern.match(name))), default=-1)


def _as_matrix(weight: Tensor) -> Tensor:
    """The VAE's attention projections are 1x1 convolutions in the original and matrices in diffusers."""
    return weight.reshape(weight.shape[0], -1)


def _transposed(weight: Tensor) -> Tensor:
    """OpenCLIP multiplies the pooled text by its projection from the right."""
    return weight.T.contiguous()


def third(place: int) -> Transform:
    """Return what takes the q, k or v part out of a fused projection."""

    def take(fused: Tensor) -> Tensor:
        size = fused.shape[0] // 3
        return fused[place * size : (place + 1) * size]

    return take


def _shape_after(transform: Transform | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if transform is None else tuple(transform(torch.empty(shape, device="meta")).shape)
