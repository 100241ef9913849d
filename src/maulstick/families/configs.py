"""Model configs that ship with Maulstick, and fitting them to the tensor shapes of a single file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from maulstick.errors import ModelError
from maulstick.families.recognise import JsonObject, read_json
from maulstick.weight_files import NamedWeights

_ASSETS = Path(str(files("maulstick"))) / "assets"
TOKENIZER_FOLDER = _ASSETS / "clip_tokenizer"

# Original CLIP text encoders and the UNets of SD 2.x and SDXL have heads of this width; SD 1.x has eight of any width.
_HEAD_WIDTH = 64


def shipped_config(model: str, part: str) -> JsonObject:
    """Return the config of ``part`` ("unet", "scheduler", …) of "sd1", "sd2-base", "sd2-768-v", "sdxl-base" or
    "sd3"."""
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    return read_json(_ASSETS / "model_configs" / model / part / name)


def fit_unet(config: JsonObject, weights: NamedWeights) -> JsonObject:
    """Return ``config`` with the widths that the weights have."""
    shapes = _shapes(weights)
    levels = len(config["block_out_channels"])
    widths = [_first(shapes, f"down_blocks.{level}.resnets.0.conv2.weight", "UNet") for level in range(levels)]
    with_attention = [level for level in range(levels) if config["down_block_types"][level] == "CrossAttnDownBlock2D"]
    attention = f"down_blocks.{with_attention[0]}.attentions.0"
    fitted: dict[str, Any] = {
        "block_out_channels": widths,
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": _first(shapes, "conv_out.weight", "UNet"),
        "cross_attention_dim": _second(shapes, f"{attention}.transformer_blocks.0.attn2.to_k.weight", "UNet"),
        "use_linear_projection": len(shapes.get(f"{attention}.proj_in.weight", (0, 0, 0, 0))) == 2,
    }
    if isinstance(config["attention_head_dim"], list):
        fitted["attention_head_dim"] = [
            _heads(width, "UNet") if level in with_attention else max(1, width // _HEAD_WIDTH)
            for level, width in enumerate(widths)
        ]
    if "projection_class_embeddings_input_dim" in config:
        added = _second(shapes, "add_embedding.linear_1.weight", "UNet")
        fitted["projection_class_embeddings_input_dim"] = added
    return {**config, **fitted}


def fit_vae(config: JsonObject, weights: NamedWeights) -> JsonObject:
    """Return ``config`` with the number of levels, depth and widths that the weights have."""
    shapes = _shapes(weights)
    levels = _count(shapes, r"encoder\.down_blocks\.(\d+)\.")
    fitted: dict[str, Any] = {
        "block_out_channels": [
            _first(shapes, f"encoder.down_blocks.{level}.resnets.0.conv1.weight", "VAE") for level in range(levels)
        ],
        "layers_per_block": _count(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "latent_channels": _second(shapes, "decoder.conv_in.weight", "VAE"),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
    }
    return {**config, **fitted}


def fit_text_encoder(config: JsonObject, weights: NamedWeights) -> JsonObject:
    """Return ``config`` with the widths and the number of layers that the weights have."""
    shapes = _shapes(weights)
    vocabulary, width = shapes.get("embeddings.token_embedding.weight", (config["vocab_size"], config["hidden_size"]))
    fitted = {
        "projection_dim": shapes.get("text_projection.weight", (config["projection_dim"],))[0],
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_attention_heads": _heads(width, "text encoder"),
        "num_hidden_layers": _count(shapes, r"encoder\.layers\.(\d+)\."),
        "intermediate_size": _first(shapes, "encoder.layers.0.mlp.fc1.weight", "text encoder"),
        "max_position_embeddings": _first(shapes, "embeddings.position_embedding.weight", "text encoder"),
    }
    return {**config, **fitted}


def fit_joint_transformer(config: JsonObject, weights: NamedWeights) -> JsonObject:
    """Return the config of an SD3 transformer of any size: everything about it shows in its weights."""
    shapes, part = _shapes(weights), "transformer"
    width = _first(shapes, "pos_embed.proj.weight", part)
    positions = _second(shapes, "pos_embed.pos_embed", part)
    patch = _dimension(shapes, "pos_embed.proj.weight", part, 2)
    dual = r"transformer_blocks\.(\d+)\.attn2\.to_q\.weight"
    fitted = {
        "num_layers": _count(shapes, r"transformer_blocks\.(\d+)\."),
        "num_attention_heads": _heads(width, part),
        "attention_head_dim": _HEAD_WIDTH,
        "caption_projection_dim": _first(shapes, "context_embedder.weight", part),
        "joint_attention_dim": _second(shapes, "context_embedder.weight", part),
        "pooled_projection_dim": _second(shapes, "time_text_embed.text_embedder.linear_1.weight", part),
        "in_channels": _second(shapes, "pos_embed.proj.weight", part),
        "out_channels": _first(shapes, "proj_out.weight", part) // patch**2,
        "patch_size": patch,
        "pos_embed_max_size": math.isqrt(positions),
        "dual_attention_layers": sorted(int(match[1]) for name in shapes if (match := re.fullmatch(dual, name))),
        "qk_norm": "rms_norm" if "transformer_blocks.0.attn.norm_q.weight" in shapes else None,
    }
    return {**config, **fitted}


def fit_t5(config: JsonObject, weights: NamedWeights) -> JsonObject:
    """Return ``config`` with the widths and the number of layers that the weights have."""
    shapes, part = _shapes(weights), "T5"
    attention = "encoder.block.0.layer.0.SelfAttention"
    buckets = f"{attention}.relative_attention_bias.weight"
    heads = _second(shapes, buckets, part)
    fitted = {
        "vocab_size": shapes.get("shared.weight", shapes.get("encoder.embed_tokens.weight", (config["vocab_size"],)))[
            0
        ],
        "d_model": _first(shapes, "encoder.final_layer_norm.weight", part),
        "d_ff": _second(shapes, "encoder.block.0.layer.1.DenseReluDense.wo.weight", part),
        "d_kv": _first(shapes, f"{attention}.q.weight", part) // heads,
        "num_heads": heads,
        "num_layers": _count(shapes, r"encoder\.block\.(\d+)\."),
        "relative_attention_num_buckets": _first(shapes, buckets, part),
    }
    return {**config, **fitted}


def _shapes(weights: NamedWeights) -> Mapping[str, tuple[int, ...]]:
    return {name: slot.shape for name, slot in weights.slots.items()}


def _first(shapes: Mapping[str, tuple[int, ...]], name: str, part: str) -> int:
    return _dimension(shapes, name, part, 0)


def _second(shapes: Mapping[str, tuple[int, ...]], name: str, part: str) -> int:
    return _dimension(shapes, name, part, 1)


def _dimension(shapes: Mapping[str, tuple[int, ...]], name: str, part: str, axis: int) -> int:
    if name not in shapes or len(shapes[name]) <= axis:
        raise ModelError(f"The {part} in this file is not complete: it lacks {name} (diffusers' name for it).")
    return shapes[name][axis]


def _count(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> int:
    return 1 + max((int(match[1]) for name in shapes if (match := re.match(pattern, name))), default=-1)


def _heads(width: int, part: str) -> int:
    if width % _HEAD_WIDTH:
        raise ModelError(
            f"The {part} in this file has width {width}, which is not a multiple of {_HEAD_WIDTH}. A single file does "
            "not say how many attention heads it has; save this model as a diffusers folder instead."
        )
    return width // _HEAD_WIDTH
