"""A whole checkpoint as a set of weight files, and which tensor of which file each LoRA module changes.

Works on names alone, for diffusers folders and for single files in the original layout, and reads one tensor at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from maulstick.adapters.joint_layout import has_swapped_rows, separated_module, swapped_halves
from maulstick.adapters.joint_names import (
    DENOISER_PREFIX,
    DIFFUSERS_PREFIX,
    TRANSFORMER,
    JointKeyNames,
    place_in_joined,
)
from maulstick.adapters.key_names import from_original_layout
from maulstick.adapters.lora_family import FAMILIES, LoraFamily
from maulstick.adapters.module_kinds import AdapterModule, exact_factors
from maulstick.adapters.safetensors_stream import SafetensorsReader, TensorSpec, tensor_bytes
from maulstick.errors import ModelError
from maulstick.families.recognise import SD1, SD2, SD3, SDXL, Recognised, recognise_file, recognise_folder
from maulstick.weight_files import PickleFile, open_weights

_WANTED = "an SD 1.x, SD 2.x, SDXL or SD3 text-to-image model"
_UNET_PREFIX = "model.diffusion_model."
COMPONENTS = ("unet", TRANSFORMER, "text_encoder", "text_encoder_2", "text_encoder_3", "vae")
_WEIGHT_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_OPEN_CLIP_PARTS = {
    "attn.out_proj.weight": "self_attn_out_proj",
    "mlp.c_fc.weight": "mlp_fc1",
    "mlp.c_proj.weight": "mlp_fc2",
}
_FUSED = "attn.in_proj_weight"


class Part(NamedTuple):
    """What a LoRA module changes in a tensor: all of it, or one of ``of`` equal slices of rows."""

    module: str
    place: int = 0
    of: int = 1

    def rows(self, tensor: Tensor) -> Tensor:
        """The part of ``tensor`` as a view."""
        size = tensor.shape[0] // self.of
        return tensor[self.place * size : (self.place + 1) * size]


class TensorSource(Protocol):
    """A file of named tensors that are read one at a time."""

    @property
    def path(self) -> Path: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; it may be changed."""
        ...

    def chunks(self, name: str) -> Iterable[bytes | memoryview]:
        """The bytes of a tensor."""
        ...


class _PickleSource:
    """A pickle's tensors, mapped where its format allows that."""

    def __init__(self, path: Path) -> None:
        file = PickleFile(path)
        self.path = path
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        file.read(list(file.shapes), self._tensors.__setitem__)
        self.specs = {name: TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def chunks(self, name: str) -> Iterable[bytes | memoryview]:
        return tensor_bytes(self._tensors[name])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened.

    Attributes:
        path: folder or file.
        family: of its LoRA files.
        sources: component ("" for a single file) -> its files; a large network may lie in several.
        parts: (component, name of tensor) -> what LoRA modules change in it.
        places: canonical module name -> (source, name of tensor, part).
    """

    path: Path
    family: LoraFamily
    sources: Mapping[str, tuple[TensorSource, ...]]
    parts: Mapping[tuple[str, str], tuple[Part, ...]]
    places: Mapping[str, tuple[TensorSource, str, Part]] = field(repr=False)

    @property
    def is_folder(self) -> bool:
        return "" not in self.sources

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Number formats of the weights that LoRA modules change."""
        return tuple(source.specs[name].dtype for source, name, _ in self.places.values())

    @cached_property
    def modules(self) -> Mapping[str, tuple[str, ...]]:
        """Names of modules in LoRA files -> the names in ``places`` whose weights, row by row, are what each changes.

        Several where this layout has more than one tensor in the place of a single weight.
        """
        parts: dict[str, dict[int, str]] = {}
        for name in self.places:
            found = place_in_joined(name) if name.startswith(DIFFUSERS_PREFIX) else None
            module, place = (name, 0) if found is None else (found.name, found.place)
            parts.setdefault(module, {})[place] = name
        return {module: tuple(name for _, name in sorted(found.items())) for module, found in parts.items()}

    def module_shape(self, module: str) -> tuple[int, ...]:
        """Shape of the weight that a LoRA module (one of ``modules``) changes."""
        shapes = []
        for place in self.modules[module]:
            source, name, part = self.places[place]
            rows, *rest = source.specs[name].shape
            shapes.append((rows // part.of, *rest))
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read_module(self, module: str) -> Tensor:
        """The weight that a LoRA module (one of ``modules``) changes, with the rows as LoRA files have them."""
        found = []
        for place in self.modules[module]:
            source, name, part = self.places[place]
            found.append(part.rows(source.read(name)))
        weight = found[0] if len(found) == 1 else torch.cat(found)
        in_diffusers_order = module not in self.places
        return (
            swapped_halves(weight) if in_diffusers_order and has_swapped_rows(module, tuple(weight.shape)) else weight
        )

    def pieces(self, name: str, module: AdapterModule) -> dict[str, AdapterModule]:
        """The module ``name`` as what it changes here, by the names in ``places``: one, or one for each of the tensors
        that this layout has in the place of a single weight.

        Raises:
            Unsupported: it would have to be taken apart, and its kind does not allow that.
        """
        is_joint = self.is_folder and isinstance(self.family.key_names, JointKeyNames)
        if not is_joint or not name.startswith(DENOISER_PREFIX):
            return {name: module}
        parts = separated_module(name, exact_factors(module))
        return {DIFFUSERS_PREFIX + _underscored(location.path): part for location, part in parts.items()}

    def tensors(self) -> Iterator[tuple[str, TensorSource, str]]:
        """(component, source, name) of every tensor."""
        for component, files in self.sources.items():
            for source in files:
                for name in source.specs:
                    yield component, source, name


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a diffusers folder or a single file of SD 1.x, SD 2.x, SDXL or SD3; no tensor is read yet.

    Raises:
        ModelError: it is something else, damaged or incomplete; the message says what.
    """
    if not path.exists():
        raise ModelError(f"There is no model at {path}.")
    sources: dict[str, tuple[TensorSource, ...]]
    if path.is_dir():
        family = _family(recognise_folder(path), path)
        sources = {name: _component_sources(path / name) for name in COMPONENTS if (path / name).is_dir()}
        denoiser = TRANSFORMER if isinstance(family.key_names, JointKeyNames) else "unet"
        if denoiser not in sources:
            raise ModelError(f"The model folder {path} is not complete: it lacks {denoiser}.")
    else:
        recognised = recognise_file(open_weights(path))
        family = _family(recognised, path)
        sources = {"": (open_source(path),)}
    parts: dict[tuple[str, str], tuple[Part, ...]] = {}
    places: dict[str, tuple[TensorSource, str, Part]] = {}
    for component, files in sources.items():
        for source in files:
            for name, spec in source.specs.items():
                # Biases and the scales of norms are vectors; a LoRA changes matrices and convolutions.
                found = _parts(component, name, family) if len(spec.shape) > 1 else ()
                if found:
                    parts[component, name] = found
                    places |= {part.module: (source, name, part) for part in found}
    return Checkpoint(path, family, sources, parts, places)


def open_source(path: Path) -> TensorSource:
    """Open one weight file for reading tensor by tensor."""
    return _PickleSource(path) if path.suffix.lower() in (".ckpt", ".pt", ".pth", ".bin") else SafetensorsReader(path)


def _family(recognised: Recognised, path: Path) -> LoraFamily:
    kinds = {SD1: "sd1", SD2: "sd2", SDXL: "sdxl", SD3: "sd3"}
    if recognised not in kinds:
        raise recognised.refusal(path, _WANTED)
    return FAMILIES[kinds[recognised]]


def _component_sources(folder: Path) -> tuple[TensorSource, ...]:
    """The weights of one component: full precision before half, safetensors before pickles."""
    for ending in ("", ".fp16", ".bf16"):
        for stem in _WEIGHT_STEMS:
            whole = folder / f"{stem}{ending}.safetensors"
            if whole.is_file():
                return (open_source(whole),)
            index = folder / f"{stem}.safetensors.index{ending}.json"
            if index.is_file():
                return tuple(open_source(folder / name) for name in _shards(index))
    for stem in _WEIGHT_STEMS:
        if (folder / f"{stem}.bin").is_file():
            return (open_source(folder / f"{stem}.bin"),)
    raise ModelError(f"{folder} has no weights: expected {_WEIGHT_STEMS[0]}.safetensors or model.safetensors.")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weight files: {error}.") from error
    for name in names:
        if not (index.parent / name).is_file():
            raise ModelError(f"{index} names {name}, which is not in {index.parent}. Download that part too.")
    return names


def _parts(component: str, name: str, family: LoraFamily) -> tuple[Part, ...]:
    """The LoRA modules that change a tensor; none for biases and everything outside UNet and text encoders."""
    if component:
        return _folder_part(component, name, family)
    if name.startswith(_UNET_PREFIX):
        path = name.removeprefix(_UNET_PREFIX)
        return _weight_part(f"lora_unet_{from_original_layout(_underscored(path))}", path)
    if joint := re.fullmatch(r"text_encoders\.(clip_l|clip_g|t5xxl)\.transformer\.(.+)", name):
        prefix = {"clip_l": "lora_te1", "clip_g": "lora_te2", "t5xxl": "lora_te3"}[joint[1]]
        return _text_part(prefix, joint[2])
    encoder = re.fullmatch(r"(cond_stage_model|conditioner\.embedders\.[01])\.(?:(transformer)|model)\.(.+)", name)
    if encoder is None:
        return ()
    is_second, is_clip, path = encoder[1].endswith(".1"), encoder[2] is not None, encoder[3]
    prefix = "lora_te2" if is_second else _first_encoder(family)
    if is_clip:
        return _text_part(prefix, path)
    layer = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", path)
    if layer is None:
        return ()
    stem = f"{prefix}_text_model_encoder_layers_{layer[1]}"
    if layer[2] == _FUSED:
        return tuple(Part(f"{stem}_self_attn_{role}_proj", place, 3) for place, role in enumerate("qkv"))
    tail = _OPEN_CLIP_PARTS.get(layer[2])
    return () if tail is None else (Part(f"{stem}_{tail}"),)


def _first_encoder(family: LoraFamily) -> str:
    return "lora_te1" if family.kind in ("sdxl", "sd3") else "lora_te"


def _folder_part(component: str, name: str, family: LoraFamily) -> tuple[Part, ...]:
    if component == "unet":
        return _weight_part(f"lora_unet_{_underscored(name)}", name)
    if component == TRANSFORMER:
        return _weight_part(DIFFUSERS_PREFIX + _underscored(name), name)
    if component == "vae":
        return ()
    further = {"text_encoder_2": "lora_te2", "text_encoder_3": "lora_te3"}
    return _text_part(further.get(component) or _first_encoder(family), name)


def _text_part(prefix: str, path: str) -> tuple[Part, ...]:
    if prefix == "lora_te3":
        return _weight_part(f"{prefix}_{_underscored(path)}", path) if path.startswith("encoder.block.") else ()
    path = path.removeprefix("text_model.")
    return _weight_part(f"{prefix}_text_model_{_underscored(path)}", path) if path.startswith("encoder.") else ()


def _underscored(path: str) -> str:
    return path.removesuffix(".weight").replace(".", "_")


def _weight_part(module: str, path: str) -> tuple[Part, ...]:
    return (Part(module),) if path.endswith(".weight") else ()
