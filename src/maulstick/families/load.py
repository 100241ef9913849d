"""Loading a base model: finding out what it is, checking what the user said about it, opening its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Family
from maulstick.families.recognise import SD1, SD2, SDXL, JsonObject, Recognised, recognise_file, recognise_folder
from maulstick.families.source import Kind, UnetSource, open_folder, open_single_file, open_vae
from maulstick.options.schema import ModelOptions
from maulstick.weight_files import WeightFile, open_weights

_WANTED = "an SD 1.x, SD 2.x or SDXL text-to-image model"
_KINDS: tuple[tuple[Recognised, Kind], ...] = ((SD1, "sd1"), (SD2, "sd2"), (SDXL, "sdxl"))


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
        vae_dtype: number format of the VAE; ``dtype`` without it, but fp32 for SDXL in fp16, which its VAE overflows.
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
        vae = open_vae(Path(options.vae).expanduser(), source.kind)
        _refuse_other_latents(vae.config, source, options.vae)
        source = replace(source, vae=vae)
    from maulstick.families.sd import StableDiffusion
    from maulstick.families.sdxl import StableDiffusionXL
    from maulstick.families.unet_family import UnetSetup

    family = StableDiffusionXL if source.kind == "sdxl" else StableDiffusion
    setup = UnetSetup(
        prediction_type="v_prediction" if predicts_v else "epsilon",
        clip_skip=options.clip_skip,
        max_token_length=options.max_token_length,
        device=torch.device(device),
        dtype=dtype,
        vae_dtype=vae_dtype or family.usual_vae_dtype(dtype),
        gradient_checkpointing=gradient_checkpointing,
    )
    return family(source, setup)


def _open_source(path: Path, options: ModelOptions) -> tuple[UnetSource, bool]:
    """Return the opened model and whether it predicts v."""
    if not path.exists():
        raise ModelError(_explain_absent(path))
    if path.is_dir():
        source = open_folder(path, _kind(recognise_folder(path), path, options))
        _refuse_other_noise(source)
        return source, _folder_predicts_v(source, options)
    file = open_weights(path)
    kind = _kind(recognise_file(file), path, options)
    _refuse_marked_v(file, options)
    source = open_single_file(file, kind, predicts_v=options.v_parameterization)
    if kind == "sd2" and not options.v_parameterization:
        note = (
            f"{path.name} is taken to predict noise: a single file does not say. An SD 2.x model for 768 pixels "
            "predicts v and needs --v_parameterization."
        )
        source = replace(source, notes=(*source.notes, note))
    return source, options.v_parameterization


def _kind(recognised: Recognised, path: Path, options: ModelOptions) -> Kind:
    kind = next((kind for known, kind in _KINDS if known is recognised), None)
    if kind is None:
        raise recognised.refusal(path, _WANTED)
    if options.v2 and kind != "sd2":
        raise OptionError(
            f"--v2 contradicts --pretrained_model_name_or_path: {path} is {recognised.description}. Leave --v2 out, or "
            "name an SD 2.x model."
        )
    return kind


def _refuse_other_noise(source: UnetSource) -> None:
    """Fine-tunes for other noise schedules (EDM, flows) say so by the scheduler they come with."""
    scheduler = str(source.scheduler_config.get("_class_name", ""))
    if scheduler.startswith(("EDM", "FlowMatch")):
        raise ModelError(
            f"{source.path} was made for another kind of noise (its scheduler is {scheduler}), which cannot be trained "
            "here. Use a model that predicts noise or v."
        )


def _folder_predicts_v(source: UnetSource, options: ModelOptions) -> bool:
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


def _refuse_other_latents(vae: JsonObject, source: UnetSource, path: str) -> None:
    kind = vae.get("_class_name", "AutoencoderKL")
    if kind != "AutoencoderKL":
        raise OptionError(f"--vae {path} is a {kind}, not a VAE (AutoencoderKL).")
    latent, wanted = vae.get("latent_channels", 4), source.unet.config.get("in_channels", 4)
    if latent != wanted:
        raise OptionError(
            f"--vae {path} makes latents with {latent} channels, but the UNet of --pretrained_model_name_or_path takes "
            f"{wanted}. Use a VAE for that kind of model."
        )
    scale, wanted = (config.get("scaling_factor", 0.18215) for config in (vae, source.vae.config))
    if scale != wanted:
        raise OptionError(
            f"--vae {path} scales its latents by {scale}, but the model's own VAE by {wanted}: it is for another kind "
            "of model (SD 1.x and 2.x have 0.18215, SDXL 0.13025)."
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
