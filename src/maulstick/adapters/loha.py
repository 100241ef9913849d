"""LoHa on a frozen model (FedPara, arXiv 2108.06098): ``W' = W + alpha / r * (w1_a @ w1_b) * (w2_a @ w2_b)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from peft import LoHaConfig
from peft.tuners.loha import LoHaModel
from peft.tuners.loha import layer as peft_layer
from torch import Tensor, nn

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.injection import DEFAULT_ADAPTER, base_weight, rank_settings, start_tensor
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.module_kinds import LohaWeights
from maulstick.adapters.targets import LoraTarget
from maulstick.adapters.whole_change import WholeChange, attach, layers

# Standard deviations of the start, as LyCORIS has them; learning rates that are known for LoHa go with them.
_STARTS = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_a": 0.0, "hada_w2_b": 1.0}


class LohaLinear(WholeChange, peft_layer.Linear):
    """LoHa of a Linear module."""


class LohaConv2d(WholeChange, peft_layer.Conv2d):
    """LoHa of a Conv2d module; the kernel is flattened into the columns of w1_b and w2_b."""


class _LohaModel(LoHaModel):
    layers_mapping: ClassVar = {nn.Conv2d: LohaConv2d, nn.Linear: LohaLinear}


def loha_shapes(target: LoraTarget) -> dict[str, tuple[int, ...]]:
    """Name of a tensor in a file -> its shape."""
    rows, columns = (target.shape[0], target.dim), (target.dim, math.prod(target.shape[1:]))
    return {"hada_w1_a": rows, "hada_w1_b": columns, "hada_w2_a": rows, "hada_w2_b": columns}


def inject_loha(
    root: nn.Module,
    targets: Sequence[LoraTarget],
    *,
    adapter_name: str = DEFAULT_ADAPTER,
    dropout: LoraDropout | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Attach a LoHa as ``lora.inject_lora`` attaches a LoRA; ``w2_a`` starts at zero. Return path -> layer."""
    settings = rank_settings(targets)
    config = LoHaConfig(
        r=settings.rank,
        alpha=settings.alpha,
        target_modules=settings.target_modules,
        rank_pattern=settings.rank_pattern,
        alpha_pattern=settings.alpha_pattern,
        init_weights=False,
    )
    modules = attach(_LohaModel, config, root, targets, adapter_name, dropout)
    for target in targets:
        module = modules[target.path]
        for part, deviation in _STARTS.items():

            def fill(start: Tensor, generator: Any, deviation: float = deviation) -> None:
                start.zero_() if deviation == 0 else start.normal_(0.0, deviation, generator=generator)

            shape = getattr(module, part)[adapter_name].shape
            parameter = start_tensor(shape, base_weight(module).device, target, seed, fill, part)
            getattr(module, part)[adapter_name] = parameter
    return modules


def loha_modules(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, Any]:
    """Path -> LoHa layer, in module order."""
    return layers(root, peft_layer.LoHaLayer, adapter_name)


def loha_parts(module: Any, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, nn.Parameter]:
    """Name of a tensor in a file -> live parameter."""
    return {part: getattr(module, part)[adapter_name] for part in _STARTS}


def loha_weights(module: Any, adapter_name: str = DEFAULT_ADAPTER) -> LohaWeights:
    """Factors and alpha; they share memory with the live parameters."""
    parts = {part: parameter.detach() for part, parameter in loha_parts(module, adapter_name).items()}
    return LohaWeights(
        LoraWeights(parts["hada_w1_b"], parts["hada_w1_a"], None),
        LoraWeights(parts["hada_w2_b"], parts["hada_w2_a"], None),
        float(module.alpha[adapter_name]),
    )
