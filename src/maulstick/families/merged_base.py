"""LoRA files of any kind merged into the frozen base model: what is trained on top of it begins from there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from maulstick.adapters.files import file_hash
from maulstick.adapters.joint_layout import has_swapped_rows, swapped_halves
from maulstick.adapters.joint_names import TRANSFORMER, separate_paths
from maulstick.adapters.key_names import Location
from maulstick.adapters.module_kinds import AdapterModule, Unsupported, add_change
from maulstick.adapters.read_formats import read_adapter
from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Family
from maulstick.options.schema import ModelOptions

_NAMED = 3


@dataclass(frozen=True)
class BaseChange:
    """One module of a file and the weights that it changes.

    Attributes:
        paths: modules of the network; several where the file knows their weights as one, on top of each other.
        name: of the module in the file.
        strength: what its change is multiplied by.
        origin: the file, for messages.
    """

    paths: tuple[str, ...]
    name: str
    module: AdapterModule
    strength: float
    origin: Path


def merge_base_weights(family: Family, options: ModelOptions) -> None:
    """Merge the files that ``base_weights`` names into the family's networks, with their multipliers.

    The denoiser is changed at once, text encoders whenever they are loaded. ``family.merged`` identifies what was done.

    Raises:
        OptionError: there are more multipliers than files.
        ModelError: a file is no adapter, or has a module that does not fit the model; names are given.
    """
    strengths = multipliers(options)
    changes: dict[str, list[BaseChange]] = {}
    digest, notes = hashlib.sha256(), []
    for path, strength in zip(options.base_weights, strengths, strict=True):
        found = _changes_of(family, path.expanduser(), strength)
        for component, members in found.items():
            changes.setdefault(component, []).extend(members)
        digest.update(f"{_identity(path.expanduser())} {strength!r};".encode())
        count = ", ".join(f"{len(members)} modules of the {component}" for component, members in found.items())
        notes.append(f"Merged into the base: {path.name} times {strength:g} ({count}).")
    if changes:
        family.change_base(changes, digest.hexdigest())
        family.notes = (*family.notes, *notes)


def multipliers(options: ModelOptions) -> list[float]:
    """Return one multiplier for each file; those that are not given are 1, as in sd-scripts. Raises OptionError."""
    files, given = options.base_weights, options.base_weights_multiplier
    if len(given) > len(files):
        raise OptionError(
            f"base_weights_multiplier has {len(given)} values for {len(files)} base_weights: give one for each file, "
            "in the same order."
        )
    if 0 in given:
        raise OptionError(
            f"base_weights_multiplier = 0 merges nothing of {files[given.index(0)]}. Leave that file out, or give "
            "another multiplier."
        )
    return [*given, *[1.0] * (len(files) - len(given))]


def _identity(path: Path) -> str:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return "+".join(file_hash(each) for each in files)


def _changes_of(family: Family, path: Path, strength: float) -> dict[str, list[BaseChange]]:
    file = read_adapter(path)
    networks = {family.denoiser_naming.component: _layers(family.denoiser)}
    if any(name.startswith("lora_te") for name in file.modules):
        with family.encoders_borrowed():
            networks |= {name: _layers(encoder) for name, encoder in family.text_encoders.items()}
    table = family.key_names.table(networks)
    changes: dict[str, list[BaseChange]] = {}
    unmatched = []
    for name, module in file.modules.items():
        location = table.get(name) or _joined(family, name, networks)
        if location is None:
            unmatched.append(name)
            continue
        paths = separate_paths(location.path) if location.component == TRANSFORMER else (location.path,)
        changes.setdefault(location.component, []).append(BaseChange(paths, name, module, strength, path))
    if unmatched:
        some = ", ".join(f"'{name}'" for name in unmatched[:_NAMED]) + (", …" if len(unmatched) > _NAMED else "")
        raise ModelError(
            f"base_weights: {path} does not fit this {family.name} model, which has no place for {len(unmatched)} of "
            f"its {len(file.modules)} modules ({some}); it is a file for {file.family.name}."
        )
    return changes


def _layers(network: nn.Module) -> list[str]:
    return [path for path, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def _joined(family: Family, name: str, networks: Mapping[str, Sequence[str]]) -> Location | None:
    """Find a module of SD3 that the file has as one, and the live model as three."""
    location = family.key_names.locate(name)
    if location is None or location.component != TRANSFORMER or TRANSFORMER not in networks:
        return None
    there = set(networks[TRANSFORMER])
    return location if all(path in there for path in separate_paths(location.path)) else None


@torch.no_grad()
def apply_changes(network: nn.Module, changes: Sequence[BaseChange]) -> None:
    """Add the changes to a network's weights: in fp32, each to the weights as they were, rounded once to their format.

    Raises ModelError where a change does not fit its weight, or a sum is not finite in the weights' number format.
    """
    grouped: dict[tuple[str, ...], list[BaseChange]] = {}
    for change in changes:
        grouped.setdefault(change.paths, []).append(change)
    for paths, members in grouped.items():
        modules = [network.get_submodule(path) for path in paths]
        weights = [_weight(module).detach().to("cpu", torch.float32) for module in modules]
        merged = _merged(torch.cat(weights), members)
        for path, module, part in zip(paths, modules, merged.split([len(each) for each in weights]), strict=True):
            old = _weight(module)
            new = part.to(old.dtype)
            if not torch.isfinite(new).all():
                raise ModelError(
                    f"base_weights: the merged weight of '{path}' has values that {old.dtype} cannot hold, or that are "
                    "not finite. Use mixed_precision = bf16 or no, or a smaller base_weights_multiplier."
                )
            # Never in place: the weights may lie in a file that is mapped into memory.
            module.weight = nn.Parameter(new.to(old.device).clone(), requires_grad=False)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _merged(base: Tensor, changes: Sequence[BaseChange]) -> Tensor:
    swapped = has_swapped_rows(changes[0].name, tuple(base.shape))
    base = swapped_halves(base) if swapped else base
    total = base.clone()
    for change in changes:
        try:
            add_change(total, base, change.module, change.strength)
        except Unsupported as reason:
            raise ModelError(f"base_weights: {change.origin}: module '{change.name}' {reason}.") from None
    return swapped_halves(total) if swapped else total
