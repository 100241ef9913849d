"""LoRA files and checkpoints for the tests of the tools."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.lora_family import FAMILIES
from maulstick.adapters.targets import plan_lora
from maulstick.adapters.write_formats import layout_tensors, save_layout
from tests.models import small_model


def underscored(prefix: str, path: str) -> str:
    return f"{prefix}_{path.replace('.', '_')}"


def random_lora(
    version: str = "sd1", *, seed: int = 0, rank: int = 3, conv: bool = True, text: bool = True, alpha: float = 2.0
) -> dict[str, LoraWeights]:
    """Random factors for every module of the small model, by canonical name; the tensors must not be changed."""
    return dict(_random_lora(version, seed, rank, conv, text, alpha))


@cache
def _random_lora(version: str, seed: int, rank: int, conv: bool, text: bool, alpha: float) -> dict[str, LoraWeights]:
    model = small_model(version)
    generator = torch.Generator().manual_seed(seed)
    modules: dict[str, LoraWeights] = {}
    for component, root, prefix in (("unet", model.unet, "lora_unet"), ("text_encoder", model.text_encoder, "lora_te")):
        if component == "text_encoder" and not text:
            continue
        for target in plan_lora(root, component=component, network_dim=rank, conv_dim=2 if conv else None):
            path = target.path if component == "unet" else f"text_model.{target.path}"
            kernel = [1, 1] if len(target.shape) == 4 else []
            modules[underscored(prefix, path)] = LoraWeights(
                0.3 * torch.randn(target.dim, *target.shape[1:], generator=generator),
                0.3 * torch.randn(target.shape[0], target.dim, *kernel, generator=generator),
                alpha,
            )
    return modules


def save_lora(
    path: Path,
    modules: dict[str, LoraWeights],
    kind: str = "sd1",
    *,
    metadata: dict[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
    layout: str = "kohya",
) -> Path:
    save_layout(
        path, layout_tensors(modules, FAMILIES[kind], layout=layout, dtype=dtype), metadata or {}, layout=layout
    )
    return path


def changes(modules: dict[str, LoraWeights]) -> dict[str, torch.Tensor]:
    return {name: delta_weight(weights) for name, weights in modules.items()}


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """No value is further away than the tolerance; a twentieth of the time that assert_close takes."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance


# ---------------------------------------------------------------------------------------------------------------------
# A checkpoint with SDXL's names and none of its size

_BIG_G = "conditioner.embedders.1.model."
_CLIP_L = "conditioner.embedders.0.transformer.text_model."
WIDTH = 4


def sdxl_rows(golden: dict) -> list[tuple[str, str, tuple[int, ...]]]:
    """(path in the diffusers UNet, name in the original layout, small shape) of SDXL's 788 LoRA targets."""
    rows = []
    for path, key, kind, *_ in golden["rows"]:
        shape = {"linear": (6, WIDTH), "conv1x1": (6, WIDTH, 1, 1), "conv3x3": (6, WIDTH, 3, 3)}[kind]
        rows.append((path, _dotted_original(key.removeprefix("lora_unet_"), path), shape))
    return rows


def _dotted_original(underscored_name: str, path: str) -> str:
    """Dots of an original name, written down here independently of the package: block numbers, then the inner part."""
    match = re.fullmatch(r"(input_blocks|output_blocks)_(\d+)_(\d)_(.+)|(middle_block)_(\d)_(.+)", underscored_name)
    pieces = [piece for piece in match.groups() if piece is not None]
    inner = pieces.pop()
    if ".attentions." in path:
        inner = path.split(".attentions.")[1].split(".", 1)[1]
    else:
        inner = re.sub(r"^(in_layers|out_layers|emb_layers)_", r"\1.", inner)
    return ".".join([*pieces, inner])


def sdxl_checkpoint(golden: dict, path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Write a single file with SDXL's names for everything a LoRA changes, and some it does not; return its tensors."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {f"model.diffusion_model.{original}.weight": random(*shape) for _, original, shape in sdxl_rows(golden)}
    tensors["model.diffusion_model.input_blocks.0.0.weight"] = random(6, 4, 3, 3)
    tensors["model.diffusion_model.time_embed.0.weight"] = random(6, 4)
    tensors["model.diffusion_model.label_emb.0.0.weight"] = random(6, 4)
    tensors["model.diffusion_model.out.2.bias"] = random(4)
    layer = f"{_BIG_G}transformer.resblocks.0."
    for name, shape in (
        (f"{_CLIP_L}encoder.layers.0.self_attn.q_proj.weight", (6, WIDTH)),
        (f"{_CLIP_L}encoder.layers.0.mlp.fc1.weight", (6, WIDTH)),
        (f"{_CLIP_L}embeddings.token_embedding.weight", (9, WIDTH)),
        (f"{layer}attn.in_proj_weight", (18, WIDTH)),
        (f"{layer}attn.in_proj_bias", (18,)),
        (f"{layer}attn.out_proj.weight", (6, WIDTH)),
        (f"{layer}mlp.c_fc.weight", (6, WIDTH)),
        (f"{_BIG_G}text_projection", (6, WIDTH)),
        ("first_stage_model.decoder.conv_in.weight", (6, 4, 3, 3)),
    ):
        tensors[name] = random(*shape)
    tensors[f"{_CLIP_L}embeddings.position_ids"] = torch.arange(7)[None]
    tensors["denoiser.sigmas"] = torch.rand(5, generator=generator)
    save_file(tensors, path, {"modelspec.title": "small", "modelspec.hash_sha256": "0x00"})
    return tensors


def sdxl_lora(golden: dict, seed: int = 0) -> dict[str, LoraWeights]:
    """A LoRA for that checkpoint: UNet, and modules of both text encoders, fused ones among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {underscored("lora_unet", path): shape for path, _, shape in sdxl_rows(golden)}
    te1, te2 = "lora_te1_text_model_encoder_layers_0", "lora_te2_text_model_encoder_layers_0"
    for name in (f"{te1}_self_attn_q_proj", f"{te1}_mlp_fc1", f"{te2}_self_attn_out_proj", f"{te2}_mlp_fc1"):
        shapes[name] = (6, WIDTH)
    for role in ("k", "v"):
        shapes[f"{te2}_self_attn_{role}_proj"] = (6, WIDTH)
    return {
        name: LoraWeights(
            torch.randn(2, *shape[1:], generator=generator),
            torch.randn(shape[0], 2, *([1, 1] if len(shape) == 4 else []), generator=generator),
            1.0,
        )
        for name, shape in shapes.items()
    }
