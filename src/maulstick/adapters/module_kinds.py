"""The kinds of modules that adapter files hold besides the plain LoRA: DoRA, LoHa, LoKr, OFT.

A LoHa or LoKr changes a weight by something that does not depend on the weight and is a product of two factors, so it
can be written exactly as a LoRA of a higher rank. What a DoRA or OFT changes depends on the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from maulstick.adapters.factors import LoraWeights


class Unsupported(Exception):
    """A module cannot be used in the way that was asked; the text says why, without naming file or module."""


@dataclass(frozen=True)
class LohaWeights:
    """Hadamard product of two low-rank matrices (FedPara, arXiv 2108.06098): ``scale * (a1 @ b1) * (a2 @ b2)``.

    ``first`` and ``second`` are (rank, columns) and (outputs, rank) pairs, columns being inputs times kernel size.
    """

    first: LoraWeights
    second: LoraWeights
    alpha: float | None

    @property
    def rank(self) -> int:
        return self.first.rank

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True)
class LokrWeights:
    """Kronecker product of two matrices (LyCORIS, arXiv 2309.14859): ``scale * kron(left, right)``.

    Each side is either whole, or a product of two factors. ``right`` may carry a kernel (rows, columns, k, k).
    ``alpha`` counts only where a side is factored.
    """

    left: Tensor | LoraWeights
    right: Tensor | LoraWeights
    alpha: float | None
    rank: int
    """What alpha is divided by; 0 where alpha has no part in it."""

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None or self.rank == 0 else self.alpha / self.rank


@dataclass(frozen=True)
class DoraWeights:
    """Weight-decomposed adapter (DoRA, arXiv 2402.09353): ``W' = magnitude * V / |V|`` with ``V = W + change``.

    ``magnitude`` has one value for each output (``axis`` 0) or for each input (``axis`` 1).
    """

    change: LoraWeights | LohaWeights | LokrWeights
    magnitude: Tensor
    axis: int

    @property
    def rank(self) -> int:
        return self.change.rank

    @property
    def alpha(self) -> float | None:
        return self.change.alpha


@dataclass(frozen=True)
class OftWeights:
    """Orthogonal fine-tuning (arXiv 2306.07280): groups of outputs are turned, see ``rotation_change``.

    ``blocks`` is as it lies in the file: (count, size, size), or PEFT's (count, size * (size - 1) / 2), which turns
    inputs and is read for inspection only. ``alpha`` times the number of outputs is a limit on the norm of all turns
    together (LyCORIS, sd-scripts); 0 and ``None`` stand for no limit.
    """

    blocks: Tensor
    alpha: float | None

    @property
    def rank(self) -> int:
        return self.blocks.shape[0]


PlainModule = LoraWeights | LohaWeights | LokrWeights
"""Kinds whose change does not depend on the weight that is changed."""

AdapterModule = PlainModule | DoraWeights | OftWeights


def kind_of(module: AdapterModule) -> str:
    """LoRA, LoHa, LoKr, DoRA or OFT."""
    names = {LoraWeights: "LoRA", LohaWeights: "LoHa", LokrWeights: "LoKr", DoraWeights: "DoRA", OftWeights: "OFT"}
    return names[type(module)]


def module_tensors(module: AdapterModule) -> dict[str, Tensor]:
    """The tensors of a module by a short name, without alpha."""
    match module:
        case LoraWeights():
            return {"down": module.down, "up": module.up}
        case LohaWeights():
            return {
                f"{part}{number}": tensor
                for number, pair in ((1, module.first), (2, module.second))
                for part, tensor in module_tensors(pair).items()
            }
        case LokrWeights():
            return _side_tensors("left", module.left) | _side_tensors("right", module.right)
        case DoraWeights():
            return {**module_tensors(module.change), "magnitude": module.magnitude}
        case OftWeights():
            return {"blocks": module.blocks}


def _side_tensors(name: str, side: Tensor | LoraWeights) -> dict[str, Tensor]:
    if isinstance(side, Tensor):
        return {name: side}
    return {f"{name}_{part}": tensor for part, tensor in module_tensors(side).items()}


def tucker_lora(down: Tensor, mid: Tensor, up: Tensor, alpha: float | None) -> LoraWeights:
    """A LoCon in Tucker form as a plain one: ``mid`` (rank, rank, k, k) joined with ``down`` (rank, inputs, 1, 1)."""
    joined = torch.einsum("mnkl,ni->mikl", mid.float(), down.flatten(1).float())
    return LoraWeights(joined, up, alpha)


def exact_factors(module: AdapterModule) -> LoraWeights:
    """The module's change as a plain LoRA; no approximation, but the rank is that of the change.

    Raises:
        Unsupported: the change depends on the weight it is applied to (DoRA, OFT).
    """
    match module:
        case LoraWeights():
            return module
        case LohaWeights():
            return _hadamard_factors(module)
        case LokrWeights():
            return _kronecker_factors(module)
        case _:
            kind = kind_of(module)
            remedy = (
                "merge it into a checkpoint, and extract a LoRA from that" if kind == "DoRA" else "use the file as is"
            )
            raise Unsupported(
                f"is {'an' if kind == 'OFT' else 'a'} {kind}, whose change depends on the weights of the base model, "
                f"so it cannot be written as a LoRA; {remedy}"
            )


def _hadamard_factors(module: LohaWeights) -> LoraWeights:
    """(A1 B1) * (A2 B2) has as its factors the row-wise products of the A and the column-wise products of the B."""
    up1, up2 = module.first.up.flatten(1).float(), module.second.up.flatten(1).float()
    down1, down2 = module.first.down.float(), module.second.down.float()
    rank = up1.shape[1] * up2.shape[1]
    up = (up1[:, :, None] * up2[:, None, :]).reshape(-1, rank)
    down = (down1[:, None] * down2[None, :]).reshape(rank, *down1.shape[1:])
    return LoraWeights(down, up * module.scale, None)


def _kronecker_factors(module: LokrWeights) -> LoraWeights:
    """kron(U1 D1, U2 D2) = kron(U1, U2) kron(D1, D2)."""
    (up1, down1), (up2, down2) = _side_factors(module.left), _side_factors(module.right)
    kernel = down2.shape[2:]
    down = torch.kron(down1, down2.flatten(1))
    if kernel:
        down = down.reshape(down.shape[0], -1, *kernel)
    return LoraWeights(down, torch.kron(up1, up2) * module.scale, None)


def _side_factors(side: Tensor | LoraWeights) -> tuple[Tensor, Tensor]:
    """(up, down) of one side; a whole matrix is its own factor beside an identity on its smaller side."""
    if isinstance(side, LoraWeights):
        return side.up.flatten(1).float(), side.down.float()
    matrix = side.float()
    if matrix.shape[0] <= math.prod(matrix.shape[1:]):
        return torch.eye(matrix.shape[0]), matrix
    identity = torch.eye(math.prod(matrix.shape[1:]))
    return matrix.flatten(1), identity.reshape(-1, *matrix.shape[1:])


def plain_change(module: PlainModule, shape: tuple[int, ...]) -> Tensor:
    """The change at strength 1 in fp32, in the base weight's ``shape``.

    Raises:
        Unsupported: the module is for a weight of another shape.
    """
    match module:
        case LoraWeights():
            change = module.scale * (module.up.flatten(1).float() @ module.down.flatten(1).float())
        case LohaWeights():
            change = module.scale * plain_change(module.first, ()) * plain_change(module.second, ())
        case LokrWeights():
            left, right = (_whole(side) for side in (module.left, module.right))
            change = module.scale * torch.kron(left, right)
    if not shape:
        return change
    if change.shape[0] != shape[0] or change.numel() != math.prod(shape):
        raise Unsupported(f"changes a weight of shape {list(change_shape(module))}, but that weight is {list(shape)}")
    return change.reshape(shape)


def _whole(side: Tensor | LoraWeights) -> Tensor:
    return side.flatten(1).float() if isinstance(side, Tensor) else plain_change(side, ())


def change_shape(module: AdapterModule) -> tuple[int, ...]:
    """Shape of the weight that the module changes; where the file keeps kernels flattened, they are so here too."""
    match module:
        case LoraWeights():
            return (module.up.shape[0], *module.down.shape[1:])
        case LohaWeights():
            return change_shape(module.first)
        case LokrWeights():
            left, right = (
                tuple(side.shape) if isinstance(side, Tensor) else change_shape(side)
                for side in (module.left, module.right)
            )
            return (left[0] * right[0], left[1] * right[1], *right[2:])
        case DoraWeights():
            return change_shape(module.change)
        case OftWeights():
            return ()


def add_change(total: Tensor, base: Tensor, module: AdapterModule, strength: float) -> None:
    """Add ``strength`` times the module's change of ``base`` to ``total`` (fp32, contiguous, same shape), in place.

    Raises:
        Unsupported: the module is for a weight of another shape, or it is PEFT's OFT, which turns inputs.
    """
    match module:
        case LoraWeights():
            _add_product(total, module, strength)
        case LohaWeights() | LokrWeights():
            total.add_(plain_change(module, tuple(base.shape)), alpha=strength)
        case DoraWeights():
            total.add_(_dora_change(module, base), alpha=strength)
        case OftWeights():
            total.add_(_oft_change(module, base), alpha=strength)


def _add_product(total: Tensor, module: LoraWeights, strength: float) -> None:
    """``total += strength * scale * up @ down`` without a second tensor of that size."""
    up, down = module.up.flatten(1).float(), module.down.flatten(1).float()
    matrix = total.view(total.shape[0], -1)
    if up.shape[0] != matrix.shape[0] or down.shape[1] != matrix.shape[1]:
        raise Unsupported(
            f"changes a weight of shape {list(change_shape(module))}, but that weight is {list(total.shape)}"
        )
    matrix.addmm_(up, down, alpha=strength * module.scale)


def _dora_change(module: DoraWeights, base: Tensor) -> Tensor:
    base = base.float()
    directed = plain_change(module.change, tuple(base.shape)).add_(base)
    others = [dimension for dimension in range(base.ndim) if dimension != module.axis]
    norm = torch.linalg.vector_norm(directed, dim=others, keepdim=True)
    shape = [1] * base.ndim
    shape[module.axis] = -1
    magnitude = module.magnitude.float().reshape(shape)
    if magnitude.shape != norm.shape:
        raise Unsupported(
            f"has {magnitude.numel()} magnitudes, but the weight it is for has {norm.numel()} rows or columns"
        )
    return directed.mul_(magnitude / norm.clamp(min=torch.finfo(torch.float32).tiny)).sub_(base)


def rotation_change(blocks: Tensor) -> Tensor:
    """``R - 1`` for blocks (count, n, n): ``R = (1 + Q) (1 - Q)^-1`` with ``Q = blocks - blocks^T``, in fp32.

    Written as ``(1 - Q)^-1 2 Q``, which is the same and loses nothing where Q is small.
    """
    skew = (blocks - blocks.mT).float()
    return torch.linalg.solve(torch.eye(skew.shape[-1], device=skew.device) - skew, 2 * skew)


def _oft_change(module: OftWeights, base: Tensor) -> Tensor:
    blocks = module.blocks.float()
    if blocks.ndim != 3:
        raise Unsupported(
            "is an OFT of PEFT's kind, which this program reads but cannot merge; merge it with the program it is from"
        )
    if blocks.shape[0] * blocks.shape[1] != base.shape[0]:
        raise Unsupported(
            f"turns {blocks.shape[0] * blocks.shape[1]} outputs, but the weight it is for has {base.shape[0]}"
        )
    if module.alpha:
        norm = torch.linalg.vector_norm(blocks - blocks.mT)
        blocks = blocks * min(1.0, module.alpha * base.shape[0] / max(float(norm), 1e-8))
    rows = base.float().reshape(*blocks.shape[:2], -1)
    return torch.einsum("knm,kni->kmi", rotation_change(blocks), rows).reshape(base.shape)


def build_module(parts: Mapping[str, Tensor], alpha: float | None, *, whole_lokr_rank: int = 0) -> AdapterModule:
    """Put a module together from the tensors of one module, by their parts (see ``tensor_names``).

    ``whole_lokr_rank``: what alpha is divided by in a LoKr of which neither side is factored. PEFT does that with the
    rank of its config; for everybody else alpha has no meaning there (0).

    Raises:
        Unsupported: a tensor is missing, or shapes do not fit each other.
    """
    names = set(parts) - {"alpha", "magnitude", "row_magnitude"}
    change: PlainModule
    if any(name.startswith("oft_") for name in names):
        return OftWeights(next(parts[name] for name in sorted(names) if name.startswith("oft_")), alpha)
    if any(name.startswith("hada_") for name in names):
        change = _build_loha(parts, alpha)
    elif any(name.startswith("lokr_") for name in names):
        change = _build_lokr(parts, alpha, whole_lokr_rank)
    else:
        change = _build_lora(parts, alpha)
    if "row_magnitude" in parts:
        return DoraWeights(change, parts["row_magnitude"].flatten(), 0)
    if "magnitude" in parts:
        magnitude = parts["magnitude"]
        return DoraWeights(change, magnitude.flatten(), 0 if magnitude.shape[0] == magnitude.numel() else 1)
    return change


def _needed(parts: Mapping[str, Tensor], name: str, shown: str) -> Tensor:
    if name not in parts:
        raise Unsupported(f"has no {shown}; the file is incomplete")
    return parts[name]


def _build_lora(parts: Mapping[str, Tensor], alpha: float | None) -> LoraWeights:
    down, up = _needed(parts, "down", "lora_down.weight"), _needed(parts, "up", "lora_up.weight")
    mid = parts.get("mid")
    fits = down.ndim in (2, 4) and up.ndim in (2, 4) and up.shape[1] == (down if mid is None else mid).shape[0]
    if mid is not None:
        fits = fits and mid.ndim == 4 and mid.shape[1] == down.shape[0]
    if not fits:
        raise Unsupported(
            f"has factors that do not fit each other: lora_down is {tuple(down.shape)}, lora_up is {tuple(up.shape)}"
            + ("" if mid is None else f", lora_mid is {tuple(mid.shape)}")
        )
    return LoraWeights(down, up, alpha) if mid is None else tucker_lora(down, mid, up, alpha)


def _build_loha(parts: Mapping[str, Tensor], alpha: float | None) -> LohaWeights:
    pairs: list[LoraWeights] = []
    for number in (1, 2):
        a = _needed(parts, f"hada_w{number}_a", f"hada_w{number}_a")
        b = _needed(parts, f"hada_w{number}_b", f"hada_w{number}_b")
        core = parts.get(f"hada_t{number}")
        pairs.append(LoraWeights(b, a, None) if core is None else _tucker_pair(core, a, b))
    first, second = pairs
    if any(pair.up.shape[1] != pair.rank for pair in pairs) or change_shape(first) != change_shape(second):
        shapes = {name: tuple(tensor.shape) for name, tensor in parts.items() if name.startswith("hada_")}
        raise Unsupported(f"has factors that do not fit each other: {shapes}")
    return LohaWeights(first, second, alpha)


def _build_lokr(parts: Mapping[str, Tensor], alpha: float | None, whole_rank: int) -> LokrWeights:
    sides: list[Tensor | LoraWeights] = []
    rank = 0
    for number in (1, 2):
        whole = parts.get(f"lokr_w{number}")
        if whole is not None:
            sides.append(whole)
            continue
        a = _needed(parts, f"lokr_w{number}_a", f"lokr_w{number} and no lokr_w{number}_a")
        b = _needed(parts, f"lokr_w{number}_b", f"lokr_w{number}_b")
        core = parts.get("lokr_t2") if number == 2 else None
        pair = LoraWeights(b, a, None) if core is None else _tucker_pair(core, a, b)
        if pair.up.shape[1] != pair.rank:
            raise Unsupported(f"has factors that do not fit each other: {tuple(a.shape)} and {tuple(b.shape)}")
        rank = b.shape[0]
        sides.append(pair)
    return LokrWeights(sides[0], sides[1], alpha, rank or whole_rank)


def _tucker_pair(core: Tensor, a: Tensor, b: Tensor) -> LoraWeights:
    """``einsum("ijkl,ip,jr->prkl", core, a, b)`` as a pair of factors: a's transpose, and core joined with b."""
    down = torch.einsum("ijkl,jr->irkl", core.float(), b.float())
    return LoraWeights(down, a.float().T.contiguous(), None)
