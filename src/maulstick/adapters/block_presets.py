"""Weights by block as the LoRA Block Weight extension writes them: lists, presets by name, and preset files.

Its order is BASE (the text encoders), IN00 to IN11, M00, OUT00 to OUT11. Shorter lists leave out the blocks in which
the usual LoRA has no module; those get 0.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maulstick.adapters.block_weights import BlockLayout
from maulstick.errors import OptionError, nearest_name_hint

BASE, MIDDLE = "BASE", "M00"


def _numbered(prefix: str, numbers: Sequence[int]) -> list[str]:
    return [f"{prefix}{number:02}" for number in numbers]


FORMATS: Mapping[int, tuple[str, ...]] = {
    12: (BASE, *_numbered("IN", (4, 5, 7, 8)), MIDDLE, *_numbered("OUT", range(6))),
    17: (BASE, *_numbered("IN", (1, 2, 4, 5, 7, 8)), MIDDLE, *_numbered("OUT", range(3, 12))),
    20: (BASE, *_numbered("IN", range(9)), MIDDLE, *_numbered("OUT", range(9))),
    26: (BASE, *_numbered("IN", range(12)), MIDDLE, *_numbered("OUT", range(12))),
}
"""Number of values -> the positions they stand for."""

_FLUX_LENGTH = 61
_LENGTHS = "17 or 26 for SD 1.x and 2.x, 12 or 20 for SDXL"

# The extension's own presets: S is shallow, D deep.
_SD_PRESETS = """
NONE:0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0
ALL:1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1
INS:1,1,1,1,0,0,0,0,0,0,0,0,0,0,0,0,0
IND:1,0,0,0,1,1,1,0,0,0,0,0,0,0,0,0,0
INALL:1,1,1,1,1,1,1,0,0,0,0,0,0,0,0,0,0
MIDD:1,0,0,0,1,1,1,1,1,1,1,1,0,0,0,0,0
OUTD:1,0,0,0,0,0,0,0,1,1,1,1,0,0,0,0,0
OUTS:1,0,0,0,0,0,0,0,0,0,0,0,1,1,1,1,1
OUTALL:1,0,0,0,0,0,0,0,1,1,1,1,1,1,1,1,1
ALL0.5:0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5
"""
# The extension has these names for SD 1.x only; read with its lists, OUTALL would switch off the blocks OUT00 to OUT02,
# where most of an SDXL LoRA lies. Here they mean the same by depth: shallow is the level of 640 channels, deep that of
# 1280.
_SDXL_PRESETS = """
NONE:0,0,0,0,0,0,0,0,0,0,0,0
ALL:1,1,1,1,1,1,1,1,1,1,1,1
INS:1,1,1,0,0,0,0,0,0,0,0,0
IND:1,0,0,1,1,0,0,0,0,0,0,0
INALL:1,1,1,1,1,0,0,0,0,0,0,0
MIDD:1,0,0,1,1,1,1,1,1,0,0,0
OUTD:1,0,0,0,0,0,1,1,1,0,0,0
OUTS:1,0,0,0,0,0,0,0,0,1,1,1
OUTALL:1,0,0,0,0,0,1,1,1,1,1,1
ALL0.5:0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5
"""


@dataclass(frozen=True)
class BlockRatios:
    """A list, read for a family.

    Attributes:
        base: the text encoders' ratio.
        blocks: one ratio per block index; 1 for blocks that the extension does not know.
        not_listed: indices that the list's format has no position for; their ratio is 0.
        values: the list itself as numbers, BASE first.
    """

    base: float
    blocks: tuple[float, ...]
    not_listed: tuple[int, ...]
    values: tuple[float, ...]


def parse_presets(text: str) -> dict[str, tuple[str, ...]]:
    """Return name -> values of a preset file's text, as the extension reads it.

    A line counts when it has a colon, no ``#`` anywhere, and 12, 17, 20, 26 or 61 values behind its first colon; every
    other line is a comment. Names are case-sensitive; of two lines with one name the later counts.
    """
    presets: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        if ":" in line and "#" not in line and line.count(",") + 1 in (*FORMATS, _FLUX_LENGTH):
            name, _, values = line.partition(":")
            presets[name.strip()] = tuple(value.strip() for value in values.split(","))
    return presets


def read_presets(path: Path) -> dict[str, tuple[str, ...]]:
    """Read a preset file (``lbwpresets.txt``).

    Raises:
        OptionError: it cannot be read, or no line of it is a preset.
    """
    try:
        presets = parse_presets(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise OptionError(f"lbw_presets: {path} is not UTF-8 text. Save it as UTF-8.") from error
    except OSError as error:
        raise OptionError(f"lbw_presets: {path} cannot be read: {error.strerror}.") from error
    if not presets:
        raise OptionError(
            f"lbw_presets: {path} holds no preset. Expected lines such as OUTALL:1,0,0,0,0,0,0,0,1,1,1,1,1,1,1,1,1 "
            f"(NAME, a colon, and {_LENGTHS} values)."
        )
    return presets


def builtin_presets(layout: BlockLayout) -> dict[str, tuple[str, ...]]:
    """Return the presets there are for a family without a file; none for families with other blocks."""
    if not {"down", "mid", "up"} <= layout.parts.keys():
        return {}
    return parse_presets(_SD_PRESETS if len(layout.parts["mid"]) == 1 else _SDXL_PRESETS)


def resolve_ratios(
    text: str,
    layout: BlockLayout,
    presets: Mapping[str, Sequence[str]],
    *,
    where: str,
    draw: random.Random | None = None,
    x: float = 1.0,
) -> BlockRatios:
    """Return the ratios that a preset's name or a list with commas stands for.

    The length of a list alone says which positions it holds, whatever the model is, as in the extension.

    Args:
        where: the option, for messages.
        draw: where the values ``R`` (from 0 to 1) and ``U`` (from -0.5 to 1.5) are drawn from, three decimals each;
            without it, as for training, these and ``X`` are refused.
        x: what ``X`` stands for; ``X+0.2`` and ``X-0.2`` are relative to it.

    Raises:
        OptionError: an unknown preset, another number of values, a value that is no number, a family without these
            blocks.
    """
    if "," in text:
        values: Sequence[str] = [value.strip() for value in text.split(",")]
    elif text in presets:
        values = presets[text]
    else:
        known = f"Presets: {', '.join(presets)}; or" if presets else "Expected"
        raise OptionError(
            f"{where}: there is no preset '{text}'.{nearest_name_hint(text, presets)} {known} a list of values with "
            f"commas between them ({_LENGTHS})."
        )
    if len(values) == _FLUX_LENGTH:
        raise OptionError(f"{where}: {text} has {_FLUX_LENGTH} values, which is for FLUX. Expected {_LENGTHS}.")
    if len(values) not in FORMATS:
        raise OptionError(f"{where} has {len(values)} values; expected {_LENGTHS}.")
    numbers = [_ratio(value, where, draw, x) for value in values]
    return _for_family(dict(zip(FORMATS[len(values)], numbers, strict=True)), layout, where)


def _ratio(value: str, where: str, draw: random.Random | None, x: float) -> float:
    if value in ("R", "U") or value.startswith("X"):
        if draw is None:
            raise OptionError(f"{where}: '{value}' is drawn anew for pictures; training needs numbers.")
        if value == "R":
            return round(draw.uniform(0, 1), 3)
        if value == "U":
            return round(draw.uniform(-0.5, 1.5), 3)
    base, text = (x, value[1:]) if value.startswith("X") else (0.0, value)
    if value == "X":
        return x
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (value.startswith("X") and text[0] not in "+-"):
        raise OptionError(f"{where}: '{value}' is no value. Expected a number, R, U, X, X+NUMBER or X-NUMBER.")
    return base + number


def _for_family(ratios: Mapping[str, float], layout: BlockLayout, where: str) -> BlockRatios:
    blocks: list[float] = []
    not_listed: list[int] = []
    for index, name in enumerate(layout.names):
        position = _position(name)
        if position is None:
            blocks.append(1.0)
        else:
            blocks.append(ratios.get(position, 0.0))
            if position not in ratios:
                not_listed.append(index)
    if all(_position(name) is None for name in layout.names):
        raise OptionError(f"{where}: lists of the LoRA Block Weight extension are for SD 1.x, SD 2.x and SDXL.")
    return BlockRatios(ratios[BASE], tuple(blocks), tuple(not_listed), tuple(ratios.values()))


def _position(name: str) -> str | None:
    """Return a block's position in the extension's lists, None where it has none."""
    if re.fullmatch(r"MID\d?", name):
        return MIDDLE
    return name if re.fullmatch(r"(?:IN|OUT)\d\d", name) else None
