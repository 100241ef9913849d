"""Learning-rate weights by block in the readable form: ``down.4-5=0.5``, ``mid=0``, ``up=sine``, or a preset's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from maulstick.adapters.block_presets import builtin_presets, resolve_ratios
from maulstick.adapters.block_weights import (
    BlockLayout,
    BlockWeights,
    WeightEntry,
    block_list,
    row_weights,
    with_threshold,
)
from maulstick.errors import OptionError, nearest_name_hint

OTHER = "other"
_RANGE = re.compile(r"(?P<part>[^.]+)\.(?P<first>\d+)(?:-(?P<last>\d+))?")


def read_block_table(layout: BlockLayout, entries: Sequence[str], threshold: float | None = None) -> BlockWeights:
    """Return the weights that ``block_lr`` gives.

    An entry is ``KEY=VALUE``. A key is a part (``down``), one of its blocks counted from 0 (``down.4``), a range with
    both ends (``down.4-7``), a block by its name (``IN04``), ``block`` with an index over all parts, or ``other`` for
    every block that no other entry names. A value is a number, a list with one for each block, or a curve over these
    blocks. Blocks that no entry names have weight 1. A single entry without ``=`` is a preset's name (``OUTALL``), or a
    list in the order of the LoRA Block Weight extension, whose BASE is the weight of the text encoders.

    Raises:
        OptionError: an unknown part or preset, a block that does not exist, a block named twice, or an unusable value.
    """
    if len(entries) == 1 and "=" not in entries[0]:
        weights = _preset(layout, entries[0].strip())
    else:
        weights = _table(layout, entries)
    return with_threshold(weights, layout, threshold)


def _preset(layout: BlockLayout, text: str) -> BlockWeights:
    ratios = resolve_ratios(text, layout, builtin_presets(layout), where="block_lr")
    negative = next((ratio for ratio in (ratios.base, *ratios.blocks) if ratio < 0), None)
    if negative is not None:
        raise OptionError(f"block_lr: {negative:g} is negative, but it multiplies a learning rate.")
    return BlockWeights(ratios.blocks, text_encoder=ratios.base, not_listed=ratios.not_listed)


def _table(layout: BlockLayout, entries: Sequence[str]) -> BlockWeights:
    values = [1.0] * len(layout.names)
    said: dict[int, str] = {}
    found: list[WeightEntry] = []
    rest: str | None = None
    for text in entries:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            presets = builtin_presets(layout)
            alone = f", or a preset's name alone ({', '.join(presets)})" if presets else ""
            first = next(iter(layout.parts))
            raise OptionError(f"block_lr '{text}': expected KEY=VALUE, such as {first}.0-1=0.5 {OTHER}=0{alone}.")
        if key == OTHER:
            if rest is not None:
                raise OptionError(f"block_lr: '{OTHER}' stands twice. Keep one.")
            rest = value
            continue
        blocks, singled_out = _blocks(layout, key)
        twice = next((index for index in blocks if index in said), None)
        if twice is not None:
            raise OptionError(
                f"block_lr: {layout.names[twice]} is named by '{said[twice]}' and by '{key}'. Name each block once."
            )
        source = f'block_lr "{key}"'
        row = row_weights(source, value, [layout.names[index] for index in blocks])
        for index, weight in zip(blocks, row, strict=True):
            said[index], values[index] = key, weight
        found.append(WeightEntry(source, tuple(blocks), singled_out, spelled_out=len(set(row)) > 1))
    default = 1.0
    if rest is not None:
        others = [index for blocks in layout.parts.values() for index in blocks if index not in said]
        if not others:
            raise OptionError(f"block_lr: '{OTHER}' means no block, because every one is named. Remove it.")
        (default,) = row_weights(f'block_lr "{OTHER}"', value=rest, names=["every other block"])
        for index in others:
            values[index] = default
    entries_with_default = (replace(e, neutral={values[index] for index in e.blocks} == {default}) for e in found)
    return BlockWeights(tuple(values), tuple(entries_with_default))


def _blocks(layout: BlockLayout, key: str) -> tuple[range, bool]:
    """Return the indices a key means, and whether it singles them out of their part."""
    parts = {"block": range(len(layout.names)), **layout.parts}
    if key in parts:
        return parts[key], False
    if key in layout.names:
        index = list(layout.names).index(key)
        return range(index, index + 1), True
    match = _RANGE.fullmatch(key)
    if match is None or match["part"] not in parts:
        known = [*parts, OTHER]
        hint = nearest_name_hint(key.partition(".")[0], [*known, *layout.names])
        raise OptionError(
            f"block_lr: '{key}' names no block.{hint} Expected {', '.join(known)}, one of them with a number or range "
            f"(such as {next(iter(layout.parts))}.0-1), or a name ({block_list(range(len(layout.names)), layout)})."
        )
    blocks = parts[match["part"]]
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    if first > last:
        raise OptionError(f"block_lr: '{key}' runs backwards. Write {match['part']}.{last}-{first}.")
    if last >= len(blocks):
        raise OptionError(
            f"block_lr: '{key}' names a block that is not there: {match['part']} has the blocks 0 to {len(blocks) - 1}."
        )
    return blocks[first : last + 1], True
