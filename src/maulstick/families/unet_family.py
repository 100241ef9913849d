"""What Stable Diffusion 1.x, 2.x and XL have in common: a UNet, a VAE, CLIP text encoders, discrete noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maulstick.adapters.blocks import BlockMap
from maulstick.adapters.ip_adapter_files import IpAdapterSpec
from maulstick.families.base import VAE, AdapterNaming, Conditioning, Family
from maulstick.families.build import build_module
from maulstick.families.clip_text import caption_ids, chunked_tokens, load_tokenizer
from maulstick.families.ip_adapter import IpAdapter, Layers
from maulstick.families.ip_adapter_unet import UnetIpAdapter, make_unet_layers, unet_spec
from maulstick.families.noise import NoiseSchedule, PredictionType
from maulstick.families.source import Component, UnetSource

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, SchedulerMixin
    from transformers import CLIPTextConfig

_UNET_NAMING = AdapterNaming(component="unet", log_name="unet")


@dataclass(frozen=True, kw_only=True)
class UnetSetup:
    """How a model is to be used.

    Attributes:
        prediction_type: what the UNet predicts.
        clip_skip: layer that text states are taken from, counted from the end; None for the family's usual one.
        max_token_length: 75, 150 or 225.
        dtype: of the UNet and the text encoders.
        vae_dtype: of the VAE.
        gradient_checkpointing: compute activations of UNet and text encoders twice.
    """

    prediction_type: PredictionType
    clip_skip: int | None
    max_token_length: int
    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype
    gradient_checkpointing: bool


class UnetFamily(Family):
    """Networks that come and go, images, noise. What is left to each family: how text and sizes reach its UNet.

    Attributes:
        identity_prefix: what the family's cache identities begin with.
        blocks: the block map of the UNet.
        tokenizers: component name of a text encoder -> its tokenizer.
        noise: the noise schedule.
    """

    identity_prefix: str
    blocks: BlockMap
    ip_adapter_encoder = "clip"
    ip_adapter_types = ("plain", "plus")

    def __init__(self, source: UnetSource, setup: UnetSetup) -> None:
        self._source = source
        self._setup = setup
        self._vae: AutoencoderKL | None = None
        self._vae_in_fp32: AutoencoderKL | None = None
        self._text_encoders: dict[str, nn.Module] = {}
        self._tensors_of: dict[str, int] = {}
        self.device, self.dtype = setup.device, setup.dtype
        self.prediction_type = setup.prediction_type
        self.denoiser_naming = _UNET_NAMING
        self.notes = source.notes
        self.vae_scale = 2 ** (len(source.vae.config["block_out_channels"]) - 1)
        self.latent_channels = source.unet.config.get("in_channels", 4)
        self.native_size = _side(source.unet.config.get("sample_size", 64)) * self.vae_scale
        self.tokenizers = {
            name: load_tokenizer(folder, pad_token=source.pad_tokens.get(name))
            for name, folder in source.tokenizer_folders.items()
        }
        self.noise = NoiseSchedule(source.scheduler_config, setup.prediction_type, setup.device)
        self.denoiser = self._build_unet()

    @staticmethod
    def usual_vae_dtype(dtype: torch.dtype) -> torch.dtype:
        """Return the VAE's number format where none was asked for."""
        return dtype

    # --- networks ----------------------------------------------------------------------------------------------------

    @property
    def vae(self) -> AutoencoderKL:
        """The VAE, loaded when first asked for."""
        if self._vae is None:
            self._vae = self._build_vae(self._setup.vae_dtype)
        return self._vae

    @property
    def text_encoders(self) -> Mapping[str, nn.Module]:
        return {name: self._text_encoder_on_device(name) for name in self._source.text_encoders}

    def encoders_on_device(self) -> frozenset[str]:
        on_device = {name for name, module in self._text_encoders.items() if self._is_here(module)}
        return frozenset(on_device if self._vae is None else on_device | {VAE})

    def release_encoders(self, *, vae: bool, text_encoders: bool) -> None:
        if vae:
            self._vae = self._vae_in_fp32 = None
        for name in list(self._text_encoders) if text_encoders else ():
            if _count_tensors(self._text_encoders[name]) == self._tensors_of[name]:
                del self._text_encoders[name]
            else:
                self._text_encoders[name].to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_here(self, module: nn.Module) -> bool:
        return next(module.parameters()).device.type == self.device.type

    def _build_unet(self) -> nn.Module:
        from diffusers import UNet2DConditionModel

        unet = self._source.unet
        module = build_module(
            lambda: UNet2DConditionModel.from_config(unet.config),
            unet.weights,
            what="UNet",
            dtype=self.dtype,
            device=self.device,
        )
        if self._setup.gradient_checkpointing:
            # diffusers' own choice of function is the non-reentrant one, which leaves the input without gradient.
            module.enable_gradient_checkpointing()
        return module

    def _build_vae(self, dtype: torch.dtype) -> AutoencoderKL:
        from diffusers import AutoencoderKL

        vae = self._source.vae
        return build_module(
            lambda: AutoencoderKL.from_config(vae.config), vae.weights, what="VAE", dtype=dtype, device=self.device
        )

    def _text_encoder_on_device(self, name: str) -> nn.Module:
        if name not in self._text_encoders:
            self._text_encoders[name] = self._build_text_encoder(name, self._source.text_encoders[name])
            self._tensors_of[name] = _count_tensors(self._text_encoders[name])
        elif not self._is_here(self._text_encoders[name]):
            self._text_encoders[name].to(self.device)
        return self._text_encoders[name]

    def _build_text_encoder(self, name: str, part: Component) -> nn.Module:
        from transformers import CLIPTextConfig

        module = build_module(
            lambda: self._new_text_encoder(name, CLIPTextConfig.from_dict(part.config)),
            part.weights,
            what=name.replace("_", " "),
            dtype=self.dtype,
            device=self.device,
        )
        if self._setup.gradient_checkpointing:
            # The public switch also makes the embeddings require gradients, which would drag the backward pass through
            # layers that train nothing.
            switch: Any = module
            switch._set_gradient_checkpointing(
                enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False)
            )
        return module

    def _new_text_encoder(self, name: str, config: CLIPTextConfig) -> nn.Module:
        """Return a text encoder of the class that ``name`` has, with whatever weights."""
        from transformers import CLIPTextModel

        return CLIPTextModel(config)

    # --- images and captions -----------------------------------------------------------------------------------------

    @property
    def latent_identity(self) -> str:
        vae = self._source.vae
        scaling = vae.config.get("scaling_factor", 0.18215)
        return f"{self.identity_prefix}-vae:{vae.weights.content_hash()}:{short_name(self._setup.vae_dtype)}:{scaling}"

    def encode_images(self, pixels: Tensor) -> Tensor:
        return self._encode(self.vae, pixels)

    def encode_images_in_fp32(self, pixels: Tensor) -> Tensor:
        return self._encode(self._fp32_vae(), pixels)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """As in ``Family``; decoded again in fp32 where the chosen precision gives values that are not finite."""
        pixels = self._decode(self.vae, latents)
        return pixels if torch.isfinite(pixels).all() else self._decode(self._fp32_vae(), latents)

    def _fp32_vae(self) -> AutoencoderKL:
        if self._setup.vae_dtype == torch.float32:
            return self.vae
        if self._vae_in_fp32 is None:
            self._vae_in_fp32 = self._build_vae(torch.float32)
        return self._vae_in_fp32

    @torch.no_grad()
    def _encode(self, vae: AutoencoderKL, pixels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            mean = vae.encode(pixels.to(self.device, vae.dtype)).latent_dist.mean
        return mean.float() * vae.config.scaling_factor

    @torch.no_grad()
    def _decode(self, vae: AutoencoderKL, latents: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            scaled = latents.to(self.device).float() / vae.config.scaling_factor
            return vae.decode(scaled.to(vae.dtype)).sample.float()

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {
            name: chunked_tokens(tokenizer, captions, self._setup.max_token_length)
            for name, tokenizer in self.tokenizers.items()
        }

    def count_tokens(self, caption: str) -> int:
        # All tokenizers of a model have one vocabulary; they differ in padding.
        return len(caption_ids(next(iter(self.tokenizers.values())), [caption])[0])

    # --- noise -------------------------------------------------------------------------------------------------------

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        return self.noise.sample_timesteps(count, generator)

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.noise.add_noise(latents, noise, timesteps)

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.noise.target(latents, noise, timesteps)

    def loss_weights(self, timesteps: Tensor, min_snr_gamma: float | None) -> Tensor:
        return self.noise.loss_weights(timesteps, min_snr_gamma)

    def _sampler(self, name: str) -> SchedulerMixin:
        from maulstick.families.samplers import make_sampler

        return make_sampler(name, {**self._source.scheduler_config, "prediction_type": self.prediction_type})

    # --- image prompts -----------------------------------------------------------------------------------------------

    def ip_adapter_spec(self, kind: str | None, tokens: int | None, feature_width: int) -> IpAdapterSpec:
        return unet_spec(self.denoiser, kind or "plain", tokens, feature_width)

    def ip_adapter_layers(self, spec: IpAdapterSpec) -> Layers:
        return make_unet_layers(self.denoiser, spec, with_weights=False)

    def attach_ip_adapter(self, spec: IpAdapterSpec, seed: int = 0) -> IpAdapter:
        self.ip_adapter = UnetIpAdapter(self.denoiser, spec, seed=seed)
        return self.ip_adapter

    def image_prompt(self, conditioning: Conditioning, count: int) -> AbstractContextManager[dict[str, Any]]:
        """Give ``added_cond_kwargs`` of the IP-Adapter for one prediction; nothing without one."""
        return nullcontext({}) if self.ip_adapter is None else self.ip_adapter.predicting(conditioning, count)

    # --- blocks ------------------------------------------------------------------------------------------------------

    def block_index(self, path: str) -> int | None:
        return self.blocks.index_of(path)

    def block_names(self) -> Sequence[str]:
        return self.blocks.names

    def block_parts(self) -> Mapping[str, range]:
        return self.blocks.parts


def short_name(dtype: torch.dtype) -> str:
    """Return "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _side(sample_size: int | Sequence[int]) -> int:
    return sample_size if isinstance(sample_size, int) else max(sample_size)


def _count_tensors(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())
