"""LoRA modules of SD3 between diffusers' layout and the original one: three projections or one, and swapped rows.

Two layers differ in more than their name. Query, key and value are one projection in the original. And where the
original's modulation of a final layer (that of the text's last block, and of the output) gives shift before scale,
diffusers has scale before shift; such a layer has twice as many outputs as inputs, every other one more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.joint_names import DIFFUSERS_PREFIX, SD3_KEY_NAMES, place_in_joined, separate_paths
from maulstick.adapters.key_names import Location
from maulstick.adapters.module_kinds import AdapterModule, Unsupported, change_shape, exact_factors

_MODULATION = "adaLN_modulation_1"


def swapped_halves(tensor: Tensor) -> Tensor:
    """Return the tensor with the two halves of its rows exchanged: (shift, scale) for (scale, shift), and back."""
    return torch.cat([*reversed(tensor.chunk(2))])


def has_swapped_rows(name: str, shape: tuple[int, ...]) -> bool:
    """Whether diffusers has the rows of the joined module ``name``, of this shape, the other way round."""
    return name.endswith(_MODULATION) and len(shape) == 2 and shape[0] == 2 * shape[1]


def joined_modules(modules: Mapping[str, AdapterModule]) -> dict[str, AdapterModule]:
    """Rename modules of diffusers' paths (``lora_transformer_…``) and join their projections; others stay as they are.

    Three projections with one down factor become one LoRA of the same rank, any others one of the sum of their ranks;
    both change the weights by exactly the same. Names that SD3 does not have are left alone.

    Raises:
        Unsupported: a projection is of a kind that cannot be joined (DoRA, OFT).
    """
    result: dict[str, AdapterModule] = {}
    parts: dict[str, dict[int, LoraWeights]] = {}
    for name, module in modules.items():
        found = place_in_joined(name) if name.startswith(DIFFUSERS_PREFIX) else None
        if found is None:
            result[name] = module
        elif found.of > 1:
            parts.setdefault(found.name, {})[found.place] = exact_factors(module)
        elif has_swapped_rows(found.name, change_shape(module)):
            weights = exact_factors(module)
            result[found.name] = weights._replace(up=swapped_halves(weights.up))
        else:
            result[found.name] = module
    return result | {name: _joined(found) for name, found in parts.items()}


def _joined(parts: Mapping[int, LoraWeights]) -> LoraWeights:
    first = next(iter(parts.values()))
    if len(parts) == 3 and all(_shares_down(part, first) for part in parts.values()):
        return first._replace(up=torch.cat([parts[place].up for place in range(3)]))
    shapes = {change_shape(part) for part in parts.values()}
    if len(shapes) > 1:
        raise Unsupported(f"is one of query, key and value projections of different shapes ({sorted(shapes)})")
    rank, rows = sum(part.rank for part in parts.values()), first.up.shape[0]
    # Strengths may differ, so they go into the up factors.
    up = torch.zeros(3 * rows, rank, dtype=torch.float32)
    column = 0
    for place, part in sorted(parts.items()):
        up[place * rows : (place + 1) * rows, column : column + part.rank] = part.up.float() * part.scale
        column += part.rank
    down = torch.cat([part.down.float() for _, part in sorted(parts.items())])
    return LoraWeights(down, up, float(rank))


def _shares_down(part: LoraWeights, first: LoraWeights) -> bool:
    return part.alpha == first.alpha and part.down.shape == first.down.shape and torch.equal(part.down, first.down)


def separated_module(name: str, weights: LoraWeights) -> dict[Location, LoraWeights]:
    """Return the modules of diffusers' own paths that do what a joined one does: each part has all of its down factor.

    Empty for a name that SD3 does not have.
    """
    location = SD3_KEY_NAMES.locate(name)
    if location is None:
        return {}
    paths = separate_paths(location.path)
    up = swapped_halves(weights.up) if has_swapped_rows(name, change_shape(weights)) else weights.up
    return {
        # Copies: writers of files refuse tensors that share memory.
        Location(location.component, path): weights._replace(down=weights.down.clone(), up=part.clone())
        for path, part in zip(paths, up.chunk(len(paths)), strict=True)
    }
