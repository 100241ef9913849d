"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): a joint transformer, a flow, and up to three text encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maulstick.adapters.block_weights import numbered_blocks
from maulstick.adapters.ip_adapter_files import IpAdapterSpec
from maulstick.adapters.joint_names import SD3_KEY_NAMES, joint_block_index
from maulstick.errors import OptionError
from maulstick.families.base import AdapterNaming, Conditioning
from maulstick.families.clip_text import chunked_tokens, layer_states, pooled_states
from maulstick.families.flow import FlowSchedule
from maulstick.families.ip_adapter import IMAGE_FEATURES, IpAdapter, Layers
from maulstick.families.ip_adapter_sd3 import Sd3IpAdapter, make_sd3_layers, sd3_spec
from maulstick.families.joint_layout import join_layers
from maulstick.families.latent_family import LatentFamily, ModelSetup, short_name
from maulstick.families.libraries import quiet_libraries
from maulstick.families.objective import refuse_noise_options
from maulstick.families.recognise import JsonObject
from maulstick.families.source import Component, ModelSource
from maulstick.families.t5_text import build_t5, load_t5_tokenizer, t5_dtype, t5_states, t5_tokens
from maulstick.options.objective_schema import ObjectiveOptions

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import CLIPTextConfig

_CLIP_L, _CLIP_G, _T5 = "text_encoder", "text_encoder_2", "text_encoder_3"
_TEXT_STATES, _POOLED = "encoder_hidden_states", "pooled_projections"
_LAYER = 2
"""Text states of CLIP are those before the last layer, without the final norm."""
_CLIP_BODY = 75
_SAMPLER = "euler"


@dataclass(frozen=True, kw_only=True)
class SD3Setup(ModelSetup):
    """How a model is to be used.

    Attributes:
        objective: how timesteps are drawn and weighed.
        t5_length: tokens that T5 reads of a caption; as many states stand for it where it is left out.
    """

    objective: ObjectiveOptions
    t5_length: int


class StableDiffusion3(LatentFamily):
    """SD3 medium, SD3.5 medium and large.

    The states of both CLIP encoders stand side by side, filled up with zeros to T5's width; those of T5 follow as
    further tokens, or zeros where there is no T5. The pooled text is that of both CLIP encoders. All is as diffusers'
    pipeline has it, an empty caption included.
    """

    identity_prefix = "sd3"
    denoiser_title = "transformer"
    prediction_type = "flow_prediction"
    key_names = SD3_KEY_NAMES
    network_module = "networks.lora_sd3"
    token_limits = (_CLIP_BODY,)
    sampler_names = (_SAMPLER,)
    ip_adapter_encoder = "siglip"
    _setup: SD3Setup

    def __init__(self, source: ModelSource, setup: SD3Setup) -> None:
        self.name, self.base_model_version, self.architecture = _version(source.denoiser.config)
        self.denoiser_naming = AdapterNaming(component="transformer", log_name="unet")
        # T5 is never trained: 4.7 billion weights for what both CLIP encoders learn as well.
        self.text_encoder_naming = {
            _CLIP_L: AdapterNaming(component=_CLIP_L, log_name="textencoder1"),
            _CLIP_G: AdapterNaming(component=_CLIP_G, log_name="textencoder2"),
        }
        self.flow = FlowSchedule(source.scheduler_config, setup.objective)
        self._blocks = numbered_blocks({"block": source.denoiser.config["num_layers"]})
        super().__init__(source, setup)
        self.t5_tokenizer = load_t5_tokenizer(source.tokenizer_folders[_T5]) if self._has_t5 else None
        if self._has_t5 and setup.dtype == torch.float16:
            note = "T5 is kept in bf16: its feed-forward output exceeds what fp16 can hold. Everything else is in fp16."
            self.notes = (*self.notes, note)

    @property
    def _has_t5(self) -> bool:
        return _T5 in self._source.text_encoders

    # --- networks ----------------------------------------------------------------------------------------------------

    @property
    def size_multiple(self) -> int:
        """Latents are cut into patches, so their sides must be whole numbers of those."""
        patch: int = self._source.denoiser.config.get("patch_size", 2)
        return self.vae_scale * patch

    @property
    def largest_side(self) -> int:
        """Positions come from a table, of which the middle is used."""
        places: int = self._source.denoiser.config["pos_embed_max_size"]
        return places * self.size_multiple

    def prepare_for_adapters(self) -> None:
        """As in ``Family``: query, key and value become one projection, see ``joint_layout``."""
        join_layers(self.denoiser)

    def _new_denoiser(self, config: JsonObject) -> nn.Module:
        from diffusers import SD3Transformer2DModel

        transformer: nn.Module = SD3Transformer2DModel.from_config(config)
        return transformer

    def _clip_encoders(self) -> frozenset[str]:
        return frozenset({_CLIP_L, _CLIP_G})

    def _build_text_encoder(self, name: str, part: Component) -> nn.Module:
        if name == _T5:
            return build_t5(part, dtype=t5_dtype(self.dtype), device=self.device)
        return super()._build_text_encoder(name, part)

    def _new_text_encoder(self, name: str, config: CLIPTextConfig) -> nn.Module:
        from transformers import CLIPTextModelWithProjection

        return CLIPTextModelWithProjection(config)

    # --- captions ----------------------------------------------------------------------------------------------------

    @property
    def text_identity(self) -> str:
        weights = "+".join(part.weights.content_hash() for part in self._source.text_encoders.values())
        padding = "+".join(str(tokenizer.pad_token_id) for tokenizer in self.tokenizers.values())
        t5 = short_name(t5_dtype(self.dtype)) if self._has_t5 else "none"
        length = self._setup.t5_length
        return f"sd3-text:{weights}:{short_name(self.dtype)}:pad-{padding}:t5-{t5}-{length}{self._merged_text}"

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """As in ``Family``; T5's tokens are (B, ``t5_length``), padded."""
        tokens = {name: chunked_tokens(t, captions, _CLIP_BODY) for name, t in self.tokenizers.items()}
        if self.t5_tokenizer is not None:
            tokens[_T5] = t5_tokens(self.t5_tokenizer, captions, self._setup.t5_length)
        return tokens

    def encode_text(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return ``encoder_hidden_states`` (B, 77 + L, D), L tokens of T5, and ``pooled_projections`` (B, P1 + P2)."""
        tokens = {name: ids.to(self.device) for name, ids in tokens.items()}
        states, pooled = [], []
        for name in (_CLIP_L, _CLIP_G):
            layer, output = layer_states(self._text_encoder_on_device(name), tokens[name], _LAYER)
            states.append(layer)
            pooled.append(pooled_states(output, len(layer)))
        clip = torch.cat(states, dim=-1)
        width: int = self._source.denoiser.config["joint_attention_dim"]
        clip = torch.nn.functional.pad(clip, (0, width - clip.shape[-1]))
        if _T5 in tokens:
            t5 = t5_states(self._text_encoder_on_device(_T5), tokens[_T5]).to(clip.dtype)
        else:
            t5 = clip.new_zeros(len(clip), self._setup.t5_length, width)
        return {_TEXT_STATES: torch.cat([clip, t5], dim=1), _POOLED: torch.cat(pooled, dim=-1)}

    # --- noise -------------------------------------------------------------------------------------------------------

    def check_objective(self, objective: ObjectiveOptions) -> None:
        refuse_noise_options(objective, self.name)

    def objective_metadata(self) -> Mapping[str, Any]:
        flow = self.flow
        return {
            "weighting_scheme": flow.scheme,
            "logit_mean": flow.logit_mean,
            "logit_std": flow.logit_std,
            "mode_scale": flow.mode_scale,
            "training_shift": flow.shift,
            "apply_lg_attn_mask": False,
            "apply_t5_attn_mask": False,
        }

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        return self.flow.sample_timesteps(count, generator)

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.flow.add_noise(latents, noise, timesteps)

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.flow.target(latents, noise)

    def loss_weights(self, timesteps: Tensor, min_snr_gamma: float | None) -> Tensor:
        return self.flow.loss_weights(timesteps)

    def predict(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As in ``Family``; input and text are brought to the transformer's number format."""
        image = None
        if self.ip_adapter is not None and IMAGE_FEATURES in conditioning:
            # Without features the transformer leaves the IP-Adapter out by itself.
            image = self.ip_adapter.inputs(conditioning[IMAGE_FEATURES])
        return self.denoiser(
            hidden_states=noisy.to(self.dtype),
            timestep=timesteps.to(self.device),
            encoder_hidden_states=conditioning[_TEXT_STATES].to(self.device, self.dtype),
            pooled_projections=conditioning[_POOLED].to(self.device, self.dtype),
            joint_attention_kwargs=image,
            return_dict=False,
        )[0]

    # --- image prompts -----------------------------------------------------------------------------------------------

    def ip_adapter_spec(self, kind: str | None, tokens: int | None, feature_width: int) -> IpAdapterSpec:
        return sd3_spec(self.denoiser, tokens, feature_width)

    def ip_adapter_layers(self, spec: IpAdapterSpec) -> Layers:
        return make_sd3_layers(self.denoiser, spec, with_weights=False)

    def attach_ip_adapter(self, spec: IpAdapterSpec, seed: int = 0) -> IpAdapter:
        self.ip_adapter = Sd3IpAdapter(self.denoiser, spec, seed=seed)
        return self.ip_adapter

    # --- blocks ------------------------------------------------------------------------------------------------------

    def block_index(self, path: str) -> int | None:
        return joint_block_index(path)

    def block_names(self) -> Sequence[str]:
        return self._blocks.names

    # --- drawing -----------------------------------------------------------------------------------------------------

    def pipeline(self, sampler: str) -> DiffusionPipeline:
        with quiet_libraries():
            from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

        if sampler not in self.sampler_names:
            raise OptionError(f"Sampler '{sampler}' does not fit {self.name}, which follows a flow. Use {_SAMPLER}.")
        encoders: dict[str, Any] = {_T5: None, **self.text_encoders}
        pipeline = StableDiffusion3Pipeline(
            transformer=self.denoiser,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=self._source.scheduler_config.get("shift", 3.0)),
            vae=self.vae,
            tokenizer=self.tokenizers[_CLIP_L],
            tokenizer_2=self.tokenizers[_CLIP_G],
            tokenizer_3=self.t5_tokenizer,
            **encoders,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def pipeline_conditioning(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> dict[str, Tensor]:
        return self._with_pooled_text(prompts, negative_prompts, _TEXT_STATES, _POOLED)


def _version(config: JsonObject) -> tuple[str, str, str]:
    """Return name, ``ss_base_model_version`` as sd-scripts has it, and ``modelspec.architecture``."""
    if not config.get("qk_norm"):
        return "SD3 medium", "3-medium", "stable-diffusion-3-medium/lora"
    size = "medium" if config.get("dual_attention_layers") else "large"
    return f"SD3.5 {size}", f"3-5-{size}", f"stable-diffusion-3-5-{size}/lora"
