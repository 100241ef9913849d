"""A live SD3 transformer with the original code's layers: joined projections, and shift before scale.

sd-scripts trains one LoRA on the joined query, key and value projection, whose down factor is shared by the three. To
train the same thing, and to have one module for each that a file names, the model gets those layers. diffusers' own
``fuse_qkv_projections`` cannot be used as it is: its attention leaves out the norms of query and key, and fails on
attention without text (``attn2``), both of which SD3.5 has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SEPARATE = {"to_qkv": ("to_q", "to_k", "to_v"), "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}


class _SplitAttention:
    """An attention module as its processor wants it: the joined projections answer as three."""

    def __init__(self, attention: nn.Module) -> None:
        self._attention = attention
        self._waiting: dict[str, tuple[Tensor, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        for joined, separate in _SEPARATE.items():
            if name in separate and getattr(self._attention, joined, None) is not None:
                return lambda states: self._part(joined, separate.index(name), states)
        return getattr(self._attention, name)

    def _part(self, joined: str, place: int, states: Tensor) -> Tensor:
        # A processor asks for the three one after the other, of the same states; they are computed once.
        if joined not in self._waiting:
            self._waiting[joined] = getattr(self._attention, joined)(states).chunk(3, dim=-1)
        return self._waiting[joined][place]


class JoinedProjections:
    """Runs diffusers' attention processor on an attention with joined projections; the result is the same."""

    def __init__(self) -> None:
        from diffusers.models.attention_processor import JointAttnProcessor2_0

        self._processor = JointAttnProcessor2_0()

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        return self._processor(_SplitAttention(attn), hidden_states, encoder_hidden_states, attention_mask)


class ShiftBeforeScale(nn.Module):
    """``AdaLayerNormContinuous`` on a linear layer whose outputs are shift, then scale, as in the original code."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.silu, self.linear, self.norm = norm.silu, norm.linear, norm.norm

    def forward(self, states: Tensor, conditioning: Tensor) -> Tensor:
        """Return the modulated states (B, L, D)."""
        shift, scale = self.linear(self.silu(conditioning).to(states.dtype)).chunk(2, dim=1)
        modulated: Tensor = self.norm(states) * (1 + scale)[:, None] + shift[:, None]
        return modulated


def is_joined(transformer: nn.Module) -> bool:
    """Whether the transformer has the original code's layers already."""
    return any(isinstance(module, ShiftBeforeScale) for module in transformer.modules())


@torch.no_grad()
def join_layers(transformer: Any) -> None:
    """Give a frozen ``SD3Transformer2DModel`` the original code's layers, one by one; it computes the same as before.

    diffusers' separate layers are let go. Nothing happens to a model that has been joined.
    """
    from diffusers.models.attention_processor import Attention
    from diffusers.models.normalization import AdaLayerNormContinuous

    if is_joined(transformer):
        return
    for module in list(transformer.modules()):
        if isinstance(module, Attention):
            module.fuse_projections()
            for joined, separate in _SEPARATE.items():
                if getattr(module, joined, None) is not None:
                    getattr(module, joined).requires_grad_(False).train(module.training)
                    for name in separate:
                        delattr(module, name)
            module.set_processor(JoinedProjections())
        for name, child in list(module.named_children()):
            if isinstance(child, AdaLayerNormContinuous):
                _swap_rows(child.linear)
                setattr(module, name, ShiftBeforeScale(child).train(child.training))


def _swap_rows(linear: nn.Linear) -> None:
    for parameter in linear.parameters():
        parameter.data = torch.cat([*reversed(parameter.data.chunk(2))])
