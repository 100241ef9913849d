"""Adapters of every kind as the tensors of a file, under the names that kohya and LyCORIS give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from maulstick.adapters.factors import Folding, LoraWeights, cast_weights
from maulstick.adapters.files import lora_tensors
from maulstick.adapters.key_names import KeyNames
from maulstick.adapters.module_kinds import (
    AdapterModule,
    DoraWeights,
    LohaWeights,
    LokrWeights,
    OftWeights,
    PlainModule,
)


def kohya_parts(module: AdapterModule) -> dict[str, Tensor]:
    """Name of a tensor behind the module's name -> tensor, without alpha. DoRA's lengths are (out, 1, …) or (1, in, …).

    Every reader takes a ``dora_scale`` whose first size is that of the weight for one length an output, and any other
    for one an input.
    """
    match module:
        case LoraWeights():
            return {"lora_down.weight": module.down, "lora_up.weight": module.up}
        case LohaWeights():
            return {
                f"hada_w{number}_{side}": tensor
                for number, pair in ((1, module.first), (2, module.second))
                for side, tensor in (("a", pair.up), ("b", pair.down))
            }
        case LokrWeights():
            return _side_parts("lokr_w1", module.left) | _side_parts("lokr_w2", module.right)
        case DoraWeights():
            parts = kohya_parts(module.change)
            shape = [1] * next(iter(parts.values())).ndim
            shape[module.axis] = -1
            return {**parts, "dora_scale": module.magnitude.reshape(shape)}
        case OftWeights():
            return {"oft_blocks": module.blocks}


def _side_parts(name: str, side: Tensor | LoraWeights) -> dict[str, Tensor]:
    return {name: side} if isinstance(side, Tensor) else {f"{name}_a": side.up, f"{name}_b": side.down}


def adapter_tensors(
    components: Mapping[str, Mapping[str, AdapterModule]],
    key_names: KeyNames,
    dtype: torch.dtype = torch.float32,
    folding: Folding = "one_alpha",
) -> dict[str, Tensor]:
    """The tensors of a file for component -> path -> module, on the CPU.

    Alphas of LoRA modules are folded (see ``files.lora_tensors``); the readers of the other kinds take each module's.
    """
    tensors: dict[str, Tensor] = {}
    for component, modules in components.items():
        lora = {path: module for path, module in modules.items() if isinstance(module, LoraWeights)}
        tensors |= lora_tensors({component: lora}, key_names, dtype, folding)
        for path, module in modules.items():
            if not isinstance(module, LoraWeights):
                name = key_names.name(component, path)
                tensors |= {f"{name}.{part}": tensor for part, tensor in cast_parts(module, dtype).items()}
    return tensors


def cast_parts(module: AdapterModule, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a module in ``dtype`` on the CPU, alpha among them.

    What ``dtype`` cannot hold of alpha goes into the first factor, so that the strength stays.
    """
    module, alpha = _exact_alpha(module, dtype)
    parts = {part: tensor.detach().to("cpu", dtype) for part, tensor in kohya_parts(module).items()}
    return parts if alpha is None else {**parts, "alpha": torch.tensor(alpha, dtype=dtype)}


def _exact_alpha(module: AdapterModule, dtype: torch.dtype) -> tuple[AdapterModule, float | None]:
    match module:
        case DoraWeights():
            change, alpha = _exact_plain(module.change, dtype)
            return replace(module, change=change), alpha
        case OftWeights():
            return module, module.alpha
        case _:
            return _exact_plain(module, dtype)


def _exact_plain(module: PlainModule, dtype: torch.dtype) -> tuple[PlainModule, float | None]:
    match module:
        case LoraWeights():
            cast = cast_weights(module, dtype)
            return cast, cast.alpha
        case LohaWeights():
            cast = cast_weights(module.first._replace(alpha=module.alpha), dtype)
            return replace(module, first=cast), cast.alpha
        case LokrWeights(alpha=None) | LokrWeights(rank=0):
            return module, module.alpha
        case LokrWeights():
            left = module.left if isinstance(module.left, Tensor) else module.left.up
            cast = cast_weights(LoraWeights(left, left, module.alpha), dtype)
            side = cast.up if isinstance(module.left, Tensor) else module.left._replace(up=cast.up)
            return replace(module, left=side), cast.alpha
