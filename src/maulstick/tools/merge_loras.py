"""``maulstick merge`` without a base: several LoRA files made into one that does what all of them do together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.lora_family import FAMILIES, LoraFamily, with_family_prefixes
from maulstick.adapters.read_formats import AdapterFile, plain_modules, read_adapter
from maulstick.errors import ModelError, OptionError
from maulstick.tools.lora_choice import LoraChoice
from maulstick.tools.lora_output import history_entry, network_entries, source_entry, with_history
from maulstick.tools.low_rank import factor_svd, from_svd, squared_norm
from maulstick.tools.strengths import Presets, strength_facts, strength_function
from maulstick.train.console import QuietConsole, RunConsole


@dataclass(frozen=True)
class MergedLoras:
    """The sum of several LoRAs.

    ``error`` is the norm of what was cut off over the norm of the exact sum; 0 for an exact merge.
    """

    modules: dict[str, LoraWeights]
    family: LoraFamily
    dtypes: tuple[torch.dtype, ...]
    error: float
    metadata: dict[str, str]


def merge_loras(
    choices: Sequence[LoraChoice],
    output: Path,
    *,
    rank: int | None = None,
    presets: Presets | None = None,
    console: RunConsole | None = None,
) -> MergedLoras:
    """Add LoRAs, each with its strengths.

    Exact without ``rank``: the factors of a module are put side by side, so that its rank is the sum of the ranks. With
    ``rank`` the sum is cut to its leading singular values, the best that a LoRA of that rank can do.

    Raises:
        ModelError: a file is no LoRA, they are for different models, or nothing is left.
        OptionError: a rank below 1, or block weights that do not fit.
    """
    if rank is not None and rank < 1:
        raise OptionError(f"--rank is {rank}; it must be at least 1.")
    files = [read_adapter(choice.path) for choice in choices]
    family = _common_family(files)
    terms = _terms(files, choices, family, presets)
    if not terms:
        raise ModelError("Nothing is left to merge: the strengths of all modules are 0.")
    console = console or QuietConsole()
    console.begin("Merging", len(terms))
    modules: dict[str, LoraWeights] = {}
    total = cut = 0.0
    for name, parts in terms.items():
        joined = _joined(name, parts)
        if rank is not None and joined.rank > rank:
            svd = factor_svd(joined)
            total += squared_norm(svd.values)
            cut += squared_norm(svd.values[rank:])
            shape = (joined.up.shape[0], *joined.down.shape[1:])
            joined = from_svd(svd, min(rank, len(svd.values)), None, shape)
        elif rank is not None:
            total += squared_norm(factor_svd(joined).values)
        modules[name] = joined
        console.advance()
    console.end()
    error = math.sqrt(cut / total) if total else 0.0
    entry = history_entry(
        "merge",
        sources=[source_entry(file, **strength_facts(choice)) for file, choice in zip(files, choices, strict=True)],
        **({} if rank is None else {"rank": rank, "error": error}),
    )
    metadata = _merged_metadata(
        [file.metadata for file in files], [choice.path for choice in choices], modules, family, output
    )
    dtypes = tuple(dtype for file in files for dtype in file.dtypes)
    return MergedLoras(modules, family, dtypes, error, with_history(metadata, entry))


def _common_family(files: Sequence[AdapterFile]) -> LoraFamily:
    first = files[0]
    family = first.family
    for other in files[1:]:
        if not family.may_be(other.family):
            raise ModelError(
                f"{first.path} is a LoRA for {family.name}, {other.path} one for {other.family.name}; they cannot be "
                "merged."
            )
        if family.kind in ("sd", "unknown"):
            first, family = other, other.family
    return family


def _terms(
    files: Sequence[AdapterFile],
    choices: Sequence[LoraChoice],
    family: LoraFamily,
    presets: Presets | None,
) -> dict[str, list[tuple[LoraWeights, float, Path]]]:
    """Module -> what is added up for it: factors, strength, and the file they are from."""
    terms: dict[str, list[tuple[LoraWeights, float, Path]]] = {}
    for file, choice in zip(files, choices, strict=True):
        modules = plain_modules(file)
        named = with_family_prefixes(modules, FAMILIES[family.kind])
        strength_of = strength_function(choice, family, presets)
        for name, weights in modules.items():
            strength = strength_of(named[name])
            if strength != 0:
                terms.setdefault(named[name], []).append((weights, strength, file.path))
    return dict(sorted(terms.items()))


def _joined(name: str, parts: Sequence[tuple[LoraWeights, float, Path]]) -> LoraWeights:
    """Factors side by side; strength and scale go into the up factors once."""
    first, _, first_path = parts[0]
    kernels = [weights.down.shape[2:] for weights, _, _ in parts]
    kernel = max(kernels, key=len)
    for weights, _, path in parts[1:]:
        same = weights.down[0].numel() == first.down[0].numel() and weights.up.shape[0] == first.up.shape[0]
        if not same:
            raise ModelError(
                f"'{name}' changes weights of different sizes in {first_path} and {path}; they are for different "
                "models."
            )
    downs = [weights.down.float().reshape(weights.rank, -1, *kernel) for weights, _, _ in parts]
    ups = [weights.up.float().flatten(1) * (strength * weights.scale) for weights, strength, _ in parts]
    up = torch.cat(ups, dim=1)
    return LoraWeights(torch.cat(downs), up[..., None, None] if kernel else up, None)


# What files say of the model they are for; the first that says it is believed, since all are for the same.
_OF_THE_MODEL = ("ss_base_model_version", "ss_v2", "modelspec.architecture", "modelspec.implementation")


def _merged_metadata(
    all_metadata: Sequence[Mapping[str, str]],
    paths: Sequence[Path],
    modules: Mapping[str, LoraWeights],
    family: LoraFamily,
    output: Path,
) -> dict[str, str]:
    """What all files say alike, what they say of the model, all their tags, and rank and name of the new file."""
    first, *others = all_metadata
    metadata = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    for key in _OF_THE_MODEL:
        said = [entries[key] for entries in all_metadata if key in entries]
        if said:
            metadata[key] = said[0]
    if tags := _all_tags(all_metadata):
        metadata["ss_tag_frequency"] = json.dumps(tags, sort_keys=True)
    network = network_entries(modules, family)
    own = {key: network.pop(key) for key in ("ss_network_module", "ss_network_dim", "ss_network_alpha")}
    names = {
        "ss_output_name": output.stem,
        "modelspec.title": output.stem,
        "modelspec.date": datetime.now().astimezone().replace(microsecond=0, tzinfo=None).isoformat(),
        "modelspec.merged_from": ", ".join(path.stem for path in paths),
    }
    return network | metadata | own | names


def _all_tags(all_metadata: Sequence[Mapping[str, str]]) -> dict[str, dict[str, int]]:
    """The tag lists of all files; where two have a folder of the same name, their counts are added."""
    tags: dict[str, dict[str, int]] = {}
    for metadata in all_metadata:
        try:
            frequency: Any = json.loads(metadata.get("ss_tag_frequency", "{}"))
        except ValueError:
            continue
        for folder, counts in frequency.items() if isinstance(frequency, dict) else []:
            if isinstance(counts, dict):
                merged = tags.setdefault(str(folder), {})
                for tag, count in counts.items():
                    merged[str(tag)] = merged.get(str(tag), 0) + int(count)
    return tags
