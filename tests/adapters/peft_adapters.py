"""What the tests of adapter files share: adapters of PEFT with values, a pipeline to load them, and random LoRAs."""

from __future__ import annotations

import copy
import warnings

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from peft import (
    inject_adapter_in_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.targets import plan_lora
from tests.models import small_model

LINEAR = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
WIDE = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
CONV1 = "down_blocks.0.attentions.0.proj_in"
CONV3 = "down_blocks.1.resnets.0.conv1"
UPSAMPLER = "up_blocks.0.upsamplers.0.conv"
MODULES = [LINEAR, WIDE, CONV1, CONV3, UPSAMPLER]


def fill(root: nn.Module, seed: int = 0) -> nn.Module:
    """Give every trainable value of the adapters a random number, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in root.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return root


def adapted(root: nn.Module, config, seed: int = 0) -> nn.Module:
    root = copy.deepcopy(root)
    inject_adapter_in_model(config, root)
    return fill(root, seed)


def deltas(root: nn.Module) -> dict[str, torch.Tensor]:
    """What PEFT adds to each weight, by path."""
    layers = {path: m for path, m in root.named_modules() if isinstance(m, BaseTunerLayer)}
    return {path: layer.get_delta_weight("default").detach() for path, layer in layers.items()}


def underscored(prefix: str, path: str) -> str:
    return f"{prefix}_{path.replace('.', '_')}"


def random_lora(version: str = "sd1", *, alphas: bool = True) -> dict[str, LoraWeights]:
    """A LoRA with convolutions, text encoder and different ranks and alphas, by canonical name."""
    model = small_model(version)
    generator = torch.Generator().manual_seed(1)
    modules: dict[str, LoraWeights] = {}
    for component, root, prefix in (("unet", model.unet, "lora_unet"), ("text_encoder", model.text_encoder, "lora_te")):
        for place, target in enumerate(plan_lora(root, component=component, network_dim=3, conv_dim=2)):
            rank = target.dim + place % 2
            path = target.path if component == "unet" else f"text_model.{target.path}"
            kernel = [1, 1] if len(target.shape) == 4 else []
            modules[underscored(prefix, path)] = LoraWeights(
                torch.randn(rank, *target.shape[1:], generator=generator),
                torch.randn(target.shape[0], rank, *kernel, generator=generator),
                [1.0, 2.0, None, 5.0][place % 4] if alphas else None,
            )
    return modules


def assert_same_changes(read: dict[str, LoraWeights], expected: dict[str, LoraWeights], tolerance: float = 1e-5):
    assert set(read) == set(expected)
    for name, weights in expected.items():
        exact = delta_weight(weights)
        assert read[name].down.ndim == weights.down.ndim, name
        assert (delta_weight(read[name]) - exact).norm() <= tolerance * exact.norm(), name


def small_pipeline() -> StableDiffusionPipeline:
    """A pipeline over copies of the small model's networks."""
    model = small_model("sd1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return StableDiffusionPipeline(
            vae=model.vae,
            text_encoder=copy.deepcopy(model.text_encoder),
            tokenizer=None,
            unet=copy.deepcopy(model.unet),
            scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
