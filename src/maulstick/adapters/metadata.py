"""The text metadata of a LoRA file: what sd-scripts writes (``ss_…``) and the model specification (``modelspec.…``).

Everything in it is a fact that the run hands in, dates and random numbers included, so that the same facts give the
same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MODEL_SPEC_VERSION = "1.0.1"
# Enough for any list of tags; whole sentences as captions could fill the header that readers accept.
MAX_TAG_FREQUENCY_BYTES = 8 * 2**20
_MINIMUM = frozenset(
    {"ss_v2", "ss_base_model_version", "ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_network_args"}
)


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """The training data, under the names of sd-scripts' metadata.

    ``tag_frequency`` is folder -> tag -> count, ``dataset_dirs`` folder -> ``n_repeats`` and ``img_count``,
    ``datasets`` the list that a run with a dataset file describes. The fields from ``batch_size_per_device`` to
    ``bucket_info`` describe a run on folders and stay ``None`` with a dataset file.
    """

    tag_frequency: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    dataset_dirs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reg_dataset_dirs: Mapping[str, Mapping[str, int]] | None = None
    datasets: list[dict[str, Any]] | None = None
    batch_size_per_device: int | None = None
    total_batch_size: int | None = None
    resolution: tuple[int, int] | None = None
    color_aug: bool | None = None
    flip_aug: bool | None = None
    random_crop: bool | None = None
    shuffle_caption: bool | None = None
    enable_bucket: bool | None = None
    bucket_no_upscale: bool | None = None
    min_bucket_reso: int | None = None
    max_bucket_reso: int | None = None
    keep_tokens: int | None = None
    bucket_info: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class BaseModelFacts:
    """The base model and VAE: names as the user sees them, hashes where they are single files."""

    sd_model_name: str | None = None
    sd_model_hash: str | None = None
    new_sd_model_hash: str | None = None
    vae_name: str | None = None
    vae_hash: str | None = None
    new_vae_hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpecFacts:
    """What the model specification asks for. ``date`` is ISO 8601 without microseconds, ``title`` falls back to the
    output name, ``resolution`` is (width, height), ``encoder_layer`` the clip skip."""

    architecture: str
    date: str
    implementation: str = "diffusers"
    implementation_version: str | None = None
    title: str | None = None
    resolution: tuple[int, int] = (512, 512)
    prediction_type: str | None = "epsilon"
    encoder_layer: int | None = None
    timestep_range: tuple[int, int] | None = None
    author: str | None = None
    description: str | None = None
    license: str | None = None
    tags: str | None = None
    usage_hint: str | None = None
    trigger_phrase: str | None = None
    merged_from: str | None = None
    thumbnail: str | None = None
    preprocessor: str | None = None
    is_negative_embedding: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoraRunFacts:
    """One run, under the names of sd-scripts' metadata without ``ss_``; ``further`` has what only some families write.

    ``None`` is written as sd-scripts writes an option that was not given. ``network_args`` (block weights are among
    them) is written, with the dropout, only when arguments were given.
    """

    base_model_version: str
    v2: bool
    network_dim: int | str
    network_alpha: float | str
    output_name: str
    model_spec: ModelSpecFacts
    base_model: BaseModelFacts = field(default_factory=BaseModelFacts)
    dataset: DatasetFacts = field(default_factory=DatasetFacts)
    network_args: Mapping[str, str] | None = None
    further: Mapping[str, Any] = field(default_factory=dict)
    network_module: str = "networks.lora"
    network_dropout: float | None = None

    session_id: int = 0
    training_started_at: float = 0.0
    training_finished_at: float = 0.0
    steps: int = 0
    epoch: int = 0
    training_comment: str | None = None
    sd_scripts_commit_hash: str = "(unknown)"  # what sd-scripts itself writes when it does not know

    learning_rate: float | None = None
    text_encoder_lr: float | list[float] | None = None
    unet_lr: float | None = None
    optimizer: str = ""
    lr_scheduler: str = "constant"
    lr_warmup_steps: int | float = 0
    max_grad_norm: float | None = None
    max_train_steps: int = 0
    num_epochs: int = 0
    num_batches_per_epoch: int = 0
    num_train_images: int = 0
    num_reg_images: int = 0
    num_validation_images: int = 0
    gradient_checkpointing: bool = False
    gradient_accumulation_steps: int = 1
    mixed_precision: str = "no"
    full_fp16: bool = False
    seed: int | None = None
    lowram: bool = False
    fp8_base: bool = False
    fp8_base_unet: bool = False

    clip_skip: int | None = None
    max_token_length: int | None = None
    cache_latents: bool = False
    caption_dropout_rate: float = 0.0
    caption_dropout_every_n_epochs: int = 0
    caption_tag_dropout_rate: float = 0.0
    face_crop_aug_range: str | None = None
    resize_interpolation: str | None = None

    prior_loss_weight: float = 1.0
    min_snr_gamma: float | None = None
    scale_weight_norms: float | None = None
    debiased_estimation: bool = False
    loss_type: str = "l2"
    huber_schedule: str = "snr"
    huber_scale: float = 1.0
    huber_c: float = 0.1
    noise_offset: float | None = None
    noise_offset_random_strength: bool = False
    adaptive_noise_scale: float | None = None
    multires_noise_iterations: int | None = None
    multires_noise_discount: float = 0.3
    ip_noise_gamma: float | None = None
    ip_noise_gamma_random_strength: bool = False
    zero_terminal_snr: bool = False

    validation_seed: int | None = None
    validation_split: float = 0.0
    max_validation_steps: int | None = None
    validate_every_n_epochs: int | None = None
    validate_every_n_steps: int | None = None


_PARTS = frozenset({"model_spec", "base_model", "dataset", "network_args", "further"})


def base_model_version(*, v2: bool, v_parameterization: bool) -> str:
    """``ss_base_model_version`` of Stable Diffusion 1.x and 2.x."""
    return ("sd_v2" if v2 else "sd_v1") + ("_v" if v_parameterization else "")


def sd_architecture(*, v2: bool, v_parameterization: bool) -> str:
    """``modelspec.architecture`` of a LoRA for Stable Diffusion 1.x and 2.x."""
    if not v2:
        return "stable-diffusion-v1/lora"
    return "stable-diffusion-v2-768-v/lora" if v_parameterization else "stable-diffusion-v2-512/lora"


def build_metadata(facts: LoraRunFacts, *, no_metadata: bool = False) -> dict[str, str]:
    """All entries of a file's metadata but the hashes, which the writer adds.

    ``no_metadata`` keeps what programs need to recognise the file: model version, network and specification. Tags are
    left out from the rarest on where their list would make the header too large for readers.
    """
    training = {f"ss_{fact.name}": str(getattr(facts, fact.name)) for fact in fields(facts) if fact.name not in _PARTS}
    training |= {f"ss_{key}": str(value) for key, value in facts.further.items()}
    training |= {f"ss_{key}": value for key, value in _given(facts.base_model).items()}
    training |= _dataset_metadata(facts.dataset)
    if facts.network_args is not None:
        training["ss_network_args"] = _json({**facts.network_args, "dropout": facts.network_dropout})
    if no_metadata:
        training = {key: value for key, value in training.items() if key in _MINIMUM}
    return dict(sorted((training | _model_spec_metadata(facts)).items()))


def _given(part: BaseModelFacts) -> dict[str, str]:
    return {fact.name: value for fact in fields(part) if (value := getattr(part, fact.name)) is not None}


def _dataset_metadata(dataset: DatasetFacts) -> dict[str, str]:
    entries: dict[str, str] = {}
    for fact in fields(dataset):
        value = getattr(dataset, fact.name)
        if fact.name == "tag_frequency":
            entries["ss_tag_frequency"] = _tag_frequency(value)
        elif value is not None:
            entries[f"ss_{fact.name}"] = _json(value) if isinstance(value, (Mapping, list)) else str(value)
    return entries


def _tag_frequency(frequency: Mapping[str, Mapping[str, int]]) -> str:
    text = _json(frequency)
    if len(text) <= MAX_TAG_FREQUENCY_BYTES:
        return text
    counted = [(count, folder, tag) for folder, tags in frequency.items() for tag, count in tags.items()]
    counted.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    kept: dict[str, dict[str, int]] = {folder: {} for folder in frequency}
    size = len(_json(kept))
    for count, folder, tag in counted:
        # Upper bound of what the entry adds: the tag as JSON, its count and ": ", ", ".
        size += len(json.dumps(tag)) + len(str(count)) + 4
        if size > MAX_TAG_FREQUENCY_BYTES:
            break
        kept[folder][tag] = count
    return _json(kept)


def _model_spec_metadata(facts: LoraRunFacts) -> dict[str, str]:
    spec = facts.model_spec
    width, height = spec.resolution
    entries: dict[str, Any] = {
        "sai_model_spec": MODEL_SPEC_VERSION,
        "architecture": spec.architecture,
        "implementation": spec.implementation,
        "implementation_version": spec.implementation_version,
        "title": spec.title or facts.output_name,
        "date": spec.date,
        "resolution": f"{width}x{height}",
        "prediction_type": spec.prediction_type,
        "encoder_layer": spec.encoder_layer,
        "timestep_range": None if spec.timestep_range is None else ",".join(map(str, spec.timestep_range)),
        "author": spec.author,
        "description": spec.description,
        "license": spec.license,
        "tags": spec.tags,
        "usage_hint": spec.usage_hint,
        "trigger_phrase": spec.trigger_phrase,
        "merged_from": spec.merged_from,
        "thumbnail": spec.thumbnail,
        "preprocessor": spec.preprocessor,
        "is_negative_embedding": spec.is_negative_embedding,
    }
    return {f"modelspec.{key}": str(value) for key, value in entries.items() if value is not None}


def _json(value: Any) -> str:
    """JSON as the other programs decode it, with sorted keys so that equal facts give equal text."""
    return json.dumps(value, sort_keys=True)
