"""Telling what a model file or folder is, from names, shapes and configs alone, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maulstick.errors import ModelError
from maulstick.families.ldm_keys import UNET_PREFIX, VAE_PREFIX
from maulstick.weight_files import WeightFile

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Recognised:
    """What something is: ``kind`` for programs, ``description`` (with article) and ``advice`` for people."""

    kind: str
    description: str
    advice: str = ""

    def refusal(self, path: Path, wanted: str) -> ModelError:
        """Return the error that says why this cannot be used where ``wanted`` (such as "an SD 1.x model") is needed."""
        return ModelError(f"{path} is {self.description}, but {wanted} is needed here. {self.advice}".rstrip())


_LORA_ADVICE = (
    "Name the base model here; a LoRA to train on goes to --network_weights, one to draw with to 'generate --lora'."
)
_PART_ADVICE = "A whole checkpoint (UNet, VAE and text encoder in one file) or a diffusers folder is needed."
_BASE_ADVICE = "Train on the ordinary text-to-image model it was made from."

SD1 = Recognised("sd1", "an SD 1.x model")
SD2 = Recognised("sd2", "an SD 2.x model")
SDXL = Recognised("sdxl", "an SDXL model")
_SDXL_REFINER = Recognised("sdxl_refiner", "the SDXL refiner or a model like it", "Train on the SDXL base model.")
SD3 = Recognised("sd3", "an SD3 or SD3.5 model")
FLUX = Recognised("flux", "a FLUX model")
LORA = Recognised("lora", "a LoRA or similar adapter file", _LORA_ADVICE)
VAE_ALONE = Recognised("vae", "a VAE alone", f"{_PART_ADVICE} A VAE to use instead of the model's own goes to --vae.")

_ADAPTER_ENDINGS = (
    ".lora_down.weight",
    ".lora_up.weight",
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora.down.weight",
    ".lora.up.weight",
    ".hada_w1_a",
    ".lokr_w1",
    ".lokr_w1_a",
)
# A UNet tells its purpose by the channels it reads: the noisy latent has 4, the rest is what it is conditioned on.
_BY_INPUT_CHANNELS = {
    5: Recognised("depth", "a depth-to-image model (5 input channels)", _BASE_ADVICE),
    7: Recognised("upscaler", "an upscaler (7 input channels)", _BASE_ADVICE),
    8: Recognised("edit", "an image-editing model such as InstructPix2Pix (8 input channels)", _BASE_ADVICE),
    9: Recognised("inpainting", "an inpainting model (9 input channels)", _BASE_ADVICE),
}
_UNCLIP = Recognised("unclip", "a model with class or image embeddings (such as SD 2.1 unCLIP)", _BASE_ADVICE)

_SIGNS: tuple[tuple[Callable[[Collection[str]], bool], Recognised], ...] = (
    (lambda names: any(name.endswith(_ADAPTER_ENDINGS) for name in names), LORA),
    (
        lambda names: _any_starts(names, "control_model.", "controlnet_cond_embedding.", "input_hint_block."),
        Recognised("controlnet", "a ControlNet", _PART_ADVICE),
    ),
    (
        lambda names: _any_starts(names, "ip_adapter.", "image_proj."),
        Recognised("ip_adapter", "an IP-Adapter", _PART_ADVICE),
    ),
    (
        lambda names: (
            _any_starts(names, "conditioner.embedders.0.model.") and not _any_starts(names, "conditioner.embedders.1.")
        ),
        _SDXL_REFINER,
    ),
    (lambda names: any("joint_blocks.0." in name for name in names), SD3),
    (lambda names: any("double_blocks.0." in name for name in names), FLUX),
    (
        lambda names: _any_starts(names, "down_blocks.") and _any_starts(names, "time_embedding."),
        Recognised("unet", "a UNet alone", _PART_ADVICE),
    ),
    (
        lambda names: _any_starts(names, "input_blocks.") and _any_starts(names, "time_embed."),
        Recognised("unet", "a UNet alone", _PART_ADVICE),
    ),
    (
        lambda names: not _any_starts(names, UNET_PREFIX) and _any_starts(names, VAE_PREFIX, "encoder.", "decoder."),
        VAE_ALONE,
    ),
    (
        lambda names: not _any_starts(names, UNET_PREFIX) and _any_starts(names, "text_model.", "cond_stage_model."),
        Recognised("text_encoder", "a text encoder alone", _PART_ADVICE),
    ),
)

_WITH_CONTROLNET = Recognised("controlnet", "a pipeline with a ControlNet", _PART_ADVICE)
# Beginnings of pipeline class names, most specific first.
_BY_PIPELINE = (
    ("StableDiffusion3ControlNet", _WITH_CONTROLNET),
    ("StableDiffusion3", SD3),
    ("Flux", FLUX),
    ("StableDiffusionControlNet", _WITH_CONTROLNET),
)

_FOLDER_PARTS = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
_SDXL_FOLDER_PARTS = (*_FOLDER_PARTS, "text_encoder_2", "tokenizer_2")
_SD3_FOLDER_PARTS = ("transformer", "vae", "tokenizer", "tokenizer_2", "scheduler")


def recognise_file(file: WeightFile) -> Recognised:
    """Say what a single weight file holds."""
    names = file.shapes.keys()
    for fits, recognised in _SIGNS:
        if fits(names):
            return recognised
    first_convolution = file.shapes.get(f"{UNET_PREFIX}input_blocks.0.0.weight")
    if _any_starts(names, "conditioner.embedders."):
        channels = first_convolution[1] if first_convolution else 4
        return SDXL if channels == 4 else _by_input_channels(channels)
    if first_convolution is None or len(first_convolution) != 4:
        some = ", ".join(sorted(names)[:3])
        return Recognised("unknown", f"no Stable Diffusion checkpoint in the original layout (it holds {some}, …)")
    if f"{UNET_PREFIX}label_emb.0.0.weight" in names or f"{UNET_PREFIX}label_emb.weight" in names:
        return SDXL if _cross_attention_width(file) == 2048 else _UNCLIP
    if first_convolution[1] != 4:
        return _by_input_channels(first_convolution[1])
    projections = [len(shape) for name, shape in file.shapes.items() if name.endswith("1.proj_in.weight")]
    return _by_text_width(_cross_attention_width(file), projects_linearly=2 in projections)


def recognise_folder(folder: Path) -> Recognised:
    """Say what a diffusers folder holds.

    Raises:
        ModelError: it is no diffusers folder, or parts of it are missing; the message names them.
    """
    index = _read_json_if_there(folder / "model_index.json")
    pipeline = str(index.get("_class_name", ""))
    for beginning, recognised in _BY_PIPELINE:
        if pipeline.startswith(beginning):
            if recognised is SD3:
                _require_parts(folder, True, _SD3_FOLDER_PARTS, "SD3")
            return recognised
    if pipeline.startswith("StableDiffusionXL"):
        return _sdxl_folder(folder)
    if (folder / "adapter_config.json").is_file() or (folder / "pytorch_lora_weights.safetensors").is_file():
        return LORA
    unet = _read_json_if_there(folder / "unet" / "config.json")
    transformer = _read_json_if_there(folder / "transformer" / "config.json")
    if not unet and transformer.get("_class_name") == "SD3Transformer2DModel":
        _require_parts(folder, bool(index), _SD3_FOLDER_PARTS, "SD3")
        return SD3
    if not unet and (folder / "transformer").is_dir():
        return Recognised("unknown", f"a transformer model ({pipeline or 'no model_index.json'})")
    if unet.get("addition_embed_type") == "text_time":
        return _sdxl_folder(folder)
    _require_parts(folder, bool(index))
    if unet.get("_class_name", "UNet2DConditionModel") != "UNet2DConditionModel":
        return Recognised("unknown", f"a model with a {unet['_class_name']}")
    if unet.get("class_embed_type") is not None or unet.get("num_class_embeds") is not None:
        return _UNCLIP
    channels = unet.get("in_channels", 4)
    if channels != 4:
        return _by_input_channels(channels)
    width = unet.get("cross_attention_dim", 1280)
    return _by_text_width(width, projects_linearly=bool(unet.get("use_linear_projection", False)))


def _sdxl_folder(folder: Path) -> Recognised:
    if (folder / "text_encoder_2").is_dir() and not (folder / "text_encoder").is_dir():
        return _SDXL_REFINER
    _require_parts(folder, True, _SDXL_FOLDER_PARTS, "SDXL")
    channels = _read_json_if_there(folder / "unet" / "config.json").get("in_channels", 4)
    return SDXL if channels == 4 else _by_input_channels(channels)


def read_json(path: Path) -> JsonObject:
    """Return the JSON object in a file; a ModelError says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, but holds a {type(content).__name__}.")
    return content


def _read_json_if_there(path: Path) -> JsonObject:
    return read_json(path) if path.is_file() else {}


def _require_parts(
    folder: Path, has_index: bool, parts: Sequence[str] = _FOLDER_PARTS, model: str = "SD 1.x or 2.x"
) -> None:
    missing = [part for part in parts if not (folder / part).is_dir()]
    if not missing:
        return
    if len(missing) < len(parts) or has_index:
        raise ModelError(
            f"The model folder {folder} is not complete: it lacks {', '.join(missing)}. A diffusers folder for {model} "
            f"has the folders {', '.join(parts)}; download or copy it again, with all of them."
        )
    single_files = sorted(path.name for ending in ("*.safetensors", "*.ckpt") for path in folder.glob(ending))
    if (folder / "config.json").is_file() and (folder.parent / "unet").is_dir():
        advice = f"It is one part of a model; give the folder above it: {folder.parent}"
    elif single_files:
        advice = f"It holds {', '.join(single_files[:5])}; give the path of that file itself."
    else:
        advice = f"A diffusers folder has the folders {', '.join(_FOLDER_PARTS)}."
    raise ModelError(f"{folder} is not a diffusers model folder. {advice}")


def _any_starts(names: Collection[str], *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in names)


def _by_input_channels(channels: int) -> Recognised:
    other = Recognised("unknown", f"a UNet with {channels} input channels", _BASE_ADVICE)
    return _BY_INPUT_CHANNELS.get(channels, other)


def _by_text_width(width: object, *, projects_linearly: bool) -> Recognised:
    """SD 1.x reads text of width 768, 2.x of width 1024; narrow test models tell by the kind of their projections."""
    by_width: Mapping[object, Recognised] = {768: SD1, 1024: SD2, 2048: SDXL}
    return by_width.get(width if isinstance(width, int) else None, SD2 if projects_linearly else SD1)


def _cross_attention_width(file: WeightFile) -> int | None:
    for name, shape in file.shapes.items():
        if name.startswith(UNET_PREFIX) and name.endswith("attn2.to_k.weight"):
            return shape[1]
    return None
