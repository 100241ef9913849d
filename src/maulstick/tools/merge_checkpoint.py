"""``maulstick merge --base``: LoRA files merged into a checkpoint, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maulstick.adapters.lora_family import with_family_prefixes
from maulstick.adapters.module_kinds import AdapterModule, DoraWeights, OftWeights, Unsupported, add_change
from maulstick.adapters.read_formats import AdapterFile, read_adapter
from maulstick.adapters.safetensors_stream import TensorSpec, write_stream
from maulstick.adapters.write_formats import new_folder
from maulstick.errors import ModelError
from maulstick.files_io import atomic_write, set_aside
from maulstick.options.tools import SavePrecision
from maulstick.tools.checkpoint import Checkpoint, Part, TensorSource
from maulstick.tools.lora_choice import LoraChoice
from maulstick.tools.lora_output import DTYPES, HISTORY, history_entry, read_history, source_entry
from maulstick.tools.strengths import Presets, strength_facts, strength_function
from maulstick.train.console import RunConsole

# What a single file holds beside the networks (noise schedules, counters) keeps its number format.
_NETWORK_PREFIXES = (
    *("model.diffusion_model.", "first_stage_model."),
    *("cond_stage_model.", "conditioner.", "text_encoders."),
)
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True)
class Change:
    """One LoRA module's part in a tensor, and the strength it is added with; ``origin`` is file and module."""

    part: Part
    module: AdapterModule
    strength: float
    origin: str


@dataclass(frozen=True)
class MergePlan:
    """What is added to which tensor, and what has no place in the checkpoint.

    Attributes:
        changes: (component, name of tensor) -> changes.
        unmatched: LoRA file -> names of its modules that the checkpoint has no weight for.
        history: the entry about this merge.
    """

    changes: Mapping[tuple[str, str], tuple[Change, ...]]
    unmatched: Mapping[Path, tuple[str, ...]]
    history: dict[str, Any]


def plan_merge(base: Checkpoint, choices: Sequence[LoraChoice], presets: Presets | None = None) -> MergePlan:
    """Read the LoRA files and find the tensors that their modules change.

    Raises:
        ModelError: a file is no LoRA, or is for a model of another family.
        OptionError: its block weights do not fit the family.
    """
    changes: dict[tuple[str, str], list[Change]] = {}
    unmatched: dict[Path, tuple[str, ...]] = {}
    sources: list[dict[str, Any]] = []
    component_of_source = {id(source): component for component, files in base.sources.items() for source in files}
    for choice in choices:
        file = read_adapter(choice.path)
        named = with_family_prefixes(file.modules, base.family)
        pieces = {name: _pieces(base, file, named[name], module) for name, module in file.modules.items()}
        missing = tuple(name for name, parts in pieces.items() if not all(part in base.places for part in parts))
        if len(missing) == len(file.modules) or not file.family.may_be(base.family):
            raise _wrong_family(base, file)
        strength_of = strength_function(choice, base.family, presets)
        for name, parts in pieces.items():
            strength = strength_of(named[name])
            for piece, module in parts.items() if strength != 0 and name not in missing else ():
                source, tensor, part = base.places[piece]
                change = Change(part, module, strength, f"{file.path}: module '{name}'")
                changes.setdefault((component_of_source[id(source)], tensor), []).append(change)
        unmatched[choice.path] = missing
        sources.append(source_entry(file, **strength_facts(choice)))
    return MergePlan(
        {key: tuple(found) for key, found in changes.items()},
        unmatched,
        history_entry("merge", base=base.path.name, sources=sources),
    )


def _pieces(base: Checkpoint, file: AdapterFile, name: str, module: AdapterModule) -> dict[str, AdapterModule]:
    """The module by what it changes; none where the checkpoint has no such weight."""
    try:
        return base.pieces(name, module) or {name: module}
    except Unsupported as reason:
        raise ModelError(
            f"{file.path}: module '{name}' {reason}. A single file in the original layout holds it whole; merge into "
            "that."
        ) from None


def _wrong_family(base: Checkpoint, file: AdapterFile) -> ModelError:
    name = next(iter(file.modules))
    return ModelError(
        f"{file.path} is a LoRA for {file.family.name}, but {base.path} is {base.family.name}: its modules "
        f"('{name}', …) cannot be merged into that."
    )


def merge_into_checkpoint(
    base: Checkpoint, plan: MergePlan, output: Path, console: RunConsole, precision: SavePrecision | None = None
) -> None:
    """Write the checkpoint with the LoRAs merged in, in the layout that ``base`` has; ``base`` stays as it is.

    Everything is computed in fp32, and at most one tensor of the checkpoint is in memory at a time, in a few forms. A
    file is written in one step, a folder is built beside its place and then renamed; what was there is set aside.

    Raises:
        ModelError: a module does not fit its tensor, or a merged value is beyond what the number format can hold;
            nothing is written then.
    """
    console.begin("Merging", sum(1 for _ in base.tensors()))
    dtype = None if precision is None else DTYPES[precision]
    try:
        if base.is_folder:
            _write_folder(base, plan, output, console, dtype)
        else:
            _write_single_file(base, plan, output, console, dtype)
    finally:
        console.end()


def _write_single_file(
    base: Checkpoint, plan: MergePlan, output: Path, console: RunConsole, dtype: torch.dtype | None
) -> None:
    (source,) = base.sources[""]

    def write(temporary: Path) -> None:
        _write_tensors(source, "", plan, temporary, console, dtype)
        set_aside(output)

    atomic_write(output, write)


def _write_folder(
    base: Checkpoint, plan: MergePlan, output: Path, console: RunConsole, dtype: torch.dtype | None
) -> None:
    with new_folder(output) as temporary:
        _copy_other_files(base, temporary)
        for component, files in base.sources.items():
            folder = temporary / component
            sizes: dict[str, tuple[str, int]] = {}
            for source in files:
                target = folder / _safetensors_name(source.path.name)
                specs = _write_tensors(source, component, plan, target, console, dtype)
                sizes |= {spec.name: (target.name, spec.nbytes) for spec in specs}
            if len(files) > 1:
                _write_index(base.path / component, folder, sizes)
        set_aside(output)


def _copy_other_files(base: Checkpoint, target: Path) -> None:
    """Copy everything but weights of the networks that are written anew, and checkpoints that lie beside them."""
    for path in sorted(base.path.rglob("*")):
        relative = path.relative_to(base.path)
        replaced = relative.parts[0] in base.sources or len(relative.parts) == 1
        is_weight = path.name.endswith(_WEIGHT_ENDINGS) or ".index." in path.name
        if path.is_dir():
            (target / relative).mkdir(exist_ok=True)
        elif not (replaced and is_weight):
            shutil.copyfile(path, target / relative)


def _safetensors_name(name: str) -> str:
    if name == "pytorch_model.bin":
        return "model.safetensors"
    return name.removesuffix(".bin").removesuffix(".safetensors") + ".safetensors"


def _write_index(source: Path, target: Path, sizes: Mapping[str, tuple[str, int]]) -> None:
    name = next(path.name for path in sorted(source.iterdir()) if ".index." in path.name)
    content = {
        "metadata": {"total_size": sum(size for _, size in sizes.values())},
        "weight_map": {tensor: file for tensor, (file, _) in sorted(sizes.items())},
    }
    atomic_write(target / name, json.dumps(content, indent=2))


def _write_tensors(
    source: TensorSource,
    component: str,
    plan: MergePlan,
    target: Path,
    console: RunConsole,
    dtype: torch.dtype | None,
) -> list[TensorSpec]:
    """Write one file of the checkpoint; tensors that do not change are copied as they lie."""
    specs = [spec._replace(dtype=_saved_dtype(spec, component, dtype)) for spec in source.specs.values()]
    wanted = {spec.name: spec.dtype for spec in specs}

    def content(name: str) -> Tensor | Iterable[bytes | memoryview]:
        changes = plan.changes.get((component, name), ())
        if not changes and wanted[name] == source.specs[name].dtype:
            return source.chunks(name)
        merged = _merged(source.read(name), changes).to(wanted[name])
        if not _is_finite(merged):
            raise ModelError(
                f"Not written: the merged tensor '{name}' holds values that {wanted[name]} cannot hold, or that are "
                "not finite. Use --save_precision bf16 or float, or smaller strengths."
            )
        return merged

    is_changed = any((component, name) in plan.changes for name in source.specs)
    metadata = _metadata(source.metadata, plan, is_changed=is_changed or component == "", in_folder=component != "")
    write_stream(target, specs, metadata, content, lambda spec: console.advance())
    return specs


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite, without a second tensor of that size (``torch.isfinite`` takes several)."""
    if tensor.numel() == 0:
        return True
    # A value that is not a number makes both extremes so. Eight-bit formats have no extremes in PyTorch.
    lowest, highest = (tensor.half() if tensor.dtype.itemsize == 1 else tensor).aminmax()
    return bool(torch.isfinite(lowest) and torch.isfinite(highest))


def _saved_dtype(spec: TensorSpec, component: str, dtype: torch.dtype | None) -> torch.dtype:
    is_network = component != "" or spec.name.startswith(_NETWORK_PREFIXES)
    return spec.dtype if dtype is None or not is_network or not spec.dtype.is_floating_point else dtype


def _merged(tensor: Tensor, changes: Sequence[Change]) -> Tensor:
    """The tensor with all changes added, in fp32; every change is one of the tensor as it was."""
    if not changes:
        return tensor
    keeps_original = any(isinstance(change.module, DoraWeights | OftWeights) for change in changes)
    total = tensor.to(torch.float32, copy=keeps_original)
    for change in changes:
        try:
            add_change(change.part.rows(total), change.part.rows(tensor), change.module, change.strength)
        except Unsupported as reason:
            raise ModelError(f"Not written: {change.origin} {reason}.") from None
    return total


def _metadata(metadata: Mapping[str, str], plan: MergePlan, *, is_changed: bool, in_folder: bool) -> dict[str, str]:
    kept = {key: value for key, value in metadata.items() if key != "modelspec.hash_sha256"}
    if in_folder:
        # transformers refuses a file that does not say whose tensors it holds.
        kept["format"] = "pt"
    return kept | ({HISTORY: json.dumps([*read_history(metadata), plan.history])} if is_changed else {})
