"""What Stable Diffusion 1.x, 2.x and XL have in common: a UNet, CLIP text encoders, discrete noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maulstick.adapters.blocks import BlockMap
from maulstick.adapters.ip_adapter_files import IpAdapterSpec
from maulstick.families.base import AdapterNaming, Conditioning
from maulstick.families.clip_text import WEIGHTS, chunked_tokens, weighted_ids, weighted_tokens
from maulstick.families.ip_adapter import IpAdapter, Layers
from maulstick.families.ip_adapter_unet import UnetIpAdapter, make_unet_layers, unet_spec
from maulstick.families.latent_family import LatentFamily, ModelSetup
from maulstick.families.noise import NoiseSchedule, PredictionType
from maulstick.families.objective import refuse_flow_options, refuse_other_prediction
from maulstick.families.recognise import JsonObject
from maulstick.families.source import ModelSource
from maulstick.options.objective_schema import ObjectiveOptions

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

_UNET_NAMING = AdapterNaming(component="unet", log_name="unet")


@dataclass(frozen=True, kw_only=True)
class UnetSetup(ModelSetup):
    """How a model is to be used.

    Attributes:
        prediction_type: what the UNet predicts.
        clip_skip: layer that text states are taken from, counted from the end; None for the family's usual one.
        max_token_length: 75, 150 or 225.
        weighted_captions: brackets in captions are weights.
        objective: which timesteps are drawn.
    """

    prediction_type: PredictionType
    clip_skip: int | None
    max_token_length: int
    weighted_captions: bool = False
    objective: ObjectiveOptions | None = None


class UnetFamily(LatentFamily):
    """What is left to each family: how text and sizes reach its UNet.

    Attributes:
        blocks: the block map of the UNet.
        noise: the noise schedule.
    """

    denoiser_title = "UNet"
    blocks: BlockMap
    ip_adapter_encoder = "clip"
    ip_adapter_types = ("plain", "plus")
    _setup: UnetSetup

    def __init__(self, source: ModelSource, setup: UnetSetup) -> None:
        self.prediction_type = setup.prediction_type
        self.denoiser_naming = _UNET_NAMING
        self.noise = NoiseSchedule(source.scheduler_config, setup.prediction_type, setup.device, setup.objective)
        super().__init__(source, setup)

    def _new_denoiser(self, config: JsonObject) -> nn.Module:
        from diffusers import UNet2DConditionModel

        unet: nn.Module = UNet2DConditionModel.from_config(config)
        return unet

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """As in ``Family``; weighted captions have the weights of their states too, under the name with ``WEIGHTS``."""
        length, tokens = self._setup.max_token_length, {}
        for name, tokenizer in self.tokenizers.items():
            if self._setup.weighted_captions:
                tokens[name], tokens[name + WEIGHTS] = weighted_tokens(tokenizer, captions, length)
            else:
                tokens[name] = chunked_tokens(tokenizer, captions, length)
        return tokens

    def count_tokens(self, caption: str) -> int:
        if not self._setup.weighted_captions:
            return super().count_tokens(caption)
        return len(weighted_ids(next(iter(self.tokenizers.values())), caption)[0])

    @property
    def _weights_identity(self) -> str:
        return ":weighted" if self._setup.weighted_captions else ""

    # --- noise -------------------------------------------------------------------------------------------------------

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        return self.noise.sample_timesteps(count, generator)

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.noise.add_noise(latents, noise, timesteps)

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return self.noise.target(latents, noise, timesteps)

    def check_objective(self, objective: ObjectiveOptions) -> None:
        refuse_flow_options(objective, self.name)
        refuse_other_prediction(objective, self.name, self.prediction_type)

    def signal_to_noise(self, timesteps: Tensor) -> Tensor:
        return self.noise.signal_to_noise(timesteps)

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
