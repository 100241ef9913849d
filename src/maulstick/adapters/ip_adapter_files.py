"""IP-Adapter files: the names that diffusers, InstantX and ComfyUI read, and how our modules' names become them.

The flat form has ``image_proj.…`` for the projection of image features and ``ip_adapter.N.…`` for the attention layers,
N being the layer's place among all attention processors. The nested form is a pickled dict of two dicts with the same
names without their first part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from maulstick.adapters.files import save_tensors
from maulstick.errors import ModelError, nearest_file_hint
from maulstick.files_io import atomic_write, disk_error_behind
from maulstick.weight_files import open_weights

Kind = Literal["plain", "plus", "time"]
"""``plain`` makes tokens of one pooled vector, ``plus`` resamples patches, ``time`` (SD3) does so by timestep."""

PROJECTION, LAYERS = "image_proj.", "ip_adapter."
PLAIN_TOKENS = 4
"""diffusers and ComfyUI read plain IP-Adapters with this many tokens, whatever the file holds."""
DEPTH = 4
"""Layers of a resampler. diffusers' loader takes four of a deeper one and says nothing."""


@dataclass(frozen=True)
class IpAdapterSpec:
    """The sizes of an IP-Adapter that do not follow from the base model.

    Attributes:
        tokens: tokens that an image becomes.
        feature_width: width of the image encoder's features.
        hidden: width inside a resampler, a multiple of 64; 0 for a plain one, which has none.
    """

    kind: Kind
    tokens: int
    feature_width: int
    hidden: int = 0

    @property
    def title(self) -> str:
        """Name for people."""
        return {"plain": "IP-Adapter", "plus": "IP-Adapter Plus", "time": "SD3 IP-Adapter"}[self.kind]


@dataclass(frozen=True)
class IpAdapterFile:
    """An IP-Adapter as it lies in a file, under the flat names, in the file's dtype."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    spec: IpAdapterSpec


# ---------------------------------------------------------------------------------------- names of our modules


def to_file_names(kind: Kind, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file for those of diffusers' modules (``image_proj.…`` and ``ip_adapter.N.…``).

    A Plus resampler is written under the names of the original code, in which key and value are one matrix.
    """
    if kind == "time":
        return dict(state)
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(LAYERS):
            named[re.sub(r"to_([kv])_ip\.0\.", r"to_\1_ip.", name)] = tensor
        elif kind == "plain":
            named[name.replace("image_proj.image_embeds.", "image_proj.proj.")] = tensor
        elif ".attn.to_k." in name:
            value = state[name.replace(".to_k.", ".to_v.")]
            named[_plus_name(name.replace(".to_k.", ".to_kv."))] = torch.cat([tensor, value])
        elif ".attn.to_v." not in name:
            named[_plus_name(name)] = tensor
    return named


def from_file_names(kind: Kind, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what ``to_file_names`` was given."""
    if kind == "time":
        return dict(tensors)
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(LAYERS):
            state[re.sub(r"to_([kv])_ip\.", r"to_\1_ip.0.", name)] = tensor
        elif kind == "plain":
            state[name.replace("image_proj.proj.", "image_proj.image_embeds.")] = tensor
        elif ".to_kv." in name:
            key, value = tensor.chunk(2)
            state[_own_plus_name(name.replace(".to_kv.", ".to_k."))] = key
            state[_own_plus_name(name.replace(".to_kv.", ".to_v."))] = value
        else:
            state[_own_plus_name(name)] = tensor
    return state


# Tail of a name inside a layer: diffusers' own -> the original code's. "(layers.N.)0." is the attention, "1." the rest.
_PLUS_TAILS = {
    "ln0.": "0.norm1.",
    "ln1.": "0.norm2.",
    "attn.to_q.": "0.to_q.",
    "attn.to_k.": "0.to_k.",
    "attn.to_v.": "0.to_v.",
    "attn.to_kv.": "0.to_kv.",
    "attn.to_out.0.": "0.to_out.",
    "ff.0.": "1.0.",
    "ff.1.net.0.proj.": "1.1.",
    "ff.1.net.2.": "1.3.",
}
_INSTANTX_TAILS = {
    "ln0.": "0.norm1.",
    "ln1.": "0.norm2.",
    "attn.to_q.": "0.to_q.",
    "attn.to_kv.": "0.to_kv.",
    "attn.to_out.0.": "0.to_out.",
    "adaln_norm.": "1.0.",
    "ff.net.0.proj.": "1.1.",
    "ff.net.2.": "1.3.",
    "adaln_proj.": "2.1.",
}


def _plus_name(name: str) -> str:
    return _renamed(name, _PLUS_TAILS)


def _own_plus_name(name: str) -> str:
    return _renamed(name, {theirs: ours for ours, theirs in _PLUS_TAILS.items()})


def instantx_name(name: str) -> str:
    """Return a flat SD3 name as InstantX's original code has it."""
    return _renamed(name, _INSTANTX_TAILS)


def flat_name(name: str) -> str:
    """Return the flat SD3 name of one of InstantX's; a flat one stays as it is."""
    return _renamed(name, {theirs: ours for ours, theirs in _INSTANTX_TAILS.items()})


def _renamed(name: str, tails: Mapping[str, str]) -> str:
    match = re.fullmatch(r"(image_proj\.layers\.\d+\.)(.+\.)(\w+)", name)
    return name if match is None or match[2] not in tails else f"{match[1]}{tails[match[2]]}{match[3]}"


# ---------------------------------------------------------------------------------------- reading


def is_ip_adapter_file(path: Path) -> bool:
    """Whether a weight file holds an IP-Adapter; False for what is no weight file at all."""
    if not path.is_file():
        return False
    try:
        return any(name.startswith((PROJECTION, LAYERS)) for name in open_weights(path).shapes)
    except ModelError:
        return False


def read_ip_adapter(path: Path) -> IpAdapterFile:
    """Read an IP-Adapter in the flat form (safetensors) or the nested one (``.bin``), InstantX's names included.

    Raises:
        ModelError: it is no IP-Adapter, of a kind that is not known here, damaged, or holds values that are not finite.
    """
    if not path.is_file():
        if path.is_dir():
            raise ModelError(f"{path} is a folder. Name the IP-Adapter file in it.")
        raise ModelError(f"There is no file {path}.{nearest_file_hint(path)}")
    file = open_weights(path)
    tensors: dict[str, Tensor] = {}
    file.read(list(file.shapes), tensors.__setitem__)
    foreign = [name for name in tensors if not name.startswith((PROJECTION, LAYERS))]
    if len(foreign) == len(tensors):
        raise ModelError(f"{path} is no IP-Adapter: no tensor is named {PROJECTION}… or {LAYERS}….")
    if foreign:
        raise ModelError(
            f"{path}: {len(foreign)} tensors are no part of an IP-Adapter ({', '.join(sorted(foreign)[:3])})."
        )
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            raise ModelError(f"{path}: tensor '{name}' holds values that are not finite; the IP-Adapter is broken.")
    if _kind_of(tensors) == "time":
        tensors = {flat_name(name): tensor for name, tensor in tensors.items()}
    return IpAdapterFile(path, tensors, dict(file.metadata), _spec_of(path, tensors))


def _kind_of(tensors: Mapping[str, Tensor]) -> Kind | None:
    if "image_proj.time_embedding.linear_1.weight" in tensors:
        return "time"
    if "image_proj.latents" in tensors:
        return "plus"
    return "plain" if "image_proj.proj.weight" in tensors else None


def _spec_of(path: Path, tensors: Mapping[str, Tensor]) -> IpAdapterSpec:
    kind = _kind_of(tensors)
    if kind is None:
        raise ModelError(
            f"{path} is an IP-Adapter of a kind that is not known here: its projection is neither that of the plain "
            "one (image_proj.proj.weight), nor of Plus (image_proj.latents), nor of SD3. FaceID and full-face ones are "
            "not supported."
        )
    layers = {int(match[1]) for name in tensors if (match := re.match(r"image_proj\.layers\.(\d+)\.", name))}
    if kind != "plain" and layers != set(range(DEPTH)):
        raise ModelError(
            f"{path}: its resampler has {len(layers)} layers. IP-Adapters have {DEPTH}: diffusers would use the first "
            "four of more, and garbage for those that are missing, without a word."
        )
    try:
        if kind == "plain":
            norm, proj = tensors["image_proj.norm.weight"], tensors["image_proj.proj.weight"]
            tokens = proj.shape[0] // norm.shape[0]
            spec = IpAdapterSpec(kind, tokens, proj.shape[1])
        else:
            latents, proj = tensors["image_proj.latents"], tensors["image_proj.proj_in.weight"]
            spec = IpAdapterSpec(kind, latents.shape[1], proj.shape[1], latents.shape[2])
    except (KeyError, IndexError) as error:
        raise ModelError(f"{path} is incomplete: it lacks {error}.") from error
    if kind == "plain" and spec.tokens != PLAIN_TOKENS:
        raise ModelError(
            f"{path}: an IP-Adapter of {spec.tokens} tokens; programs read plain ones with {PLAIN_TOKENS} only."
        )
    return spec


def describe_misfit(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Say how the tensors of a file differ in names and shapes from those of a model; None where they fit.

    diffusers' usual loading (low_cpu_mem_usage) is silent about all of this and computes garbage.
    """
    layers = [len({name.split(".")[1] for name in each if name.startswith(LAYERS)}) for each in (given, wanted)]
    if layers[0] != layers[1]:
        return f"it has {layers[0]} attention layers, this model has {layers[1]}: it is for another model"
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    parts = [
        f"{len(names)} tensors are {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    if parts:
        return " and ".join(parts)
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            return (
                f"'{name}' has shape {list(tensor.shape)}, this model needs {list(wanted[name].shape)}: it is for "
                "another model or another image encoder"
            )
    return None


# ---------------------------------------------------------------------------------------- writing


def save_flat(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the flat safetensors form. Raises ModelError for values that are not finite; nothing is written then."""
    save_tensors(path, tensors, {**metadata, "format": "pt"})


def save_nested(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the nested pickled form; a resampler of SD3 under InstantX's names, which ComfyUI's node reads."""
    nested: dict[str, dict[str, Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    is_time = _kind_of(tensors) == "time"
    for name, tensor in sorted(tensors.items()):
        part, rest = (instantx_name(name) if is_time else name).split(".", 1)
        nested[part][rest] = tensor.contiguous().clone()

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            try:
                torch.save(nested, file)
            except RuntimeError as error:
                # torch's writer hides what the disk said behind an error of its own.
                raise disk_error_behind(error) or error from None

    atomic_write(path, write)
