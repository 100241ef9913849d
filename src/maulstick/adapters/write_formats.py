"""Writing a LoRA in the naming of kohya, diffusers, PEFT or ComfyUI, with the trained strength in every reader."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor

from maulstick.adapters.adapter_tensors import kohya_parts
from maulstick.adapters.factors import Folding, LoraWeights, cast_weights, fold_alphas
from maulstick.adapters.files import save_lora_file
from maulstick.adapters.joint_layout import separated_module
from maulstick.adapters.joint_names import TRANSFORMER, JointKeyNames
from maulstick.adapters.joint_names import original_path as joint_original_path
from maulstick.adapters.key_names import Location
from maulstick.adapters.lora_family import LoraFamily, component_of
from maulstick.adapters.module_kinds import DoraWeights, kind_of
from maulstick.adapters.tensor_names import Layout, original_path, sai_name
from maulstick.errors import ModelError
from maulstick.files_io import atomic_write

UnetNames = Literal["sai", "diffusers"]

_COMFYUI_ENCODERS = {
    "sd1": {"lora_te": "clip_l"},
    "sd": {"lora_te": "clip_l"},
    "sd2": {"lora_te": "clip_h"},
    "sdxl": {"lora_te1": "clip_l", "lora_te2": "clip_g"},
    "sd3": {"lora_te1": "clip_l", "lora_te2": "clip_g", "lora_te3": "t5xxl"},
}
_PEFT_PREFIX = "base_model.model."
_KOHYA_PARTS = ("lora_down.weight", "lora_up.weight")
_PEFT_PARTS = ("lora_A.weight", "lora_B.weight")


def layout_tensors(
    modules: Mapping[str, LoraWeights | DoraWeights],
    family: LoraFamily,
    *,
    layout: Layout = "kohya",
    dtype: torch.dtype = torch.float32,
    unet_names: UnetNames = "sai",
) -> dict[str, Tensor]:
    """The tensors of a file that holds ``modules`` (canonical name -> LoRA, or DoRA of a LoRA), on the CPU.

    ``unet_names`` matters to kohya's layout of SDXL only: the original (SAI) names that sd-scripts writes, or those of
    diffusers. Alphas become one for each component in kohya's and ComfyUI's layout; in those of diffusers and PEFT the
    strength goes into the up factor, so that alpha equals the rank, which is what their readers take it to be.

    Raises:
        ModelError: a module has no name in that layout, or is a DoRA that its readers cannot apply.
    """
    down_part, up_part = _KOHYA_PARTS if layout in ("kohya", "comfyui") else _PEFT_PARTS
    tensors: dict[str, Tensor] = {}
    for name, weights in folded(lora_changes(modules), layout).items():
        module = modules[name]
        if isinstance(family.key_names, JointKeyNames) and layout in ("diffusers", "peft"):
            _refuse_for_joint(name, module, family, layout)
            parts = separated_module(name, weights)
            if not parts:
                raise _no_name(name, family, layout)
            named = [(_dotted_stem(location, layout), part) for location, part in parts.items()]
        else:
            named = [(_stem(name, family, layout, unet_names), weights)]
        for stem, part in named:
            cast = cast_weights(part, dtype)
            tensors[f"{stem}.{down_part}"] = cast.down.detach().cpu()
            tensors[f"{stem}.{up_part}"] = cast.up.detach().cpu().contiguous()
            if cast.alpha is not None:
                tensors[f"{stem}.alpha"] = torch.tensor(cast.alpha, dtype=dtype)
        if isinstance(module, DoraWeights):
            magnitude_part, magnitude = _magnitude(name, module, layout)
            tensors[f"{named[0][0]}.{magnitude_part}"] = magnitude.detach().to("cpu", dtype)
    return tensors


def lora_changes(modules: Mapping[str, LoraWeights | DoraWeights]) -> dict[str, LoraWeights]:
    """The modules without the lengths of a DoRA.

    Raises:
        ModelError: a DoRA is of another kind than LoRA.
    """
    changes: dict[str, LoraWeights] = {}
    for name, module in modules.items():
        change = module.change if isinstance(module, DoraWeights) else module
        if not isinstance(change, LoraWeights):
            raise ModelError(f"Module '{name}' is a DoRA of a {kind_of(change)}, which has no other naming.")
        changes[name] = change
    return changes


def _magnitude(name: str, module: DoraWeights, layout: Layout) -> tuple[str, Tensor]:
    if layout in ("kohya", "comfyui"):
        return "dora_scale", kohya_parts(module)["dora_scale"]
    if module.axis != 0:
        raise ModelError(
            f"Module '{name}' is a DoRA with a length for each input, but diffusers and PEFT have one for each output. "
            "Train with wd_on_output = true for them, or merge it into a checkpoint."
        )
    is_conv = kohya_parts(module)["dora_scale"].ndim == 4
    return "lora_magnitude_vector", module.magnitude.reshape(1, -1, 1, 1) if is_conv else module.magnitude.flatten()


def folded(modules: Mapping[str, LoraWeights], layout: Layout = "kohya") -> dict[str, LoraWeights]:
    """The modules with the alphas that ``layout_tensors`` writes, and factors that make up for what changed."""
    by_component: dict[str, dict[str, LoraWeights]] = {}
    for name, weights in modules.items():
        by_component.setdefault(component_of(name), {})[name] = weights
    folding: Folding = "one_alpha" if layout in ("kohya", "comfyui") else "no_alpha"
    return {
        name: weights for members in by_component.values() for name, weights in fold_alphas(members, folding).items()
    }


def _stem(name: str, family: LoraFamily, layout: Layout, unet_names: UnetNames) -> str:
    if layout == "kohya":
        if name.startswith("lora_transformer_"):
            raise _no_name(name, family, layout)
        return sai_name(name) if family.kind == "sdxl" and unet_names == "sai" else name
    if layout == "comfyui":
        return _comfyui_stem(name, family)
    return _dotted_stem(_dotted(name, family, layout), layout)


def _dotted_stem(location: Location, layout: Layout) -> str:
    return f"{_PEFT_PREFIX}{location.path}" if layout == "peft" else f"{location.component}.{location.path}"


def _refuse_for_joint(name: str, module: LoraWeights | DoraWeights, family: LoraFamily, layout: Layout) -> None:
    """Refuse what diffusers' and PEFT's forms of an SD3 LoRA cannot hold."""
    if isinstance(module, DoraWeights):
        raise ModelError(
            f"Module '{name}' is a DoRA of {family.name}; diffusers and PEFT have other modules there, so its lengths "
            "fit nothing. Merge it into a checkpoint instead."
        )
    if layout == "peft" and name.startswith("lora_te"):
        raise ModelError(
            f"Module '{name}': PEFT's names do not tell the text encoders of {family.name} apart. Use the layout "
            "diffusers."
        )


def _dotted(name: str, family: LoraFamily, layout: Layout) -> Location:
    """diffusers' component and the path in it."""
    location = None if family.key_names is None else family.key_names.locate(name)
    if location is None:
        raise _no_name(name, family, layout)
    path = location.path
    if layout == "peft" and location.component == "text_encoder":
        # PEFT goes by the paths of the network itself, and transformers 5 has no such level in CLIPTextModel.
        path = path.removeprefix("text_model.")
    return Location(location.component, path)


def _comfyui_stem(name: str, family: LoraFamily) -> str:
    component = component_of(name)
    if component == "lora_unet" and family.key_names is not None:
        if isinstance(family.key_names, JointKeyNames):
            location = family.key_names.locate(name)
            path = None if location is None else joint_original_path(location.path)
        else:
            path = original_path(name, is_sdxl=family.kind == "sdxl")
        if path is not None:
            return f"diffusion_model.{path}"
    encoder = _COMFYUI_ENCODERS.get(family.kind, {}).get(component)
    if encoder is None:
        raise _no_name(name, family, "comfyui")
    return f"text_encoders.{encoder}.transformer.{_dotted(name, family, 'comfyui').path}"


def _no_name(name: str, family: LoraFamily, layout: Layout) -> ModelError:
    return ModelError(
        f"Module '{name}' (a LoRA for {family.name}) has no known name in the layout '{layout}'. Layouts can be "
        "changed for SD 1.x, SD 2.x, SDXL and SD3; for other families only the number format can."
    )


def save_layout(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, layout: Layout = "kohya"
) -> None:
    """Write what ``layout_tensors`` returned: one file, or a folder with a PEFT adapter for each component.

    PEFT's folders get an ``adapter_config.json``. diffusers' layout gets no config entry (``lora_adapter_metadata``):
    without one its readers take alpha to be the rank, which it is, and with one diffusers 0.42 looks for the modules of
    a text encoder under names that transformers 5 does not have. Nothing is left behind when writing fails.
    """
    if layout == "peft":
        _save_peft(path, tensors, metadata)
        return
    save_lora_file(path, tensors, {**metadata, "format": "pt"} if layout == "diffusers" else metadata)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside ``folder`` to write into, and rename it at the end; remove it after a failure."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{uuid4().hex[:8]}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save_peft(folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    with new_folder(folder) as temporary:
        for component, members in _by_component(tensors).items():
            part = temporary / component
            part.mkdir()
            config = {"peft_type": "LORA", "task_type": None, "inference_mode": True, "bias": "none"}
            config |= _peft_config(members)
            save_lora_file(
                part / "adapter_model.safetensors",
                {_PEFT_PREFIX + key: tensor for key, tensor in members.items()},
                {**metadata, "format": "pt"},
            )
            atomic_write(part / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True))


def _by_component(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Component -> its tensors by their path; PEFT's names do not say which it is, but the paths tell."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        path = key.removeprefix(_PEFT_PREFIX)
        component = "unet"
        if joint_original_path(path.rsplit(".lora_", 1)[0]) or path.startswith("transformer_blocks."):
            component = TRANSFORMER
        elif path.startswith("encoder.layers."):
            component = "text_encoder"
        elif path.startswith("text_model."):
            component = "text_encoder_2"
        parts.setdefault(component, {})[path] = tensor
    return parts


def _peft_config(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """PEFT's description of factors whose strength is 1: alpha is the rank of each module."""
    ending = ".lora_A.weight"
    ranks = {key.removesuffix(ending): tensor.shape[0] for key, tensor in tensors.items() if key.endswith(ending)}
    common = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: rank for path, rank in ranks.items() if rank != common}
    return {
        "r": common,
        "lora_alpha": common,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "use_dora": any(key.endswith("lora_magnitude_vector") for key in tensors),
        "use_rslora": False,
    }
