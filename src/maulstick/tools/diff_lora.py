"""``maulstick diff``: how far two LoRA files are apart, block by block, and what their metadata say differently."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.lora_family import FAMILIES, block_label, block_labels, with_family_prefixes
from maulstick.adapters.read_formats import AdapterFile, plain_modules, read_adapter
from maulstick.errors import ModelError
from maulstick.tools.lora_metadata import decoded_metadata
from maulstick.tools.parallel import map_modules
from maulstick.train.console import QuietConsole, RunConsole


@dataclass(frozen=True)
class BlockDifference:
    """Two changes of the same weights, A and B, as one long vector each.

    ``relative_distance`` is |A - B| over the larger of the norms: 0 for the same, up to 2 for opposite ones.
    ``cosine`` is ``None`` where one of them is zero.
    """

    block: str
    modules: int
    only_first: int
    only_second: int
    first_norm: float
    second_norm: float
    distance: float
    relative_distance: float
    cosine: float | None


@dataclass(frozen=True)
class FileDifference:
    """``metadata`` is entry -> (in A, in B), ``None`` where it is not there, for entries that differ."""

    first: str
    second: str
    findings: tuple[str, ...]
    whole: BlockDifference
    blocks: tuple[BlockDifference, ...]
    metadata: dict[str, tuple[Any, Any]]

    def as_json(self) -> dict[str, Any]:
        """All facts as JSON-ready values."""
        return asdict(self)


@dataclass
class _Sums:
    """Squares and products over modules; A - B is measured itself, because its square drowns in those of A and B."""

    modules: int = 0
    only_first: int = 0
    only_second: int = 0
    first: float = 0.0
    second: float = 0.0
    product: float = 0.0
    difference: float = 0.0

    @classmethod
    def of(cls, first: LoraWeights | None, second: LoraWeights | None) -> _Sums:
        """One module; ``None`` where a file does not have it."""
        a = None if first is None else _scaled_factors(first)
        b = None if second is None else _scaled_factors(second)
        square_a = 0.0 if a is None else _product(a, a)
        square_b = 0.0 if b is None else _product(b, b)
        if a is None or b is None:
            return cls(1, b is None, a is None, square_a, square_b, 0.0, square_a + square_b)
        return cls(1, 0, 0, square_a, square_b, _product(a, b), _difference_square(a, b))

    def add(self, other: _Sums) -> None:
        for sum_of in fields(self):
            setattr(self, sum_of.name, getattr(self, sum_of.name) + getattr(other, sum_of.name))

    def result(self, block: str) -> BlockDifference:
        first, second, distance = (math.sqrt(max(0.0, s)) for s in (self.first, self.second, self.difference))
        larger = max(first, second)
        return BlockDifference(
            block=block,
            modules=self.modules,
            only_first=self.only_first,
            only_second=self.only_second,
            first_norm=first,
            second_norm=second,
            distance=distance,
            relative_distance=distance / larger if larger else 0.0,
            cosine=max(-1.0, min(1.0, self.product / (first * second))) if first and second else None,
        )


def diff_files(first: Path, second: Path, console: RunConsole | None = None) -> FileDifference:
    """Compare two files module by module, whatever naming each has.

    Raises:
        ModelError: a file is no LoRA, they are for different families, or a module changes weights of other sizes.
    """
    a, b = read_adapter(first), read_adapter(second)
    if not a.family.may_be(b.family):
        raise ModelError(
            f"{first} is a LoRA for {a.family.name}, {second} one for {b.family.name}; they cannot be compared."
        )
    family = b.family if a.family.kind in ("sd", "unknown") else a.family
    modules_a, modules_b = _named(a, family.kind), _named(b, family.kind)
    names = sorted(modules_a.keys() | modules_b.keys())
    sums = {label: _Sums() for label in block_labels(family, names)}
    whole = _Sums()
    console = console or QuietConsole()
    console.begin("Comparing", len(names))
    pairs = {name: (modules_a.get(name), modules_b.get(name)) for name in names}
    for name, pair in pairs.items():
        _check_shapes(name, a, b, *pair)
    for name, one in zip(pairs, map_modules(lambda pair: _Sums.of(*pair), pairs.values()), strict=True):
        for target in (sums[block_label(name, family)], whole):
            target.add(one)
        console.advance()
    console.end()
    common = len(modules_a.keys() & modules_b.keys())
    findings = [] if common else ["The files have no module in common."]
    metadata_a, metadata_b = decoded_metadata(a.metadata), decoded_metadata(b.metadata)
    return FileDifference(
        first=str(first),
        second=str(second),
        findings=tuple(findings),
        whole=whole.result("all"),
        blocks=tuple(target.result(label) for label, target in sums.items()),
        metadata={
            key: (metadata_a.get(key), metadata_b.get(key))
            for key in sorted(metadata_a.keys() | metadata_b.keys())
            if metadata_a.get(key) != metadata_b.get(key)
        },
    )


def _named(file: AdapterFile, kind: str) -> dict[str, LoraWeights]:
    """The file's modules under the names that the common family gives them."""
    modules = plain_modules(file)
    renamed = with_family_prefixes(modules, FAMILIES[kind])
    return {renamed[name]: weights for name, weights in modules.items()}


def _check_shapes(
    name: str, a: AdapterFile, b: AdapterFile, first: LoraWeights | None, second: LoraWeights | None
) -> None:
    if first is None or second is None:
        return
    shapes = [(weights.up.shape[0], weights.down[0].numel()) for weights in (first, second)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"'{name}' changes a weight of {shapes[0][0]}x{shapes[0][1]} in {a.path} and of {shapes[1][0]}x"
            f"{shapes[1][1]} in {b.path}; they are for different models."
        )


def _scaled_factors(weights: LoraWeights) -> tuple[Tensor, Tensor]:
    return weights.up.flatten(1).double() * weights.scale, weights.down.flatten(1).double()


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Inner product of two changes, the trace of (upA downA)ᵀ upB downB, by rank x rank products."""
    return float(((a[0].T @ b[0]) * (a[1] @ b[1].T)).sum())


def _difference_square(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Square of the norm of the difference, by a QR of the joined factors: accurate for files almost alike, too."""
    if all(torch.equal(*pair) for pair in zip(a, b, strict=True)):
        return 0.0
    up, down = torch.cat([a[0], -b[0]], dim=1), torch.cat([a[1], b[1]], dim=0)
    core = torch.linalg.qr(up, mode="r").R @ torch.linalg.qr(down.T, mode="r").R.T
    return float(core.square().sum())
