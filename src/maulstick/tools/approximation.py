"""How far a low-rank approximation of a whole LoRA is from what it stands for, block by block."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.lora_family import LoraFamily, block_label, block_labels


@dataclass(frozen=True)
class BlockError:
    """What was approximated in a block: ``error`` is the norm of what was cut off over that of the whole."""

    block: str
    modules: int
    ranks: tuple[int, ...]
    error: float | None


@dataclass(frozen=True)
class Approximation:
    """Modules of lower rank, and how far they are from what they stand for: ``error`` as in ``BlockError``."""

    modules: dict[str, LoraWeights]
    error: float
    blocks: tuple[BlockError, ...]

    def as_json(self) -> dict[str, Any]:
        """The errors as JSON-ready values."""
        return {"error": self.error, "blocks": [asdict(block) for block in self.blocks]}


class Squares:
    """Squared norms of modules: of the whole, and of what an approximation leaves out."""

    def __init__(self, family: LoraFamily) -> None:
        self._family = family
        self._by_module: dict[str, tuple[float, float]] = {}

    def add(self, module: str, whole: float, cut_off: float) -> None:
        """Note one module; ``module`` is its canonical name."""
        self._by_module[module] = whole, cut_off

    @property
    def total(self) -> float:
        """Squared norm of all that was noted."""
        return sum(whole for whole, _ in self._by_module.values())

    def approximation(self, modules: dict[str, LoraWeights]) -> Approximation:
        """Sum up by block and over all modules; blocks of which none was noted are left out."""
        blocks = []
        for label in block_labels(self._family, self._by_module):
            members = [name for name in self._by_module if block_label(name, self._family) == label]
            if members:
                ranks = tuple(sorted({modules[name].rank for name in members if name in modules}))
                blocks.append(BlockError(label, len(members), ranks, self._error(members)))
        return Approximation(modules, self._error(list(self._by_module)) or 0.0, tuple(blocks))

    def _error(self, names: list[str]) -> float | None:
        whole = sum(self._by_module[name][0] for name in names)
        return math.sqrt(sum(self._by_module[name][1] for name in names) / whole) if whole > 0 else None
