"""The forward of kinds that make the whole change of a weight (LoHa, LoKr), and how they are put on a model.

peft's layers hold the factors and multiply them. Here the product is made in fp32 whatever autocast says, and dropouts
follow LyCORIS: whole rows of the change (rank_dropout) or all of it (module_dropout).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lycoris_utils import LycorisConfig, LycorisLayer, LycorisTuner
from torch import Tensor, nn

from maulstick.adapters.injection import inject, refuse_no_targets, refuse_unplanned, set_dropout
from maulstick.adapters.lean import LoraDropout, adapter_input, refuse_unusual
from maulstick.adapters.targets import LoraTarget


class WholeChange:
    """Mixed into one of peft's layers, before its own class: ``base(x) + change * x``."""

    lora_noise: dict[str, LoraDropout]
    training: bool

    def __init__(self, base_layer: nn.Module, adapter_name: str, **peft_arguments: Any) -> None:
        refuse_unusual(base_layer, "LoHa, LoKr or OFT")
        super().__init__(base_layer, adapter_name, **peft_arguments)  # type: ignore[call-arg]
        self.lora_noise = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own: Any = self
        if args or kwargs or own.disable_adapters or own.merged_adapters:
            whole: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return whole
        base = own._modules["base_layer"]
        result: Tensor = base(x)
        base_dtype = result.dtype
        for name in own.active_adapters:
            noise = self.lora_noise.get(name) if self.training else None
            if name not in own._available_adapters or (noise is not None and is_left_out(noise)):
                continue
            with torch.autocast(x.device.type, enabled=False):
                change = own.get_delta_weight(name)
            if noise is not None and noise.rank > 0.0:
                change = change * kept_rows(change, noise.rank)
            z = adapter_input(x, change)
            if isinstance(base, nn.Linear):
                result = result + F.linear(z, change)
            else:
                result = result + F.conv2d(z, change, None, base.stride, base.padding)
        return result.to(base_dtype)


def is_left_out(noise: LoraDropout) -> bool:
    """Draw whether the module is left out; from torch's own generator, so that a checkpointed block draws the same."""
    return noise.module > 0.0 and bool(torch.rand(()) < noise.module)


def kept_rows(change: Tensor, chance: float) -> Tensor:
    """One factor for each row: 0 with this chance, otherwise what keeps the mean."""
    kept = torch.rand(change.shape[0], device=change.device) > chance
    return (kept.to(change.dtype) / (1.0 - chance)).view(-1, *[1] * (change.ndim - 1))


def attach(
    tuner: type[LycorisTuner],
    config: LycorisConfig,
    root: nn.Module,
    targets: Sequence[LoraTarget],
    adapter_name: str,
    dropout: LoraDropout | None,
) -> dict[str, Any]:
    """Let a tuner put its layers around the modules in ``targets`` and freeze the rest; return path -> layer.

    The parameters are left on the meta device, for the caller to fill.
    """
    refuse_no_targets(root, targets, adapter_name)
    inject(lambda: tuner(root, config, adapter_name, low_cpu_mem_usage=True))
    modules = layers(root, tuner.tuner_layer_cls, adapter_name)
    attached = {path: (module.r[adapter_name], module.alpha[adapter_name]) for path, module in modules.items()}
    refuse_unplanned(attached, targets)
    for target in targets:
        if dropout is not None and not dropout.is_off:
            set_dropout(modules[target.path], target, adapter_name, dropout)
    return modules


def layers(root: nn.Module, kind: type, adapter_name: str) -> dict[str, Any]:
    """Path -> layer for every module of ``root`` that carries the adapter, in module order."""
    found: Mapping[str, Any] = dict(root.named_modules())
    return {
        path: module
        for path, module in found.items()
        if isinstance(module, kind) and isinstance(module, LycorisLayer) and adapter_name in module._available_adapters
    }


def fan_in_bound(shape: Sequence[int]) -> float:
    """Bound of the uniform start that torch's Linear and Conv2d have: 1/sqrt(fan-in)."""
    values = 1
    for size in shape[1:]:
        values *= size
    return float(max(values, 1) ** -0.5)
