"""One report as the table of causes asks it: short questions about the finding, the modules around it and the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .report import LARGEST, Direction, Finding, Report, times


@dataclass(frozen=True)
class KnownCause:
    """A row of the table.

    Attributes:
        fits: returns the evidence in a sentence, None where the cause does not fit.
        cure: what to do, with the option that does it.
        seen_in: threads in which it was found.
        general: it speaks only where no more specific cause fits.
    """

    id: str
    fits: Callable[[Case], str | None]
    sentence: str
    cure: str
    seen_in: tuple[str, ...] = ()
    general: bool = False


@dataclass(frozen=True)
class Case:
    """A report and the modules it speaks of."""

    report: Report
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def finding(self) -> Finding | None:
        """What was found; None in a healthy run."""
        return self.report.finding

    def fact(self, name: str, default: Any = None) -> Any:
        """Return a fact about the run."""
        return self.report.facts.get(name, default)

    def arose(self, *directions: Direction) -> Finding | None:
        """Return the finding if it has one of these directions."""
        finding = self.finding
        return finding if finding is not None and finding.direction in directions else None

    def op_is(self, *names: str) -> bool:
        """Whether the operation's name contains one of these parts."""
        op = "" if self.finding is None or self.finding.op is None else self.finding.op.split(".")[1:2]
        return bool(op) and any(name in op[0] for name in names)

    def around(self, *words: str) -> str | None:
        """Return the innermost module around the place of which name or class contains one of these words."""
        if self.finding is None:
            return None
        for path, kind in reversed(self.finding.chain):
            last = path.rpartition(".")[2].lower()
            if any(word in last or word in kind.lower() for word in words):
                return f"{path or 'the model itself'} ({kind})"
        # A module whose method was called, such as vae.encode(), is in the paths of its parts only.
        parts = (self.finding.module or "").split(".")
        for length in range(len(parts), 0, -1):
            if any(word in parts[length - 1].lower() for word in words):
                return ".".join(parts[:length])
        return None

    @property
    def own_name(self) -> str:
        """Name and class of the module at work, in small letters, without the path to it."""
        finding = self.finding
        if finding is None or finding.module is None:
            return ""
        return f"{finding.module.rpartition('.')[2]} {finding.module_class}".lower()

    def overflowed(self) -> str | None:
        """Return a sentence where half precision alone made the value: finite in fp32, and above fp16's largest."""
        finding = self.arose(Direction.FORWARD)
        if finding is None or finding.tensor.dtype != "float16" or any(not one.finite for one in finding.operands):
            return None
        reached = finding.amax_in_fp32
        cast = "_to_copy" in (finding.op or "")
        if reached is not None and reached > LARGEST["float16"]:
            excess = times(reached / LARGEST["float16"])
            return f"{finding.op} reaches {reached:.4g} in fp32, {excess} fp16's largest value 65504"
        if cast:
            amax = max((operand.amax or 0.0 for operand in finding.operands), default=0.0)
            return f"values up to {amax:.4g} were cast to fp16, whose largest value is 65504"
        if finding.tensor.plus_inf or finding.tensor.minus_inf:
            return f"{finding.op} gives infinity in fp16 from finite operands"
        return None

    def zero_operand(self, place: int = -1) -> bool:
        """Whether the operand (default: the last one) contains zeros."""
        operands = () if self.finding is None else self.finding.operands
        return bool(operands) and operands[place].zeros > 0

    def enclosing(self) -> Iterator[nn.Module]:
        """Yield the modules around the place, innermost first, as far as they are at hand."""
        for path, _ in reversed(() if self.finding is None else self.finding.chain):
            for root_name, root in self.modules.items():
                inside = path.removeprefix(root_name).removeprefix(".") if path.startswith(root_name) else None
                if inside is None:
                    continue
                try:
                    yield root.get_submodule(inside)
                except AttributeError:
                    continue
                break

    def weights_nearby(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) of the two innermost modules, children included."""
        for _, module in zip(range(2), self.enclosing(), strict=False):
            yield from module.named_parameters()
