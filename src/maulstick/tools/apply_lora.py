"""Putting LoRA files on a loaded model, with strengths by block."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from maulstick.adapters.block_presets import BASE, BlockRatios, builtin_presets, resolve_ratios
from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.file_kinds import describe_family
from maulstick.adapters.files import AssignedWeights, assign_modules, data_hash, lora_tensors
from maulstick.adapters.lora import add_lora, set_strengths
from maulstick.adapters.module_kinds import (
    AdapterModule,
    DoraWeights,
    OftWeights,
    Unsupported,
    add_change,
    exact_factors,
)
from maulstick.adapters.read_formats import read_adapter
from maulstick.errors import ModelError
from maulstick.families.base import Family
from maulstick.families.libraries import quiet_libraries
from maulstick.tools.lora_choice import LoraChoice, parse_lora_choice

__all__ = ["OUTSIDE", "AppliedLora", "LoraChoice", "apply_loras", "parse_lora_choice", "set_block_shares"]

_DENOISER = ("lora_unet_", "lora_transformer_")
OUTSIDE = ""
"""Where modules of the denoiser are that lie in no block."""


@dataclass(frozen=True)
class AppliedLora:
    """A LoRA on a model.

    Attributes:
        data_hash: sha256 of its tensor data, by which programs know it whatever its name and metadata.
        modules_by_place: number of modules it changes in the text encoders (``BASE``), in each block, and outside of
            all blocks (``OUTSIDE``).
        unmatched: names in the file that this model has no module for.
        ratios: ratios by block; None where none were given.
        adapter_name: its name on the networks.
    """

    choice: LoraChoice
    data_hash: str
    modules_by_place: Mapping[str, int]
    unmatched: tuple[str, ...]
    ratios: BlockRatios | None
    adapter_name: str

    @property
    def modules(self) -> int:
        """Number of modules it changes."""
        return sum(self.modules_by_place.values())

    def strengths(self, block_names: Sequence[str]) -> dict[str, float]:
        """Return place -> strength, the ratios by block included. Modules outside of all blocks have no ratio."""
        base, blocks = (
            (1.0, [1.0] * len(block_names)) if self.ratios is None else (self.ratios.base, self.ratios.blocks)
        )
        unet = self.choice.denoiser_strength
        by_block = {name: unet * ratio for name, ratio in zip(block_names, blocks, strict=True)}
        return {BASE: self.choice.text_encoder_strength * base, OUTSIDE: unet, **by_block}


def apply_loras(
    family: Family,
    choices: Sequence[LoraChoice],
    *,
    presets: Mapping[str, Sequence[str]] | None = None,
    draw: random.Random | None = None,
) -> list[AppliedLora]:
    """Put LoRA files on the live modules of ``family``, all active with their strengths.

    Every module gets exactly the strength its file gives it: alphas are folded into the factors, because diffusers
    reads one alpha for a whole network. Where diffusers knows the names that files have, its own loader puts them on.

    Args:
        presets: ratios by block by name, before those that there are anyway.
        draw: where ratios that are to be drawn come from; fresh ones without it.

    Raises:
        ModelError: a file is no LoRA, is damaged, or was made for a model of other sizes.
        OptionError: ratios by block are unusable.
    """
    if not choices:
        return []
    layout = family.block_layout()
    known = {**builtin_presets(layout), **(presets or {})}
    draw = draw or random.Random()
    # Read before anything is put on the model.
    ratios = [
        None
        if choice.lbw is None
        else resolve_ratios(choice.lbw, layout, known, where=f"--lora {choice.path}: lbw", draw=draw, x=choice.x)
        for choice in choices
    ]
    family.prepare_for_adapters()
    pipeline = family.pipeline("euler")
    networks = _networks(family)
    modules = {
        component: {
            path: module for path, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
        }
        for component, network in networks.items()
    }
    table = family.key_names.table(modules)
    applied = []
    for number, (choice, own_ratios) in enumerate(zip(choices, ratios, strict=True)):
        file = read_adapter(choice.path)
        assigned = assign_modules(file, table, family.name)
        _refuse_lesser_half(choice.path, file.modules, assigned, family)
        fitted = {
            component: {
                path: _fitted(choice.path, path, weights, modules[component][path]) for path, weights in part.items()
            }
            for component, part in assigned.components.items()
        }
        # peft refuses a dot in an adapter's name, so the file's own name will not do.
        name = f"lora_{number}"
        if family.key_names.read_by_diffusers:
            # It would warn about a LoRA without a text encoder part, which is the usual kind.
            with quiet_libraries():
                tensors = lora_tensors(fitted, family.key_names, folding="no_alpha")
                pipeline.load_lora_weights(tensors, adapter_name=name)
        else:
            for component, part in fitted.items():
                add_lora(networks[component], part, component=component, adapter_name=name)
        places = Counter(_place(family, component, path) for component, part in fitted.items() for path in part)
        unmatched = tuple(assigned.unmatched)
        applied.append(AppliedLora(choice, data_hash(choice.path), places, unmatched, own_ratios, name))
    for network in networks.values():
        own = getattr(network, "peft_config", {})
        set_strengths(network, {lora.adapter_name: 1.0 for lora in applied if lora.adapter_name in own})
    set_block_shares(family, applied)
    for network in networks.values():
        network.requires_grad_(False)
    return applied


def set_block_shares(family: Family, applied: Sequence[AppliedLora], shares: Mapping[str, float] | None = None) -> None:
    """Let every module act with its strength, times the share of its place where one is given (1 elsewhere).

    Args:
        shares: a block's name or ``BASE`` -> factor.
    """
    block_names = family.block_names()
    strengths = {lora.adapter_name: lora.strengths(block_names) for lora in applied}
    for component, network in _networks(family).items():
        for path, module in network.named_modules():
            if isinstance(module, LoraLayer):
                place = _place(family, component, path)
                for name, by_place in strengths.items():
                    module.set_scale(name, by_place[place] * (shares or {}).get(place, 1.0))


def _refuse_lesser_half(
    path: Path, modules: Mapping[str, AdapterModule], assigned: AssignedWeights[AdapterModule], family: Family
) -> None:
    """Families share text encoders: a LoRA for another one fits there, while none of its denoiser does."""
    left_out = [name for name in assigned.unmatched if name.startswith(_DENOISER)]
    if left_out and family.denoiser_naming.component not in assigned.components:
        raise ModelError(
            f"{path} is a LoRA for {describe_family(modules) or 'another model family'}: its modules for text encoders "
            f"fit this {family.name} model, but none of the {len(left_out)} for the denoiser ('{left_out[0]}', …)."
        )


def _networks(family: Family) -> dict[str, nn.Module]:
    return {family.denoiser_naming.component: family.denoiser, **family.text_encoders}


def _place(family: Family, component: str, path: str) -> str:
    if component != family.denoiser_naming.component:
        return BASE
    index = family.block_index(path)
    return OUTSIDE if index is None else family.block_names()[index]


def _as_lora(file: Path, path: str, module: AdapterModule, weight: Tensor) -> LoraWeights:
    """The module's change of this weight as a LoRA: exactly, so that it can be switched and weighted like one.

    What a DoRA or OFT changes depends on the weight and has full rank: one factor is the change, the other an identity.
    """
    if not isinstance(module, DoraWeights | OftWeights):
        return exact_factors(module)
    weight = weight.detach().to("cpu", torch.float32)
    change = torch.zeros_like(weight)
    try:
        add_change(change, weight, module, 1.0)
    except Unsupported as reason:
        raise ModelError(f"{file}: module '{path}' {reason}.") from None
    return LoraWeights(change, torch.eye(len(change)), None)


def _fitted(file: Path, path: str, in_file: AdapterModule, module: nn.Linear | nn.Conv2d) -> LoraWeights:
    """The change as a LoRA with the dimensions that the module wants.

    1x1 convolutions and matrices hold the same numbers.
    """
    base = module.weight
    weights = _as_lora(file, path, in_file, base)
    down, up = weights.down, weights.up
    if base.ndim == 4 and down.ndim == 2 and down.shape[1] == base[0].numel():
        # Also kernels that the file keeps flattened, as LoHa and LoKr do.
        down = down.reshape(len(down), *base.shape[1:])
    elif base.ndim == 2 and down.ndim == 4 and tuple(down.shape[2:]) == (1, 1):
        down = down.flatten(1)
    up = up.flatten(1) if base.ndim == 2 else up.reshape(*up.shape[:2], 1, 1)
    if down.shape[1:] != base.shape[1:] or up.shape[0] != base.shape[0]:
        raise ModelError(
            f"{file} was made for another kind of model: its part for '{path}' changes a weight of shape "
            f"{[up.shape[0], *down.shape[1:]]}, but that weight is {list(base.shape)} here."
        )
    return LoraWeights(down, up, weights.alpha)
