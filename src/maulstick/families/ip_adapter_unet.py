"""IP-Adapters of UNets (SD 1.x, 2.x, XL): a second cross-attention beside that to the text (Ye et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maulstick.adapters.ip_adapter_files import DEPTH, PLAIN_TOKENS, IpAdapterSpec
from maulstick.errors import ModelError
from maulstick.families.ip_adapter import IpAdapter, Layers, freeze_all_but, plain_weight

_HEAD_WIDTH = 64
_WIDEST_RESAMPLER = 1280
PLUS_TOKENS = 16


def unet_spec(unet: Any, kind: str, tokens: int | None, feature_width: int) -> IpAdapterSpec:
    """Return the sizes of a new plain or Plus IP-Adapter, as the published ones have them.

    Raises:
        ModelError: a plain one of other than 4 tokens, which no program reads.
    """
    if kind == "plain":
        if tokens not in (None, PLAIN_TOKENS):
            raise ModelError(
                f"ip_adapter_tokens = {tokens}: a plain IP-Adapter has {PLAIN_TOKENS}; programs read no other. Leave "
                "it out, or set ip_adapter_type = plus."
            )
        return IpAdapterSpec("plain", PLAIN_TOKENS, feature_width)
    width = min(unet.config.cross_attention_dim, _WIDEST_RESAMPLER)
    # 768 for SD 1.x, 1280 for SDXL: a resampler's heads are 64 wide.
    return IpAdapterSpec("plus", tokens or PLUS_TOKENS, feature_width, max(1, width // _HEAD_WIDTH) * _HEAD_WIDTH)


def make_unet_layers(unet: Any, spec: IpAdapterSpec, *, with_weights: bool = True) -> Layers:
    """Make the modules for a UNet; keys and values of the image begin as those of the text.

    Args:
        with_weights: without it the modules have shapes only (on the meta device).

    Raises:
        ModelError: the UNet's attention layers do not stand in the order that files count on.
    """
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    places = {place: name for place, name in enumerate(unet.attn_processors) if name.endswith("attn2.processor")}
    if list(places) != [2 * number + 1 for number in range(len(places))]:
        raise ModelError(
            "This UNet has other attention layers than the usual pairs (attn1, attn2), so an IP-Adapter for it could "
            "not be written: files number the layers by these pairs."
        )
    with torch.device("cpu" if with_weights else "meta"):
        projection = _projection(spec, unet.config.cross_attention_dim)
        processors: dict[int, nn.Module] = {}
        paths = {}
        for place, name in places.items():
            paths[place] = name.removesuffix(".processor")
            attention: Any = unet.get_submodule(paths[place])
            key, value = plain_weight(attention.to_k), plain_weight(attention.to_v)
            processor = IPAdapterAttnProcessor2_0(key.shape[0], key.shape[1], num_tokens=[spec.tokens], scale=1.0)
            if with_weights:
                processor.to_k_ip[0].weight.data.copy_(key)
                processor.to_v_ip[0].weight.data.copy_(value)
            processors[place] = processor
    return Layers(projection, processors, paths)


def _projection(spec: IpAdapterSpec, width: int) -> nn.Module:
    from diffusers.models.embeddings import ImageProjection, IPAdapterPlusImageProjection

    if spec.kind == "plain":
        plain: nn.Module = ImageProjection(spec.feature_width, width, spec.tokens)
        return plain
    plus: nn.Module = IPAdapterPlusImageProjection(
        embed_dims=spec.feature_width,
        output_dims=width,
        hidden_dims=spec.hidden,
        depth=DEPTH,
        dim_head=_HEAD_WIDTH,
        heads=spec.hidden // _HEAD_WIDTH,
        num_queries=spec.tokens,
    )
    return plus


class UnetIpAdapter(IpAdapter):
    """An IP-Adapter in a UNet."""

    def __init__(self, unet: Any, spec: IpAdapterSpec, *, seed: int = 0) -> None:
        """Put a new one in; ``seed``: of the projection's first weights.

        Raises:
            ModelError: the UNet has one already, or cannot have one.
        """
        from diffusers.models.embeddings import MultiIPAdapterImageProjection

        if getattr(unet, "encoder_hid_proj", None) is not None:
            raise ModelError("The UNet has a projection of its own before its text states; it can have no IP-Adapter.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = make_unet_layers(unet, spec)
        device = next(unet.parameters()).device
        for part in (layers.projection, *layers.processors.values()):
            part.to(device)
        names = list(unet.attn_processors)
        # The projection comes after the processors: a Plus one has attention layers of its own, which would be taken
        # for the UNet's.
        unet.set_attn_processor(
            {name: layers.processors.get(place, unet.attn_processors[name]) for place, name in enumerate(names)}
        )
        unet.encoder_hid_proj = MultiIPAdapterImageProjection([layers.projection])
        unet.config.encoder_hid_dim_type = "ip_image_proj"
        freeze_all_but(unet, layers)
        super().__init__(unet, spec, layers)

    @staticmethod
    def _set_scale(processor: Any, scale: float) -> None:
        processor.scale = [scale]

    def inputs(self, features: Tensor) -> dict[str, Any]:
        # The second dimension counts images.
        return {"image_embeds": [features.to(self.device, torch.float32).unsqueeze(1)]}

    def pipeline_inputs(self, features: Tensor) -> dict[str, Any]:
        return {"ip_adapter_image_embeds": self.inputs(features)["image_embeds"]}
