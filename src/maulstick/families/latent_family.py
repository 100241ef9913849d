"""What all families have in common: networks that come and go, and images as latents of a VAE."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maulstick.adapters.fp8 import store_in_fp8, stored_bytes
from maulstick.families.base import VAE, Family
from maulstick.families.build import build_module
from maulstick.families.clip_text import caption_ids, load_tokenizer
from maulstick.families.merged_base import BaseChange, apply_changes
from maulstick.families.recognise import JsonObject
from maulstick.families.source import Component, ModelSource

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig


KEPT_WHOLE = frozenset({"conv_in", "conv_out", "pos_embed", "proj_out", "wo"})
"""Layers that stay whole under ``fp8_base``: the first and last, whose format libraries take for that of the network,
and T5's ``wo``, in whose format it computes."""
_NOT_IN_FP8 = re.compile(r"embed|shared|relative_attention|\bwo\b")


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """How a model is to be used.

    Attributes:
        dtype: of the denoiser and the text encoders.
        vae_dtype: of the VAE.
        gradient_checkpointing: compute activations of denoiser and text encoders twice.
    """

    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype
    gradient_checkpointing: bool


class LatentFamily(Family):
    """Networks and latents. What is left to each family: its denoiser, its noise, and how text reaches the denoiser.

    Attributes:
        identity_prefix: what the family's cache identities begin with.
        denoiser_title: what messages call the denoiser.
        tokenizers: component name of a CLIP text encoder -> its tokenizer.
    """

    identity_prefix: str
    denoiser_title: str

    def __init__(self, source: ModelSource, setup: ModelSetup) -> None:
        self._source = source
        self._setup = setup
        self._vae: AutoencoderKL | None = None
        self._vae_in_fp32: AutoencoderKL | None = None
        self._text_encoders: dict[str, nn.Module] = {}
        self._tensors_of: dict[str, int] = {}
        self._changes: Mapping[str, Sequence[BaseChange]] = {}
        self._in_fp8: frozenset[str] = frozenset()
        self.device, self.dtype = setup.device, setup.dtype
        self.notes = source.notes
        self.vae_scale = 2 ** (len(source.vae.config["block_out_channels"]) - 1)
        self.latent_channels = source.denoiser.config.get("in_channels", 4)
        self.native_size = _side(source.denoiser.config.get("sample_size", 64)) * self.vae_scale
        self.tokenizers = {
            name: load_tokenizer(folder, pad_token=source.pad_tokens.get(name))
            for name, folder in source.tokenizer_folders.items()
            if name in self._clip_encoders()
        }
        self.denoiser = self._build_denoiser()

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

    def change_base(self, changes: Mapping[str, Sequence[BaseChange]], identity: str) -> None:
        self._changes, self.merged = changes, identity
        loaded = {self.denoiser_naming.component: self.denoiser, **self._text_encoders}
        for component, network in loaded.items():
            apply_changes(network, changes.get(component, ()))

    def store_in_fp8(self, components: Collection[str]) -> None:
        self._in_fp8 |= frozenset(components)
        for component, network in {self.denoiser_naming.component: self.denoiser, **self._text_encoders}.items():
            if component in components:
                store_in_fp8(network, KEPT_WHOLE)

    def base_bytes(self, in_fp8: Collection[str] = ()) -> dict[str, int]:
        name = self.denoiser_naming.component
        found = {name: stored_bytes(self.denoiser, in_fp8=name in in_fp8, keep=KEPT_WHOLE)}
        for name, part in self._source.text_encoders.items():
            slots = {slot.source: (path, slot.shape) for path, slot in part.weights.slots.items()}.values()
            small = {path for path, shape in slots if len(shape) == 2 and not _NOT_IN_FP8.search(path)}
            found[name] = sum(
                math.prod(shape) * (1 if name in in_fp8 and path in small else self.dtype.itemsize)
                for path, shape in slots
            )
        return found

    @property
    def _merged_text(self) -> str:
        """What ``text_identity`` says about changed text encoders; nothing where there are none."""
        return f":merged-{self.merged}" if self._changes.keys() & self._source.text_encoders.keys() else ""

    @property
    def text_encoder_components(self) -> frozenset[str]:
        return frozenset(self._source.text_encoders)

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

    def _clip_encoders(self) -> frozenset[str]:
        """Return the names of the text encoders that are CLIP's."""
        return frozenset(self._source.text_encoders)

    @abstractmethod
    def _new_denoiser(self, config: JsonObject) -> nn.Module:
        """Return a denoiser with whatever weights."""

    def _build_denoiser(self) -> nn.Module:
        denoiser = self._source.denoiser
        module: Any = build_module(
            lambda: self._new_denoiser(denoiser.config),
            denoiser.weights,
            what=self.denoiser_title,
            dtype=self.dtype,
            device=self.device,
        )
        if self._setup.gradient_checkpointing:
            # diffusers' own choice of function is the non-reentrant one, which leaves the input without gradient.
            module.enable_gradient_checkpointing()
        frozen: nn.Module = module
        return frozen

    def _build_vae(self, dtype: torch.dtype) -> AutoencoderKL:
        from diffusers import AutoencoderKL

        vae = self._source.vae
        return build_module(
            lambda: AutoencoderKL.from_config(vae.config), vae.weights, what="VAE", dtype=dtype, device=self.device
        )

    def _text_encoder_on_device(self, name: str) -> nn.Module:
        if name not in self._text_encoders:
            built = self._build_text_encoder(name, self._source.text_encoders[name])
            apply_changes(built, self._changes.get(name, ()))
            if name in self._in_fp8:
                store_in_fp8(built, KEPT_WHOLE)
            self._text_encoders[name] = built
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

    # --- images ------------------------------------------------------------------------------------------------------

    @property
    def latent_identity(self) -> str:
        vae = self._source.vae
        scaling, shift = vae.config.get("scaling_factor", 0.18215), vae.config.get("shift_factor")
        place = f"{scaling}" if shift is None else f"{scaling}:{shift}"
        return f"{self.identity_prefix}-vae:{vae.weights.content_hash()}:{short_name(self._setup.vae_dtype)}:{place}"

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
        return (mean.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor

    @torch.no_grad()
    def _decode(self, vae: AutoencoderKL, latents: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            plain = latents.to(self.device).float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
            return vae.decode(plain.to(vae.dtype)).sample.float()

    def count_tokens(self, caption: str) -> int:
        # All tokenizers of a model have one vocabulary; they differ in padding.
        return len(caption_ids(next(iter(self.tokenizers.values())), [caption])[0])

    @torch.no_grad()
    def _with_pooled_text(
        self, prompts: Sequence[str], negative_prompts: Sequence[str], states: str, pooled: str
    ) -> dict[str, Tensor]:
        """Return what a pipeline takes that wants pooled text beside the states; both names are of ``encode_text``."""
        encoded = self.encode_text(self.tokenize([*negative_prompts, *prompts]))
        counts = [len(negative_prompts), len(prompts)]
        negative, positive = encoded[states].to(self.dtype).split(counts)
        negative_pooled, positive_pooled = encoded[pooled].to(self.dtype).split(counts)
        return {
            "prompt_embeds": positive,
            "negative_prompt_embeds": negative,
            "pooled_prompt_embeds": positive_pooled,
            "negative_pooled_prompt_embeds": negative_pooled,
        }


def short_name(dtype: torch.dtype) -> str:
    """Return "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _side(sample_size: int | Sequence[int]) -> int:
    return sample_size if isinstance(sample_size, int) else max(sample_size)


def _count_tensors(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())
