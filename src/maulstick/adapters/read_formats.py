"""Reading adapter files of every program: kohya, diffusers (new and old), PEFT and ComfyUI, LoRA and its relatives."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.file_kinds import describe_kind
from maulstick.adapters.files import LoraFile
from maulstick.adapters.joint_layout import joined_modules
from maulstick.adapters.lora_family import (
    LoraFamily,
    component_of,
    kernel_size,
    recognise_lora_family,
    with_family_prefixes,
)
from maulstick.adapters.module_kinds import (
    AdapterModule,
    DoraWeights,
    OftWeights,
    PlainModule,
    Unsupported,
    build_module,
    change_shape,
    exact_factors,
    module_tensors,
)
from maulstick.adapters.safetensors_stream import SafetensorsReader
from maulstick.adapters.tensor_names import Layout, TensorName, parse_tensor_name
from maulstick.errors import ModelError, nearest_file_hint

_ACCEPTED = (
    "A LoRA file in the naming of kohya (lora_unet_….lora_down.weight), diffusers (unet.….lora_A.weight), PEFT "
    "(base_model.model.….lora_A.weight) or ComfyUI (diffusion_model.….lora_down.weight) is needed."
)
_FOR_IP_ADAPTERS = (
    "`maulstick generate --ip_adapter FILE --ip_image PICTURE` draws with it, `maulstick convert` gives it other "
    "programs' form."
)
# diffusers' name of a component -> prefix of canonical names.
_COMPONENTS = {
    "unet": "lora_unet",
    "text_encoder": "lora_te1",
    "text_encoder_2": "lora_te2",
    "text_encoder_3": "lora_te3",
    "transformer": "lora_transformer",
}
# Embeddings that some trainers pack into the same file.
_PACKED_EMBEDDINGS = "bundle_emb."


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as it lies in a file, in the file's dtype.

    Attributes:
        metadata: the file's own text entries.
        layout: whose naming the file has.
        original_layout: whether it names the UNet as the original (SAI) code does.
        modules: canonical name (see ``tensor_names``) -> module.
        dtypes: number formats of the tensors, by name such as "F16", without those of the alphas.
        not_finite: name of a tensor in the file -> number of its values that are NaN or infinite.
        notes: what the user should know about the file as it was found.
    """

    path: Path
    metadata: dict[str, str]
    layout: Layout
    original_layout: bool
    family: LoraFamily
    modules: dict[str, AdapterModule]
    dtypes: tuple[torch.dtype, ...]
    not_finite: dict[str, int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _PeftSettings:
    """Ranks and alphas as PEFT's config gives them, where the tensors do not."""

    rank: int
    alpha: float
    alpha_pattern: Mapping[str, float]
    rank_stabilised: bool

    def alpha_for(self, path: str, rank: int) -> float:
        """The alpha that divided by ``rank`` gives the strength PEFT applies."""
        alpha = next((a for key, a in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", path)), self.alpha)
        # Rank-stabilised LoRA (arXiv 2312.03732) divides by the root of the rank.
        return alpha * math.sqrt(rank) if self.rank_stabilised else alpha


def read_adapter(path: Path, *, allow_non_finite: bool = False) -> AdapterFile:
    """Read an adapter file, or a folder that PEFT or diffusers wrote.

    Raises:
        ModelError: it is no adapter, is damaged, incomplete, or (unless allowed) holds values that are not finite;
            the message says which.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[str, TensorName] = {}
    metadata: dict[str, str] = {}
    settings: dict[str, _PeftSettings] = {}
    foreign: list[str] = []
    for file, component in _files_of(path):
        read, entries = _read_tensors(file)
        metadata |= entries
        for key, tensor in read.items():
            parsed = parse_tensor_name(key)
            if parsed is None:
                foreign.append(key)
                continue
            if component is not None:
                parsed = _moved(parsed, component)
            full_key = key if component is None else f"{component}/{key}"
            tensors[full_key], names[full_key] = tensor, parsed
        settings |= _peft_settings(file, entries, component or _only_component(names))
    notes = _refuse_foreign(path, foreign, has_parts=bool(names))
    not_finite = {key: count for key, tensor in tensors.items() if (count := _count_not_finite(tensor))}
    if not_finite and not allow_non_finite:
        raise ModelError(_explain_not_finite(path, tensors, not_finite))
    modules, module_notes = _build_modules(path, tensors, names, settings)
    original = any(name.original_layout for name in names.values())
    layouts = [name.layout for name in names.values()]
    layout = max(set(layouts), key=layouts.count)
    shapes = {name: change_shape(module) for name, module in modules.items()}
    family = recognise_lora_family(shapes, metadata, original_layout=original and layout == "kohya")
    if family.kind == "sd3":
        try:
            modules = joined_modules(modules)
        except Unsupported as reason:
            raise ModelError(f"{path}: a module {reason}.") from None
    renamed = with_family_prefixes(modules, family)
    return AdapterFile(
        path=path,
        metadata=metadata,
        layout=layout,
        original_layout=original,
        family=family,
        modules={renamed[name]: module for name, module in sorted(modules.items())},
        dtypes=tuple(dict.fromkeys(t.dtype for key, t in tensors.items() if names[key].part != "alpha")),
        not_finite=not_finite,
        notes=(*notes, *module_notes),
    )


def read_plain_lora(path: Path) -> LoraFile:
    """Read a LoRA in any naming as if it were kohya's: what ``files.read_lora_file`` returns, for more files.

    LoHa and LoKr come out as the LoRA of higher rank that they are. Names are those that ``KeyNames.table`` knows.

    Raises:
        ModelError: as ``read_adapter``, or a module cannot be written as a LoRA (DoRA, OFT).
    """
    file = read_adapter(path)
    return LoraFile(file.path, file.metadata, plain_modules(file))


def plain_modules(file: AdapterFile) -> dict[str, LoraWeights]:
    """All modules of a file as LoRA.

    Raises:
        ModelError: a module is of a kind whose change depends on the base model's weights.
    """
    modules: dict[str, LoraWeights] = {}
    for name, module in file.modules.items():
        try:
            factors = exact_factors(module)
        except Unsupported as reason:
            raise ModelError(f"{file.path}: module '{name}' {reason}.") from None
        modules[name] = factors if factors is module else _with_kernel(factors, kernel_size(name, file.family))
    return modules


def _with_kernel(weights: LoraWeights, kernel: int | None) -> LoraWeights:
    """Give factors of a module that was kept as a matrix the dimensions of the convolution that it is for."""
    if kernel is None or weights.down.ndim == 4:
        return weights._replace(up=weights.up[..., None, None]) if weights.down.ndim == 4 else weights
    down = weights.down.reshape(weights.rank, -1, kernel, kernel)
    return weights._replace(down=down, up=weights.up[..., None, None])


def _files_of(path: Path) -> Iterator[tuple[Path, str | None]]:
    """The files of an adapter, and the component that all of a file is for where the folder says so."""
    if path.is_file():
        yield path, None
        return
    if not path.is_dir():
        raise ModelError(f"There is no file {path}.{nearest_file_hint(path)}")
    for stem in ("adapter_model", "pytorch_lora_weights"):
        for ending in (".safetensors", ".bin"):
            if (path / f"{stem}{ending}").is_file():
                yield path / f"{stem}{ending}", None
                return
    found = [
        (file, component)
        for component in _COMPONENTS
        for ending in (".safetensors", ".bin")
        if (file := path / component / f"adapter_model{ending}").is_file()
    ]
    if not found:
        raise ModelError(
            f"{path} is a folder without a LoRA: expected pytorch_lora_weights.safetensors (diffusers), "
            "adapter_model.safetensors (PEFT), or folders unet and text_encoder with the latter. Give the path of a "
            "file."
        )
    yield from found


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if path.suffix.lower() in (".bin", ".pt", ".pth", ".ckpt"):
        from maulstick.weight_files import PickleFile

        pickled = PickleFile(path)
        tensors: dict[str, Tensor] = {}
        pickled.read(list(pickled.shapes), tensors.__setitem__)
        return tensors, {}
    reader = SafetensorsReader(path)
    return {name: reader.read(name) for name in reader.specs}, reader.metadata


def _moved(name: TensorName, component: str) -> TensorName:
    """The name with the component that the folder says, where the file's own names only hint at it."""
    tail = name.module.removeprefix(f"{component_of(name.module)}_")
    return name._replace(module=f"{_COMPONENTS[component]}_{tail}")


def _only_component(names: Mapping[str, TensorName]) -> str | None:
    found = {component_of(name.module) for name in names.values() if name.path}
    return next((c for c, prefix in _COMPONENTS.items() if {prefix} == found), None)


def _peft_settings(file: Path, metadata: Mapping[str, str], component: str | None) -> dict[str, _PeftSettings]:
    """Prefix of canonical names -> ranks and alphas, from ``adapter_config.json`` or diffusers' metadata entry."""
    config_file = file.parent / "adapter_config.json"
    if file.stem == "adapter_model" and component is not None and config_file.is_file():
        return {_COMPONENTS[component]: _settings(_json_object(config_file.read_text("utf-8"), config_file))}
    if "lora_adapter_metadata" not in metadata:
        return {}
    entries = _json_object(metadata["lora_adapter_metadata"], file)
    found: dict[str, _PeftSettings] = {}
    for name, prefix in _COMPONENTS.items():
        own = {key.removeprefix(f"{name}."): value for key, value in entries.items() if key.startswith(f"{name}.")}
        if own:
            found[prefix] = _settings(own)
    return found


def _settings(config: Mapping[str, Any]) -> _PeftSettings:
    rank = int(config.get("r", 0))
    return _PeftSettings(
        rank=rank,
        alpha=float(config.get("lora_alpha", config.get("alpha", rank))),
        alpha_pattern=config.get("alpha_pattern") or {},
        rank_stabilised=bool(config.get("use_rslora", False)),
    )


def _json_object(text: str, where: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where}: the adapter's config is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{where}: the adapter's config should be a JSON object, but is a {type(content).__name__}.")
    return content


def _refuse_foreign(path: Path, foreign: list[str], *, has_parts: bool) -> tuple[str, ...]:
    """Raise for tensors that are no part of an adapter; return notes for those that may be left out."""
    others = [key for key in foreign if not key.startswith(_PACKED_EMBEDDINGS)]
    if others or not has_parts:
        kind = describe_kind(others)
        if kind is not None and not has_parts:
            advice = _FOR_IP_ADAPTERS if kind == "an IP-Adapter" else _ACCEPTED
            raise ModelError(f"{path} is {kind}, not a LoRA. {advice}")
        if not others:
            raise ModelError(f"{path} holds no tensors of a LoRA. {_ACCEPTED}")
        described = f"; it looks like {kind}" if kind else ""
        raise ModelError(f"{path} holds a tensor '{others[0]}' that is no part of a LoRA{described}. {_ACCEPTED}")
    if foreign:
        return (f"{path.name} also holds {len(foreign)} tensors of textual-inversion embeddings, left out.",)
    return ()


def _count_not_finite(tensor: Tensor) -> int:
    return tensor.numel() - int(torch.isfinite(tensor.float()).sum())


def _explain_not_finite(path: Path, tensors: Mapping[str, Tensor], not_finite: Mapping[str, int]) -> str:
    key = next(iter(not_finite))
    more = f"; {len(not_finite) - 1} more tensors have some, too" if len(not_finite) > 1 else ""
    return (
        f"{path}: tensor '{key}' holds {not_finite[key]} of {tensors[key].numel()} values that are not finite (NaN or "
        f"infinite){more}. The LoRA is broken; use one that was saved earlier. 'maulstick inspect' lists all."
    )


def _build_modules(
    path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, TensorName], settings: Mapping[str, _PeftSettings]
) -> tuple[dict[str, AdapterModule], list[str]]:
    parts: dict[str, dict[str, Tensor]] = {}
    paths: dict[str, str] = {}
    for key, name in names.items():
        of_module = parts.setdefault(name.module, {})
        if name.part in of_module:
            raise ModelError(f"{path} holds two tensors for '{name.module}' ({name.part}); one of them is '{key}'.")
        of_module[name.part] = tensors[key]
        paths[name.module] = name.path
    modules: dict[str, AdapterModule] = {}
    for module_name, of_module in parts.items():
        setting = settings.get(component_of(module_name))
        try:
            modules[module_name] = _with_alpha(of_module, paths[module_name], setting)
        except Unsupported as reason:
            raise ModelError(f"{path}: module '{module_name}' {reason}.") from None
    is_peft = any(name.layout == "peft" for name in names.values())
    if is_peft and not settings and not any("alpha" in of_module for of_module in parts.values()):
        return modules, [f"{path.name} has no adapter_config.json beside it: its alpha is taken to be the rank."]
    return modules, []


def _with_alpha(parts: Mapping[str, Tensor], path: str, setting: _PeftSettings | None) -> AdapterModule:
    stored = parts.get("alpha")
    if stored is not None:
        if stored.numel() != 1:
            raise Unsupported(f"has an alpha of shape {tuple(stored.shape)}, but it must be a single number")
        return build_module(parts, float(stored))
    if setting is None:
        return build_module(parts, None)
    module = build_module(parts, None, whole_lokr_rank=setting.rank)
    alpha = setting.alpha_for(path, module.rank)
    return _replace_alpha(module, alpha)


def _replace_alpha(module: AdapterModule, alpha: float) -> AdapterModule:
    if isinstance(module, DoraWeights):
        return replace(module, change=_plain_with_alpha(module.change, alpha))
    return replace(module, alpha=alpha) if isinstance(module, OftWeights) else _plain_with_alpha(module, alpha)


def _plain_with_alpha(module: PlainModule, alpha: float) -> PlainModule:
    return module._replace(alpha=alpha) if isinstance(module, LoraWeights) else replace(module, alpha=alpha)


def is_zero(module: AdapterModule) -> bool:
    """Whether a module changes nothing because one of the factors that start at zero is still there."""
    tensors = module_tensors(module)
    return any(not tensor.any() for name, tensor in tensors.items() if name != "magnitude")
