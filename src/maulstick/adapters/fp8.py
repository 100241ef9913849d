"""Frozen layers whose weights are kept in eight bits (float8_e4m3fn) and computed in the format of their input.

A plain cast loses what is small: below 2^-6 the format has fewer and fewer digits. So each output's row is first scaled
by a power of two to use the format's range, which costs one number a row and no rounding of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from maulstick.errors import ModelError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_SMALLEST_SCALE = -14
"""Exponent of the smallest scale, which fp16 still holds."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight (out, …) in eight bits, and its scales (out,) in fp32, powers of two."""
    rows = weight.detach().float().flatten(1)
    exponents = torch.ceil(torch.log2(rows.abs().amax(1).clamp(min=2.0**-40) / LARGEST)).clamp(min=_SMALLEST_SCALE)
    scales = torch.exp2(exponents)
    return (rows / scales[:, None]).to(FP8).view(weight.shape), scales


def restored(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in ``dtype``; exact where its numbers are normal ones there."""
    return weight.to(dtype) * scales.to(dtype).view(-1, *(1,) * (weight.ndim - 1))


class _Linear(torch.autograd.Function):
    """Keeps the eight-bit weight for the backward pass; autograd by itself would keep the restored one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scales)
        return F.linear(x, restored(weight, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weight, scales = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ restored(weight, scales, gradient.dtype), None, None, None


class _Conv2d(torch.autograd.Function):
    """The same for a convolution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.shape, ctx.arguments = x.shape, arguments
        return F.conv2d(x, restored(weight, scales, x.dtype), bias, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weight, scales = ctx.saved_tensors
        (gradient,) = gradients
        whole = restored(weight, scales, gradient.dtype)
        back = conv2d_input(ctx.shape, whole, gradient, *ctx.arguments)
        return back, None, None, None, None


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Fp8Linear(nn.Linear):
    """A frozen Linear in eight bits; made by ``store_in_fp8``."""

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        dtype = _compute_dtype(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        output: Tensor = _Linear.apply(input.to(dtype), self.weight, self.weight_scales, bias)
        return output


class Fp8Conv2d(nn.Conv2d):
    """A frozen Conv2d in eight bits; made by ``store_in_fp8``."""

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        dtype = _compute_dtype(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        arguments = (self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = _Conv2d.apply(input.to(dtype), self.weight, self.weight_scales, bias, arguments)
        return output


_IN_FP8: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Fp8Linear, nn.Conv2d: Fp8Conv2d}


def layers_for_fp8(network: nn.Module, keep: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield path and module of each frozen layer that can be kept in eight bits.

    ``keep``: names of modules that stay as they are, at the top of the network or at the end of a path. What trains
    stays too, and everything that is no Linear or Conv2d: norms, embeddings, biases.
    """
    for path, module in network.named_modules():
        parts = path.split(".")
        if type(module) in _IN_FP8 and parts[0] not in keep and parts[-1] not in keep:
            weight: Any = module.weight
            is_padded_otherwise = getattr(module, "padding_mode", "zeros") != "zeros"
            if not weight.requires_grad and not weight.is_meta and not is_padded_otherwise:
                yield path, module


@torch.no_grad()
def store_in_fp8(network: nn.Module, keep: Collection[str] = ()) -> None:
    """Put a frozen network's weights into eight bits, layer by layer; see ``layers_for_fp8``.

    Raises ModelError for a weight that is not finite.
    """
    for path, module in list(layers_for_fp8(network, keep)):
        weight, scales = quantised(module.weight)
        if not torch.isfinite(weight.float()).all():
            raise ModelError(f"fp8_base: the weight of '{path}' is not finite; the model is damaged.")
        module.weight = nn.Parameter(weight, requires_grad=False)
        # Computed from the weight, so no file needs it.
        module.register_buffer("weight_scales", scales, persistent=False)
        module.__class__ = _IN_FP8[type(module)]


def whole_weight(module: Any) -> Tensor:
    """Return a layer's weight, in fp32 where it is kept in eight bits."""
    weight: Tensor = module.weight
    return restored(weight, module.weight_scales, torch.float32) if weight.dtype == FP8 else weight


def stored_bytes(network: nn.Module, *, in_fp8: bool, keep: Collection[str] = ()) -> int:
    """Return how many bytes the frozen weights take, or would take in eight bits."""
    small = {id(module.weight) for _, module in layers_for_fp8(network, keep)} if in_fp8 else set()
    frozen = [parameter for parameter in network.parameters() if not parameter.requires_grad]
    return sum(each.numel() * (1 if id(each) in small else each.element_size()) for each in frozen)
