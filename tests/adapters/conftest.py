"""Small and full-size models for the adapter tests, and the golden module lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

GOLDEN = Path(__file__).parents[1] / "data" / "blocks"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def golden_sd() -> dict[str, Any]:
    """Config of the SD 1.5 UNet and its 278 targets: path, key name, kind, container, shape, block index."""
    return _golden("sd15")


@pytest.fixture(scope="session")
def golden_sdxl() -> dict[str, Any]:
    """The same for SDXL, 788 targets."""
    return _golden("sdxl")


@pytest.fixture
def meta_unet():
    """A function that builds a UNet of a config on the meta device: real structure, no memory."""

    def build(config: dict[str, Any], **changes: Any) -> UNet2DConditionModel:
        with torch.device("meta"):
            return UNet2DConditionModel.from_config(config | changes)

    return build


@pytest.fixture
def meta_text_encoder():
    """A function that builds a CLIP text encoder on the meta device."""

    def build(layers: int, width: int, *, projection: bool = False) -> torch.nn.Module:
        config = CLIPTextConfig(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64
        )
        with torch.device("meta"):
            return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)

    return build


@pytest.fixture
def small_unet():
    """A function that builds a narrow UNet with all blocks of SD 1.x, on the CPU, with the same weights every time."""

    def build(**changes: Any) -> UNet2DConditionModel:
        config: dict[str, Any] = {
            "sample_size": 8,
            "block_out_channels": (8, 16, 32, 32),
            "layers_per_block": 2,
            "attention_head_dim": 2,
            "norm_num_groups": 4,
            "cross_attention_dim": 24,
        }
        torch.manual_seed(0)
        return UNet2DConditionModel(**(config | changes))

    return build


@pytest.fixture
def small_text_encoder():
    """A function that builds a CLIP text encoder of two narrow layers on the CPU."""

    def build() -> CLIPTextModel:
        torch.manual_seed(1)
        config = CLIPTextConfig(
            vocab_size=64,
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        return CLIPTextModel(config)

    return build
