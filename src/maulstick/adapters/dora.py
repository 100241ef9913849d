"""DoRA on a frozen model (arXiv 2402.09353): a LoRA gives the direction of each column, a trained vector its length.

``W' = V * m / |V|`` with ``V = W + alpha / r * up @ down``. The norm is taken over each input's column, as in the paper
(equation 5; ``m`` is (1, in)), which every program that reads ``dora_scale`` applies alike; or over each output's row
(``on_output``), as PEFT and diffusers do, where ComfyUI and the web UI compute something else.

A column of W that is zero starts with length 0 and stays as it is until the direction changes; nothing is divided by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maulstick.adapters.injection import DEFAULT_ADAPTER, base_weight
from maulstick.adapters.lean import LeanConv2d, LeanLinear, LoraDropout, adapter_input, refuse_unusual
from maulstick.adapters.lora import attach_factors, lora_modules, lora_weights
from maulstick.adapters.module_kinds import DoraWeights
from maulstick.adapters.targets import LoraTarget
from maulstick.errors import ModelError


class _Dora:
    """What the Linear and the Conv2d form share. Mixed into a lean LoRA layer, before its own class."""

    # Filled by `inject_dora`; the name holds peft's "lora_", so that peft lets it be trained.
    lora_magnitude: nn.ParameterDict
    axis: int
    training: bool

    def _length_ratio(self, name: str) -> Tensor:
        """``m / |V|``, one value for each input or output. The norm is a constant for the gradient (paper, 4.3)."""
        own: Any = self
        with torch.no_grad(), torch.autocast(own.lora_A[name].weight.device.type, enabled=False):
            norm = lengths(self._direction(name), self.axis)
        return self.lora_magnitude[name] / norm.clamp(min=torch.finfo(torch.float32).tiny)

    def _direction(self, name: str) -> Tensor:
        own: Any = self
        down, up = own.lora_A[name].weight.flatten(1), own.lora_B[name].weight.flatten(1)
        weight = base_weight(self).detach().to(torch.float32)
        changed: Tensor = torch.addmm(weight.flatten(1), up, down, alpha=own.scaling[name])
        return changed.view(weight.shape)

    def _only_adapter(self) -> str | None:
        own: Any = self
        names = [name for name in own.active_adapters if name in self.lora_magnitude]
        if len(names) > 1:
            raise ModelError("Only one DoRA can be trained on a module at a time.")
        return names[0] if names else None

    @torch.no_grad()
    def get_delta_weight(self, adapter: str) -> Tensor:
        """What the adapter changes in the weight, in fp32."""
        weight = base_weight(self).to(torch.float32)
        shape = [1] * weight.ndim
        shape[self.axis] = -1
        return self._direction(adapter) * self._length_ratio(adapter).view(shape) - weight

    def _dora(self, x: Tensor) -> Tensor:
        """Output for ``x``: the ratio rides on the input, or on the output before the bias is added."""
        own: Any = self
        base = own._modules["base_layer"]
        name = self._only_adapter()
        if name is None or (self.training and own._is_dropped(name)):
            plain: Tensor = base(x)
            return plain
        channels = -1 if isinstance(base, nn.Linear) else 1
        ratio = self._length_ratio(name)
        if self.axis == 1:
            scaled = x * _along(ratio, x.ndim, channels)
            x = scaled if torch.is_autocast_enabled(x.device.type) else scaled.to(x.dtype)
            result: Tensor = base(x)
            bias = None
        else:
            weight = base_weight(self)
            result, bias = own.operate(x, weight if weight is base.weight else weight.to(x.dtype)), base.bias
        base_dtype = result.dtype
        down, up = own._down_and_up(name)
        z = own.operate(adapter_input(x, down), down)
        if self.training:
            z = own._with_noise(z, name, rank_axis=channels)
        z = z * own.scaling[name]
        result = result + (F.linear(z, up) if isinstance(base, nn.Linear) else F.conv2d(z, up))
        if self.axis == 0:
            result = result * _along(ratio, result.ndim, channels)
            if bias is not None:
                result = result + _along(bias, result.ndim, channels)
        return result.to(base_dtype)


def _along(vector: Tensor, dimensions: int, axis: int) -> Tensor:
    shape = [1] * dimensions
    shape[axis] = -1
    return vector.view(shape)


class DoraLinear(_Dora, LeanLinear):
    """DoRA of a Linear module."""

    def operate(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(x, *args, **kwargs) if self._needs_peft_forward(args, kwargs) else self._dora(x)


class DoraConv2d(_Dora, LeanConv2d):
    """DoRA of a Conv2d module."""

    def operate(self, x: Tensor, weight: Tensor) -> Tensor:
        base: Any = self._modules["base_layer"]
        return F.conv2d(x, weight, None, base.stride, base.padding)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(x, *args, **kwargs) if self._needs_peft_forward(args, kwargs) else self._dora(x)


def _layer(target: nn.Module, adapter_name: str, **peft_arguments: Any) -> nn.Module:
    refuse_unusual(target, "DoRA")
    form = DoraLinear if isinstance(target, nn.Linear) else DoraConv2d
    layer: Any = form(target, adapter_name, **peft_arguments)
    layer.lora_noise = {}
    layer.lora_magnitude = nn.ParameterDict()
    module: nn.Module = layer
    return module


def lengths(weight: Tensor, axis: int) -> Tensor:
    """Euclidean norm over everything but ``axis``."""
    return torch.linalg.vector_norm(weight, dim=[d for d in range(weight.ndim) if d != axis])


def inject_dora(
    root: nn.Module,
    targets: Sequence[LoraTarget],
    *,
    on_output: bool = False,
    adapter_name: str = DEFAULT_ADAPTER,
    dropout: LoraDropout | None = None,
    seed: int = 0,
) -> dict[str, nn.Module]:
    """Attach a DoRA as ``lora.inject_lora`` attaches a LoRA; return path -> module.

    The lengths start at those of the base weight, so the model computes what it did before.
    """
    attach_factors(root, targets, adapter_name, _layer, dropout=dropout, seed=seed)
    modules: dict[str, Any] = dict(lora_modules(root, adapter_name))
    for module in modules.values():
        module.axis = 0 if on_output else 1
        start = lengths(base_weight(module).detach().to(torch.float32), module.axis)
        module.lora_magnitude[adapter_name] = nn.Parameter(start)
    return modules


def dora_weights(module: Any, adapter_name: str = DEFAULT_ADAPTER) -> DoraWeights:
    """Factors, alpha and lengths of one module; they share memory with the live parameters."""
    magnitude = module.lora_magnitude[adapter_name].detach()
    return DoraWeights(lora_weights(module, adapter_name), magnitude, module.axis)
