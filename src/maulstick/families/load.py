"""Loading a base model: finding out what it is, checking what the user said about it, opening its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from maulstick.errors import ModelError, OptionError, nearest_file_hint
from maulstick.families.base import Family
from maulstick.families.recognise import SD1, SD2, SD3, SDXL, JsonObject, Recognised, recognise_file, recognise_folder
from maulstick.families.source import Kind, ModelSource, open_folder, open_single_file, open_vae
from maulstick.garbage import uncollected
from maulstick.options.schema import ModelOptions, ObjectiveOptions
from maulstick.weight_files import WeightFile, open_weights

_WANTED = "an SD 1.x, SD 2.x, SDXL or SD3 text-to-image model"
_KINDS: tuple[tuple[Recognised, Kind], ...] = ((SD1, "sd1"), (SD2, "sd2"), (SDXL, "sdxl"), (SD3, "sd3"))
_SD3_OPTIONS = ("clip_l", "clip_g", "t5xxl", "no_t5xxl", "t5xxl_max_token_length")
_UNET_OPTIONS = ("v2", "v_parameterization", "clip_skip")
_T5_LENGTH = 256


@uncollected()  # Building hundreds of modules, and importing what builds them.
def load_family(
    options: ModelOptions,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    vae_dtype: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    objective: ObjectiveOptions | None = None,
) -> Family:
    """Load the base model that ``options`` names, from a diffusers folder or a single file, without any network.

    Weights are read on the CPU and then moved to ``device``. VAE and text encoder are loaded when they are first used.

    Args:
        dtype: number format of denoiser and text encoders.
        vae_dtype: number format of the VAE; ``dtype`` without it, but fp32 for SDXL in fp16, which its VAE overflows.
        gradient_checkpointing: compute activations twice to save memory.
        objective: options about noise and loss, for training; those that mean nothing for the model are refused.

    Raises:
        OptionError: no model is given, or an option contradicts what the model is.
        ModelError: the model is of another kind, incomplete or damaged.
    """
    if not options.pretrained_model_name_or_path:
        raise OptionError("No base model is given. Name one with --pretrained_model_name_or_path FOLDER_OR_FILE.")
    path = Path(options.pretrained_model_name_or_path).expanduser()
    if not path.exists():
        raise ModelError(_explain_absent(path))
    source, predicts_v = _find_source(path, options, objective)
    from maulstick.families.merged_base import merge_base_weights
    from maulstick.families.sd import StableDiffusion
    from maulstick.families.sd3 import SD3Setup, StableDiffusion3
    from maulstick.families.sdxl import StableDiffusionXL
    from maulstick.families.unet_family import UnetSetup

    device = torch.device(device)
    family: Family
    if source.kind == "sd3":
        family = StableDiffusion3(
            source,
            SD3Setup(
                device=device,
                dtype=dtype,
                vae_dtype=vae_dtype or StableDiffusion3.usual_vae_dtype(dtype),
                gradient_checkpointing=gradient_checkpointing,
                objective=objective or ObjectiveOptions(),
                t5_length=options.t5xxl_max_token_length or _T5_LENGTH,
            ),
        )
    else:
        of_unet = StableDiffusionXL if source.kind == "sdxl" else StableDiffusion
        family = of_unet(
            source,
            UnetSetup(
                prediction_type="v_prediction" if predicts_v else "epsilon",
                clip_skip=options.clip_skip,
                max_token_length=options.max_token_length,
                weighted_captions=options.weighted_captions,
                device=device,
                dtype=dtype,
                vae_dtype=vae_dtype or of_unet.usual_vae_dtype(dtype),
                gradient_checkpointing=gradient_checkpointing,
                objective=objective,
            ),
        )
    if objective is not None:
        family.check_objective(objective)
    merge_base_weights(family, options)
    return family


def _find_source(path: Path, options: ModelOptions, objective: ObjectiveOptions | None) -> tuple[ModelSource, bool]:
    """Return where the model's parts are, and whether it predicts v."""
    file = None if path.is_dir() else open_weights(path)
    recognised = recognise_folder(path) if file is None else recognise_file(file)
    kind = _kind(recognised, path, options)
    if kind == "sd3":
        source, predicts_v = _open_sd3(file or path, options), False
    else:
        _refuse_sd3_options(path, recognised, options)
        source, predicts_v = _open_source(file or path, kind, options)
        if objective is not None and objective.zero_terminal_snr:
            source = replace(source, scheduler_config={**source.scheduler_config, "rescale_betas_zero_snr": True})
    if options.vae:
        vae = open_vae(Path(options.vae).expanduser(), source.kind)
        _refuse_other_latents(vae.config, source, options.vae)
        source = replace(source, vae=vae)
    return source, predicts_v


def _open_sd3(found: Path | WeightFile, options: ModelOptions) -> ModelSource:
    from maulstick.families.sd3_source import open_sd3

    path = found if isinstance(found, Path) else found.path
    # kohya_ss writes clip_skip = 1 into every file, whatever the model.
    asked = options if options.clip_skip != 1 else replace(options, clip_skip=None)
    given = next((name for name in _UNET_OPTIONS if getattr(asked, name)), None)
    if given is not None:
        raise OptionError(
            f"{given} = {getattr(options, given)}: it means nothing for SD3 ({path}), which predicts a flow and takes "
            f"its text from the layer before CLIP's last. Leave {given} out."
        )
    if options.max_token_length != 75:
        raise OptionError(
            f"max_token_length = {options.max_token_length}: CLIP always reads 75 tokens of a caption in SD3. Leave it "
            "out; t5xxl_max_token_length says how many T5 reads."
        )
    if options.weighted_captions:
        raise OptionError(
            f"weighted_captions: SD3 ({path}) reads captions with T5 too, whose states know no weights; sd-scripts has "
            "none for it either. Leave it out."
        )
    return open_sd3(found, options)


def _refuse_sd3_options(path: Path, recognised: Recognised, options: ModelOptions) -> None:
    given = next((name for name in _SD3_OPTIONS if getattr(options, name)), None)
    if given is not None:
        raise OptionError(
            f"{given} is for SD3, but {path} is {recognised.description}, whose text encoders are its own. Leave "
            f"{given} out."
        )


def _open_source(found: Path | WeightFile, kind: Kind, options: ModelOptions) -> tuple[ModelSource, bool]:
    """Return the opened model with a UNet (from its folder or file), and whether it predicts v."""
    if isinstance(found, Path):
        source = open_folder(found, kind)
        _refuse_other_noise(source)
        return source, _folder_predicts_v(source, options)
    file = found
    _refuse_marked_v(file, options)
    source = open_single_file(file, kind, predicts_v=options.v_parameterization)
    if kind == "sd2" and not options.v_parameterization:
        note = (
            f"{file.path.name} is taken to predict noise: a single file does not say. An SD 2.x model for 768 pixels "
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


def _refuse_other_noise(source: ModelSource) -> None:
    """Fine-tunes for other noise schedules (EDM, flows) say so by the scheduler they come with."""
    scheduler = str(source.scheduler_config.get("_class_name", ""))
    if scheduler.startswith(("EDM", "FlowMatch")):
        raise ModelError(
            f"{source.path} was made for another kind of noise (its scheduler is {scheduler}), which cannot be trained "
            "here. Use a model that predicts noise or v."
        )


def _folder_predicts_v(source: ModelSource, options: ModelOptions) -> bool:
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


def _refuse_other_latents(vae: JsonObject, source: ModelSource, path: str) -> None:
    kind = vae.get("_class_name", "AutoencoderKL")
    if kind != "AutoencoderKL":
        raise OptionError(f"--vae {path} is a {kind}, not a VAE (AutoencoderKL).")
    latent, wanted = vae.get("latent_channels", 4), source.denoiser.config.get("in_channels", 4)
    if latent != wanted:
        raise OptionError(
            f"--vae {path} makes latents with {latent} channels, but the denoiser of --pretrained_model_name_or_path "
            f"takes {wanted}. Use a VAE for that kind of model."
        )
    scale, wanted = (config.get("scaling_factor", 0.18215) for config in (vae, source.vae.config))
    if scale != wanted:
        raise OptionError(
            f"--vae {path} scales its latents by {scale}, but the model's own VAE by {wanted}: it is for another kind "
            "of model (SD 1.x and 2.x have 0.18215, SDXL 0.13025, SD3 1.5305)."
        )


def _explain_absent(path: Path) -> str:
    near = nearest_file_hint(path)
    hints = [near] if near else []
    if not hints and _looks_like_hub_name(path):
        hints.append(
            " It looks like a name on the Hugging Face hub; Maulstick never downloads. Download the model first and "
            "give its folder."
        )
    if not path.is_absolute():
        hints.append(f" Paths are relative to the current folder, {Path.cwd()}.")
    return f"There is no model at {path}.{''.join(hints) or ' Look at how the path is written.'}"


def _looks_like_hub_name(path: Path) -> bool:
    weights = path.suffix in (".safetensors", ".ckpt")
    return len(path.parts) == 2 and not path.is_absolute() and not weights and not path.parent.exists()
