"""Putting LoRA files on a loaded model, through diffusers' own loader."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.files import assign_modules, data_hash, lora_tensors, read_lora_file
from maulstick.errors import ModelError
from maulstick.families.base import Family
from maulstick.families.libraries import quiet_libraries


@dataclass(frozen=True)
class LoraChoice:
    """A LoRA file and the strength it is applied with."""

    path: Path
    weight: float


@dataclass(frozen=True)
class AppliedLora:
    """A LoRA on a model.

    Attributes:
        data_hash: sha256 of its tensor data, by which programs know it whatever its name and metadata.
        modules: number of modules it changes.
        unmatched: names in the file that this model has no module for.
    """

    choice: LoraChoice
    data_hash: str
    modules: int
    unmatched: tuple[str, ...]


def parse_lora_choice(text: str) -> LoraChoice:
    """Read ``FILE`` or ``FILE:WEIGHT``; a colon that no number follows (as in ``C:\\file``) belongs to the name.

    Raises:
        ModelError: there is no such file.
    """
    path, weight = Path(text).expanduser(), 1.0
    name, colon, number = text.rpartition(":")
    if colon and not path.exists():
        try:
            weight = float(number)
        except ValueError:
            pass
        else:
            path = Path(name).expanduser()
    if not path.is_file():
        raise ModelError(
            f"There is no LoRA file {path}. Give it as FILE or FILE:WEIGHT, such as style.safetensors:0.8."
        )
    return LoraChoice(path, weight)


def apply_loras(family: Family, choices: Sequence[LoraChoice]) -> list[AppliedLora]:
    """Put LoRA files on the live modules of ``family``, all active with their weights.

    Every module gets exactly the strength its file gives it: alphas are folded into the factors, because diffusers
    reads one alpha for a whole network.

    Raises:
        ModelError: a file is no LoRA, is damaged, or was made for a model of other sizes.
    """
    if not choices:
        return []
    pipeline = family.pipeline("euler")
    components: dict[str, nn.Module] = {family.denoiser_naming.component: family.denoiser, **family.text_encoders}
    modules = {
        component: {
            path: module for path, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
        }
        for component, network in components.items()
    }
    table = family.key_names.table(modules)
    applied, names = [], []
    for place, choice in enumerate(choices):
        file = read_lora_file(choice.path)
        assigned = assign_modules(file, table, family.name)
        fitted = {
            component: {
                path: _fitted(choice.path, path, weights, modules[component][path]) for path, weights in part.items()
            }
            for component, part in assigned.components.items()
        }
        # peft refuses a dot in an adapter's name, so the file's own name will not do.
        names.append(f"lora_{place}")
        # It would warn about a LoRA without a text encoder part, which is the usual kind.
        with quiet_libraries(), warnings.catch_warnings():
            # Several adapters on one model are meant.
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            pipeline.load_lora_weights(
                lora_tensors(fitted, family.key_names, folding="no_alpha"), adapter_name=names[-1]
            )
        count = sum(len(part) for part in fitted.values())
        applied.append(AppliedLora(choice, data_hash(choice.path), count, tuple(assigned.unmatched)))
    pipeline.set_adapters(names, adapter_weights=[choice.weight for choice in choices])
    for network in components.values():
        network.requires_grad_(False)
    return applied


def _fitted(file: Path, path: str, weights: LoraWeights, module: nn.Linear | nn.Conv2d) -> LoraWeights:
    """Give the factors the dimensions that the module wants; 1x1 convolutions and matrices hold the same numbers."""
    base = module.weight
    down, up = weights.down, weights.up
    if base.ndim == 4 and down.ndim == 2 and tuple(base.shape[2:]) == (1, 1):
        down = down[:, :, None, None]
    elif base.ndim == 2 and down.ndim == 4 and tuple(down.shape[2:]) == (1, 1):
        down = down.flatten(1)
    up = up.flatten(1) if base.ndim == 2 else up.reshape(*up.shape[:2], 1, 1)
    if down.shape[1:] != base.shape[1:] or up.shape[0] != base.shape[0]:
        raise ModelError(
            f"{file} was made for another kind of model: its part for '{path}' changes a weight of shape "
            f"{[up.shape[0], *down.shape[1:]]}, but that weight is {list(base.shape)} here."
        )
    return LoraWeights(down, up, weights.alpha)
