"""A small SD3.5 model for tests: three joint blocks (one with two attentions), norms of query and key, three encoders.

The first block is as in SD3.5 medium, the last as in all of them. Deterministic and cached for the session; folders and
files must not be changed, copy them first.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from maulstick.adapters.files import save_lora_file
from tests.models import TOKENIZER, _session_folder, _vae_original, text_encoder_config, vae_config

WIDTH, T5_WIDTH = 128, 256
CLIP_WIDTH, CLIP_G_WIDTH, CLIP_G_POOLED = 64, 128, 96
SCALING, SHIFT = 1.5305, 0.0609
BLOCKS = 3
RANK, ALPHA = 3, 2.0
"""Of the LoRA that ``kohya_file`` writes."""
WORDS = ["▁a", "▁cat", "▁photo", "▁of", "▁shape", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789,."]


@dataclass(frozen=True)
class SmallSd3:
    """The networks of the small model, in fp32 and evaluation mode."""

    transformer: SD3Transformer2DModel
    vae: AutoencoderKL
    text_encoder: CLIPTextModelWithProjection
    text_encoder_2: CLIPTextModelWithProjection
    text_encoder_3: T5EncoderModel

    def networks(self) -> dict[str, nn.Module]:
        return dict(vars(self))


def transformer_config(*, qk_norm: bool = True) -> dict[str, Any]:
    return {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": BLOCKS,
        "attention_head_dim": 64,
        "num_attention_heads": WIDTH // 64,
        "joint_attention_dim": T5_WIDTH,
        "caption_projection_dim": WIDTH,
        "pooled_projection_dim": CLIP_WIDTH + CLIP_G_POOLED,
        "pos_embed_max_size": 8,
        "dual_attention_layers": (0,) if qk_norm else (),
        "qk_norm": "rms_norm" if qk_norm else None,
    }


def sd3_vae_config() -> dict[str, Any]:
    return {
        **vae_config(),
        "latent_channels": 16,
        "scaling_factor": SCALING,
        "shift_factor": SHIFT,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def clip_g_config() -> dict[str, Any]:
    return {
        **text_encoder_config("sd2"),
        "hidden_size": CLIP_G_WIDTH,
        "intermediate_size": 128,
        "projection_dim": CLIP_G_POOLED,
        "num_hidden_layers": 32,
        "num_attention_heads": 2,
    }


def t5_config() -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "d_model": T5_WIDTH,
        "d_kv": 32,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }


@cache
def small_sd3(*, qk_norm: bool = True) -> SmallSd3:
    """Build the model; without ``qk_norm`` it is like SD3 medium, with one attention in every block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3500 + qk_norm)
        model = SmallSd3(
            SD3Transformer2DModel(**transformer_config(qk_norm=qk_norm)),
            AutoencoderKL(**sd3_vae_config()),
            CLIPTextModelWithProjection(CLIPTextConfig(**text_encoder_config("sd1"))),
            CLIPTextModelWithProjection(CLIPTextConfig(**clip_g_config())),
            T5EncoderModel(T5Config(**t5_config())),
        )
        # Norms start at 1, where it would not show if they were mixed up.
        for name, parameter in model.transformer.named_parameters():
            if "norm_" in name and name.endswith("weight") and parameter.ndim == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
    for network in model.networks().values():
        network.eval().requires_grad_(False)
    return model


@cache
def sd3_folder(*, with_t5: bool = True, qk_norm: bool = True) -> Path:
    """Return a diffusers folder of the small model."""
    name = f"sd3-{'t5' if with_t5 else 'clip'}-{'norm' if qk_norm else 'plain'}"
    return save_sd3_folder(small_sd3(qk_norm=qk_norm), _session_folder() / name, with_t5=with_t5)


@cache
def sd3_file(*, with_encoders: bool = True, with_t5: bool = False) -> Path:
    """Return the small model as one .safetensors file in the original layout."""
    path = _session_folder() / f"sd3-{with_encoders}-{with_t5}.safetensors"
    tensors = original_sd3(small_sd3())
    dropped = () if with_encoders and with_t5 else ("text_encoders.t5xxl.",) if with_encoders else ("text_encoders.",)
    save_file({name: t for name, t in tensors.items() if not name.startswith(dropped)}, path)
    return path


@cache
def encoder_file(name: str) -> Path:
    """Return one text encoder ("clip_l", "clip_g", "t5xxl") in a file of its own."""
    path, prefix = _session_folder() / f"{name}.safetensors", f"text_encoders.{name}.transformer."
    tensors = original_sd3(small_sd3())
    save_file({key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}, path)
    return path


def save_sd3_folder(model: SmallSd3, folder: Path, *, with_t5: bool = True) -> Path:
    networks = model.networks() if with_t5 else {k: v for k, v in model.networks().items() if k != "text_encoder_3"}
    for part, network in networks.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
        if part.startswith("text_encoder"):
            network.config.save_pretrained(folder / part)
            # One table under two names; files hold it once.
            tensors.pop("encoder.embed_tokens.weight", None)
            save_file(tensors, folder / part / "model.safetensors", {"format": "pt"})
        else:
            network.save_config(folder / part)
            save_file(tensors, folder / part / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    for name, pad in (("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!")):
        shutil.copytree(TOKENIZER, folder / name, dirs_exist_ok=True)
        config = json.loads((folder / name / "tokenizer_config.json").read_text())
        (folder / name / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": pad}))
    if with_t5:
        t5_tokenizer().save_pretrained(folder / "tokenizer_3")
    (folder / "scheduler").mkdir(exist_ok=True)
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = json.loads((TOKENIZER.parent / "model_configs" / "sd3" / "model_index.json").read_text())
    if not with_t5:
        index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """A T5 tokenizer of a few words and all letters: pad 0, end mark 1, unknown 2."""
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((word, -float(n)) for n, word in enumerate(WORDS))]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def original_sd3(model: SmallSd3) -> dict[str, Tensor]:
    """Return the model's weights under the names, and in the form, that the original code gives them in one file."""
    prefix = "model.diffusion_model."
    tensors = {prefix + name: tensor for name, tensor in original_transformer(model.transformer).items()}
    for name, tensor in model.vae.state_dict().items():
        original = _vae_original(name, levels=4)
        is_projection = ".attn_1." in original and original.endswith("weight") and ".norm." not in original
        tensors[f"first_stage_model.{original}"] = tensor[:, :, None, None] if is_projection else tensor
    for name, encoder in (("clip_l", model.text_encoder), ("clip_g", model.text_encoder_2)):
        tensors |= {f"text_encoders.{name}.transformer.{key}": t for key, t in encoder.state_dict().items()}
    for key, tensor in model.text_encoder_3.state_dict().items():
        if key != "encoder.embed_tokens.weight":
            tensors[f"text_encoders.t5xxl.transformer.{key}"] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def original_transformer(transformer: nn.Module) -> dict[str, Tensor]:
    """Joined projections, shift before scale in the last text block and the output, everything renamed."""
    ours = transformer.state_dict()
    outer = {
        "pos_embed.proj": "x_embedder.proj",
        "context_embedder": "context_embedder",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "proj_out": "final_layer.linear",
    }
    inner = {
        "attn.to_out.0": "x_block.attn.proj",
        "attn.to_add_out": "context_block.attn.proj",
        "attn2.to_out.0": "x_block.attn2.proj",
        "ff.net.0.proj": "x_block.mlp.fc1",
        "ff.net.2": "x_block.mlp.fc2",
        "ff_context.net.0.proj": "context_block.mlp.fc1",
        "ff_context.net.2": "context_block.mlp.fc2",
        "norm1.linear": "x_block.adaLN_modulation.1",
        "norm1_context.linear": "context_block.adaLN_modulation.1",
        "attn.norm_q": "x_block.attn.ln_q",
        "attn.norm_k": "x_block.attn.ln_k",
        "attn.norm_added_q": "context_block.attn.ln_q",
        "attn.norm_added_k": "context_block.attn.ln_k",
        "attn2.norm_q": "x_block.attn2.ln_q",
        "attn2.norm_k": "x_block.attn2.ln_k",
    }
    joined = {
        "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    }
    theirs = {"pos_embed": ours["pos_embed.pos_embed"]}
    for kind in ("weight", "bias"):
        for mine, original in outer.items():
            theirs[f"{original}.{kind}"] = ours[f"{mine}.{kind}"]
        theirs[f"final_layer.adaLN_modulation.1.{kind}"] = _swapped(ours[f"norm_out.linear.{kind}"])
        for block in range(BLOCKS):
            mine, original = f"transformer_blocks.{block}", f"joint_blocks.{block}"
            for path, name in inner.items():
                if f"{mine}.{path}.{kind}" in ours:
                    theirs[f"{original}.{name}.{kind}"] = ours[f"{mine}.{path}.{kind}"]
            for name, parts in joined.items():
                if f"{mine}.{parts[0]}.{kind}" in ours:
                    theirs[f"{original}.{name}.{kind}"] = torch.cat([ours[f"{mine}.{part}.{kind}"] for part in parts])
        last = f"joint_blocks.{BLOCKS - 1}.context_block.adaLN_modulation.1.{kind}"
        theirs[last] = _swapped(theirs[last])
    return theirs


def _swapped(tensor: Tensor) -> Tensor:
    half = len(tensor) // 2
    return torch.cat([tensor[half:], tensor[:half]])


def kohya_file(path: Path) -> Path:
    """A LoRA for every module of the small model and for CLIP, as sd-scripts writes it."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    shapes = {
        f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}": tuple(tensor.shape)
        for name, tensor in original_transformer(small_sd3().transformer).items()
        if name.startswith("joint_blocks") and tensor.ndim == 2
    }
    shapes["lora_te1_text_model_encoder_layers_0_mlp_fc1"] = (128, 64)
    # diffusers takes an encoder's part for no LoRA where it has no attention.
    shapes["lora_te1_text_model_encoder_layers_0_self_attn_v_proj"] = (64, 64)
    shapes["lora_te2_text_model_encoder_layers_3_self_attn_q_proj"] = (128, 128)
    for name, (rows, columns) in shapes.items():
        tensors[f"{name}.lora_down.weight"] = torch.randn(RANK, columns, generator=generator)
        tensors[f"{name}.lora_up.weight"] = torch.randn(rows, RANK, generator=generator)
        tensors[f"{name}.alpha"] = torch.tensor(ALPHA)
    save_lora_file(path, tensors, {})
    return path
