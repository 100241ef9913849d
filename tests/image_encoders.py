"""Small CLIP and SigLIP vision models as folders, deterministic and cached for the test session."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from tests.models import _session_folder

CLIP_WIDTH, CLIP_PROJECTED, SIGLIP_WIDTH = 32, 48, 40
SIDE, PATCH = 32, 8


def clip_config() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=CLIP_WIDTH,
        intermediate_size=64,
        projection_dim=CLIP_PROJECTED,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )


def siglip_config() -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=SIGLIP_WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )


@cache
def clip_encoder() -> Path:
    return _saved("clip-vision", CLIPVisionModelWithProjection, clip_config())


@cache
def siglip_encoder() -> Path:
    return _saved("siglip-vision", SiglipVisionModel, siglip_config())


def _saved(name: str, kind: Any, config: Any) -> Path:
    folder = _session_folder() / name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = kind(config).eval()
        for parameter in model.parameters():
            # The libraries' own first weights are so small that all images look alike.
            parameter.data.mul_(4) if parameter.ndim > 1 else None
    folder.mkdir()
    config.save_pretrained(folder)
    tensors = {tensor_name: tensor.contiguous().clone() for tensor_name, tensor in model.state_dict().items()}
    if name.startswith("siglip"):
        # transformers 4 and every published file have the prefix.
        tensors = {f"vision_model.{tensor_name}": tensor for tensor_name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
