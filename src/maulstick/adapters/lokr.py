"""LoKr on a frozen model (LyCORIS, arXiv 2309.14859): ``W' = W + alpha / r * kron(w1, w2)``.

Both sizes of the weight are split in two. ``w1`` gets the smaller parts and is whole; ``w2`` gets the larger parts and
the kernel, and is a product of rank r where that is smaller. With ``decompose_both`` w1 may be a product too. Where
neither is a product there is no rank, and every reader leaves alpha out: the strength is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from peft import LoKrConfig
from peft.tuners.lokr import LoKrModel
from peft.tuners.lokr import layer as peft_layer
from torch import Tensor, nn

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.injection import DEFAULT_ADAPTER, base_weight, rank_settings, start_tensor
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.module_kinds import LokrWeights
from maulstick.adapters.targets import LoraTarget
from maulstick.adapters.whole_change import WholeChange, attach, fan_in_bound, layers

_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
# The one that starts at zero, as in LyCORIS.
_ZERO = frozenset({"lokr_w2", "lokr_w2_b"})


class LokrLinear(WholeChange, peft_layer.Linear):
    """LoKr of a Linear module."""


class LokrConv2d(WholeChange, peft_layer.Conv2d):
    """LoKr of a Conv2d module."""


class _LokrModel(LoKrModel):
    layers_mapping: ClassVar = {nn.Conv2d: LokrConv2d, nn.Linear: LokrLinear}


def lokr_shapes(target: LoraTarget, factor: int = -1, decompose_both: bool = False) -> dict[str, tuple[int, ...]]:
    """Name of a tensor in a file -> its shape."""
    (rows1, rows2), (columns1, columns2) = (
        peft_layer.factorization(size, factor) for size in (target.shape[0], target.shape[1])
    )
    kernel, rank = target.shape[2:], target.dim
    shapes: dict[str, tuple[int, ...]] = {}
    if decompose_both and rank < max(rows1, columns1) / 2:
        shapes |= {"lokr_w1_a": (rows1, rank), "lokr_w1_b": (rank, columns1)}
    else:
        shapes["lokr_w1"] = (rows1, columns1)
    if rank < max(rows2, columns2) / 2:
        shapes |= {"lokr_w2_a": (rows2, rank), "lokr_w2_b": (rank, columns2 * math.prod(kernel))}
    else:
        shapes["lokr_w2"] = (rows2, columns2, *kernel)
    return shapes


def lokr_target(target: LoraTarget, factor: int = -1, decompose_both: bool = False) -> LoraTarget:
    """The target with the alpha that has an effect: that of strength 1 where neither factor is a product."""
    is_whole = set(lokr_shapes(target, factor, decompose_both)) == {"lokr_w1", "lokr_w2"}
    return replace(target, alpha=float(target.dim)) if is_whole else target


def inject_lokr(
    root: nn.Module,
    targets: Sequence[LoraTarget],
    *,
    factor: int = -1,
    decompose_both: bool = False,
    adapter_name: str = DEFAULT_ADAPTER,
    dropout: LoraDropout | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Attach a LoKr as ``lora.inject_lora`` attaches a LoRA; return path -> layer.

    ``w2`` (or its second factor) starts at zero, the others uniform in ±1/sqrt(fan-in).

    Args:
        factor: size of w1 that is aimed at, in rows and columns; -1 for as near to the root of each size as can be.
    """
    targets = [lokr_target(target, factor, decompose_both) for target in targets]
    settings = rank_settings(targets)
    config = LoKrConfig(
        r=settings.rank,
        alpha=settings.alpha,
        target_modules=settings.target_modules,
        rank_pattern=settings.rank_pattern,
        alpha_pattern=settings.alpha_pattern,
        decompose_factor=factor,
        decompose_both=decompose_both,
        init_weights=False,
    )
    modules = attach(_LokrModel, config, root, targets, adapter_name, dropout)
    for target in targets:
        module = modules[target.path]
        for part, parameter in lokr_parts(module, adapter_name).items():
            bound = 0.0 if part in _ZERO else fan_in_bound(parameter.shape)

            def fill(start: Tensor, generator: Any, bound: float = bound) -> None:
                start.uniform_(-bound, bound, generator=generator)

            filled = start_tensor(parameter.shape, base_weight(module).device, target, seed, fill, part)
            getattr(module, part)[adapter_name] = filled
    return modules


def lokr_modules(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, Any]:
    """Path -> LoKr layer, in module order."""
    return layers(root, peft_layer.LoKrLayer, adapter_name)


def lokr_parts(module: Any, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, nn.Parameter]:
    """Name of a tensor in a file -> live parameter."""
    return {part: getattr(module, part)[adapter_name] for part in _PARTS if adapter_name in getattr(module, part)}


def lokr_weights(module: Any, adapter_name: str = DEFAULT_ADAPTER) -> LokrWeights:
    """Factors and alpha; they share memory with the live parameters."""
    parts = {part: parameter.detach() for part, parameter in lokr_parts(module, adapter_name).items()}
    left, right = (
        parts[name] if name in parts else LoraWeights(parts[f"{name}_b"], parts[f"{name}_a"], None)
        for name in ("lokr_w1", "lokr_w2")
    )
    is_whole = isinstance(left, Tensor) and isinstance(right, Tensor)
    rank = 0 if is_whole else int(module.r[adapter_name])
    return LokrWeights(left, right, float(module.alpha[adapter_name]), rank)
