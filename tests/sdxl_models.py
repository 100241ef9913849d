"""A small SDXL model for tests: the true block layout, 12 and 32 text layers, narrow, random weights.

Its UNet has all 722 (with convolutions 788) LoRA modules of the full-size one. Deterministic and cached for the
session; folders and files must not be changed, copy them first.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from tests.models import (
    TOKENIZER,
    Prediction,
    _session_folder,
    _unet_original,
    _vae_original,
    open_clip_layers,
    scheduler_config,
    text_encoder_config,
    vae_config,
)

CLIP_WIDTH, OPEN_CLIP_WIDTH, POOLED_WIDTH = 64, 128, 96
SCALING = 0.13025


@dataclass(frozen=True)
class SmallSdxl:
    """The networks of the small model, in fp32 and evaluation mode."""

    unet: UNet2DConditionModel
    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    text_encoder_2: CLIPTextModelWithProjection

    def networks(self) -> dict[str, nn.Module]:
        return {name: getattr(self, name) for name in ("unet", "vae", "text_encoder", "text_encoder_2")}


def unet_config() -> dict[str, Any]:
    """SDXL's own, but for widths: that of the first level, which has no attention, is free; others have 64 a head."""
    return {
        "sample_size": 8,
        "block_out_channels": (32, 128, 64),
        "attention_head_dim": (1, 2, 1),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": CLIP_WIDTH + OPEN_CLIP_WIDTH,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": POOLED_WIDTH + 6 * 256,
    }


def open_clip_config() -> dict[str, Any]:
    return {
        **text_encoder_config("sd2"),
        "hidden_size": OPEN_CLIP_WIDTH,
        "intermediate_size": 128,
        "projection_dim": POOLED_WIDTH,
        "num_hidden_layers": 32,
        "num_attention_heads": 2,
    }


@cache
def small_sdxl() -> SmallSdxl:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1024)
        model = SmallSdxl(
            UNet2DConditionModel(**unet_config()),
            AutoencoderKL(**vae_config(), scaling_factor=SCALING),
            CLIPTextModel(CLIPTextConfig(**text_encoder_config("sd1"))),
            CLIPTextModelWithProjection(CLIPTextConfig(**open_clip_config())),
        )
    for network in model.networks().values():
        network.eval().requires_grad_(False)
    return model


@cache
def sdxl_folder(prediction: Prediction = "epsilon") -> Path:
    """Return a diffusers folder of the small model."""
    return save_sdxl_folder(small_sdxl(), _session_folder() / f"sdxl-{prediction}", prediction)


@cache
def sdxl_file() -> Path:
    """Return the small model as one .safetensors file in the original layout."""
    path = _session_folder() / "sdxl.safetensors"
    save_file(original_sdxl(small_sdxl()), path)
    return path


def save_sdxl_folder(model: SmallSdxl, folder: Path, prediction: Prediction = "epsilon") -> Path:
    for part, network in model.networks().items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
        if part.startswith("text_encoder"):
            network.config.save_pretrained(folder / part)
            save_file(tensors, folder / part / "model.safetensors", {"format": "pt"})
        else:
            network.save_config(folder / part)
            save_file(tensors, folder / part / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    for name, pad in (("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!")):
        shutil.copytree(TOKENIZER, folder / name, dirs_exist_ok=True)
        _update_json(folder / name / "tokenizer_config.json", pad_token=pad)
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler_config(prediction)))
    shipped = TOKENIZER.parent / "model_configs" / "sdxl-base" / "model_index.json"
    shutil.copyfile(shipped, folder / "model_index.json")
    return folder


def _update_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def original_sdxl(model: SmallSdxl) -> dict[str, Tensor]:
    """Return the model's weights under the names that the original code gives them in one file."""
    tensors = {f"model.diffusion_model.{_sgm_unet_name(name)}": t for name, t in model.unet.state_dict().items()}
    for name, tensor in model.vae.state_dict().items():
        original = _vae_original(name, levels=4)
        is_projection = ".attn_1." in original and original.endswith("weight") and ".norm." not in original
        tensors[f"first_stage_model.{original}"] = tensor[:, :, None, None] if is_projection else tensor
    clip = "conditioner.embedders.0.transformer.text_model."
    for name, tensor in model.text_encoder.state_dict().items():
        tensors[clip + name.removeprefix("text_model.")] = tensor
    tensors[f"{clip}embeddings.position_ids"] = torch.arange(77)[None]
    open_clip = _open_clip_tensors(model.text_encoder_2.state_dict())
    tensors |= {f"conditioner.embedders.1.model.{name}": tensor for name, tensor in open_clip.items()}
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _sgm_unet_name(name: str) -> str:
    for ours, theirs in (("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2")):
        if name.startswith(ours):
            return name.replace(ours, theirs)
    # Behind the attention that SD 1.x/2.x have not in their lowest level.
    return _unet_original(name).replace("output_blocks.2.1.conv", "output_blocks.2.2.conv")


def _open_clip_tensors(text: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {
        "token_embedding.weight": text["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": text["text_model.embeddings.position_embedding.weight"],
        "ln_final.weight": text["text_model.final_layer_norm.weight"],
        "ln_final.bias": text["text_model.final_layer_norm.bias"],
        "text_projection": text["text_projection.weight"].T,
        "logit_scale": torch.tensor(4.6),
    }
    return named | open_clip_layers(text, "text_model.encoder.layers", 32)
