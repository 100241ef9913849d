"""Stable Diffusion XL (Podell et al. 2023): two text encoders, pooled text, and the image's sizes as conditioning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from maulstick.adapters.blocks import SDXL_BLOCKS
from maulstick.adapters.key_names import SDXL_KEY_NAMES
from maulstick.errors import OptionError
from maulstick.families.base import AdapterNaming, Conditioning, Framing
from maulstick.families.clip_text import WEIGHTS, layer_states, pooled_states, weighted_states
from maulstick.families.latent_family import short_name
from maulstick.families.libraries import quiet_libraries
from maulstick.families.source import ModelSource
from maulstick.families.unet_family import UnetFamily, UnetSetup

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import CLIPTextConfig

_CLIP_L, _OPEN_CLIP = "text_encoder", "text_encoder_2"
_TEXT_STATES, _POOLED, _SIZES = "encoder_hidden_states", "text_embeds", "time_ids"
_LAYER = 2
"""Text states are those before the last layer of both encoders, without the final norm."""


class StableDiffusionXL(UnetFamily):
    """SDXL base and its fine-tunes, predicting noise or v.

    The text states of both encoders stand side by side; the pooled text is the second one's projected end mark, of the
    first window where there are several. An empty caption is encoded like any other, in training as in drawing: that
    is what caption dropout teaches, so nothing is set to zero (diffusers' ``force_zeros_for_empty_prompt``).

    Raises:
        OptionError: ``clip_skip`` names another layer than the one that SDXL takes in any case; 1 counts as not given.
    """

    name = "SDXL"
    base_model_version = "sdxl_base_v1-0"
    architecture = "stable-diffusion-xl-v1-base/lora"
    identity_prefix = "sdxl"
    blocks = SDXL_BLOCKS
    key_names = SDXL_KEY_NAMES

    def __init__(self, source: ModelSource, setup: UnetSetup) -> None:
        # kohya_ss writes clip_skip = 1 into every file, whatever the model; sd-scripts ignores it for SDXL.
        if setup.clip_skip not in (None, 1, _LAYER):
            raise OptionError(
                f"clip_skip {setup.clip_skip}: SDXL always takes the text states one layer before the last, which is "
                "clip_skip 2 (sd-scripts ignores the option). Leave clip_skip out."
            )
        self.text_encoder_naming = {
            _CLIP_L: AdapterNaming(component=_CLIP_L, log_name="textencoder1"),
            _OPEN_CLIP: AdapterNaming(component=_OPEN_CLIP, log_name="textencoder2"),
        }
        super().__init__(source, setup)

    @staticmethod
    def usual_vae_dtype(dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for fp16, whose range the activations of SDXL's VAE exceed."""
        return torch.float32 if dtype == torch.float16 else dtype

    def _new_text_encoder(self, name: str, config: CLIPTextConfig) -> nn.Module:
        from transformers import CLIPTextModelWithProjection

        return CLIPTextModelWithProjection(config) if name == _OPEN_CLIP else super()._new_text_encoder(name, config)

    # --- captions and sizes ------------------------------------------------------------------------------------------

    @property
    def text_identity(self) -> str:
        weights = "+".join(part.weights.content_hash() for part in self._source.text_encoders.values())
        padding = "+".join(str(tokenizer.pad_token_id) for tokenizer in self.tokenizers.values())
        setup = f"tokens-{self._setup.max_token_length}:pad-{padding}{self._weights_identity}{self._merged_text}"
        return f"sdxl-clip:{weights}:{short_name(self.dtype)}:{setup}"

    def encode_text(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return ``encoder_hidden_states`` (B, T, D1 + D2) and ``text_embeds`` (B, P), the pooled text."""
        tokens = {name: ids.to(self.device) for name, ids in tokens.items()}
        first, _ = layer_states(self._text_encoder_on_device(_CLIP_L), tokens[_CLIP_L], _LAYER)
        second, output = layer_states(self._text_encoder_on_device(_OPEN_CLIP), tokens[_OPEN_CLIP], _LAYER)
        first = weighted_states(first, tokens.get(_CLIP_L + WEIGHTS))
        second = weighted_states(second, tokens.get(_OPEN_CLIP + WEIGHTS))
        return {_TEXT_STATES: torch.cat([first, second], dim=-1), _POOLED: pooled_states(output, len(second))}

    def image_conditioning(self, framings: Sequence[Framing]) -> Conditioning:
        """Return ``time_ids`` (B, 6), fp32: (height, width) of the image, (top, left) of the crop, (height, width)."""
        rows = [(*framing.original[::-1], *framing.crop[::-1], *framing.target[::-1]) for framing in framings]
        return {_SIZES: torch.tensor(rows, dtype=torch.float32, device=self.device)}

    def predict(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As in ``Family``; without ``time_ids`` the pictures are taken for whole images of their size."""
        sizes = conditioning.get(_SIZES)
        if sizes is None:
            height, width = (side * self.vae_scale for side in noisy.shape[-2:])
            sizes = self.image_conditioning([Framing.whole(width, height)] * len(noisy))[_SIZES]
        added = {
            _POOLED: conditioning[_POOLED].to(self.device, self.dtype),
            # Sizes stay in fp32: bf16 would make 1080 pixels of 1081.
            _SIZES: sizes.to(self.device, torch.float32),
        }
        states = conditioning[_TEXT_STATES].to(self.device, self.dtype)
        with self.image_prompt(conditioning, len(noisy)) as image:
            return self.denoiser(
                noisy.to(self.dtype),
                timesteps,
                encoder_hidden_states=states,
                added_cond_kwargs={**added, **image},
                return_dict=False,
            )[0]

    # --- drawing -----------------------------------------------------------------------------------------------------

    def pipeline(self, sampler: str) -> DiffusionPipeline:
        """As in ``Family``; pictures are drawn as whole images of their size, which is the pipeline's own default."""
        with quiet_libraries():
            from diffusers import StableDiffusionXLPipeline

        pipeline = StableDiffusionXLPipeline(
            vae=self.vae,
            tokenizer=self.tokenizers[_CLIP_L],
            tokenizer_2=self.tokenizers[_OPEN_CLIP],
            unet=self.denoiser,
            scheduler=self._sampler(sampler),
            force_zeros_for_empty_prompt=False,
            add_watermarker=False,
            **self.text_encoders,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def pipeline_conditioning(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> dict[str, Tensor]:
        return self._with_pooled_text(prompts, negative_prompts, _TEXT_STATES, _POOLED)
