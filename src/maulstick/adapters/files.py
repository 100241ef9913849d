"""LoRA files in kohya's format: three tensors a module, text metadata, hashes that other programs know them by.

Writing is reproducible: the same tensors and metadata give the same bytes, which the safetensors library's own writer
does not (it orders the metadata at random).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maulstick.adapters.factors import Folding, LoraWeights, cast_weights, fold_alphas
from maulstick.adapters.file_kinds import describe_family, describe_kind
from maulstick.adapters.key_names import KeyNames, Location
from maulstick.adapters.safetensors_stream import TensorSpec, header_bytes, tensor_bytes
from maulstick.errors import ModelError, nearest_file_hint
from maulstick.files_io import atomic_write

# Civitai's reader refuses larger headers.
MAX_HEADER_BYTES = 64 * 2**20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What a module must hold to be read, as sets of which one must be there; a dot in a name is part of the module's.
_COMPLETE = (
    ("lora_down.weight", "lora_up.weight"),
    ("lora_A.weight", "lora_B.weight"),
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    *(
        (*first, *second)
        for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
        for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
    ),
    ("oft_blocks",),
)
_TENSOR_NAME = re.compile(r"(.+?)\.((?:lora_(?:down|up|A|B)\.weight)|[^.]+)")
_ACCEPTED = "Maulstick reads kohya-style LoRA files (tensors named lora_unet_….lora_down.weight and …lora_up.weight)."
# The part of a file that the old "legacy" hashes of the web UI look at.
_LEGACY_START, _LEGACY_END = 0x100000, 0x110000

Module = TypeVar("Module")
Kind = TypeVar("Kind", covariant=True)


PICKLED = (".ckpt", ".pt")
"""Endings of pickled files."""


class SavedHashes(NamedTuple):
    """``data`` is the sha256 of the tensor data (``sshs_model_hash``), ``legacy`` the old eight-digit hash."""

    data: str
    legacy: str


@dataclass(frozen=True)
class LoraFile:
    """A LoRA as it lies in a file: metadata, and name of the module -> factors and alpha, in the file's dtype."""

    path: Path
    metadata: dict[str, str]
    modules: dict[str, LoraWeights]


class ModuleFile(Protocol[Kind]):
    """A file of modules of one kind, or of several."""

    @property
    def path(self) -> Path: ...

    @property
    def modules(self) -> Mapping[str, Kind]: ...


class AssignedWeights(NamedTuple, Generic[Module]):
    """A file's modules placed in a model: component -> path -> weights; and the names that have no place in it."""

    components: dict[str, dict[str, Module]]
    unmatched: list[str]


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def lora_tensors(
    components: Mapping[str, Mapping[str, LoraWeights]],
    key_names: KeyNames,
    dtype: torch.dtype = torch.float32,
    folding: Folding = "one_alpha",
) -> dict[str, Tensor]:
    """The tensors of a LoRA file for component -> path -> weights, on the CPU.

    Alphas are folded per component (see ``fold_alphas``), because not every reader honours different ones.
    """
    tensors: dict[str, Tensor] = {}
    for component, modules in components.items():
        for path, folded in fold_alphas(modules, folding).items():
            weights = cast_weights(folded, dtype)
            name = key_names.name(component, path)
            tensors[f"{name}.lora_down.weight"] = weights.down.detach().cpu()
            tensors[f"{name}.lora_up.weight"] = weights.up.detach().cpu()
            if weights.alpha is not None:
                tensors[f"{name}.alpha"] = torch.tensor(weights.alpha, dtype=dtype)
    return tensors


def save_lora_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedHashes:
    """Write a LoRA file in one step, with both ``sshs`` hashes added to the metadata.

    Raises ``ModelError`` and writes nothing when a tensor holds a value that is not finite, a module lacks a factor,
    an alpha is not positive, or the header would be larger than readers accept.
    """
    _refuse_unusable(path, tensors)
    _refuse_incomplete(path, tensors)
    return _write(path, tensors, metadata)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedHashes:
    """Write an adapter file in one step, with both ``sshs`` hashes added to the metadata.

    Raises ``ModelError`` and writes nothing when a tensor holds a value that is not finite, or the header would be
    larger than readers accept.
    """
    _refuse_unusable(path, tensors)
    return _write(path, tensors, metadata)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedHashes:
    if path.suffix in PICKLED:
        return _write_pickle(path, tensors)
    clean = {key: _as_utf8(value) for key, value in metadata.items()}
    hashes = _hashes(tensors, clean)
    clean |= {"sshs_model_hash": hashes.data, "sshs_legacy_hash": hashes.legacy}
    header = _header(tensors, clean)
    if len(header) >= MAX_HEADER_BYTES:
        largest = max(clean, key=lambda key: len(clean[key]))
        raise ModelError(
            f"{path} was not written: its metadata takes {len(header) / 2**20:.0f} MiB, but readers refuse 64 MiB and "
            f"more. The largest entry is {largest}; save without metadata (no_metadata) or shorten it."
        )

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(header)
            for chunk in _data_chunks(tensors):
                file.write(chunk)

    atomic_write(path, write)
    return hashes


def _write_pickle(path: Path, tensors: Mapping[str, Tensor]) -> SavedHashes:
    """Write a plain dict of tensors, without metadata, as sd-scripts does.

    In torch's older format: the one with a zip file holds entries today that the web UI's check of such files refuses.
    """
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    atomic_write(path, lambda temporary: torch.save(plain, temporary, _use_new_zipfile_serialization=False))
    return _hashes(tensors, {})


def _refuse_unusable(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{path} was not written: tensor '{key}' is {tensor.dtype}, not fp32, fp16 or bf16.")
        finite = torch.isfinite(tensor)
        if not finite.all():
            count = tensor.numel() - int(finite.sum())
            advice = " Values above 65504 do not fit into fp16: save_precision bf16 or float holds them."
            raise ModelError(
                f"{path} was not written: tensor '{key}' holds {count} of {tensor.numel()} values that are not finite "
                f"(NaN or infinite).{advice if tensor.dtype == torch.float16 else ''}"
            )


def _refuse_incomplete(path: Path, tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        raise ModelError(f"{path} was not written: the LoRA has no module.")
    modules: dict[str, set[str]] = {}
    for key, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(key)
        name, part = (match[1], match[2]) if match else (key, "")
        modules.setdefault(name, set()).add(part)
        if part == "alpha" and not tensor.item() > 0:
            raise ModelError(f"{path} was not written: '{key}' is {tensor.item()}, but must be above 0.")
    for name, parts in modules.items():
        missing = _missing_part(parts)
        if missing is not None:
            raise ModelError(f"{path} was not written: module '{name}' has no {missing}.")


def _missing_part(parts: set[str]) -> str | None:
    """What the module lacks to be of the kind that it is nearest to; None where it is complete."""
    begun = [needed for needed in _COMPLETE if parts & set(needed)]
    if any(parts >= set(needed) for needed in begun):
        return None
    wanted = min(begun, key=lambda needed: len(set(needed) - parts)) if begun else _COMPLETE[0]
    return next(part for part in wanted if part not in parts)


def _as_utf8(value: str) -> str:
    """Replace what cannot be written as UTF-8: names of files may hold bytes that are not text."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The library's order: wide dtypes first, so that every tensor is aligned, then by name."""
    dtype_rank = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
    # Of equally wide dtypes the library puts BF16 before F16.
    dtype_rank[torch.bfloat16], dtype_rank[torch.float16] = 1, 2
    return sorted(tensors.items(), key=lambda item: (dtype_rank[item[1].dtype], item[0]))


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header: metadata sorted and first, padded with spaces so that the data is aligned to 8 bytes."""
    return header_bytes(
        (TensorSpec(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in _ordered(tensors)), metadata
    )


def _data_chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for _, tensor in _ordered(tensors):
        yield from tensor_bytes(tensor)


def _hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedHashes:
    """Hashes as sd-scripts computes them; the legacy one over a serialisation that holds only ``ss_`` metadata."""
    data, legacy = hashlib.sha256(), hashlib.sha256()
    position = 0

    def feed_legacy(chunk: bytes | memoryview) -> None:
        nonlocal position
        legacy.update(chunk[max(0, _LEGACY_START - position) : max(0, _LEGACY_END - position)])
        position += len(chunk)

    feed_legacy(_header(tensors, {key: value for key, value in metadata.items() if key.startswith("ss_")}))
    for chunk in _data_chunks(tensors):
        data.update(chunk)
        feed_legacy(chunk)
    return SavedHashes(data.hexdigest(), legacy.hexdigest()[:8])


def data_hash(path: Path) -> str:
    """sha256 of a safetensors file's tensor data, whatever its metadata: the identity of a LoRA (AutoV3, shorthash).

    Pickled files, which have no metadata, are hashed whole.
    """
    if path.suffix in PICKLED:
        return file_hash(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + length)
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """sha256 of a whole file, the web UI's "new" hash of a checkpoint."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def legacy_file_hash(path: Path) -> str:
    """The web UI's old hash of a checkpoint: eight digits over 64 KiB at 1 MiB."""
    with path.open("rb") as file:
        file.seek(_LEGACY_START)
        return hashlib.sha256(file.read(_LEGACY_END - _LEGACY_START)).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_lora_file(path: Path) -> LoraFile:
    """Read a kohya-style LoRA of any family, with or without alphas.

    Raises ``ModelError`` that says what the file is when it is no such LoRA, or what is wrong with it.
    """
    metadata, tensors = _read_safetensors(path)
    kind = describe_kind(tensors.keys())
    if kind is not None:
        raise ModelError(f"{path} is {kind}. {_ACCEPTED}")
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"([^.]+)\.(lora_down\.weight|lora_up\.weight|alpha)", key)
        if match is None:
            raise ModelError(f"{path} holds a tensor '{key}' that is no part of a LoRA. {_ACCEPTED}")
        if not torch.isfinite(tensor.float()).all():
            raise ModelError(f"{path}: tensor '{key}' holds values that are not finite; the LoRA is broken.")
        modules.setdefault(match[1], {})[match[2]] = tensor
    if not modules:
        raise ModelError(f"{path} holds no tensors. {_ACCEPTED}")
    return LoraFile(path, metadata, {name: _module(path, name, parts) for name, parts in sorted(modules.items())})


def _module(path: Path, name: str, parts: Mapping[str, Tensor]) -> LoraWeights:
    for needed in ("lora_down.weight", "lora_up.weight"):
        if needed not in parts:
            raise ModelError(f"{path}: module '{name}' has no {needed}; the file is incomplete.")
    down, up, alpha = parts["lora_down.weight"], parts["lora_up.weight"], parts.get("alpha")
    if down.dim() not in (2, 4) or up.dim() not in (2, 4) or up.shape[1] != down.shape[0]:
        raise ModelError(
            f"{path}: the factors of '{name}' do not fit each other: lora_down is {tuple(down.shape)}, lora_up is "
            f"{tuple(up.shape)}, but lora_up's second size must be lora_down's first."
        )
    if alpha is not None and alpha.numel() != 1:
        raise ModelError(f"{path}: '{name}.alpha' has shape {tuple(alpha.shape)}, but must be a single number.")
    return LoraWeights(down, up, None if alpha is None else float(alpha))


def _read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise ModelError(f"There is no file {path}.{nearest_file_hint(path)}")
    _refuse_damaged(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict(file.metadata() or {}), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(f"{path} is a damaged safetensors file: {error}.") from error


def _refuse_damaged(path: Path) -> None:
    """Say plainly what the library reports in terms of its own parser: another format, or a file cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
        length = struct.unpack("<Q", start[:8])[0] if len(start) == 9 else 0
        if len(start) < 9 or start[8:9] != b"{" or length > 100_000_000:
            raise ModelError(f"{path} is not a safetensors file. {_ACCEPTED}")
        if 8 + length > size:
            raise ModelError(f"{path} is cut off: its header alone takes {8 + length} bytes, the file has {size}.")
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            entries = [entry for key, entry in header.items() if key != "__metadata__"]
            data_end = max((int(entry["data_offsets"][1]) for entry in entries), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ModelError(f"{path} is a damaged safetensors file: its header cannot be read ({error}).") from error
    if 8 + length + data_end > size:
        raise ModelError(f"{path} is cut off: it should have {8 + length + data_end} bytes and has {size}.")


def assign_modules(file: ModuleFile[Module], table: Mapping[str, Location], family: str) -> AssignedWeights[Module]:
    """Place a file's modules in a model by the model's name table (``KeyNames.table``).

    ``family`` is the model's family in words. Raises ``ModelError`` when not one module has a place.
    """
    components: dict[str, dict[str, Module]] = {}
    unmatched: list[str] = []
    for name, weights in file.modules.items():
        location = table.get(name)
        if location is None:
            unmatched.append(name)
        else:
            components.setdefault(location.component, {})[location.path] = weights
    if not components:
        made_for = describe_family(file.modules)
        raise ModelError(
            f"{file.path} is a LoRA for {made_for or 'another model family'}; none of its {len(unmatched)} modules "
            f"('{unmatched[0]}', …) exists in this {family} model."
        )
    return AssignedWeights(components, unmatched)
