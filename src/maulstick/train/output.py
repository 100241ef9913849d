"""The files a run leaves: adapter files with their metadata, under the names sd-scripts gives them."""

from __future__ import annotations

import base64
import random
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from maulstick import __version__
from maulstick.adapters.files import file_hash, legacy_file_hash
from maulstick.adapters.metadata import BaseModelFacts, DatasetFacts, LoraRunFacts, ModelSpecFacts, build_metadata
from maulstick.data.summary import bucket_info, dataset_dirs, datasets_metadata, tag_frequency
from maulstick.errors import OptionError
from maulstick.families.base import Family
from maulstick.files_io import set_aside
from maulstick.options.output_schema import MetadataOptions
from maulstick.options.schema import RunOptions, TrainOptions
from maulstick.options.text_rates import text_encoder_rates
from maulstick.train.plan import Plan
from maulstick.train.precision import DTYPES
from maulstick.train.prepare import Prepared
from maulstick.train.trains import Attached, Trains

LARGEST_THUMBNAIL = 2**20
"""In bytes."""


def lora_path(run: RunOptions, label: str | None, folder: Path | None = None) -> Path:
    """Return the path of the final file (no label) or of an intermediate one, in ``folder`` or output_dir."""
    folder = folder or run.output_dir
    if folder is None:
        raise ValueError("output_dir is checked when options are read")
    return folder / f"{run.output_name}{f'-{label}' if label else ''}.{run.save_model_as}"


@dataclass
class AdapterOutput:
    """Writes what trains as it stands, with the run's metadata.

    A file of an earlier run under the same name is set aside the first time this run writes that name.
    """

    options: TrainOptions
    plan: Plan
    family: Family
    trains: Trains
    attached: Attached
    seed: int
    dataset: DatasetFacts
    started_at: float = field(default_factory=time.time)
    written: dict[Path, Path | None] = field(default_factory=dict)
    _hashes_of: dict[Path, tuple[str, str]] = field(default_factory=dict)

    folder: Path | None = None

    def path(self, label: str | None) -> Path:
        """Return the path of the final file (no label) or of an intermediate one, in ``folder`` or output_dir."""
        return lora_path(self.options.run, label, self.folder)

    def save(self, label: str | None, *, step: int, epoch: int, dtype: torch.dtype | None = None) -> Path:
        """Write the file, in ``save_precision`` or ``dtype``.

        Raises ModelError when a trained value is not finite in that format, OSError when the disk refuses.
        """
        path = self.path(label)
        if path not in self.written:
            self.written[path] = set_aside(path)
        dtype = dtype or DTYPES[self.options.run.save_precision or "float"]
        self.attached.save(path, dtype, self.metadata(step, epoch))
        return path

    def metadata(self, step: int, epoch: int) -> dict[str, str]:
        """Return what is written into the file's header."""
        o, plan = self.options, self.plan
        # Drawn from the start time, so that it is unique to the run and the same in all its files.
        session_id = random.Random(self.started_at).randint(0, 2**32)
        facts = LoraRunFacts(
            base_model_version=self.family.base_model_version,
            v2=self.family.base_model_version.startswith("sd_v2"),
            further=self.family.objective_metadata(),
            output_name=o.run.output_name,
            model_spec=ModelSpecFacts(
                architecture=self.family.architecture,
                date=datetime.now().astimezone().replace(microsecond=0, tzinfo=None).isoformat(),
                implementation_version=f"maulstick/{__version__}",
                resolution=plan.resolution,
                prediction_type=_PREDICTIONS.get(self.family.prediction_type),
                encoder_layer=o.model.clip_skip,
                **author_facts(o.metadata),
            ),
            base_model=self._base_model_facts(),
            dataset=self.dataset,
            session_id=session_id,
            training_started_at=self.started_at,
            training_finished_at=time.time(),
            steps=step,
            epoch=epoch,
            training_comment=o.run.training_comment,
            **self.trains.network_facts(),
            **self._rate_facts(),
            **self._length_facts(),
            **self._objective_facts(),
        )
        return self.trains.refine_metadata(build_metadata(facts, no_metadata=o.run.no_metadata))

    def _base_model_facts(self) -> BaseModelFacts:
        model = Path(self.options.model.pretrained_model_name_or_path or "")
        vae = Path(self.options.model.vae) if self.options.model.vae else None
        model_hashes, vae_hashes = self._hashes(model), self._hashes(vae)
        return BaseModelFacts(
            sd_model_name=model.name,
            sd_model_hash=model_hashes[0],
            new_sd_model_hash=model_hashes[1],
            vae_name=vae.name if vae else None,
            vae_hash=vae_hashes[0],
            new_vae_hash=vae_hashes[1],
        )

    def _hashes(self, path: Path | None) -> tuple[str | None, str | None]:
        """Return a single file's old and new hash, computed once a run; sd-scripts has none for folders either."""
        if path is None or not path.is_file():
            return None, None
        if path not in self._hashes_of:
            self._hashes_of[path] = legacy_file_hash(path), file_hash(path)
        return self._hashes_of[path]

    def _rate_facts(self) -> dict[str, Any]:
        o = self.options
        return {
            "learning_rate": o.optimizer.learning_rate,
            "unet_lr": o.optimizer.unet_lr,
            "text_encoder_lr": o.optimizer.text_encoder_lr or self._text_encoder_rates_by_number(),
            "optimizer": o.optimizer.optimizer_type
            + (f"({','.join(o.optimizer.optimizer_args)})" if o.optimizer.optimizer_args else ""),
            "max_grad_norm": o.optimizer.max_grad_norm,
            "lr_scheduler": o.schedule.lr_scheduler,
            "lr_warmup_steps": self.plan.warmup_steps,
        }

    def _text_encoder_rates_by_number(self) -> list[float] | None:
        o = self.options.optimizer
        if o.text_encoder_lr1 is None and o.text_encoder_lr2 is None:
            return None
        return text_encoder_rates(o, len(self.family.text_encoder_naming))

    def _length_facts(self) -> dict[str, Any]:
        o, plan = self.options, self.plan
        return {
            "max_train_steps": plan.total_steps,
            "num_epochs": plan.epochs,
            "num_batches_per_epoch": plan.batches_per_epoch,
            "num_train_images": plan.train_images,
            "num_reg_images": plan.reg_images,
            "num_validation_images": len(plan.validation_images),
            "validation_split": o.dataset.validation_split,
            "validation_seed": o.dataset.validation_seed,
            **vars(o.validation),
            "gradient_checkpointing": o.run.gradient_checkpointing,
            "gradient_accumulation_steps": o.run.gradient_accumulation_steps,
            "mixed_precision": o.run.mixed_precision,
            "fp8_base": o.run.fp8_base,
            "fp8_base_unet": o.run.fp8_base_unet,
            "seed": self.seed,
        }

    def _objective_facts(self) -> dict[str, Any]:
        o = self.options
        return {
            "clip_skip": o.model.clip_skip,
            "max_token_length": o.model.max_token_length if o.model.max_token_length > 75 else None,
            "cache_latents": o.dataset.cache_latents,
            "resize_interpolation": o.dataset.resize_interpolation,
            "caption_dropout_rate": o.dataset.caption_dropout_rate,
            "caption_dropout_every_n_epochs": o.dataset.caption_dropout_every_n_epochs,
            "caption_tag_dropout_rate": o.dataset.caption_tag_dropout_rate,
            "prior_loss_weight": o.dataset.prior_loss_weight,
            "min_snr_gamma": o.objective.min_snr_gamma,
            **{name: getattr(o.objective, name) for name in _OBJECTIVE_FACTS},
            "debiased_estimation": o.objective.debiased_estimation_loss,
            "scale_weight_norms": o.network.scale_weight_norms,
        }


def author_facts(options: MetadataOptions) -> dict[str, Any]:
    """Return what the user says about the file, under the names of the model specification.

    Raises:
        OptionError: the thumbnail is no picture, or a large one.
    """
    said = {name.removeprefix("metadata_"): value for name, value in vars(options).items()}
    return {**said, "thumbnail": _data_url(options.metadata_thumbnail)}


def _data_url(thumbnail: str | None) -> str | None:
    if thumbnail is None or thumbnail.startswith("data:"):
        return thumbnail
    path = Path(thumbnail)
    try:
        with Image.open(path) as image:
            kind = Image.MIME.get(image.format or "", "image/png")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no picture"
        raise OptionError(
            f"metadata_thumbnail: {path} cannot be read ({reason}). Name an image file, or give a data URL (data:...)."
        ) from error
    if len(content) > LARGEST_THUMBNAIL:
        raise OptionError(
            f"metadata_thumbnail: {path} has {len(content) / 2**20:.1f} MiB, and every saved file would hold it. Make "
            f"it smaller than {LARGEST_THUMBNAIL / 2**20:g} MiB; 512 pixels are enough."
        )
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


_OBJECTIVE_FACTS = (
    *("noise_offset", "noise_offset_random_strength", "adaptive_noise_scale"),
    *("multires_noise_iterations", "multires_noise_discount", "ip_noise_gamma", "ip_noise_gamma_random_strength"),
    *("zero_terminal_snr", "loss_type", "huber_schedule", "huber_c", "huber_scale"),
)
"""Options that the metadata has under their own names."""
_PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v"}
"""What ``modelspec.prediction_type`` knows."""


def dataset_facts(prepared: Prepared) -> DatasetFacts:
    """Return what the file's metadata says about the training data."""
    index, options = prepared.index, prepared.options.dataset
    common: dict[str, Any] = {"tag_frequency": tag_frequency(index), "dataset_dirs": dataset_dirs(index)}
    if options.dataset_config is not None:
        return DatasetFacts(**common, datasets=datasets_metadata(index))
    first = index.datasets[0]
    spec = first.spec
    return DatasetFacts(
        **common,
        reg_dataset_dirs=dataset_dirs(index, reg=True),
        batch_size_per_device=spec.batch_size,
        total_batch_size=prepared.plan.images_per_step,
        resolution=spec.resolution,
        color_aug=options.color_aug,
        flip_aug=options.flip_aug,
        random_crop=options.random_crop,
        shuffle_caption=options.shuffle_caption,
        enable_bucket=spec.enable_bucket,
        bucket_no_upscale=spec.bucket_no_upscale,
        min_bucket_reso=spec.min_bucket_reso if spec.enable_bucket else None,
        max_bucket_reso=spec.max_bucket_reso if spec.enable_bucket else None,
        keep_tokens=options.keep_tokens,
        bucket_info=bucket_info(first),
    )
