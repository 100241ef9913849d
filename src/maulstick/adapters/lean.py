"""The LoRA forward that is trained: peft's modules with a shorter way through them, and sd-scripts' dropouts.

peft multiplies the full-size output of the up factor by the strength and adds it to the base output. Here the strength
rides on the rank side or inside the matrix product that also does the addition, so that no extra full-size tensor is
made. The sum is the same to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

from maulstick.errors import ModelError, OptionError


@dataclass(frozen=True)
class LoraDropout:
    """Probabilities of the three dropouts of sd-scripts; they act in training mode only.

    ``neuron``: each value between the two factors is zeroed (network_dropout). ``rank``: whole rank channels are zeroed
    per sample (rank_dropout). Both scale what is kept by 1 / (1 - p). ``module``: the whole adapter module is left out
    of a forward pass (module_dropout), without rescaling.
    """

    neuron: float = 0.0
    rank: float = 0.0
    module: float = 0.0

    def __post_init__(self) -> None:
        for name, option in (("neuron", "network_dropout"), ("rank", "rank_dropout"), ("module", "module_dropout")):
            probability = getattr(self, name)
            if not (math.isfinite(probability) and 0.0 <= probability < 1.0):
                raise OptionError(f"{option} is {probability}, but it must be at least 0 and below 1.")

    @property
    def is_off(self) -> bool:
        return self.neuron == 0.0 and self.rank == 0.0 and self.module == 0.0


class _Lean:
    """What the Linear and the Conv2d form share. Mixed into a peft LoRA layer, before its own class."""

    # Set per adapter by `inject_lora`; absent means no dropout.
    lora_noise: dict[str, LoraDropout]
    training: bool

    def _needs_peft_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call needs something only peft's own forward does: merged, disabled, mixed-batch, DoRA."""
        own: Any = self
        return bool(args or kwargs or own._disable_adapters or own.merged_adapters or own.lora_variant)

    def _down_and_up(self, name: str) -> tuple[nn.Parameter, nn.Parameter] | None:
        # Module attribute lookups cost a microsecond each, and there are six of them per forward of each of hundreds of
        # modules; the dictionaries behind them answer at once.
        modules = self.__dict__["_modules"]
        down = modules["lora_A"]._modules.get(name)
        if down is None:
            return None
        return down._parameters["weight"], modules["lora_B"]._modules[name]._parameters["weight"]

    def _is_dropped(self, name: str) -> bool:
        noise = self.lora_noise.get(name)
        # Drawn from torch's own generator, so that a checkpointed block draws the same again when it is recomputed.
        return noise is not None and noise.module > 0.0 and bool(torch.rand(()) < noise.module)

    def _with_noise(self, z: Tensor, name: str, *, rank_axis: int) -> Tensor:
        """Apply neuron and rank dropout to the activations between the factors; ``rank_axis`` holds the r channels."""
        noise = self.lora_noise.get(name)
        if noise is None:
            return z
        if noise.neuron > 0.0:
            z = F.dropout(z, noise.neuron)
        if noise.rank > 0.0:
            mask_shape = [1] * z.dim()
            mask_shape[0], mask_shape[rank_axis] = z.shape[0], z.shape[rank_axis]
            kept = torch.rand(mask_shape, device=z.device) > noise.rank
            z = z * (kept.to(z.dtype) / (1.0 - noise.rank))
        return z


def adapter_input(x: Tensor, down: Tensor) -> Tensor:
    """Cast to the adapter's dtype as peft does, unless autocast is going to choose the dtype anyway."""
    if x.dtype == down.dtype or torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(down.dtype)


class LeanLinear(_Lean, peft_layer.Linear):
    """LoRA of a Linear module: ``base(x) + scaling * up(down(x))`` with one fused multiply-add."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._needs_peft_forward(args, kwargs):
            return super().forward(x, *args, **kwargs)
        result: Tensor = self._modules["base_layer"](x)
        base_dtype = result.dtype
        for name in self.active_adapters:
            factors = self._down_and_up(name)
            if factors is None or (self.training and self._is_dropped(name)):
                continue
            down, up = factors
            z = F.linear(adapter_input(x, down), down)
            if self.training:
                z = self._with_noise(z, name, rank_axis=-1)
            if z.dtype == result.dtype:
                flat = torch.addmm(result.flatten(0, -2), z.flatten(0, -2), up.t(), alpha=self.scaling[name])
                result = flat.view(result.shape)
            else:
                result = result + F.linear(z * self.scaling[name], up)
        return result if result.dtype == base_dtype else result.to(base_dtype)


class LeanConv2d(_Lean, peft_layer.Conv2d):
    """LoRA of a Conv2d module: ``base(x) + up(scaling * down(x))``, up being a 1x1 convolution."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._needs_peft_forward(args, kwargs):
            return super().forward(x, *args, **kwargs)
        base: Any = self._modules["base_layer"]
        result: Tensor = base(x)
        base_dtype = result.dtype
        for name in self.active_adapters:
            factors = self._down_and_up(name)
            if factors is None or (self.training and self._is_dropped(name)):
                continue
            down, up = factors
            z = F.conv2d(adapter_input(x, down), down, None, base.stride, base.padding)
            if self.training:
                z = self._with_noise(z, name, rank_axis=1)
            result = result + F.conv2d(z * self.scaling[name], up)
        return result if result.dtype == base_dtype else result.to(base_dtype)


def _is_plain(module: nn.Module) -> bool:
    """Whether the weight is an ordinary float tensor; quantised layers subclass Linear too, but peft has its own."""
    weight = getattr(module, "weight", None)
    return type(weight) is nn.Parameter and weight.is_floating_point() and weight.element_size() >= 2


def lean_or_none(target: nn.Module, adapter_name: str, **peft_arguments: Any) -> nn.Module | None:
    """Build the lean layer around ``target``; ``None`` makes peft build its own (quantised and unusual layers).

    Called by peft for each target module, in the place of a layer class.
    """
    if not _is_plain(target):
        return None
    if isinstance(target, nn.Linear):
        layer: nn.Module = LeanLinear(target, adapter_name, **peft_arguments)
    elif isinstance(target, nn.Conv2d):
        refuse_unusual(target, "LoRA")
        layer = LeanConv2d(target, adapter_name, **peft_arguments)
    else:
        return None
    layer.lora_noise = {}  # type: ignore[assignment]
    return layer


def refuse_unusual(target: nn.Module, kind: str) -> None:
    """Raise ``ModelError`` for modules that only a peft layer of their own could adapt, if any can."""
    if not _is_plain(target):
        raise ModelError(
            f"A {type(target).__name__} whose weight is {type(getattr(target, 'weight', None)).__name__} cannot carry "
            f"a {kind}; only plain Linear and Conv2d modules can, such as those of a base model that is not quantised."
        )
    if isinstance(target, nn.Conv2d) and (
        target.groups != 1 or tuple(target.dilation) != (1, 1) or target.padding_mode != "zeros"
    ):
        raise ModelError(
            f"A convolution with groups={target.groups}, dilation={tuple(target.dilation)} and padding mode "
            f"'{target.padding_mode}' cannot carry a {kind}; only plain convolutions can."
        )
