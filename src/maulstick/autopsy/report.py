"""What an autopsy found: plain data that goes into JSON and comes back. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
"""The largest finite value of each number format."""


class Direction(StrEnum):
    """Where the first non-finite value came from."""

    INPUT = "input"
    WEIGHT = "weight"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STATE = "optimizer state"
    OPTIMIZER_STEP = "optimizer step"


def headroom(amax: float | None, dtype: str) -> float | None:
    """Return how often ``amax`` fits below the largest value of ``dtype``; None where that cannot be said."""
    largest = LARGEST.get(dtype)
    if largest is None or amax is None or not math.isfinite(amax) or amax == 0:
        return None
    return largest / amax


@dataclass(frozen=True)
class TensorFacts:
    """One tensor in numbers.

    ``nan``, ``plus_inf``, ``minus_inf`` and ``zeros`` count its elements; ``low`` and ``high`` bound the finite ones,
    None where there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nan: int
    plus_inf: int
    minus_inf: int
    zeros: int
    low: float | None
    high: float | None

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return not (self.nan or self.plus_inf or self.minus_inf)

    @property
    def kind(self) -> str:
        """ "NaN", "Inf", "NaN and Inf", or "finite"."""
        infinite = self.plus_inf or self.minus_inf
        return "NaN and Inf" if self.nan and infinite else "NaN" if self.nan else "Inf" if infinite else "finite"

    @property
    def amax(self) -> float | None:
        """Largest absolute value of the finite elements."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    def describe(self) -> str:
        """One line for a person."""
        elements = math.prod(self.shape)
        counts = [
            f"{count} {kind}"
            for count, kind in ((self.nan, "NaN"), (self.plus_inf, "+Inf"), (self.minus_inf, "-Inf"))
            if count
        ]
        text = f"{self.name}, {self.dtype} {list(self.shape)}"
        if counts:
            text += f": {', '.join(counts)} of {elements}"
        if self.low is None or self.high is None:
            return text
        text += (
            f"; finite values {self.low:.4g} to {self.high:.4g}" if counts else f": {self.low:.4g} to {self.high:.4g}"
        )
        return text + _against_largest(self.amax, self.dtype)


@dataclass(frozen=True)
class Headroom:
    """The largest value that one module computed, in its own number format."""

    module: str
    module_class: str
    op: str
    dtype: str
    amax: float

    @property
    def factor(self) -> float | None:
        """How often it fits below the largest value of its number format."""
        return headroom(self.amax, self.dtype)

    @property
    def factor_in_fp16(self) -> float | None:
        """How often it fits below fp16's largest value; below 1 it would overflow there."""
        return headroom(self.amax, "float16")


@dataclass(frozen=True)
class Finding:
    """The first non-finite tensor, in the order of execution.

    Attributes:
        module: path of the innermost module at work; "" for the root itself, None outside of all modules.
        chain: (path, class) of that module and those around it, outermost first.
        tensor: the first non-finite tensor.
        op: the operation that made it, such as ``aten.div.Tensor``; None for a tensor that was there before the run.
        node: in the backward pass, the autograd node at work, such as ``SqrtBackward0``.
        custom_node: that node is a Python ``torch.autograd.Function``.
        operands: what went into the operation.
        amax_in_fp32: largest absolute value of the same operation in fp32; infinite or NaN where it fails there too.
        before: the modules right before it, the last one last.
        masked: the loss is finite all the same; only gradients are not.
    """

    direction: Direction
    module: str | None
    module_class: str | None
    tensor: TensorFacts
    chain: tuple[tuple[str, str], ...] = ()
    op: str | None = None
    node: str | None = None
    custom_node: bool = False
    operands: tuple[TensorFacts, ...] = ()
    amax_in_fp32: float | None = None
    before: tuple[Headroom, ...] = ()
    masked: bool = False

    @property
    def where(self) -> str:
        """The module in words."""
        if self.direction in (Direction.OPTIMIZER_STATE, Direction.OPTIMIZER_STEP):
            return "the optimizer"
        if self.module is None:
            return "outside of all modules (noise, target, loss or loss weights)"
        return f"{self.module or 'the model itself'} ({self.module_class})"

    def headline(self) -> str:
        """One sentence: what, in which direction, where."""
        kind, name = self.tensor.kind, self.tensor.name
        if self.direction is Direction.INPUT:
            return f"{kind} was in the input already: {name}"
        if self.direction is Direction.WEIGHT:
            return f"{kind} was in a weight already: {name}"
        if self.direction is Direction.OPTIMIZER_STATE:
            return f"{kind} was in the optimizer's state already: {name}"
        if self.direction is Direction.OPTIMIZER_STEP:
            return f"gradients and weights were finite, and the optimizer's step wrote {kind} into {name}"
        by = f" by {self.node or self.op}" if self.node or self.op else ""
        return f"{kind} arose in the {self.direction} pass in {self.where}{by}"


@dataclass(frozen=True)
class Sample:
    """A sample of the batch that brings the non-finite values in. ``alone``: it does so without the others too."""

    place: int
    name: str = ""
    caption: str = ""
    alone: bool = True
    detail: str = ""

    def describe(self) -> str:
        """One line for a person."""
        caption = f": “{self.caption}”" if self.caption else ""
        how = "" if self.alone else "; only together with the others named here"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.name or f'sample {self.place}'}{caption}{detail}{how}"


@dataclass(frozen=True)
class Cause:
    """A known cause that fits: why it is thought to be the one, what cures it, and where it was seen before."""

    id: str
    sentence: str
    evidence: str
    cure: str
    seen_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The result of one re-run.

    Attributes:
        finding: the first non-finite tensor; None where everything was finite.
        causes: known causes that fit, the most specific first.
        samples: samples that bring it in; empty where the batch was not searched or every sample does.
        tightest: the modules with the least headroom, the tightest first.
        facts: what else is known about the run.
        notes: sentences on how the re-run was made and how far it can be trusted.
    """

    finding: Finding | None
    loss: float
    loss_scale: float = 1.0
    title: str = ""
    causes: tuple[Cause, ...] = ()
    samples: tuple[Sample, ...] = ()
    samples_in_batch: int | None = None
    tightest: tuple[Headroom, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing non-finite was found."""
        return self.finding is None

    def with_notes(self, *notes: str) -> Report:
        """Return the report with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def as_json(self) -> dict[str, Any]:
        """Return plain values; numbers that JSON cannot hold become the strings "nan", "inf" and "-inf"."""
        plain = _plain({"format": "maulstick-autopsy-1", **asdict(self)})
        if not isinstance(plain, dict):
            raise TypeError("a report is a mapping")
        return plain

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Report:
        """Take back what ``as_json`` gave. Raises ValueError where it is something else."""
        if content.get("format") != "maulstick-autopsy-1":
            raise ValueError("not an autopsy report")
        try:
            return cls(
                finding=None if content["finding"] is None else _finding(content["finding"]),
                loss=_number(content["loss"]),
                loss_scale=_number(content["loss_scale"]),
                title=content["title"],
                causes=tuple(Cause(**{**cause, "seen_in": tuple(cause["seen_in"])}) for cause in content["causes"]),
                samples=tuple(Sample(**sample) for sample in content["samples"]),
                samples_in_batch=content["samples_in_batch"],
                tightest=tuple(_headroom(row) for row in content["tightest"]),
                facts=content["facts"],
                notes=tuple(content["notes"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"an autopsy report that cannot be read ({error})") from error

    def text(self, *, table: bool | None = None) -> str:
        """Return the report for a person; ``table``: with the modules of least headroom (default: when healthy)."""
        from .report_text import report_text

        return report_text(self, table=self.healthy if table is None else table)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _number(value: Any) -> float:
    return float(value)


def _facts(content: Mapping[str, Any]) -> TensorFacts:
    return TensorFacts(**{**content, "shape": tuple(content["shape"])})


def _headroom(content: Mapping[str, Any]) -> Headroom:
    return Headroom(**{**content, "amax": _number(content["amax"])})


def _finding(content: Mapping[str, Any]) -> Finding:
    in_fp32 = content["amax_in_fp32"]
    return Finding(
        **{
            **content,
            "direction": Direction(content["direction"]),
            "tensor": _facts(content["tensor"]),
            "chain": tuple((path, kind) for path, kind in content["chain"]),
            "operands": tuple(_facts(operand) for operand in content["operands"]),
            "amax_in_fp32": None if in_fp32 is None else _number(in_fp32),
            "before": tuple(_headroom(row) for row in content["before"]),
        }
    )


def _against_largest(amax: float | None, dtype: str) -> str:
    """The headroom in words, where it is small enough to be of interest."""
    factor = headroom(amax, dtype)
    if factor is None or factor > 1e6:
        return ""
    return f" (headroom {times(factor)} to {dtype}'s {LARGEST[dtype]:.6g})"


def times(factor: float) -> str:
    """Return a factor such as "1.02x" or "5325x"."""
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.3g}x"
