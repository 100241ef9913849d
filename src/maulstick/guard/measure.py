"""One pass over the gradients: global norm, norm per group, non-finite tensors, cosine; one read by the host.

The norm of each tensor is taken in fp32 (fp64 for fp64 gradients) by one foreach call and combined in fp64, which is
as exact as summing everything in fp64 and costs a fraction of it. Only when the result is not finite, or zero, is it
taken again in fp64, to tell an overflow (or underflow) of the squares from a bad gradient, and to find the bad tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from .collective import Collective
from .cosine import PreviousGradient, as_fp32
from .errors import GuardError
from .scale import LossScale
from .sources import GradientSource

_dtype_and_layout = attrgetter("dtype", "layout")


@dataclass(frozen=True)
class Measurement:
    """What one window's gradients look like, the same on every process.

    ``norm`` and ``group_norms`` are in true units; ``scaled_norm`` is multiplied by the loss scale, and inf where the
    sum of its squares overflows fp32. ``loss`` is the mean over processes. ``tensors`` and ``bad_tensors`` (with a NaN
    or infinite value) are counted on this process; ``first_bad`` is the place of the first one on any process.
    """

    norm: float
    scaled_norm: float
    group_norms: dict[str, float]
    tensors: int
    loss: float | None = None
    loss_is_finite: bool = True
    scale: float | None = None
    cosine: float | None = None
    bad_tensors: int = 0
    first_bad: int | None = None


@dataclass
class LocalGradients:
    """This process's gradients as plain tensors. ``weights`` makes the sum over processes count each value once."""

    gradients: list[torch.Tensor]
    counts: list[int]
    weights: list[float] | float


def measure(
    source: GradientSource,
    *,
    loss: torch.Tensor | float | None = None,
    scale: LossScale | None = None,
    collective: Collective | None = None,
    previous: PreviousGradient | None = None,
    on_host: bool | None = None,
) -> Measurement:
    """Measure the gradients of ``source``.

    ``loss`` is a number or a tensor of one element. ``on_host`` forces where the per-tensor norms are added up; left
    None, gradients on the CPU are added up by the host and others on their device, so that the host waits once.
    """
    collective = Collective(None) if collective is None else collective
    local = local_gradients(source, collective)
    device = local.gradients[0].device if local.gradients else torch.device("cpu")
    on_host = device.type == "cpu" if on_host is None else on_host
    cosine_sums = None if previous is None else previous.local_sums(local.gradients, local.weights)
    norms = tensor_norms(local.gradients)
    if on_host and collective.size == 1:
        numbers = _read_on_host(_sums_on_host(norms, local), len(norms), loss, scale, cosine_sums)
    else:
        if on_host:
            sums = torch.tensor(_sums_on_host(norms, local), dtype=torch.float64, device=device)
        else:
            sums = sums_on_device(norms, local, device)
        vector = NumberVector.gather(sums, len(norms), loss, scale, cosine_sums, collective)
        numbers = vector.parse(vector.values.tolist())
    # Every process sees the same numbers here, so all of them look again or none does.
    if not all(map(math.isfinite, numbers.sums)) or (numbers.tensors > 0 and not any(numbers.sums)):
        numbers.sums, bad_tensors, first_bad = _measure_again(source, local, device, collective)
    else:
        bad_tensors, first_bad = 0, None
    return assemble(source, numbers, previous, len(norms), bad_tensors, first_bad)


def local_gradients(source: GradientSource, collective: Collective) -> LocalGradients:
    """The gradients this process holds; of a sharded one its own part."""
    gradients, counts = source.gradients()
    size = collective.size
    weights: list[float] | float = 1.0 / size
    if not set(map(type, gradients)) <= {torch.Tensor}:
        weights = [1.0 / size] * len(gradients)
        for place, gradient in enumerate(gradients):
            if hasattr(gradient, "to_local"):
                gradients[place], shards = _local_shard(gradient, size)
                weights[place] = shards / size
    return LocalGradients(gradients, counts, weights)


def _local_shard(gradient: Any, size: int) -> tuple[torch.Tensor, int]:
    """This process's part of a DTensor, and into how many different parts the whole is cut."""
    if any(placement.is_partial() for placement in gradient.placements):
        return gradient.full_tensor(), 1
    mesh = gradient.device_mesh
    shards = math.prod(mesh.size(i) for i, placement in enumerate(gradient.placements) if placement.is_shard())
    if shards > 1 and size == 1:
        raise GuardError("Gradients sharded over processes need a guard with processes='auto' or their process group.")
    return gradient.to_local(), shards


def tensor_norms(gradients: list[torch.Tensor], exact: bool = False) -> list[torch.Tensor]:
    """The L2 norm of each tensor, in fp32 (fp64 for fp64 gradients, and where ``exact``)."""
    if not gradients:
        return []
    kinds = set(map(_dtype_and_layout, gradients))
    if any(layout is not torch.strided for _, layout in kinds):
        gradients = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    if any(dtype.is_complex for dtype, _ in kinds):
        gradients = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    double = exact or any(dtype in (torch.float64, torch.complex128) for dtype, _ in kinds)
    return list(torch._foreach_norm(gradients, 2, torch.float64 if double else torch.float32))


def _sums_on_host(norms: list[torch.Tensor], local: LocalGradients) -> list[float]:
    """Sum of squares per group. On the CPU, reading each number costs less than stacking them."""
    values = [norm.item() for norm in norms]
    squares = [value * value for value in values]
    if isinstance(local.weights, list):
        squares = [square * weight for square, weight in zip(squares, local.weights, strict=True)]
    sums, start = [], 0
    for count in local.counts:
        sums.append(sum(squares[start : start + count]))
        start += count
    return sums if isinstance(local.weights, list) else [each * local.weights for each in sums]


def sums_on_device(norms: list[torch.Tensor], local: LocalGradients, device: torch.device) -> torch.Tensor:
    """Sum of squares per group, by the device and in a fixed order (no atomic additions)."""
    if not norms:
        return torch.zeros(len(local.counts), dtype=torch.float64, device=device)
    squares = _stack(norms, device).double().square_()
    if isinstance(local.weights, list):
        squares *= _weight_vector(tuple(local.weights), device)
    else:
        squares *= local.weights
    if len(local.counts) == 1:
        return squares.sum().reshape(1)
    padded = torch.cat([squares, squares.new_zeros(1)])
    return padded[_group_table(tuple(local.counts), device)].sum(dim=1)


def _stack(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if all(norm.device == device for norm in norms):
        return torch.stack(norms)
    return torch.stack([norm.to(device, non_blocking=True) for norm in norms])


@lru_cache(maxsize=16)
def _weight_vector(weights: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64, device=device)


@lru_cache(maxsize=16)
def _group_table(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[groups, longest group] places in the list of tensors; the place after the last one stands for nothing."""
    nothing, longest = sum(counts), max(counts)
    rows, start = [], 0
    for count in counts:
        rows.append(list(range(start, start + count)) + [nothing] * (longest - count))
        start += count
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(counts), longest)


@dataclass
class Numbers:
    """What the host reads, summed over processes: squares per group, how many tensors, and the rest."""

    sums: list[float]
    tensors: float
    loss: float | None
    loss_is_finite: bool
    scale: LossScale | None
    cosine: tuple[float, float] | None


def _read_on_host(
    sums: list[float], tensors: int, loss: Any, scale: LossScale | None, cosine: torch.Tensor | None
) -> Numbers:
    loss = None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    dot, squares = (math.nan, math.nan) if cosine is None else cosine.tolist()
    return Numbers(
        sums=sums,
        tensors=tensors,
        loss=loss,
        loss_is_finite=loss is None or math.isfinite(loss),
        scale=None if scale is None else LossScale(float(scale.value), scale.still_applied),
        cosine=None if cosine is None else (dot, squares),
    )


@dataclass(frozen=True)
class NumberVector:
    """The same numbers in one fp64 tensor on the gradients' device, so that one transfer reads them all."""

    values: torch.Tensor
    groups: int
    has_loss: bool
    has_cosine: bool
    scale_is_applied: bool | None

    @classmethod
    def gather(
        cls,
        sums: torch.Tensor,
        tensors: int,
        loss: Any,
        scale: LossScale | None,
        cosine: torch.Tensor | None,
        collective: Collective,
    ) -> NumberVector:
        """Put everything together and add it up over processes, without waiting for the device."""

        def on_device(value: Any) -> torch.Tensor:
            if isinstance(value, torch.Tensor):
                return value.detach().to(sums.device, torch.float64).reshape(-1)
            # full() is a kernel; copying a number from the host would wait for the device.
            return torch.full((1,), value, dtype=torch.float64, device=sums.device)

        parts = [sums, on_device(tensors)]
        if loss is not None:
            parts += [on_device(loss) / collective.size, (~on_device(loss).isfinite()).double()]
        if cosine is not None:
            parts.append(on_device(cosine))
        values = collective.sum(torch.cat(parts))
        if scale is not None:
            # The scale is the same on every process and must not be added up.
            values = torch.cat([values, on_device(scale.value)])
        return cls(
            values=values,
            groups=sums.numel(),
            has_loss=loss is not None,
            has_cosine=cosine is not None,
            scale_is_applied=None if scale is None else scale.still_applied,
        )

    def parse(self, values: list[float]) -> Numbers:
        """The numbers in ``values``, which is ``self.values`` read by the host."""
        rest = iter(values[self.groups :])
        tensors = next(rest)
        loss, loss_bad = (next(rest), next(rest)) if self.has_loss else (None, 0.0)
        cosine = (next(rest), next(rest)) if self.has_cosine else None
        scale = None if self.scale_is_applied is None else LossScale(next(rest), self.scale_is_applied)
        return Numbers(values[: self.groups], tensors, loss, loss_bad == 0, scale, cosine)


def _measure_again(
    source: GradientSource, local: LocalGradients, device: torch.device, collective: Collective
) -> tuple[list[float], int, int | None]:
    """Group sums in fp64, how many tensors are bad here, and the place of the first bad one on any process."""
    norms = tensor_norms(local.gradients, exact=True)
    bad = [place for place, norm in enumerate(norms) if not math.isfinite(norm.item())]
    sums = collective.sum(torch.tensor(_sums_on_host(norms, local), dtype=torch.float64, device=device)).tolist()
    nowhere = sum(len(group.params) for group in source.groups)
    first = source.places_with_gradient()[bad[0]] if bad else nowhere
    [first] = collective.smallest([first], device)
    return sums, len(bad), first if first < nowhere else None


def assemble(
    source: GradientSource,
    numbers: Numbers,
    previous: PreviousGradient | None,
    tensors: int,
    bad_tensors: int,
    first_bad: int | None,
) -> Measurement:
    """The measurement that ``numbers`` amount to."""
    scale = numbers.scale
    factor = 1.0 if scale is None else float(scale.value)
    divisor = factor if scale is not None and scale.still_applied and factor != 0 else 1.0
    to_scaled = 1.0 if scale is None or scale.still_applied else factor
    total = sum(numbers.sums)
    group_sums: dict[str, float] = {}
    for group, value in zip(source.groups, numbers.sums, strict=True):
        group_sums[group.name] = group_sums.get(group.name, 0.0) + value
    scaled_norm = as_fp32(math.sqrt(as_fp32(total * to_scaled * to_scaled)))
    cosine = None
    if previous is not None and numbers.cosine is not None:
        cosine = previous.finish(*numbers.cosine, scaled_norm, to_scaled)
    return Measurement(
        norm=math.sqrt(total) / divisor,
        scaled_norm=scaled_norm,
        group_norms={name: math.sqrt(value) / divisor for name, value in group_sums.items()},
        tensors=tensors,
        loss=numbers.loss,
        loss_is_finite=numbers.loss_is_finite,
        scale=None if scale is None else factor,
        cosine=cosine,
        bad_tensors=bad_tensors,
        first_bad=first_bad,
    )
