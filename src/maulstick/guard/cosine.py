"""Cosine between the gradient of this step and of the one before."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from .presets import CosineMode

SAMPLES_PER_TENSOR = 64
# Part of the logged formula: dot(g, g_prev) / (norm * (norm_prev + 1e-12)).
EPSILON = 1e-12


class PreviousGradient:
    """Keeps the last gradient (``exact``: a copy; ``sampled``: 64 evenly spaced values of each tensor)."""

    def __init__(self, mode: CosineMode) -> None:
        self.mode = mode
        self.kept: list[torch.Tensor] | None = None
        self.norm = math.nan
        self.factor = 1.0

    def local_sums(self, gradients: list[torch.Tensor], weights: list[float] | float) -> torch.Tensor:
        """[dot with the previous gradient, squared norm of what is compared] of this process, in fp64.

        The gradient becomes the previous one. The dot product is NaN when there is none to compare with.
        """
        exact = self.mode == "exact"
        current = [each.detach().reshape(-1) for each in gradients] if exact else _samples(gradients)
        device = current[0].device if current else torch.device("cpu")
        dot = torch.full((), math.nan, dtype=torch.float64, device=device)
        if self.kept is not None and [each.shape for each in self.kept] == [each.shape for each in current]:
            # A loaded state may lie on another device than the gradients.
            self.kept = [old.to(new.device, new.dtype) for old, new in zip(self.kept, current, strict=True)]
            dot = _weighted_dot(current, self.kept, weights if exact else 1.0, device)
            torch._foreach_copy_(self.kept, current)
        else:
            self.kept = [each.clone() for each in current]
        squares = torch.zeros_like(dot) if exact else _weighted_dot(current, current, 1.0, device)
        return torch.stack([dot, squares])

    def finish(self, dot: float, squares: float, scaled_norm: float, factor: float) -> float:
        """The cosine, from the sums over all processes.

        ``factor`` turns the units of the gradients into scaled ones (the loss scale, or 1). Like the norm, the dot
        product of the exact form is that of fp32, so that it overflows where a recorded one did.
        """
        if self.mode == "sampled":
            norm, dot = math.sqrt(squares) * factor, dot * factor * self.factor
        else:
            norm, dot = scaled_norm, as_fp32(dot * factor * self.factor)
        below = norm * (self.norm + EPSILON)
        cosine = dot / below if below != 0 else math.nan
        self.norm, self.factor = norm, factor
        return cosine

    def state_dict(self) -> dict[str, Any]:
        """The kept gradient (copies) and its norm."""
        kept = None if self.kept is None else [each.clone() for each in self.kept]
        return {"mode": self.mode, "kept": kept, "norm": self.norm, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; one kept in another mode is of no use and is dropped."""
        if state["mode"] != self.mode:
            self.kept, self.norm, self.factor = None, math.nan, 1.0
            return
        self.kept = None if state["kept"] is None else [each.clone() for each in state["kept"]]
        self.norm, self.factor = state["norm"], state["factor"]


def as_fp32(value: float) -> float:
    """``value`` rounded to float32, inf where that overflows."""
    return ctypes.c_float(value).value


def _samples(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Up to 64 evenly spaced values of each tensor, in one fp32 vector per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        flat = gradient.detach() if gradient.is_contiguous() else gradient.detach().reshape(-1)
        count = min(SAMPLES_PER_TENSOR, flat.numel())
        stride = flat.numel() // count if count else 1
        by_device.setdefault(flat.device, []).append(flat.as_strided((count,), (stride,), flat.storage_offset()))
    return [torch.cat(samples).float() for samples in by_device.values()]


def _weighted_dot(
    left: list[torch.Tensor], right: list[torch.Tensor], weights: list[float] | float, device: torch.device
) -> torch.Tensor:
    if not left:
        return torch.zeros((), dtype=torch.float64, device=device)
    if any(each.dtype in (torch.float16, torch.bfloat16) for each in left):
        left, right = [each.float() for each in left], [each.float() for each in right]
    dots = [torch.dot(a, b) for a, b in zip(left, right, strict=True)]
    if any(dot.device != device for dot in dots):
        dots = [dot.to(device, non_blocking=True) for dot in dots]
    values = torch.stack(dots).double()
    if isinstance(weights, list):
        return (values * torch.tensor(weights, dtype=torch.float64, device=device)).sum()
    return values.sum() * weights
