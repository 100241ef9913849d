"""Learning-rate weights by block, as sd-scripts writes them: one option for each part of the denoiser.

A weight multiplies the learning rate of a block; a block of weight 0 is not trained at all. The readable form is in
``block_table``, the presets of the LoRA Block Weight extension in ``block_presets``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from maulstick.adapters.curves import CURVE_FORM, curve_weights
from maulstick.errors import OptionError

Weights = str | float | Sequence[str | float]
"""Weights as a user gives them: ``"0,0.5,1"``, ``"sine+0.2"``, ``0.5``, or a list from a TOML file."""


class BlockLayout(Protocol):
    """The blocks of a family: a name for each index, and the indices that each part (``down``, ``up``) stands for."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def parts(self) -> Mapping[str, range]: ...


@dataclass(frozen=True)
class NamedBlocks:
    """A layout by itself, for families whose parts are plain rows of blocks."""

    names: tuple[str, ...]
    parts: Mapping[str, range]


def numbered_blocks(sizes: Mapping[str, int]) -> NamedBlocks:
    """Return the layout of parts that follow each other, such as ``{"double": 19, "single": 38}``."""
    names: list[str] = []
    parts: dict[str, range] = {}
    for part, size in sizes.items():
        parts[part] = range(len(names), len(names) + size)
        names += [f"{part}.{number}" for number in range(size)]
    return NamedBlocks(tuple(names), parts)


@dataclass(frozen=True)
class WeightEntry:
    """One thing a user said about weights.

    Attributes:
        source: how it was written, for messages.
        blocks: the indices it speaks of.
        singled_out: these blocks were named themselves; a whole part also covers blocks that have no module.
        spelled_out: it gives blocks different weights, so that the user may expect each of them to count.
        neutral: it gives them the weight they would have without it.
    """

    source: str
    blocks: tuple[int, ...]
    singled_out: bool = False
    spelled_out: bool = False
    neutral: bool = False


@dataclass(frozen=True)
class BlockWeights:
    """A weight for every block index, and how it came about.

    Attributes:
        text_encoder: the text encoders' weight, BASE of a preset.
        not_listed: blocks that a preset's list has no value for; their weight is 0.
    """

    values: tuple[float, ...]
    entries: tuple[WeightEntry, ...] = ()
    text_encoder: float = 1.0
    not_listed: tuple[int, ...] = ()


def parse_block_weights(
    layout: BlockLayout,
    *,
    down_lr_weight: Weights | None = None,
    mid_lr_weight: Weights | None = None,
    up_lr_weight: Weights | None = None,
    block_lr_zero_threshold: float | None = None,
) -> tuple[float, ...] | None:
    """Return one weight per block index, None where no list is given (a threshold alone says nothing).

    ``down`` runs from the input to the middle, ``up`` from the middle to the output. See ``read_part_weights``.
    """
    given = {"down": down_lr_weight, "mid": mid_lr_weight, "up": up_lr_weight}
    weights = read_part_weights(layout, given, block_lr_zero_threshold)
    return None if weights is None else weights.values


def read_part_weights(
    layout: BlockLayout, given: Mapping[str, Weights | None], threshold: float | None = None
) -> BlockWeights | None:
    """Read ``down_lr_weight``, ``mid_lr_weight`` and ``up_lr_weight`` (part -> weights); None where all are None.

    A part is given as a list with a number for every block (an empty item is 0), one number for all of them, or a curve
    (``mid``: numbers only). A part that is not given, and a block in no part, has weight 1. Weights at or below
    ``threshold`` become 0; unlike in sd-scripts also those of parts that are not given.

    Raises:
        OptionError: wrong length, unknown curve, no number, a negative weight, or a part this family does not have.
    """
    if all(value is None for value in given.values()):
        return None
    values = [1.0] * len(layout.names)
    entries = []
    for part, value in given.items():
        if value is None:
            continue
        option = f"{part}_lr_weight"
        blocks = layout.parts.get(part)
        if blocks is None:
            raise OptionError(
                f"{option}: this model has no part '{part}'. Its blocks are weighed with block_lr, by "
                f"{', '.join(layout.parts)}."
            )
        row = row_weights(option, value, [layout.names[index] for index in blocks], allow_curve=part != "mid")
        for index, weight in zip(blocks, row, strict=True):
            values[index] = weight
        entries.append(WeightEntry(option, tuple(blocks), spelled_out=len(set(row)) > 1, neutral=set(row) == {1.0}))
    return with_threshold(BlockWeights(tuple(values), tuple(entries)), layout, threshold)


def with_threshold(weights: BlockWeights, layout: BlockLayout, threshold: float | None) -> BlockWeights:
    """Set weights at or below the threshold (0 without one) to 0; blocks that are in no part keep theirs."""
    limit = 0.0 if threshold is None else threshold
    if not (math.isfinite(limit) and limit >= 0):
        raise OptionError(f"block_lr_zero_threshold = {limit}: expected 0 or more.")
    inside = {index for blocks in layout.parts.values() for index in blocks}
    kept = [weight if weight > limit or index not in inside else 0.0 for index, weight in enumerate(weights.values)]
    return replace(weights, values=tuple(kept))


def row_weights(option: str, value: Weights, names: Sequence[str], *, allow_curve: bool = True) -> list[float]:
    """Return a weight for each of the named blocks from a list, a single number or a curve.

    Negative weights come from curves with a negative base only, and are left to the threshold.
    """
    if isinstance(value, str) and "," not in value and not is_number(value):
        if not allow_curve:
            raise OptionError(f"{option} = {value}: expected {_expected(names, allow_curve=False)}.")
        return curve_weights(value, len(names), option)
    return row_numbers(option, value, names, allow_curve=allow_curve)


def row_numbers(option: str, value: Weights, names: Sequence[str], *, allow_curve: bool = False) -> list[float]:
    """Return a number of 0 or more for each of the named blocks, from a list or from one number for all."""
    items = _items(value)
    expected = _expected(names, allow_curve=allow_curve)
    if len(items) not in (1, len(names)):
        raise OptionError(f"{option} has {len(items)} values, but {_count(names)}. Expected {expected}.")
    numbers = [_number(option, item, expected) for item in items]
    return numbers * len(names) if len(numbers) == 1 else numbers


def _items(value: Weights) -> list[str | float]:
    if isinstance(value, str):
        return [*value.split(",")]
    return [value] if isinstance(value, int | float) else list(value)


def is_number(text: str) -> bool:
    """Tell whether the text is a number as Python reads one."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(option: str, item: str | float, expected: str) -> float:
    if isinstance(item, str) and not item.strip():
        return 0.0
    try:
        number = math.nan if isinstance(item, bool) else float(item)
    except (ValueError, TypeError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise OptionError(f"{option}: '{item}' is not a number of 0 or more. Expected {expected}.")
    return number


def _count(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"there is one block ({names[0]})"
    return f"there are {len(names)} blocks ({names[0]} to {names[-1]})"


def _expected(names: Sequence[str], *, allow_curve: bool) -> str:
    if len(names) == 1:
        return "one number"
    listed = f"{len(names)} numbers with commas between them, one number for all"
    return f"{listed}, or {CURVE_FORM}" if allow_curve else listed.replace(", one number", ", or one number")


# ---------------------------------------------------------------------------------------------------------------------
# Weights and modules


def check_weights_against_modules(
    weights: BlockWeights, modules_per_block: Mapping[int, int], layout: BlockLayout
) -> list[str]:
    """Compare weights with the modules that there are; return lines about weights that have no effect.

    A list or a curve for a whole part necessarily covers blocks without a module, so those are only named. Where all
    the weights above 0 that an entry gives are for blocks without a module, nothing of what it asks for can be trained:
    that is an error.

    Args:
        modules_per_block: block index -> number of modules before blocks of weight 0 are left out.

    Raises:
        OptionError: see above.
    """
    without_effect: set[int] = set()
    for entry in weights.entries:
        empty = [index for index in entry.blocks if not modules_per_block.get(index)]
        weighed = [index for index in entry.blocks if weights.values[index]]
        if weighed and set(weighed) <= set(empty) and not entry.neutral:
            filled = [index for index in range(len(layout.names)) if modules_per_block.get(index)]
            raise OptionError(
                f"{entry.source}: there is no module to train in {block_list(weighed, layout)}, so a weight there has "
                f"no effect. Blocks with modules: {block_list(filled, layout)} (conv_dim adds those with convolutions "
                "only)."
            )
        if entry.singled_out or entry.spelled_out:
            without_effect |= set(empty)
    lines = []
    if without_effect:
        named = block_list(without_effect, layout)
        lines.append(f"No module in {named}: the weights given for these blocks have no effect.")
    left_out = [index for index in weights.not_listed if modules_per_block.get(index)]
    if left_out:
        named = block_list(left_out, layout)
        lines.append(f"block_lr: the list has no value for {named}, which means 0: their modules are left out.")
    return lines


def block_list(indices: Collection[int], layout: BlockLayout) -> str:
    """Name blocks, neighbours of one part as a range: ``IN00, IN09-IN11``."""
    part_of = {index: part for part, blocks in layout.parts.items() for index in blocks}
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] == index - 1 and part_of.get(index) == part_of.get(index - 1):
            runs[-1].append(index)
        else:
            runs.append([index])
    first_and_last = ((layout.names[run[0]], layout.names[run[-1]]) for run in runs)
    return ", ".join(first if first == last else f"{first}-{last}" for first, last in first_and_last)
