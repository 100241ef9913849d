"""Small Stable Diffusion models for tests: true SD 1.x and 2.x layout, narrow, random weights, real CLIP vocabulary.

Everything is deterministic and cached for the test session; the folders and files must not be changed, copy them first.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

Version = Literal["sd1", "sd2", "tiny"]
Prediction = Literal["epsilon", "v_prediction"]

TOKENIZER = Path(str(files("maulstick"))) / "assets" / "clip_tokenizer"
TEXT_WIDTH = 64
NATIVE_SIZE = 64


@dataclass(frozen=True)
class SmallModel:
    """The networks of a small model, in fp32 and evaluation mode."""

    version: Version
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    text_encoder: CLIPTextModel

    def networks(self) -> dict[str, nn.Module]:
        return {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}


@cache
def small_model(version: Version = "sd1") -> SmallModel:
    """Build the model: four-level UNet with all 12 + 1 + 12 blocks, VAE of factor 8, 12 (SD 2: 23) text layers.

    The UNet of "sd1" has the 192 (with convolutions 278) LoRA modules of the full-size one; that of "sd2" has one fewer
    with convolutions, because its first two levels are equally wide. "tiny" is an SD 1.x model with two levels of one
    layer and four text layers: 48 and 24 modules, for tests that ask about the run and not about the model. It loads
    from a folder only.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240 + ("sd1", "sd2", "tiny").index(version))
        unet = UNet2DConditionModel(**unet_config(version))
        vae = AutoencoderKL(**vae_config(version))
        text_encoder = CLIPTextModel(CLIPTextConfig(**text_encoder_config(version)))
    for network in (unet, vae, text_encoder):
        network.eval().requires_grad_(False)
    return SmallModel(version, unet, vae, text_encoder)


def unet_config(version: Version) -> dict[str, Any]:
    if version == "tiny":
        return {
            "sample_size": NATIVE_SIZE // 8,
            "block_out_channels": (16, 16),
            "norm_num_groups": 8,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "layers_per_block": 1,
            "cross_attention_dim": TEXT_WIDTH,
        }
    is_v2 = version == "sd2"
    return {
        "sample_size": NATIVE_SIZE // 8,
        "block_out_channels": (64, 64, 128, 128) if is_v2 else (32, 64, 96, 96),
        # Heads are 64 wide in SD 2.x; SD 1.x has eight of them everywhere.
        "attention_head_dim": (1, 1, 2, 2) if is_v2 else 8,
        "cross_attention_dim": TEXT_WIDTH,
        "use_linear_projection": is_v2,
    }


def vae_config(version: Version = "sd1") -> dict[str, Any]:
    if version == "tiny":
        return vae_config() | {"block_out_channels": (8,) * 4, "norm_num_groups": 4, "layers_per_block": 1}
    return {
        "block_out_channels": (32, 32, 64, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "sample_size": NATIVE_SIZE,
    }


def text_encoder_config(version: Version) -> dict[str, Any]:
    return {
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "projection_dim": TEXT_WIDTH,
        "num_hidden_layers": {"sd1": 12, "sd2": 23, "tiny": 4}[version],
        "num_attention_heads": 1,
        "hidden_act": "gelu" if version == "sd2" else "quick_gelu",
        "vocab_size": 49408,
        "bos_token_id": 49406,
        "eos_token_id": 49407,
        "pad_token_id": 0 if version == "sd2" else 49407,
    }


def scheduler_config(prediction: Prediction = "epsilon") -> dict[str, Any]:
    return {
        "_class_name": "DDIMScheduler",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000,
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "prediction_type": prediction,
    }


@cache
def model_folder(version: Version = "sd1", prediction: Prediction = "epsilon") -> Path:
    """Return a diffusers folder of the small model."""
    return save_folder(small_model(version), _session_folder() / f"{version}-{prediction}", prediction=prediction)


@cache
def single_file(version: Version = "sd1") -> Path:
    """Return the small model as one .safetensors file in the original layout."""
    path = _session_folder() / f"{version}.safetensors"
    save_file(original_layout(small_model(version)), path)
    return path


def save_folder(
    model: SmallModel,
    folder: Path,
    *,
    prediction: Prediction = "epsilon",
    text_prefix: str = "text_model.",
    variant: str = "",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a diffusers folder.

    ``text_prefix`` is "text_model." as transformers 4.x writes it, or "" for the names of 5.x; ``variant``, such as
    ".fp16", goes before the extension.
    """
    for part, network in model.networks().items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        tensors = _tensors(network, dtype)
        if part == "text_encoder":
            tensors = {text_prefix + name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
            network.config.save_pretrained(folder / part)
            save_file(tensors, folder / part / f"model{variant}.safetensors", {"format": "pt"})
        else:
            network.save_config(folder / part)
            save_file(tensors, folder / part / f"diffusion_pytorch_model{variant}.safetensors", {"format": "pt"})
    _copy_tokenizer(folder / "tokenizer", model.version)
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler_config(prediction))
    _write_json(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1"})
    return folder


def original_layout(model: SmallModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the model's weights under the names of the original code, as checkpoints have them."""
    tensors = {f"model.diffusion_model.{_unet_original(name)}": t for name, t in _tensors(model.unet, dtype).items()}
    for name, tensor in _tensors(model.vae, dtype).items():
        original = _vae_original(name, levels=4)
        # The VAE's attention is made of 1x1 convolutions there.
        is_projection = ".attn_1." in original and original.endswith("weight") and ".norm." not in original
        tensors[f"first_stage_model.{original}"] = tensor[:, :, None, None].contiguous() if is_projection else tensor
    text = {name.removeprefix("text_model."): t for name, t in _tensors(model.text_encoder, dtype).items()}
    return tensors | (_open_clip(text) if model.version == "sd2" else _clip(text))


def _tensors(network: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype).contiguous() for name, tensor in network.state_dict().items()}


def _clip(text: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {f"cond_stage_model.transformer.text_model.{name}": tensor for name, tensor in text.items()}
    return named | {"cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None]}


def _open_clip(text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Twenty-four fused layers, of which the last is not used, a projection, and buffers."""
    prefix = "cond_stage_model.model."
    named = {
        "token_embedding.weight": text["embeddings.token_embedding.weight"],
        "positional_embedding": text["embeddings.position_embedding.weight"],
        "ln_final.weight": text["final_layer_norm.weight"],
        "ln_final.bias": text["final_layer_norm.bias"],
        "text_projection": torch.zeros(TEXT_WIDTH, TEXT_WIDTH),
        "logit_scale": torch.tensor(4.6),
        "attn_mask": torch.full((77, 77), float("-inf")).triu(1),
    }
    named |= open_clip_layers(text, "encoder.layers", 23)
    last = {name: tensor for name, tensor in named.items() if ".resblocks.22." in name}
    unused = {name.replace(".22.", ".23."): torch.zeros_like(tensor) for name, tensor in last.items()}
    return {prefix + name: tensor for name, tensor in (named | unused).items()}


def open_clip_layers(text: dict[str, Tensor], source: str, count: int) -> dict[str, Tensor]:
    """The layers below ``source`` of a transformers text encoder under OpenCLIP's names, query, key and value fused."""
    tails = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "self_attn.out_proj": "attn.out_proj",
    }
    named = {}
    for layer in range(count):
        ours, theirs = f"{source}.{layer}.", f"transformer.resblocks.{layer}."
        for kind in ("weight", "bias"):
            fused = [text[f"{ours}self_attn.{role}_proj.{kind}"] for role in "qkv"]
            named[f"{theirs}attn.in_proj_{kind}"] = torch.cat(fused)
            for our_tail, their_tail in tails.items():
                named[f"{theirs}{their_tail}.{kind}"] = text[f"{ours}{our_tail}.{kind}"]
    return named


def _unet_original(name: str) -> str:
    outside = {
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
    }
    module, _, kind = name.rpartition(".")
    if module in outside:
        return f"{outside[module]}.{kind}"
    side, level, role, number, tail = re.fullmatch(r"(\w+_blocks?)\.?(\d+)?\.(\w+)\.(\d+)\.(.+)", name).groups()
    inner = _resnet_original(tail) if role == "resnets" else tail
    place, block = {"resnets": 0, "attentions": 1}.get(role), int(number)
    if side == "mid_block":
        return f"middle_block.{2 * block if role == 'resnets' else 1}.{inner}"
    if side == "down_blocks":
        first = 1 + 3 * int(level)
        if place is None:
            return f"input_blocks.{first + 2}.0.op.{kind}"
        return f"input_blocks.{first + block}.{place}.{inner}"
    first = 3 * int(level)
    if place is None:
        return f"output_blocks.{first + 2}.{1 if level == '0' else 2}.conv.{kind}"
    return f"output_blocks.{first + block}.{place}.{inner}"


def _resnet_original(tail: str) -> str:
    names = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
    module, kind = tail.split(".")
    return f"{names[module]}.{kind}"


def _vae_original(name: str, levels: int) -> str:
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    for ours, theirs in attention.items():
        name = name.replace(f"mid_block.attentions.0.{ours}.", f"mid.attn_1.{theirs}.")
    name = re.sub(r"down_blocks\.(\d)\.resnets\.", r"down.\1.block.", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0\.", r"down.\1.downsample.", name)
    name = re.sub(r"up_blocks\.(\d)\.resnets\.", lambda m: f"up.{levels - 1 - int(m[1])}.block.", name)
    return re.sub(r"up_blocks\.(\d)\.upsamplers\.0\.", lambda m: f"up.{levels - 1 - int(m[1])}.upsample.", name)


@cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="maulstick-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _copy_tokenizer(folder: Path, version: Version) -> None:
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    if version == "sd2":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        _write_json(folder / "tokenizer_config.json", config | {"pad_token": "!"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))
