"""The two factors of one LoRA module, and what can be computed from them without forming their product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Folding = Literal["one_alpha", "no_alpha", "none"]


class LoraWeights(NamedTuple):
    """What a LoRA adds to one base weight W of shape (out, in) or (out, in, k, k): ``alpha / rank * up @ down``.

    ``down`` is (rank, in) or (rank, in, k, k), ``up`` is (out, rank) or (out, rank, 1, 1). An ``alpha`` of ``None``
    stands for the rank (strength 1), which is how a file without alpha is read.
    """

    down: Tensor
    up: Tensor
    alpha: float | None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


def delta_weight(weights: LoraWeights) -> Tensor:
    """The change of the base weight at strength 1, in fp32 and in the base weight's shape."""
    down = weights.down.to(torch.float32)
    up = weights.up.to(torch.float32)
    return (weights.scale * (up.flatten(1) @ down.flatten(1))).reshape(up.shape[0], *down.shape[1:])


def product_norm(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Frobenius norm of ``scale * up @ down`` as a 0-d fp32 tensor.

    The norm's square is tr(upᵀ up · down downᵀ), so two rank x rank products do, whatever the size of the layer.
    """
    down = down.detach().flatten(1).to(torch.float32)
    up = up.detach().flatten(1).to(torch.float32)
    square = ((up.T @ up) * (down @ down.T)).sum()
    return square.clamp(min=0).sqrt() * scale  # rounding may leave a square of zero slightly negative


def fold_alphas(modules: Mapping[str, LoraWeights], folding: Folding) -> dict[str, LoraWeights]:
    """Rewrite the modules of one component so that every reader applies the trained strength.

    diffusers applies the most common alpha of a component to most of its modules, so a file with different alphas is
    read wrongly by it. ``one_alpha``: modules with another alpha than the most common one get it, and their up factor
    is scaled to make up for it; nothing changes where the alphas already agree. ``no_alpha``: the whole strength goes
    into the up factor and alpha is left out (read as strength 1). ``none``: every module keeps its own alpha.
    """
    if folding == "none":
        return dict(modules)
    if folding == "no_alpha":
        return {path: LoraWeights(w.down, _scaled(w.up, w.scale), None) for path, w in modules.items()}
    if all(w.alpha is None for w in modules.values()):
        return dict(modules)
    alphas = {path: float(w.rank) if w.alpha is None else w.alpha for path, w in modules.items()}
    counted = Counter(alpha for alpha in alphas.values() if alpha != 0)
    common = max(counted, key=lambda alpha: (counted[alpha], alpha), default=1.0)
    return {path: LoraWeights(w.down, _scaled(w.up, alphas[path] / common), common) for path, w in modules.items()}


def cast_weights(weights: LoraWeights, dtype: torch.dtype) -> LoraWeights:
    """Cast both factors and alpha, keeping the strength where ``dtype`` cannot hold alpha exactly.

    The part of alpha that is lost by rounding (up to 0.4 % in bf16) goes into the up factor.
    """
    if weights.alpha is None:
        return LoraWeights(weights.down.to(dtype), weights.up.to(dtype), None)
    limits = torch.finfo(dtype)
    stored = float(torch.tensor(min(max(weights.alpha, limits.smallest_normal), limits.max), dtype=dtype))
    lost = weights.alpha / stored
    up = weights.up if abs(lost - 1.0) < 1e-6 else _scaled(weights.up, lost)
    return LoraWeights(weights.down.to(dtype), up.to(dtype), stored)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else tensor.to(torch.float32) * factor
