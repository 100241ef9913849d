"""Where the parts of an SD 1.x/2.x model lie: in a diffusers folder or one original checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maulstick.errors import ModelError
from maulstick.families.configs import TOKENIZER_FOLDER, fit_text_encoder, fit_unet, fit_vae, shipped_config
from maulstick.families.ldm_keys import (
    CLIP_PREFIX,
    OPEN_CLIP_PREFIX,
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


@dataclass(frozen=True)
class Component:
    """One part of a model: its config in diffusers' (transformers') form, and its weights under that form's names."""

    config: JsonObject
    weights: NamedWeights


@dataclass(frozen=True)
class SdSource:
    """All parts of an SD 1.x/2.x model on disk.

    Attributes:
        path: the folder or file.
        is_v2: whether the architecture is that of SD 2.x.
        states_prediction_type: whether the source itself says what the model predicts.
        notes: what the user should know about the source.
    """

    path: Path
    is_v2: bool
    unet: Component
    vae: Component
    text_encoder: Component
    tokenizer_folder: Path
    scheduler_config: JsonObject
    states_prediction_type: bool
    notes: tuple[str, ...] = ()


_NAMES_IN_FOLDER = {
    "unet": ("diffusion_pytorch_model",),
    "vae": ("diffusion_pytorch_model",),
    "text_encoder": ("model", "pytorch_model"),
}
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


def open_folder(folder: Path, *, is_v2: bool) -> SdSource:
    """Open a diffusers folder that ``recognise_folder`` has found to be SD 1.x or 2.x."""
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json")
    tokenizer = folder / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        absent = [name for name in ("vocab.json", "merges.txt") if not (tokenizer / name).is_file()]
        if absent:
            raise ModelError(f"{tokenizer} lacks {' and '.join(absent)}. Copy the tokenizer's files again.")
    return SdSource(
        path=folder,
        is_v2=is_v2,
        unet=_folder_component(folder / "unet", "unet"),
        vae=_folder_component(folder / "vae", "vae"),
        text_encoder=_folder_component(folder / "text_encoder", "text_encoder"),
        tokenizer_folder=tokenizer,
        scheduler_config=scheduler,
        states_prediction_type="prediction_type" in scheduler,
    )


def open_single_file(file: WeightFile, *, is_v2: bool, predicts_v: bool) -> SdSource:
    """Open an original checkpoint that ``recognise_file`` has found to be SD 1.x or 2.x."""
    model = ("sd2-768-v" if predicts_v else "sd2-base") if is_v2 else "sd1"
    for prefix, part in ((VAE_PREFIX, "VAE"), ("cond_stage_model.", "text encoder")):
        if not any(name.startswith(prefix) for name in file.shapes):
            raise ModelError(f"{file.path} has no {part} (no tensor named {prefix}…). Use a checkpoint with all parts.")
    unet, vae = unet_weights(file), vae_weights(file)
    text_config = shipped_config(model, "text_encoder")
    if any(name.startswith(OPEN_CLIP_PREFIX) for name in file.shapes):
        text = open_clip_weights(file, text_config["num_hidden_layers"])
    else:
        text = clip_weights(file)
    return SdSource(
        path=file.path,
        is_v2=is_v2,
        unet=Component(fit_unet(shipped_config(model, "unet"), unet), unet),
        vae=Component(fit_vae(shipped_config(model, "vae"), vae), vae),
        text_encoder=Component(fit_text_encoder(text_config, text), text),
        tokenizer_folder=TOKENIZER_FOLDER,
        scheduler_config={
            **shipped_config(model, "scheduler"),
            "prediction_type": "v_prediction" if predicts_v else "epsilon",
        },
        states_prediction_type=False,
        notes=_notes_on_unknown_tensors(file),
    )


def open_vae(path: Path) -> Component:
    """Open a VAE of its own: a folder (of the VAE or of a whole model), or a file in either layout."""
    if not path.exists():
        raise ModelError(f"The VAE {path} does not exist.")
    if path.is_dir():
        folder = path / "vae" if (path / "vae").is_dir() else path
        if not (folder / "config.json").is_file():
            raise ModelError(f"{path} is not a VAE: neither it nor a folder 'vae' in it has a config.json.")
        return _folder_component(folder, "vae")
    file = open_weights(path)
    recognised = recognise_file(file)
    if any(name.startswith(VAE_PREFIX) for name in file.shapes):
        weights = vae_weights(file)
    elif recognised is not VAE_ALONE:
        raise recognised.refusal(path, "a VAE")
    elif any(name.startswith("encoder.down_blocks.") for name in file.shapes):
        weights = _as_named(file).renamed(_current_attention_name)
    else:
        weights = vae_weights(file, prefix="")
    return Component(fit_vae(shipped_config("sd1", "vae"), weights), weights)


def _folder_component(folder: Path, part: str) -> Component:
    config = read_json(folder / "config.json")
    file = open_weights(_find_weights(folder, _NAMES_IN_FOLDER[part]))
    if part == "text_encoder":
        # Some folders have the config of a whole CLIP model there.
        config = config.get("text_config", config)
        text = _as_named(file, UNUSED_TEXT_TENSORS)
        return Component(config, text.renamed(lambda name: name.removeprefix("text_model.")))
    return Component(config, _as_named(file).renamed(_current_attention_name))


def _find_weights(folder: Path, stems: Sequence[str]) -> Path:
    for pattern in _WEIGHT_FILE_NAMES:
        for stem in stems:
            if (folder / pattern.format(stem)).is_file():
                return folder / pattern.format(stem)
    present = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ModelError(f"{folder} has no weights: expected {stems[0]}.safetensors or .fp16.safetensors, found {present}.")


def _as_named(file: WeightFile, unused: frozenset[str] = frozenset()) -> NamedWeights:
    return NamedWeights(file, {name: Slot(name, shape) for name, shape in file.shapes.items() if name not in unused})


def _current_attention_name(name: str) -> str:
    for old, new in _OLD_ATTENTION_NAMES.items():
        name = name.replace(old, new)
    return name


def _notes_on_unknown_tensors(file: WeightFile) -> tuple[str, ...]:
    """Name tensors outside the three parts that no known tool writes; inside a part they are an error."""
    parts = (UNET_PREFIX, VAE_PREFIX, CLIP_PREFIX, OPEN_CLIP_PREFIX)
    unknown = [name for name in file.shapes if "." in name and not name.startswith((*parts, *_UNUSED_IN_CHECKPOINT))]
    unknown = [name for name in unknown if not name.startswith("model.logit_scale")]
    if not unknown:
        return ()
    return (f"{file.path.name} holds {len(unknown)} tensors of no known use, left out: {', '.join(unknown[:3])}.",)
