"""Where the parts of a model lie: in a diffusers folder or one original checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from maulstick.errors import ModelError
from maulstick.families.configs import TOKENIZER_FOLDER, fit_text_encoder, fit_unet, fit_vae, shipped_config
from maulstick.families.ldm_keys import (
    CLIP_PREFIX,
    OPEN_CLIP_PREFIX,
    SDXL_CLIP_PREFIX,
    SDXL_OPEN_CLIP_PREFIX,
    UNET_PREFIX,
    UNUSED_TEXT_TENSORS,
    VAE_PREFIX,
    clip_weights,
    open_clip_weights,
    unet_weights,
    vae_weights,
)
from maulstick.families.recognise import VAE_ALONE, JsonObject, read_json, recognise_file
from maulstick.weight_files import NamedWeights, Slot, WeightFile, open_weights

Kind = Literal["sd1", "sd2", "sdxl", "sd3"]


@dataclass(frozen=True)
class Component:
    """One part of a model: its config in diffusers' (transformers') form, and its weights under that form's names."""

    config: JsonObject
    weights: NamedWeights


@dataclass(frozen=True)
class ModelSource:
    """All parts of a model on disk.

    Attributes:
        path: the folder or file.
        text_encoders, tokenizer_folders: by component name, such as "text_encoder_2".
        pad_tokens: padding by component name, where it is not what the tokenizer's folder says.
        states_prediction_type: whether the source itself says what the model predicts.
        notes: what the user should know about the source.
    """

    path: Path
    kind: Kind
    denoiser: Component
    vae: Component
    text_encoders: Mapping[str, Component]
    tokenizer_folders: Mapping[str, Path]
    scheduler_config: JsonObject
    states_prediction_type: bool
    pad_tokens: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_TEXT_ENCODERS: Mapping[Kind, tuple[str, ...]] = {
    "sd1": ("text_encoder",),
    "sd2": ("text_encoder",),
    "sdxl": ("text_encoder", "text_encoder_2"),
}
# OpenCLIP pads with "!" (token 0), OpenAI's CLIP with the end mark. A folder's tokenizer says so, a single file cannot.
_PAD_TOKENS: Mapping[Kind, Mapping[str, str]] = {
    "sd1": {},
    "sd2": {"text_encoder": "!"},
    "sdxl": {"text_encoder_2": "!"},
}
_STEMS = ("diffusion_pytorch_model",)
TEXT_ENCODER_STEMS = ("model", "pytorch_model")
# In the order of preference: full precision before half, safe before pickled.
_WEIGHT_FILE_NAMES = (
    "{}.safetensors",
    "{}.safetensors.index.json",
    "{}.fp16.safetensors",
    "{}.safetensors.index.fp16.json",
    "{}.bf16.safetensors",
    "{}.bin",
    "{}.fp16.bin",
)
# Before diffusers had one attention module for everything, the VAE's projections had these names.
_OLD_ATTENTION_NAMES = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}

# Tensors of a whole checkpoint that training and drawing have no use for: running averages, noise schedules, losses.
_UNUSED_IN_CHECKPOINT = (
    "model_ema.",
    "loss.",
    "embedding_manager.",
    "denoiser.",
    "cond_stage_model.",
    "v_pred",
    "ztsnr",
)
# Fine-tunes whose noise schedule ends in pure noise carry an empty tensor of this name.
_ZERO_SNR_MARK = "ztsnr"


def open_folder(folder: Path, kind: Kind) -> ModelSource:
    """Open a diffusers folder with a UNet that ``recognise_folder`` has found to be of this kind."""
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json")
    names = _TEXT_ENCODERS[kind]
    return ModelSource(
        path=folder,
        kind=kind,
        denoiser=folder_component(folder / "unet"),
        vae=folder_component(folder / "vae"),
        text_encoders={name: clip_in_folder(folder / name) for name in names},
        tokenizer_folders={
            name: checked_tokenizer(folder / name.replace("text_encoder", "tokenizer")) for name in names
        },
        scheduler_config=scheduler,
        states_prediction_type="prediction_type" in scheduler,
    )


def open_single_file(file: WeightFile, kind: Kind, *, predicts_v: bool) -> ModelSource:
    """Open an original checkpoint with a UNet that ``recognise_file`` has found to be of this kind."""
    model = _shipped_model(kind, predicts_v=predicts_v)
    text_prefixes = ("cond_stage_model.",) if kind != "sdxl" else (SDXL_CLIP_PREFIX, SDXL_OPEN_CLIP_PREFIX)
    for prefix, part in ((VAE_PREFIX, "VAE"), *((prefix, "text encoder") for prefix in text_prefixes)):
        if not any(name.startswith(prefix) for name in file.shapes):
            raise ModelError(f"{file.path} has no {part} (no tensor named {prefix}…). Use a checkpoint with all parts.")
    unet, vae = unet_weights(file), vae_weights(file)
    return ModelSource(
        path=file.path,
        kind=kind,
        denoiser=Component(fit_unet(shipped_config(model, "unet"), unet), unet),
        vae=Component(fit_vae(shipped_config(model, "vae"), vae), vae),
        text_encoders={name: _text_encoder_in_file(file, model, name) for name in _TEXT_ENCODERS[kind]},
        tokenizer_folders=dict.fromkeys(_TEXT_ENCODERS[kind], TOKENIZER_FOLDER),
        scheduler_config={
            **shipped_config(model, "scheduler"),
            "prediction_type": "v_prediction" if predicts_v else "epsilon",
            **({"rescale_betas_zero_snr": True} if _ZERO_SNR_MARK in file.shapes else {}),
        },
        states_prediction_type=False,
        pad_tokens=_PAD_TOKENS[kind],
        notes=notes_on_unknown_tensors(file),
    )


def _shipped_model(kind: Kind, *, predicts_v: bool) -> str:
    names = {"sd1": "sd1", "sd2": "sd2-768-v" if predicts_v else "sd2-base", "sdxl": "sdxl-base", "sd3": "sd3"}
    return names[kind]


def _text_encoder_in_file(file: WeightFile, model: str, name: str) -> Component:
    config = shipped_config(model, name)
    layers = config["num_hidden_layers"]
    if name == "text_encoder_2":
        weights = open_clip_weights(file, layers, SDXL_OPEN_CLIP_PREFIX, with_projection=True)
    elif model == "sdxl-base":
        weights = clip_weights(file, SDXL_CLIP_PREFIX)
    elif any(tensor.startswith(OPEN_CLIP_PREFIX) for tensor in file.shapes):
        weights = open_clip_weights(file, layers)
    else:
        weights = clip_weights(file)
    return Component(fit_text_encoder(config, weights), weights)


def open_vae(path: Path, kind: Kind = "sd1") -> Component:
    """Open a VAE of its own: a folder (of the VAE or of a whole model), or a file in either layout.

    ``kind`` is that of the model it is for: a single file does not say how its latents are scaled.
    """
    if not path.exists():
        raise ModelError(f"The VAE {path} does not exist.")
    if path.is_dir():
        folder = path / "vae" if (path / "vae").is_dir() else path
        if not (folder / "config.json").is_file():
            raise ModelError(f"{path} is not a VAE: neither it nor a folder 'vae' in it has a config.json.")
        return folder_component(folder)
    file = open_weights(path)
    recognised = recognise_file(file)
    if any(name.startswith(VAE_PREFIX) for name in file.shapes):
        weights = vae_weights(file)
    elif recognised is not VAE_ALONE:
        raise recognised.refusal(path, "a VAE")
    elif any(name.startswith("encoder.down_blocks.") for name in file.shapes):
        weights = as_named(file).renamed(_current_attention_name)
    else:
        weights = vae_weights(file, prefix="")
    config = shipped_config(_shipped_model(kind, predicts_v=False), "vae")
    return Component(fit_vae(config, weights), weights)


def folder_component(folder: Path) -> Component:
    """Open a denoiser or VAE of a diffusers folder."""
    config = read_json(folder / "config.json")
    file = open_weights(find_weights(folder, _STEMS))
    return Component(config, as_named(file).renamed(_current_attention_name))


def clip_in_folder(folder: Path, *, with_projection: bool = False) -> Component:
    """Open a CLIP text encoder of a diffusers folder; SD 1.x, SD 2.x and SDXL's first leave its projection aside."""
    config = read_json(folder / "config.json")
    file = open_weights(find_weights(folder, TEXT_ENCODER_STEMS))
    unused = UNUSED_TEXT_TENSORS
    if with_projection or folder.name == "text_encoder_2":
        unused -= {"text_projection.weight"}
    # Some folders have the config of a whole CLIP model there.
    text = as_named(file, unused).renamed(lambda name: name.removeprefix("text_model."))
    return Component(config.get("text_config", config), text)


def checked_tokenizer(folder: Path) -> Path:
    """Return the folder of a CLIP tokenizer, if all its files are there."""
    if not (folder / "tokenizer.json").is_file():
        absent = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
        if absent:
            raise ModelError(f"{folder} lacks {' and '.join(absent)}. Copy the tokenizer's files again.")
    return folder


def find_weights(folder: Path, stems: Sequence[str]) -> Path:
    """Return the weight file of a folder, full precision before half and safe before pickled."""
    for pattern in _WEIGHT_FILE_NAMES:
        for stem in stems:
            if (folder / pattern.format(stem)).is_file():
                return folder / pattern.format(stem)
    present = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ModelError(f"{folder} has no weights: expected {stems[0]}.safetensors or .fp16.safetensors, found {present}.")


def as_named(file: WeightFile, unused: frozenset[str] = frozenset()) -> NamedWeights:
    return NamedWeights(file, {name: Slot(name, shape) for name, shape in file.shapes.items() if name not in unused})


def _current_attention_name(name: str) -> str:
    for old, new in _OLD_ATTENTION_NAMES.items():
        name = name.replace(old, new)
    return name


def notes_on_unknown_tensors(file: WeightFile, further_parts: Sequence[str] = ()) -> tuple[str, ...]:
    """Name tensors outside all parts that no known tool writes; inside a part they are an error."""
    parts = (UNET_PREFIX, VAE_PREFIX, CLIP_PREFIX, OPEN_CLIP_PREFIX, SDXL_CLIP_PREFIX, SDXL_OPEN_CLIP_PREFIX)
    unknown = [name for name in file.shapes if "." in name and not name.startswith((*parts, *_UNUSED_IN_CHECKPOINT))]
    unknown = [name for name in unknown if not name.startswith(("model.logit_scale", *further_parts))]
    if not unknown:
        return ()
    return (f"{file.path.name} holds {len(unknown)} tensors of no known use, left out: {', '.join(unknown[:3])}.",)
