"""Ranks and alphas by block: ``block_dims``, ``block_alphas``, ``conv_block_dims``, ``conv_block_alphas``."""

from __future__ import annotations

from typing import NamedTuple

from maulstick.adapters.block_weights import BlockLayout, Weights, row_numbers
from maulstick.errors import OptionError


class BlockRank(NamedTuple):
    """Rank and alpha of one block: for Linear and 1x1 convolutions, and for larger convolutions; dim 0: no module."""

    dim: int
    alpha: float
    conv_dim: int = 0
    conv_alpha: float = 1.0


def parse_block_ranks(
    layout: BlockLayout,
    *,
    block_dims: Weights | None = None,
    block_alphas: Weights | None = None,
    conv_block_dims: Weights | None = None,
    conv_block_alphas: Weights | None = None,
    network_dim: int = 4,
    network_alpha: float = 1.0,
    conv_dim: int | None = None,
    conv_alpha: float | None = None,
) -> dict[int, BlockRank] | None:
    """Return block index -> rank for every block; None where nothing is given by block.

    Each list has one value per block of the family, or is one number for all. What is not given by block comes from
    ``network_dim``, ``network_alpha``, ``conv_dim`` and ``conv_alpha``; an alpha of 0 stands for the rank, a rank of 0
    leaves the modules out.

    Raises:
        OptionError: wrong length, a rank that is no whole number, or ``conv_block_alphas`` without a rank to go with.
    """
    if block_dims is block_alphas is conv_block_dims is conv_block_alphas is None:
        return None
    if conv_block_alphas is not None and conv_block_dims is None and conv_dim is None:
        raise OptionError("conv_block_alphas is given without conv_block_dims. Give conv_block_dims too.")
    dims = _ranks("block_dims", block_dims, network_dim, layout)
    alphas = _alphas("block_alphas", block_alphas, network_alpha, layout)
    conv_dims = _ranks("conv_block_dims", conv_block_dims, conv_dim or 0, layout)
    conv_alphas = _alphas("conv_block_alphas", conv_block_alphas, 1.0 if conv_alpha is None else conv_alpha, layout)
    rows = zip(dims, alphas, conv_dims, conv_alphas, strict=True)
    return {index: BlockRank(*row) for index, row in enumerate(rows)}


def _alphas(option: str, value: Weights | None, default: float, layout: BlockLayout) -> list[float]:
    return [default] * len(layout.names) if value is None else row_numbers(option, value, layout.names)


def _ranks(option: str, value: Weights | None, default: int, layout: BlockLayout) -> list[int]:
    if value is None:
        return [default] * len(layout.names)
    numbers = row_numbers(option, value, layout.names)
    for number in numbers:
        if number != int(number):
            raise OptionError(f"{option}: {number:g} is no rank; expected whole numbers (0 leaves a block out).")
    return [int(number) for number in numbers]
