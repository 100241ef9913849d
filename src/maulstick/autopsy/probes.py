"""Watching one forward and backward pass, operation by operation.

Every aten operation is seen below autograd, in the forward pass, in the backward pass and in what checkpointing
computes again. An operation whose result is not finite becomes a ``BadOp`` that knows which earlier ones its bad
operands came from; the first of them that had finite operands made the value. ``torch.autograd.detect_anomaly`` looks
for NaN only, and so blames the operation after an infinity; here both passes are judged alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .report import Headroom, TensorFacts
from .values import Known, KnownTensors, dtype_name, is_checkable, storage_of, tensor_facts, tensors_in, value_range

Chain = tuple[tuple[str, str], ...]
"""(path, class) of the modules around a place, outermost first."""

_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
_FILLING = (
    *("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where", "scalar_tensor"),
    *("lift_fresh", "lift_fresh_copy", "index_put", "index_put_", "index_fill", "index_fill_", "triu", "triu_", "tril"),
)
"""Operations that put -inf where somebody wants it: attention masks."""
_BEFORE = 4


@dataclass(frozen=True)
class Birth:
    """What there is to know about an operation that got its bad operands, if any, from before the run."""

    result: TensorFacts
    operands: tuple[TensorFacts, ...]
    amax_in_fp32: float | None
    before: tuple[Headroom, ...]


@dataclass(frozen=True)
class BadOp:
    """An operation with a result that is not finite.

    Attributes:
        parents: numbers of the operations that its bad operands came from.
        outside: bad operands that were there before the run.
        unknown: it has a bad operand that neither the run nor anything known made.
        deliberate: the only bad values are -inf, put there on purpose, as in an attention mask.
        birth: details, where no bad operand was made by the run.
    """

    number: int
    op: str
    backward: bool
    chain: Chain | None
    node: str | None
    custom_node: bool
    passes_to: str | None
    parents: tuple[int, ...]
    outside: tuple[Known, ...]
    unknown: bool
    deliberate: bool
    birth: Birth | None


class Probe(TorchDispatchMode):
    """Records what every operation under it does. Use inside ``watching``."""

    def __init__(self, known: KnownTensors) -> None:
        super().__init__()
        self.known = known
        self.bad: list[BadOp] = []
        self.peaks: dict[str, Headroom] = {}
        self.parameter_names: dict[int, str] = {}
        self._maker: dict[int, int] = {}
        self._stack: list[tuple[str, str]] = []
        self._chain_of: dict[Any, Chain] = {}
        self._recent: deque[Headroom] = deque(maxlen=_BEFORE + 1)
        self._writes: dict[Any, tuple[frozenset[int], frozenset[str]]] = {}

    # --- modules -----------------------------------------------------------------------------------------------------

    def enter(self, path: str, kind: str, arguments: Any) -> None:
        """A module begins; what its arguments come from belongs to the module around it."""
        self.claim(arguments)
        self._stack.append((path, kind))

    def leave(self, path: str, outputs: Any) -> None:
        """A module ends, by an exception too: whatever of the graph is not claimed yet is its own."""
        self.claim(outputs)
        while self._stack and self._stack.pop()[0] != path:
            pass

    def claim(self, values: Any) -> None:
        """Note for the autograd nodes behind ``values`` which module they were made in."""
        chain = tuple(self._stack)
        pending = [tensor.grad_fn for _, tensor in tensors_in(values)]
        while pending:
            node = pending.pop()
            if node is None or node in self._chain_of:
                continue
            self._chain_of[node] = chain
            pending.extend(following for following, _ in node.next_functions)

    # --- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        outputs += self._written(func, args, kwargs)
        if name in _UNINITIALISED:
            for output in outputs:
                self._maker.pop(storage_of(output), None)
        elif func._schema.is_mutable or not _is_view_of(outputs, args):
            self._look_at(func, name, args, kwargs, outputs)
        return result

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the arguments that the operation has changed in place."""
        if not func._schema.is_mutable:
            return []
        if func not in self._writes:
            arguments = func._schema.arguments
            places = [place for place, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write]
            self._writes[func] = frozenset(places), frozenset(arguments[place].name for place in places)
        places_written, names_written = self._writes[func]
        changed = [args[place] for place in sorted(places_written) if place < len(args)]
        changed += [value for name, value in kwargs.items() if name in names_written]
        return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]

    def _look_at(self, func: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        first_bad, minus_inf_only = None, True
        amax = 0.0
        for output in outputs:
            if not is_checkable(output):
                if not output.is_sparse:
                    self._maker.pop(storage_of(output), None)
                continue
            low, high = value_range(output)
            if math.isfinite(low) and math.isfinite(high):
                amax = max(amax, -low, high)
                if output.numel() * output.element_size() >= output.untyped_storage().nbytes():
                    self._maker.pop(storage_of(output), None)
                continue
            minus_inf_only = minus_inf_only and not math.isnan(low) and high != math.inf
            first_bad = output if first_bad is None else first_bad
            self._maker[storage_of(output)] = len(self.bad)
        if first_bad is not None:
            self._note_bad(func, name, args, kwargs, first_bad, minus_inf_only)
        elif outputs and amax > 0:
            self._note_peak(func, outputs[0], amax)

    def _note_peak(self, func: Any, output: Tensor, amax: float) -> None:
        if not self._stack or not output.is_floating_point():
            return
        path, kind = self._stack[-1]
        row = Headroom(path, kind, str(func).removesuffix(".default"), dtype_name(output.dtype), amax)
        if path not in self.peaks or self.peaks[path].amax < amax:
            self.peaks[path] = row
        if self._recent and self._recent[-1].module == path:
            self._recent.pop()
        self._recent.append(row)

    def _note_bad(self, func: Any, name: str, args: Any, kwargs: Any, output: Tensor, minus_inf_only: bool) -> None:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        number = len(self.bad)
        parents: list[int] = []
        outside: list[Known] = []
        unknown = mask = False
        for operand in operands:
            # An operand that the operation has changed in place is its result by now.
            maker = self._maker.get(storage_of(operand)) if not operand.is_sparse else None
            if maker is not None and maker != number:
                parents.append(maker)
            elif maker is None and is_checkable(operand):
                low, high = value_range(operand)
                if math.isfinite(low) and math.isfinite(high):
                    continue
                known = self.known.look_up(operand)
                mask_like = low == -math.inf and high != math.inf
                if known is None or (known.origin == "buffer" and mask_like):
                    unknown = unknown or not mask_like
                    mask = mask or mask_like
                else:
                    outside.append(known)
        real_parents = [parent for parent in parents if not self.bad[parent].deliberate]
        given = bool(real_parents or outside or unknown)
        fills = mask or name in _FILLING or any(self.bad[parent].deliberate for parent in parents)
        node = torch._C._current_autograd_node()
        self.bad.append(
            BadOp(
                number=number,
                op=str(func).removesuffix(".default"),
                backward=node is not None and not self._stack,
                chain=self._place_of(node),
                node=None if node is None or self._stack else _node_name(node),
                custom_node=isinstance(node, torch.autograd.function.BackwardCFunction),
                passes_to=None if node is None else self._parameter_behind(node, output),
                parents=tuple(real_parents),
                outside=tuple(outside),
                unknown=unknown,
                deliberate=minus_inf_only and fills and not given,
                birth=None if real_parents else self._birth(func, args, kwargs, operands, output),
            )
        )

    # --- details -----------------------------------------------------------------------------------------------------

    def _place_of(self, node: Any) -> Chain | None:
        """Return the modules around what happens now; None where that is not known or outside of all of them."""
        if self._stack:
            return tuple(self._stack)
        return (self._chain_of.get(node) or None) if node is not None else None

    def _parameter_behind(self, node: Any, output: Tensor) -> str | None:
        """Return the parameter that a gradient goes to directly, where its shape says that it is the one."""
        if self._stack:
            return None
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None and variable.shape == output.shape:
                return self.parameter_names.get(id(variable))
        return None

    def _birth(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor], output: Tensor) -> Birth:
        facts = [
            tensor_facts(f"operand {place}", operand)
            for place, operand in enumerate(operands, 1)
            if is_checkable(operand) and storage_of(operand) != storage_of(output)
        ]
        here = self._stack[-1][0] if self._stack else None
        before = [row for row in self._recent if row.module != here][-_BEFORE:]
        return Birth(
            tensor_facts("result", output), tuple(facts), self._in_fp32(func, args, kwargs, output), tuple(before)
        )

    def _in_fp32(self, func: Any, args: Any, kwargs: Any, output: Tensor) -> float | None:
        """Return the largest absolute result of the same operation in fp32; None where that cannot be computed."""
        if output.element_size() >= 4 or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return None

        def wide(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.float() if value.is_floating_point() else value
            return torch.float32 if isinstance(value, torch.dtype) and value.is_floating_point else value

        try:
            again = func(*tree_map(wide, args), **tree_map(wide, kwargs))
            result = next(leaf for leaf in tree_leaves(again) if isinstance(leaf, Tensor))
            low, high = value_range(result)
        except (RuntimeError, StopIteration, NotImplementedError, TypeError):
            return None
        return max(abs(low), abs(high)) if not math.isnan(low) else math.nan


def _is_view_of(outputs: list[Tensor], args: Any) -> bool:
    """Whether the results are other views of the operands' memory; torch does not mark all such operations."""
    if not outputs or any(output.is_sparse for output in outputs):
        return False
    operands = {storage_of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and not leaf.is_sparse}
    return all(storage_of(output) in operands for output in outputs)


def _node_name(node: Any) -> str:
    name = type(node).__name__
    return name if name != "object" else str(node.name())


@contextmanager
def watching(roots: Mapping[str, nn.Module], known: KnownTensors) -> Iterator[Probe]:
    """Watch every module under ``roots`` and every operation, until the end of the ``with`` block.

    A root of the name "" gives its children's paths without a prefix. The hooks are removed at the end.
    """
    probe = Probe(known)
    handles = []
    seen: set[int] = set()
    try:
        for root_name, root in roots.items():
            for name, module in root.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                path = ".".join(part for part in (root_name, name) if part)
                handles += _hooks(probe, path, module)
        with probe:
            yield probe
    finally:
        for handle in handles:
            handle.remove()


def _hooks(probe: Probe, path: str, module: nn.Module) -> list[Any]:
    kind = type(module).__name__

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        probe.enter(path, kind, (args, kwargs))

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        probe.leave(path, output)

    return [
        module.register_forward_pre_hook(begin, with_kwargs=True),
        module.register_forward_hook(end, with_kwargs=True, always_call=True),
    ]
