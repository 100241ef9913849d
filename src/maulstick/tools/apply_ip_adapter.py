"""Putting an IP-Adapter file and its reference image on a loaded model."""

from __future__ import annotations

import math
from pathlib import Path

from maulstick.adapters.files import data_hash, file_hash
from maulstick.adapters.ip_adapter_files import describe_misfit, read_ip_adapter, to_file_names
from maulstick.data.images import read_rgb
from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Family
from maulstick.families.image_encoder import ImageEncoder
from maulstick.families.ip_adapter import ImagePrompt, feature_kind, negative_features
from maulstick.options.generate import IpAdapterChoice
from maulstick.pictures.picture_files import UsedIpAdapter

_ENCODERS = {"clip": "CLIP", "siglip": "SigLIP", None: "no"}


def check_choice(choice: IpAdapterChoice) -> None:
    """Refuse an IP-Adapter without image or encoder, and either without an IP-Adapter. Raises OptionError."""
    parts = {"ip_adapter": choice.ip_adapter, "ip_image": choice.ip_image, "image_encoder": choice.image_encoder}
    missing = [f"--{name}" for name, value in parts.items() if value is None]
    if missing and len(missing) < len(parts):
        raise OptionError(
            f"An IP-Adapter needs all of --ip_adapter FILE, --ip_image IMAGE and --image_encoder FOLDER; there is no "
            f"{' and no '.join(missing)}."
        )
    if not math.isfinite(choice.ip_scale):
        raise OptionError(f"--ip_scale is {choice.ip_scale}; it must be a finite number.")
    if missing and choice.ip_scale != 1.0:
        raise OptionError("--ip_scale is the strength of an IP-Adapter. Name one with --ip_adapter.")


def apply_ip_adapter(family: Family, choice: IpAdapterChoice) -> tuple[ImagePrompt, UsedIpAdapter] | None:
    """Put an IP-Adapter into the denoiser, and return its image prompt and what pictures say of it; None without one.

    LoRA must be put on before.

    Raises:
        ModelError: the file is no IP-Adapter, for another family or encoder, incomplete, or broken.
    """
    if choice.ip_adapter is None or choice.ip_image is None or choice.image_encoder is None:
        return None
    path = choice.ip_adapter.expanduser()
    file = read_ip_adapter(path)
    of_sd3, on_sd3 = file.spec.kind == "time", family.ip_adapter_encoder == "siglip"
    if of_sd3 != on_sd3:
        wanted = "SD3" if of_sd3 else "SD 1.x, SD 2.x or SDXL"
        raise ModelError(f"{path} is an IP-Adapter for {wanted}, but the model is {family.name}.")
    encoder = ImageEncoder(choice.image_encoder, device=family.device)
    kind = feature_kind(file.spec)
    if encoder.kind != family.ip_adapter_encoder:
        raise ModelError(
            f"--image_encoder {encoder.folder} is a {encoder.title} model; IP-Adapters for {family.name} read "
            f"{_ENCODERS[family.ip_adapter_encoder]}."
        )
    if encoder.width(kind) != file.spec.feature_width:
        raise ModelError(
            f"{path} reads features {file.spec.feature_width} wide, but those of --image_encoder {encoder.folder} are "
            f"{encoder.width(kind)} wide. Use the encoder that it was trained with."
        )
    wanted_tensors = to_file_names(file.spec.kind, dict(family.ip_adapter_layers(file.spec).parameters()))
    misfit = describe_misfit(file.tensors, wanted_tensors)
    if misfit is not None:
        raise ModelError(f"{path} does not fit this model: {misfit}.")
    # Before anything is attached: what is wrong with the image should not leave a half-made model behind.
    features = encoder.encode([read_rgb(choice.ip_image.expanduser())], kind)[0]
    prompt = ImagePrompt(features, negative_features(encoder, file.spec), choice.ip_scale)
    encoder.release()
    family.attach_ip_adapter(file.spec).load(file)
    family.denoiser.requires_grad_(False)
    return prompt, UsedIpAdapter(path.stem, choice.ip_scale, _identity(path), choice.ip_image.name)


def _identity(path: Path) -> str:
    return data_hash(path) if path.suffix == ".safetensors" else file_hash(path)
