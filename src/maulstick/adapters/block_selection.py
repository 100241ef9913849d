"""Which numbered blocks are trained at all: sd-scripts' ``train_block_indices``."""

from __future__ import annotations

import re

from maulstick.adapters.block_weights import BlockLayout
from maulstick.errors import OptionError, nearest_name_hint

OPTION = "train_block_indices"
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_block_selection(text: str, layout: BlockLayout) -> frozenset[int]:
    """Return the block indices of ``all``, ``none`` (or nothing), or numbers and inclusive ranges such as ``0-5,8``.

    Raises:
        OptionError: the model's blocks are no single row, the text is none of these, or it names a block that is not
            there (which sd-scripts accepts silently).
    """
    if list(layout.parts) != ["block"]:
        raise OptionError(
            f"{OPTION} = {text}: this model's blocks have no single row of numbers. Leave blocks out by a weight of 0, "
            f"such as block_lr = {next(iter(layout.parts))}=0."
        )
    last = len(layout.names) - 1
    if text.strip() in ("none", ""):
        return frozenset()
    if text.strip() == "all":
        return frozenset(range(last + 1))
    chosen: set[int] = set()
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            hint = nearest_name_hint(item.strip(), ("all", "none"))
            raise OptionError(
                f"{OPTION}: '{item.strip()}' is no block.{hint} Expected all, none, or numbers and ranges from 0 to "
                f"{last}, such as 0-{min(5, last)},{last}."
            )
        start = int(match[1])
        end = start if match[2] is None else int(match[2])
        if start > end:
            raise OptionError(f"{OPTION}: '{item.strip()}' runs backwards. Write {end}-{start}.")
        if end > last:
            raise OptionError(f"{OPTION}: '{item.strip()}' names a block that is not there: there are 0 to {last}.")
        chosen.update(range(start, end + 1))
    return frozenset(chosen)
