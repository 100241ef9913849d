"""The IP-Adapter of SD3 and SD3.5 as diffusers defines it: a resampler that knows the timestep, and joint attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maulstick.adapters.ip_adapter_files import DEPTH, IpAdapterSpec
from maulstick.errors import ModelError
from maulstick.families.ip_adapter import IpAdapter, Layers, freeze_all_but, plain_weight
from maulstick.families.joint_layout import is_joined

_HEAD_WIDTH = 64
_RESAMPLER_WIDTH = 1280
SD3_TOKENS = 64


def sd3_spec(transformer: Any, tokens: int | None, feature_width: int) -> IpAdapterSpec:
    """Return the sizes of a new IP-Adapter: 64 tokens and a resampler 1280 wide, as InstantX's has.

    A transformer that is narrower itself gets a narrower resampler.
    """
    hidden = max(1, min(_RESAMPLER_WIDTH, _width(transformer)) // _HEAD_WIDTH) * _HEAD_WIDTH
    return IpAdapterSpec("time", tokens or SD3_TOKENS, feature_width, hidden)


def _width(transformer: Any) -> int:
    return int(transformer.config.attention_head_dim * transformer.config.num_attention_heads)


def make_sd3_layers(transformer: Any, spec: IpAdapterSpec, *, with_weights: bool = True) -> Layers:
    """Make the modules for a transformer; keys, values and their norms begin as those of the base's own attention.

    Args:
        with_weights: without it the modules have shapes only (on the meta device).
    """
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
    from diffusers.models.embeddings import IPAdapterTimeImageProjection

    width = _width(transformer)
    with torch.device("cpu" if with_weights else "meta"):
        projection: nn.Module = IPAdapterTimeImageProjection(
            embed_dim=spec.feature_width,
            output_dim=width,
            hidden_dim=spec.hidden,
            depth=DEPTH,
            dim_head=_HEAD_WIDTH,
            heads=spec.hidden // _HEAD_WIDTH,
            num_queries=spec.tokens,
            timestep_in_dim=spec.hidden // 4,
        )
        processors: dict[int, nn.Module] = {}
        paths = {}
        for place, name in enumerate(transformer.attn_processors):
            paths[place] = name.removesuffix(".processor")
            processor = SD3IPAdapterJointAttnProcessor2_0(
                hidden_size=width,
                ip_hidden_states_dim=width,
                head_dim=transformer.config.attention_head_dim,
                timesteps_emb_dim=spec.hidden,
                # diffusers' own default of 0.5 is for drawing; an adapter trained at it would be too strong at 1.
                scale=1.0,
            )
            if with_weights:
                _begin_as_base(processor, transformer.get_submodule(paths[place]))
            processors[place] = processor
    return Layers(projection, processors, paths)


@torch.no_grad()
def _begin_as_base(processor: Any, attention: Any) -> None:
    processor.to_k_ip.weight.copy_(plain_weight(attention.to_k))
    processor.to_v_ip.weight.copy_(plain_weight(attention.to_v))
    for ours, base in (("norm_q", "norm_q"), ("norm_k", "norm_k"), ("norm_ip_k", "norm_k")):
        norm = getattr(attention, base, None)
        if norm is not None:
            getattr(processor, ours).weight.copy_(plain_weight(norm))


class Sd3IpAdapter(IpAdapter):
    """An IP-Adapter in an ``SD3Transformer2DModel``.

    It does not begin as the base model, whatever its first weights: its branch attends to the picture itself once more.
    Only a small scale at the start does (``ip_adapter_scale_warmup_steps``).
    """

    def __init__(self, transformer: Any, spec: IpAdapterSpec, *, seed: int = 0) -> None:
        """Put a new one in; ``seed``: of the first weights that do not come from the base.

        Raises:
            ModelError: the transformer has one already.
        """
        if getattr(transformer, "image_proj", None) is not None:
            raise ModelError("The transformer has an IP-Adapter already.")
        if is_joined(transformer):
            raise ModelError("A LoRA and an IP-Adapter together are not supported for SD3 yet. Leave one of them out.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = make_sd3_layers(transformer, spec)
        device = next(transformer.parameters()).device
        for part in (layers.projection, *layers.processors.values()):
            part.to(device)
        names = list(transformer.attn_processors)
        # The resampler comes last: its own attention layers would be taken for the transformer's.
        transformer.set_attn_processor({name: layers.processors[place] for place, name in enumerate(names)})
        transformer.image_proj = layers.projection
        freeze_all_but(transformer, layers)
        super().__init__(transformer, spec, layers)

    @staticmethod
    def _set_scale(processor: Any, scale: float) -> None:
        processor.scale = scale

    def inputs(self, features: Tensor) -> dict[str, Any]:
        return {"ip_adapter_image_embeds": features.to(self.device, torch.float32)}

    def pipeline_inputs(self, features: Tensor) -> dict[str, Any]:
        return self.inputs(features)
