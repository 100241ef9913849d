"""``maulstick resize``: a LoRA with another rank, as close to the old one as that rank allows."""

from __future__ import annotations

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.read_formats import AdapterFile, plain_modules
from maulstick.errors import OptionError
from maulstick.tools.approximation import Approximation, Squares
from maulstick.tools.low_rank import RankChoice, factor_svd, from_svd, squared_norm
from maulstick.tools.parallel import map_modules
from maulstick.train.console import QuietConsole, RunConsole


def resize_lora(
    file: AdapterFile, choice: RankChoice, conv_choice: RankChoice | None = None, console: RunConsole | None = None
) -> Approximation:
    """Cut every module to the rank that ``choice`` gives it (``conv_choice`` for 3x3 convolutions).

    The factors are decomposed by QR and an SVD of rank x rank, so that the layer's matrix is never formed. Alpha
    changes with the rank, so that alpha / rank, and with it the strength at which the LoRA is used, stays. A LoHa or
    LoKr comes out as a LoRA.

    Raises:
        ModelError: a module cannot be written as a LoRA (DoRA, OFT).
        OptionError: no module would become smaller.
    """
    modules = plain_modules(file)
    console = console or QuietConsole()
    console.begin("Resizing", len(modules))
    resized: dict[str, LoraWeights] = {}
    squares = Squares(file.family)
    results = map_modules(lambda weights: _resized(weights, choice, conv_choice or choice), modules.values())
    for name, (smaller, whole, cut_off) in zip(modules, results, strict=True):
        resized[name] = smaller
        squares.add(name, whole, cut_off)
        console.advance()
    console.end()
    if all(resized[name] is module for name, module in file.modules.items()):
        largest = max(weights.rank for weights in modules.values())
        raise OptionError(
            f"{file.path} has no module of a rank above what was asked for (its largest is {largest}); there is "
            "nothing to resize."
        )
    return squares.approximation(resized)


def _resized(weights: LoraWeights, choice: RankChoice, conv_choice: RankChoice) -> tuple[LoraWeights, float, float]:
    """The module at its new rank, and the squared norms of the whole and of what was cut off."""
    svd = factor_svd(weights)
    total = squared_norm(svd.values)
    is_large_conv = weights.down.ndim == 4 and tuple(weights.down.shape[2:]) != (1, 1)
    rank = (conv_choice if is_large_conv else choice).rank(svd.values)
    if rank >= weights.rank:
        return weights, total, 0.0
    scale = weights.scale if weights.scale > 0 else 1.0
    shape = (weights.up.shape[0], *weights.down.shape[1:])
    alpha = None if weights.alpha is None else scale * rank
    return from_svd(svd, rank, alpha, shape), total, squared_norm(svd.values[rank:])
