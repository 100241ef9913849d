"""From a non-finite loss or gradient back to the operation, weight or input that it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .probes import BadOp, Probe
from .report import Direction, Finding
from .values import Known, storage_of, tensor_facts


def makers(probe: Probe, tensors: Iterable[Tensor]) -> list[int]:
    """Return the numbers of the operations that left the non-finite values in ``tensors``."""
    return [number for tensor in tensors if (number := probe._maker.get(storage_of(tensor))) is not None]


def first_origin(bad: Sequence[BadOp], ends: Iterable[int]) -> BadOp | None:
    """Return the earliest operation that the ends descend from and that no operation of the run gave a bad operand.

    Where the ends are not known, the earliest of all such operations is returned, masks left out.
    """
    pending = list(ends) or [one.number for one in bad if not one.deliberate]
    seen: set[int] = set()
    origins: list[int] = []
    while pending:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        if bad[number].parents:
            pending.extend(bad[number].parents)
        else:
            origins.append(number)
    return bad[min(origins)] if origins else None


def finding_of(origin: BadOp, known_bad: Sequence[Known], *, loss_is_finite: bool) -> Finding:
    """Say what the origin means: something given (input, weight), or something the operation made."""
    if origin.birth is None:
        raise ValueError("an origin has details")
    module, kind = origin.chain[-1] if origin.chain else (None, None)
    given = origin.outside or tuple(known for known in known_bad[:1] if origin.unknown)
    if given:
        first = given[0]
        direction = {
            "weight": Direction.WEIGHT,
            "buffer": Direction.WEIGHT,
            "input": Direction.INPUT,
            "optimizer state": Direction.OPTIMIZER_STATE,
        }[first.origin]
        name, tensor = first.name, tensor_facts(first.name, first.tensor)
    elif origin.unknown:
        direction, name = Direction.INPUT, "a tensor from before the run"
        bad_operand = next((operand for operand in origin.birth.operands if not operand.finite), origin.birth.result)
        tensor = type(bad_operand)(**{**vars(bad_operand), "name": name})
    else:
        direction = Direction.BACKWARD if origin.backward else Direction.FORWARD
        name = _name_of_result(origin)
        tensor = type(origin.birth.result)(**{**vars(origin.birth.result), "name": name})
    return Finding(
        direction=direction,
        module=module,
        module_class=kind,
        tensor=tensor,
        chain=origin.chain or (),
        op=origin.op,
        node=origin.node,
        custom_node=origin.custom_node,
        operands=origin.birth.operands,
        amax_in_fp32=origin.birth.amax_in_fp32,
        before=origin.birth.before,
        masked=loss_is_finite and direction is Direction.FORWARD,
    )


def _name_of_result(origin: BadOp) -> str:
    if not origin.backward:
        return "result"
    return f"gradient of {origin.passes_to}" if origin.passes_to else "gradient passed on"
