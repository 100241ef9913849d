"""Stable Diffusion 1.x and 2.x: one UNet, one CLIP text encoder, a noise schedule of 1000 steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maulstick.adapters.blocks import SD_BLOCKS, sd_block_index
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.metadata import base_model_version, sd_architecture
from maulstick.errors import OptionError
from maulstick.families.base import VAE, AdapterNaming, Conditioning, Family
from maulstick.families.build import build_module
from maulstick.families.clip_text import caption_ids, chunked_tokens, load_tokenizer, text_states
from maulstick.families.libraries import quiet_libraries
from maulstick.families.noise import NoiseSchedule, PredictionType
from maulstick.families.source import Component, SdSource

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DiffusionPipeline

_TEXT_ENCODER = "text_encoder"
_TEXT_STATES = "encoder_hidden_states"
# SD 2.x was trained with "!" (token 0) as padding, SD 1.x with the end mark.
_PAD_TOKEN_V2 = "!"

_UNET_NAMING = AdapterNaming(component="unet", log_name="unet")
_TEXT_ENCODER_NAMING = AdapterNaming(component=_TEXT_ENCODER, log_name="textencoder")


class StableDiffusion(Family):
    """SD 1.x or 2.x, predicting noise or v.

    Args:
        source: where the parts lie.
        prediction_type: what the UNet predicts.
        clip_skip: layer of the text encoder, counted from the end; None for the last.
        max_token_length: 75, 150 or 225.
        dtype: of the UNet and the text encoder.
        vae_dtype: of the VAE.
        gradient_checkpointing: compute activations of UNet and text encoder twice.
    """

    def __init__(
        self,
        source: SdSource,
        *,
        prediction_type: PredictionType,
        clip_skip: int | None,
        max_token_length: int,
        device: torch.device,
        dtype: torch.dtype,
        vae_dtype: torch.dtype,
        gradient_checkpointing: bool,
    ) -> None:
        self._source = source
        self._clip_skip = clip_skip
        self._max_token_length = max_token_length
        self._checkpoints = gradient_checkpointing
        self._vae_dtype = vae_dtype
        self._vae: AutoencoderKL | None = None
        self._vae_in_fp32: AutoencoderKL | None = None
        self._text_encoder: nn.Module | None = None
        self._text_encoder_size = 0
        self.name = "SD 2.x" if source.is_v2 else "SD 1.x"
        self.device, self.dtype = device, dtype
        self.prediction_type = prediction_type
        predicts_v = prediction_type == "v_prediction"
        self.base_model_version = base_model_version(v2=source.is_v2, v_parameterization=predicts_v)
        self.architecture = sd_architecture(v2=source.is_v2, v_parameterization=predicts_v)
        self.key_names = SD_KEY_NAMES
        self.denoiser_naming = _UNET_NAMING
        self.text_encoder_naming = {_TEXT_ENCODER: _TEXT_ENCODER_NAMING}
        self.notes = source.notes
        self.vae_scale = 2 ** (len(source.vae.config["block_out_channels"]) - 1)
        self.latent_channels = source.unet.config.get("in_channels", 4)
        self.native_size = _side(source.unet.config.get("sample_size", 64)) * self.vae_scale
        self.tokenizer = load_tokenizer(source.tokenizer_folder, pad_token=self._pad_token())
        self.noise = NoiseSchedule(source.scheduler_config, prediction_type, device)
        self.denoiser = self._build_unet()
        _refuse_layer_beyond(clip_skip, source.text_encoder)

    # --- networks ----------------------------------------------------------------------------------------------------

    @property
    def vae(self) -> AutoencoderKL:
        """The VAE, loaded when first asked for."""
        if self._vae is None:
            self._vae = self._build_vae(self._vae_dtype)
        return self._vae

    @property
    def text_encoders(self) -> Mapping[str, nn.Module]:
        return {_TEXT_ENCODER: self._text_encoder_on_device()}

    def encoders_on_device(self) -> frozenset[str]:
        on_device = set()
        if self._vae is not None:
            on_device.add(VAE)
        if self._text_encoder is not None and _device_of(self._text_encoder).type == self.device.type:
            on_device.add(_TEXT_ENCODER)
        return frozenset(on_device)

    def release_encoders(self, *, vae: bool, text_encoders: bool) -> None:
        if vae:
            self._vae = self._vae_in_fp32 = None
        if text_encoders and self._text_encoder is not None:
            if _count_tensors(self._text_encoder) == self._text_encoder_size:
                self._text_encoder = None
            else:
                self._text_encoder.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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
        if self._checkpoints:
            # diffusers' own choice of function is the non-reentrant one, which leaves the input without gradient.
            module.enable_gradient_checkpointing()
        return module

    def _build_vae(self, dtype: torch.dtype) -> AutoencoderKL:
        from diffusers import AutoencoderKL

        vae = self._source.vae
        return build_module(
            lambda: AutoencoderKL.from_config(vae.config), vae.weights, what="VAE", dtype=dtype, device=self.device
        )

    def _text_encoder_on_device(self) -> nn.Module:
        if self._text_encoder is None:
            self._text_encoder = self._build_text_encoder()
            self._text_encoder_size = _count_tensors(self._text_encoder)
        elif _device_of(self._text_encoder).type != self.device.type:
            self._text_encoder.to(self.device)
        return self._text_encoder

    def _build_text_encoder(self) -> nn.Module:
        from transformers import CLIPTextConfig, CLIPTextModel

        text_encoder = self._source.text_encoder
        module = build_module(
            lambda: CLIPTextModel(CLIPTextConfig.from_dict(text_encoder.config)),
            text_encoder.weights,
            what="text encoder",
            dtype=self.dtype,
            device=self.device,
        )
        if self._checkpoints:
            # The public switch also makes the embeddings require gradients, which would drag the backward pass through
            # layers that train nothing.
            module._set_gradient_checkpointing(
                enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False)
            )
        return module

    # --- images and captions -----------------------------------------------------------------------------------------

    @property
    def latent_identity(self) -> str:
        scaling = self._source.vae.config.get("scaling_factor", 0.18215)
        return f"sd-vae:{self._source.vae.weights.content_hash()}:{_short(self._vae_dtype)}:{scaling}"

    @property
    def text_identity(self) -> str:
        weights = self._source.text_encoder.weights.content_hash()
        return (
            f"sd-clip:{weights}:{_short(self.dtype)}:layer-{self._clip_skip or 1}:tokens-{self._max_token_length}"
            f":pad-{self.tokenizer.pad_token_id}"
        )

    def encode_images(self, pixels: Tensor) -> Tensor:
        return self._encode(self.vae, pixels)

    def encode_images_in_fp32(self, pixels: Tensor) -> Tensor:
        return self._encode(self._fp32_vae(), pixels)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """As in ``Family``; decoded again in fp32 where the chosen precision gives values that are not finite."""
        pixels = self._decode(self.vae, latents)
        return pixels if torch.isfinite(pixels).all() else self._decode(self._fp32_vae(), latents)

    def _fp32_vae(self) -> AutoencoderKL:
        if self._vae_dtype == torch.float32:
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
        return {_TEXT_ENCODER: chunked_tokens(self.tokenizer, captions, self._max_token_length)}

    def count_tokens(self, caption: str) -> int:
        return len(caption_ids(self.tokenizer, [caption])[0])

    def encode_text(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        text_encoder = self._text_encoder_on_device()
        return {_TEXT_STATES: text_states(text_encoder, tokens[_TEXT_ENCODER].to(self.device), self._clip_skip)}

    def _pad_token(self) -> str | None:
        """A single file says nothing about padding; a folder's tokenizer does."""
        return _PAD_TOKEN_V2 if self._source.is_v2 and self._source.path.is_file() else None

    # --- noise and prediction ----------------------------------------------------------------------------------------

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        return self.noise.sample_timesteps(count, generator)

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.noise.add_noise(latents, noise, timesteps)

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.noise.target(latents, noise, timesteps)

    def loss_weights(self, timesteps: Tensor, min_snr_gamma: float | None) -> Tensor:
        return self.noise.loss_weights(timesteps, min_snr_gamma)

    def predict(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As in ``Family``; input and text states are brought to the UNet's number format, as outside of autocast."""
        states = conditioning[_TEXT_STATES].to(self.device, self.dtype)
        return self.denoiser(noisy.to(self.dtype), timesteps, encoder_hidden_states=states, return_dict=False)[0]

    def block_index(self, path: str) -> int | None:
        return sd_block_index(path)

    def block_names(self) -> Sequence[str]:
        return SD_BLOCKS.names

    def block_parts(self) -> Mapping[str, range]:
        return SD_BLOCKS.parts

    # --- drawing -----------------------------------------------------------------------------------------------------

    def pipeline(self, sampler: str) -> DiffusionPipeline:
        with quiet_libraries():
            from diffusers import StableDiffusionPipeline

        from maulstick.families.samplers import make_sampler

        config = {**self._source.scheduler_config, "prediction_type": self.prediction_type}
        pipeline = StableDiffusionPipeline(
            vae=self.vae,
            text_encoder=self._text_encoder_on_device(),
            tokenizer=self.tokenizer,
            unet=self.denoiser,
            scheduler=make_sampler(sampler, config),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @torch.no_grad()
    def pipeline_conditioning(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> dict[str, Tensor]:
        states = self.encode_text(self.tokenize([*negative_prompts, *prompts]))[_TEXT_STATES].to(self.dtype)
        negative, positive = states.split([len(negative_prompts), len(prompts)])
        return {"prompt_embeds": positive, "negative_prompt_embeds": negative}


def _refuse_layer_beyond(clip_skip: int | None, text_encoder: Component) -> None:
    layers = text_encoder.config.get("num_hidden_layers", 12)
    if clip_skip is not None and not 1 <= clip_skip <= layers:
        raise OptionError(f"clip_skip {clip_skip} names no layer: this model's text encoder has {layers}.")


def _side(sample_size: int | Sequence[int]) -> int:
    return sample_size if isinstance(sample_size, int) else max(sample_size)


def _count_tensors(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
