"""The measurements of ``maulstick probe``: gradients by block, and trial updates of single blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maulstick.adapters.lora import lora_parameters
from maulstick.adapters.targets import LoraTarget
from maulstick.errors import ModelError
from maulstick.families.base import Family
from maulstick.options.schema import Precision
from maulstick.tools.probe_draws import Draw, LossBench, Replicate
from maulstick.train.rates import ComponentRates

# fp16 would lose small gradients on the way back; the factors themselves, and so their gradients, are fp32.
_FP16_LOSS_SCALE = 1024.0

Advance = Callable[[], None]


@dataclass(frozen=True)
class BlockFactors:
    """The LoRA of one block.

    Attributes:
        up: its up factors, each with the factor that turns its gradient into an estimate for the whole weight
            (see ``measure_gradients``).
        rated: all its factors, each with its learning rate.
    """

    index: int
    name: str
    modules: int
    up: Sequence[tuple[nn.Parameter, float]]
    rated: Sequence[tuple[nn.Parameter, float]]

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter, _ in self.rated)


@dataclass(frozen=True)
class GradientFacts:
    """Gradients of one block over all draws: estimates for the base weights, per draw of one image.

    Attributes:
        norm: root mean square of the gradient's norm.
        signal: squared norm of the mean gradient, unbiased; may come out below 0 where there is none to be seen.
        signal_error: standard error that the signal would have if there were none.
        noise: variance around the mean, summed over all weights.
    """

    norm: float
    signal: float
    signal_error: float
    noise: float

    @property
    def snr(self) -> float | None:
        """Signal by noise of one image; None where there is no noise to compare with."""
        return self.signal / self.noise if self.noise > 0 else None


@dataclass(frozen=True)
class Trial:
    """What a short training of some blocks did to the loss of held-back draws.

    Attributes:
        change: mean loss after minus before, on the same draws; below 0 is better.
        error: standard error of that mean, over replicates.
        seconds_per_image: of forward and backward pass, the fastest of the updates.
    """

    change: float
    error: float
    seconds_per_image: float


def block_factors(family: Family, targets: Sequence[LoraTarget], rates: ComponentRates) -> list[BlockFactors]:
    """Sort the attached LoRA by block, in the order of the blocks; modules outside every block are left out."""
    by_path = {target.path: target for target in targets}
    up: dict[int, list[tuple[nn.Parameter, float]]] = {}
    rated: dict[int, list[tuple[nn.Parameter, float]]] = {}
    for parameter in lora_parameters(family.denoiser):
        target = by_path[parameter.path]
        if target.block is None:
            continue
        rated.setdefault(target.block, []).append((parameter.parameter, rates.group_of(target, parameter.role)[1]))
        if parameter.role == "up":
            up.setdefault(target.block, []).append((parameter.parameter, _to_weight_gradient(target)))
    names = family.block_names()
    return [BlockFactors(block, names[block], len(up[block]), up[block], rated[block]) for block in sorted(up)]


def _to_weight_gradient(target: LoraTarget) -> float:
    fan_in = math.prod(target.shape[1:])
    return math.sqrt(3 * fan_in / target.dim) * target.dim / target.alpha


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def measure_gradients(
    bench: LossBench,
    blocks: Sequence[BlockFactors],
    replicates: Sequence[Replicate],
    precision: Precision,
    advance: Advance = lambda: None,
) -> list[GradientFacts]:
    """Run every draw forward and backward alone, and return the gradient's statistics for each block.

    A LoRA that starts at zero has no gradient in its down factors A, and s G Aᵀ in its up factors, where G is the
    gradient of the base weight and s = alpha / rank. The entries of A are independent, with variance 1 / (3 fan-in), so
    that |G Aᵀ|² has the mean |G|² rank / (3 fan-in): multiplied by sqrt(3 fan-in / rank) / s, the up factors' gradient
    is a random projection of G whose squared norms and products are those of G on average over A. What is returned
    so depends neither on alpha nor on the rank, and on A only by chance: |G|² of a module by sqrt(2 / rank) of itself
    at most (where G has rank one), of a block by less.

    Two tensors of the LoRA's size are kept besides its gradient, whatever the number of draws. See ``statistics``.

    Raises:
        ModelError: a gradient is not finite.
    """
    up = [parameter for block in blocks for parameter, _ in block.up]
    factors = [factor for block in blocks for _, factor in block.up]
    scale = loss_scale(precision)
    total = [torch.zeros_like(parameter) for parameter in up]
    squares, products = [], []
    with only_trained(up):
        for replicate in replicates:
            mean = [torch.zeros_like(parameter) for parameter in up]
            for draw in replicate:
                (bench.losses([draw]).sum() * scale).backward()
                gradients = _taken_gradients(up)
                torch._foreach_mul_(gradients, [factor / scale for factor in factors])
                squares.append(_finite(_products(gradients, gradients, blocks), draw))
                torch._foreach_add_(mean, gradients, alpha=1 / len(replicate))
                advance()
            products.append(_products(mean, total, blocks))
            torch._foreach_add_(total, mean)
    return statistics(torch.stack(squares), torch.stack(products[1:]))


def statistics(squares: Tensor, products: Tensor) -> list[GradientFacts]:
    """Return the facts of each block from what was kept of its gradients.

    With m_1 to m_R the means of the replicates, the signal is the mean product of two different ones, which is the
    squared norm of the mean gradient without the bias that a norm has; the noise is mean |g|² - signal (compare
    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1). Where there is no signal, the
    products of each mean with the sum of those before are a martingale difference sequence, so that the sum of their
    squares estimates the variance of their sum.

    Args:
        squares: |g|² of each draw, shape (draws, blocks).
        products: m_r · (m_1 + … + m_{r-1}) for r from 2 on, shape (R - 1, blocks).
    """
    pairs = len(products) * (len(products) + 1) / 2
    signal = products.sum(0) / pairs
    error = (products**2).sum(0).sqrt() / pairs
    square = squares.mean(0)
    columns = (square.sqrt(), signal, error, square - signal)
    return [GradientFacts(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def loss_scale(precision: Precision) -> float:
    """Return what losses are multiplied by before the backward pass."""
    return _FP16_LOSS_SCALE if precision == "fp16" else 1.0


def _taken_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients and clear them; zeros where the loss does not reach a parameter."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _products(one: Sequence[Tensor], other: Sequence[Tensor], blocks: Sequence[BlockFactors]) -> Tensor:
    """Return the inner product of two sets of tensors in each block, shape (blocks,), fp64 on the CPU."""
    of_tensors = torch.stack([product.sum() for product in torch._foreach_mul(list(one), list(other))]).cpu().double()
    return torch.stack([part.sum() for part in of_tensors.split([len(block.up) for block in blocks])])


def _finite(squares: Tensor, draw: Draw) -> Tensor:
    if not torch.isfinite(squares).all():
        raise ModelError(
            f"The gradient of {draw.image.name} at timestep {draw.timestep.item():g} is not finite. Use mixed_precision"
            " bf16 or no; if that does not help, the model file or the image is damaged."
        )
    return squares


# ---------------------------------------------------------------------------------------------------------------------
# Trial updates


def try_update(
    bench: LossBench,
    blocks: Sequence[BlockFactors],
    updates: Sequence[Sequence[Draw]],
    held_back: Sequence[Replicate],
    before: Tensor,
    precision: Precision,
) -> Trial:
    """Train the LoRA of these blocks alone with Adam, measure, and put back what was there, bit for bit.

    Args:
        updates: the draws of each update; its loss is their mean.
        held_back: the draws that the change is measured on.
        before: their losses before, shape (draws,), in order.
    """
    rated = [item for block in blocks for item in block.rated]
    parameters = [parameter for parameter, _ in rated]
    start = [parameter.detach().clone() for parameter in parameters]
    seconds = []
    try:
        with only_trained(parameters):
            by_rate: dict[float, list[nn.Parameter]] = {}
            for parameter, rate in rated:
                by_rate.setdefault(rate, []).append(parameter)
            optimizer = torch.optim.Adam([{"params": members, "lr": rate} for rate, members in by_rate.items()])
            for draws in updates:
                seconds.append(_accumulate(bench, draws, parameters, loss_scale(precision)) / len(draws))
                optimizer.step()
                optimizer.zero_grad()
        after = bench.all_losses([draw for replicate in held_back for draw in replicate])
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
    change, error = paired_change(before, after, [len(replicate) for replicate in held_back])
    return Trial(change, error, min(seconds))


def paired_change(before: Tensor, after: Tensor, sizes: Sequence[int]) -> tuple[float, float]:
    """Return the mean change of the losses, and its standard error over replicates of these sizes."""
    means = torch.stack([part.mean() for part in (after - before).split(list(sizes))])
    return float(means.mean()), float(means.std() / math.sqrt(len(means)))


def _accumulate(bench: LossBench, draws: Sequence[Draw], parameters: Sequence[nn.Parameter], scale: float) -> float:
    """Leave the gradient of the draws' mean loss in the parameters; return the seconds it took."""
    device = bench.family.device
    _wait_for(device)
    started = time.perf_counter()
    for places in bench.in_parts(draws):
        (bench.losses([draws[place] for place in places]).sum() * (scale / len(draws))).backward()
    if scale != 1.0:
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], scale)
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


@contextmanager
def only_trained(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let only these parameters require gradients inside, and leave them without gradients, requiring none."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
