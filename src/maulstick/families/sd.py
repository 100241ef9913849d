"""Stable Diffusion 1.x and 2.x: one UNet, one CLIP text encoder, a noise schedule of 1000 steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maulstick.adapters.blocks import SD_BLOCKS
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.metadata import base_model_version, sd_architecture
from maulstick.errors import OptionError
from maulstick.families.base import AdapterNaming, Conditioning
from maulstick.families.clip_text import WEIGHTS, text_states, weighted_states
from maulstick.families.latent_family import short_name
from maulstick.families.libraries import quiet_libraries
from maulstick.families.source import Component, ModelSource
from maulstick.families.unet_family import UnetFamily, UnetSetup

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import CLIPTokenizer

_TEXT_ENCODER = "text_encoder"
_TEXT_STATES = "encoder_hidden_states"


class StableDiffusion(UnetFamily):
    """SD 1.x or 2.x, predicting noise or v. Text states come from the last layer where ``clip_skip`` names no other."""

    identity_prefix = "sd"
    blocks = SD_BLOCKS
    key_names = SD_KEY_NAMES

    def __init__(self, source: ModelSource, setup: UnetSetup) -> None:
        is_v2, predicts_v = source.kind == "sd2", setup.prediction_type == "v_prediction"
        self.name = "SD 2.x" if is_v2 else "SD 1.x"
        self.base_model_version = base_model_version(v2=is_v2, v_parameterization=predicts_v)
        self.architecture = sd_architecture(v2=is_v2, v_parameterization=predicts_v)
        self.text_encoder_naming = {_TEXT_ENCODER: AdapterNaming(component=_TEXT_ENCODER, log_name="textencoder")}
        super().__init__(source, setup)
        _refuse_layer_beyond(setup.clip_skip, source.text_encoders[_TEXT_ENCODER])

    @property
    def tokenizer(self) -> CLIPTokenizer:
        """The tokenizer of the one text encoder."""
        return self.tokenizers[_TEXT_ENCODER]

    @property
    def text_identity(self) -> str:
        weights = self._source.text_encoders[_TEXT_ENCODER].weights.content_hash()
        layer, length = self._setup.clip_skip or 1, self._setup.max_token_length
        return (
            f"sd-clip:{weights}:{short_name(self.dtype)}:layer-{layer}:tokens-{length}"
            f":pad-{self.tokenizer.pad_token_id}{self._weights_identity}{self._merged_text}"
        )

    def encode_text(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        text_encoder = self._text_encoder_on_device(_TEXT_ENCODER)
        states = text_states(text_encoder, tokens[_TEXT_ENCODER].to(self.device), self._setup.clip_skip)
        return {_TEXT_STATES: weighted_states(states, tokens.get(_TEXT_ENCODER + WEIGHTS))}

    def predict(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As in ``Family``; input and text states are brought to the UNet's number format, as outside of autocast."""
        states = conditioning[_TEXT_STATES].to(self.device, self.dtype)
        with self.image_prompt(conditioning, len(noisy)) as added:
            return self.denoiser(
                noisy.to(self.dtype),
                timesteps,
                encoder_hidden_states=states,
                added_cond_kwargs=added or None,
                return_dict=False,
            )[0]

    # --- drawing -----------------------------------------------------------------------------------------------------

    def pipeline(self, sampler: str) -> DiffusionPipeline:
        with quiet_libraries():
            from diffusers import StableDiffusionPipeline

        pipeline = StableDiffusionPipeline(
            vae=self.vae,
            tokenizer=self.tokenizer,
            unet=self.denoiser,
            scheduler=self._sampler(sampler),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            **self.text_encoders,
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
