"""What all tools that write a file do alike: never lose an old one, and say in the file what was done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from maulstick import __version__
from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.files import data_hash, legacy_file_hash
from maulstick.adapters.lora_family import LoraFamily
from maulstick.adapters.read_formats import AdapterFile
from maulstick.adapters.write_formats import folded
from maulstick.errors import OptionError
from maulstick.files_io import set_aside
from maulstick.options.tools import SavePrecision
from maulstick.tools.checkpoint import Checkpoint

HISTORY = "maulstick.history"
# Entries that speak of the tensors or of the config of a file that was read, and are wrong in the one that is written.
_OF_THE_OLD_FILE = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", "lora_adapter_metadata", "format")
DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_output(path: Path, *, set_old_aside: bool, ending: str = ".safetensors") -> None:
    """Refuse a place where nothing can or may be written, before any work is done.

    ``ending`` is "" for a folder.

    Raises:
        OptionError: the name has another ending, or something is there already.
    """
    if ending and path.suffix != ending:
        raise OptionError(f"--output {path} should end in {ending}.")
    if not ending and path.suffix == ".safetensors":
        raise OptionError(f"--output {path}: a folder is written here; give its name without .safetensors.")
    if path.exists() and not set_old_aside:
        raise OptionError(
            f"--output {path} exists already. Give another name, or --set_aside to rename the old one "
            f"(to {path.stem}.old-1{path.suffix})."
        )


@contextmanager
def old_set_aside(path: Path) -> Iterator[None]:
    """Rename what is at ``path`` for the time a new one is put there; it comes back when that fails."""
    old = set_aside(path)
    try:
        yield
    except BaseException:
        if old is not None:
            if path.is_dir():
                shutil.rmtree(path)
            old.rename(path)
        raise


def chosen_dtype(precision: SavePrecision | None, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The number format asked for, or the widest of what was read: fp32, bf16, or fp16 when all is fp16."""
    if precision is not None:
        return DTYPES[precision]
    found = set(dtypes)
    if found == {torch.float16}:
        return torch.float16
    return torch.bfloat16 if found == {torch.bfloat16} else torch.float32


def history_entry(tool: str, **facts: Any) -> dict[str, Any]:
    """One entry of the history: which tool, when, and what it was told and found."""
    when = datetime.now().astimezone().replace(microsecond=0, tzinfo=None).isoformat()
    return {"tool": f"maulstick {tool}", "version": __version__, "date": when, **facts}


def with_history(metadata: Mapping[str, str], entry: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a file that was read, without what no longer holds in the one made from it, and extended."""
    kept = {key: value for key, value in metadata.items() if key not in _OF_THE_OLD_FILE}
    return kept | {HISTORY: json.dumps([*read_history(metadata), entry])}


def read_history(metadata: Mapping[str, str]) -> list[Any]:
    """The history in a file's metadata; an empty list where there is none that can be read."""
    try:
        history = json.loads(metadata.get(HISTORY, "[]"))
    except ValueError:
        return []
    return history if isinstance(history, list) else []


def network_entries(modules: Mapping[str, LoraWeights], family: LoraFamily) -> dict[str, str]:
    """Rank, alpha and model version as other programs read them; "Dynamic" where they are mixed, as sd-scripts says.

    Alphas are those that are written in kohya's layout.
    """
    modules = folded(modules)
    ranks = {weights.rank for weights in modules.values()}
    alphas = {float(weights.rank) if weights.alpha is None else weights.alpha for weights in modules.values()}
    entries = {
        "ss_network_module": "networks.lora_sd3" if family.kind == "sd3" else "networks.lora",
        "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": str(alphas.pop()) if len(alphas) == 1 else "Dynamic",
    }
    versions = {"sd1": "sd_v1", "sd2": "sd_v2", "sdxl": "sdxl_base_v1-0"}
    architectures = {
        "sd1": "stable-diffusion-v1/lora",
        "sd2": "stable-diffusion-v2-512/lora",
        "sdxl": "stable-diffusion-xl-v1-base/lora",
    }
    if family.kind in versions:
        entries["ss_v2"] = str(family.kind == "sd2")
        entries["ss_base_model_version"] = versions[family.kind]
        entries["modelspec.architecture"] = architectures[family.kind]
        entries["modelspec.sai_model_spec"] = "1.0.1"
    return entries


def updated_metadata(
    metadata: Mapping[str, str],
    modules: Mapping[str, LoraWeights],
    family: LoraFamily,
    output: Path,
    entry: Mapping[str, Any],
    *,
    resized: bool,
) -> dict[str, str]:
    """The metadata of a LoRA made from one with ``metadata``: kept, with the name and history of the new one.

    What the old file says about its model stays, and (unless it was ``resized``) about rank and alpha; only what it
    does not say is added.
    """
    entries = network_entries(modules, family)
    always = {key: entries.pop(key) for key in ("ss_network_dim", "ss_network_alpha")} if resized else {}
    names = {"ss_output_name": output.stem}
    if "modelspec.title" in metadata:
        names["modelspec.title"] = output.stem
    return with_history(entries | dict(metadata) | always | names, entry)


def source_entry(file: AdapterFile, **facts: Any) -> dict[str, Any]:
    """How a history names a LoRA that something was made from: name, hash of its tensors, and how it was used."""
    hashed = {"sha256": data_hash(file.path)} if file.path.suffix == ".safetensors" else {}
    return {"file": file.path.name, **hashed, **facts}


def extracted_metadata(
    base: Checkpoint, tuned: Checkpoint, modules: Mapping[str, LoraWeights], output: Path, error: float, rank: int
) -> dict[str, str]:
    """The metadata of a LoRA made from two checkpoints; "base model" is the one it is used with."""
    entries = network_entries(modules, base.family)
    entries |= {
        "ss_output_name": output.stem,
        "modelspec.title": output.stem,
        "modelspec.date": datetime.now().astimezone().replace(microsecond=0, tzinfo=None).isoformat(),
        "ss_sd_model_name": base.path.name,
        "ss_training_comment": f"extracted from {tuned.path.name}",
    }
    if base.path.is_file():
        entries["ss_sd_model_hash"] = legacy_file_hash(base.path)
    entry = history_entry("extract", base=base.path.name, tuned=tuned.path.name, rank=rank, error=error)
    return with_history(entries, entry)
