"""Loading a base model: finding out what it is, checking what the user said about it, opening its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Family
from maulstick.families.noise import PredictionType
from maulstick.families.recognise import SD1, SD2, JsonObject, Recognised, recognise_file, recognise_folder
from maulstick.families.source import SdSource, open_folder, open_single_file, open_vae
from maulstick.options.schema import ModelOptions
from maulstick.weight_files import WeightFile, open_weights

_WANTED = "an SD 1.x or 2.x text-to-image model"


def load_family(
    options: ModelOptions,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    vae_dtype: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
) -> Family:
    """Load the base model that ``options`` names, from a diffusers folder or a single file, without any network.

    Weights are read on the CPU and then moved to ``device``. VAE and text encoder are loaded when they are first used.

    Args:
        dtype: number format of denoiser and text encoders.
        vae_dtype: number format of the VAE; ``dtype`` without it.
        gradient_checkpointing: compute activations twice to save memory.

    Raises:
        OptionError: no model is given, or an option contradicts what the model is.
        ModelError: the model is of another kind, incomplete or damaged.
    """
    if not options.pretrained_model_name_or_path:
        raise OptionError("No base model is given. Name one with --pretrained_model_name_or_path FOLDER_OR_FILE.")
    path = Path(options.pretrained_model_name_or_path).expanduser()
    source, predicts_v = _open_source(path, options)
    if options.vae:
        vae = open_vae(Path(options.vae).expanduser())
        _refuse_other_latents(vae.config, source.unet.config, options.vae)
        source = replace(source, vae=vae)
    from maulstick.families.sd import StableDiffusion

    prediction_type: PredictionType = "v_prediction" if predicts_v else "epsilon"
    return StableDiffusion(
        source,
        prediction_type=prediction_type,
        clip_skip=options.clip_skip,
        max_token_length=options.max_token_length,
        device=torch.device(device),
        dtype=dtype,
        vae_dtype=vae_dtype or dtype,
        gradient_checkpointing=gradient_checkpointing,
    )


def _open_source(path: Path, options: ModelOptions) -> tuple[SdSource, bool]:
    """Return the opened model and whether it predicts v."""
    if not path.exists():
        raise ModelError(_explain_absent(path))
    if path.is_dir():
        is_v2 = _is_v2(recognise_folder(path), path, options)
        source = open_folder(path, is_v2=is_v2)
        return source, _folder_predicts_v(source, options)
    file = open_weights(path)
    is_v2 = _is_v2(recognise_file(file), path, options)
    _refuse_marked_v(file, options)
    source = open_single_file(file, is_v2=is_v2, predicts_v=options.v_parameterization)
    if is_v2 and not options.v_parameterization:
        note = (
            f"{path.name} is taken to predict noise: a single file does not say. An SD 2.x model for 768 pixels "
            "predicts v and needs --v_parameterization."
        )
        source = replace(source, notes=(*source.notes, note))
    return source, options.v_parameterization


def _is_v2(recognised: Recognised, path: Path, options: ModelOptions) -> bool:
    if recognised not in (SD1, SD2):
        raise recognised.refusal(path, _WANTED)
    if options.v2 and recognised is SD1:
        raise OptionError(
            f"--v2 contradicts --pretrained_model_name_or_path: {path} is an SD 1.x model. Leave --v2 out, or name an "
            "SD 2.x model."
        )
    return recognised is SD2


def _folder_predicts_v(source: SdSource, options: ModelOptions) -> bool:
    """The folder's scheduler config decides; a flag that says otherwise is an error."""
    config = source.path / "scheduler" / "scheduler_config.json"
    stated = source.scheduler_config.get("prediction_type", "epsilon")
    if stated not in ("epsilon", "v_prediction"):
        raise ModelError(f"{config} says prediction_type '{stated}'; only epsilon and v_prediction can be trained.")
    if options.v_parameterization and stated != "v_prediction":
        says = f'"prediction_type": "{stated}"' if source.states_prediction_type else "no prediction_type (noise)"
        raise OptionError(
            f"--v_parameterization contradicts {config}, which says {says}. Leave --v_parameterization out; if the "
            'model does predict v, write "prediction_type": "v_prediction" into that file.'
        )
    return stated == "v_prediction"


def _refuse_marked_v(file: WeightFile, options: ModelOptions) -> None:
    """Some single files say that they predict v; training them as if they predicted noise would ruin them."""
    if options.v_parameterization:
        return
    marks: list[str] = [name for name in ("v_pred",) if name in file.shapes]
    if file.metadata.get("modelspec.prediction_type") == "v":
        marks.append("modelspec.prediction_type = v")
    if marks:
        raise OptionError(
            f"{file.path} says that it predicts v ({', '.join(marks)}), but --v_parameterization is not given. Add it."
        )


def _refuse_other_latents(vae: JsonObject, unet: dict[str, Any], path: str) -> None:
    kind = vae.get("_class_name", "AutoencoderKL")
    if kind != "AutoencoderKL":
        raise OptionError(f"--vae {path} is a {kind}, not a VAE (AutoencoderKL).")
    latent, wanted = vae.get("latent_channels", 4), unet.get("in_channels", 4)
    if latent != wanted:
        raise OptionError(
            f"--vae {path} makes latents with {latent} channels, but the UNet of --pretrained_model_name_or_path takes "
            f"{wanted}. Use a VAE for SD 1.x/2.x."
        )


def _explain_absent(path: Path) -> str:
    looks_like_hub_name = len(path.parts) == 2 and not path.is_absolute() and not path.suffix
    hint = (
        " It looks like a name on the Hugging Face hub; Maulstick never downloads. Download the model first and give "
        "its folder."
        if looks_like_hub_name
        else ""
    )
    return f"There is no model at {path}.{hint}"
