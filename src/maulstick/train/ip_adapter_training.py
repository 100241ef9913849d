"""An IP-Adapter as what a run trains: the projection of image features and a second attention to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from maulstick.adapters.ip_adapter_files import (
    IpAdapterFile,
    IpAdapterSpec,
    describe_misfit,
    read_ip_adapter,
    save_flat,
    to_file_names,
)
from maulstick.data.batches import BatchItem
from maulstick.data.image_features import ImageFeatures
from maulstick.data.images import ImageError, read_rgb, verify_image
from maulstick.data.index import Progress
from maulstick.data.latents import Report
from maulstick.data.records import DatasetIndex
from maulstick.data.references import Reference, find_references, references_digest
from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Conditioning, Family
from maulstick.families.image_encoder import ImageEncoder
from maulstick.families.ip_adapter import (
    IMAGE_FEATURES,
    ImagePrompt,
    IpAdapter,
    feature_kind,
    negative_features,
)
from maulstick.options.ip_adapter_schema import IpAdapterOptions
from maulstick.options.schema import TrainOptions
from maulstick.train.conditioner import Conditioner
from maulstick.train.optim import RateGroup
from maulstick.train.plan import ComponentPlan, modules_per_block
from maulstick.train.precision import DTYPES
from maulstick.train.rates import component_rates
from maulstick.train.seeds import derive_seed
from maulstick.train.trains import Attached, Trains

INTENDED_SCALE = 1.0
"""What it is trained at, and so what pictures should be drawn at. diffusers sets 0.5 for SD3 when it loads a file."""


@dataclass
class AttachedIpAdapter(Attached):
    """An IP-Adapter in the denoiser."""

    adapter: IpAdapter = field(kw_only=True)

    def save(self, path: Path, dtype: torch.dtype, metadata: Mapping[str, str]) -> None:
        save_flat(path, self.adapter.file_tensors(dtype), metadata)


class IpAdapterTraining(Trains):
    """A new IP-Adapter for the denoiser, or one from a file that is trained on."""

    def __init__(self, family: Family, options: TrainOptions) -> None:
        """Open the image encoder's config and work out sizes; no weights are read but those of ``network_weights``.

        Raises:
            OptionError: the options do not fit the model, or ``network_weights`` is for another one.
            ModelError: the encoder is of another kind, or cannot be used.
        """
        own = options.ip_adapter
        self.family, self.options = family, options
        self.targets, self.rates, self.notes = {}, {}, ()
        if own.image_encoder is None:
            raise OptionError("network_type = ip_adapter needs image_encoder.")
        self.encoder = ImageEncoder(own.image_encoder, device=family.device)
        self.spec = _checked_spec(family, own, self.encoder)
        self.start = None if options.network.network_weights is None else self._start(options.network.network_weights)
        self.learning_rate, _ = component_rates(options.optimizer, list(family.text_encoder_naming))
        if not self.learning_rate:
            raise OptionError("Nothing would be trained: the learning rate is 0.")
        self._layers = family.ip_adapter_layers(self.spec)
        self._references: dict[Path, Reference] = {}

    def _start(self, path: Path) -> IpAdapterFile:
        file = read_ip_adapter(path)
        if file.spec != self.spec:
            raise OptionError(
                f"network_weights: {path} is an {file.spec.title} of {file.spec.tokens} tokens for features "
                f"{file.spec.feature_width} wide; this run plans an {self.spec.title} of {self.spec.tokens} tokens for "
                f"features {self.spec.feature_width} wide. Set ip_adapter_type, ip_adapter_tokens and image_encoder to "
                "what the file was trained with."
            )
        misfit = describe_misfit(file.tensors, to_file_names(self.spec.kind, self.family_shapes()))
        if misfit is not None:
            raise OptionError(f"network_weights: {path} does not fit this model: {misfit}.")
        return file

    def family_shapes(self) -> dict[str, torch.Tensor]:
        """Return name -> tensor without memory, of every trained parameter."""
        return dict(self.family.ip_adapter_layers(self.spec).parameters())

    # --- the plan ----------------------------------------------------------------------------------------------------

    def components(self) -> list[ComponentPlan]:
        naming, spec = self.family.denoiser_naming, self.spec
        of = "whole images" if spec.kind == "plain" else "patches"
        return [
            ComponentPlan(
                component=naming.component,
                log_name=naming.log_name,
                network_type=spec.title,
                learning_rate=self.learning_rate,
                groups={naming.log_name: self.learning_rate},
                modules=len(self._layers.processors),
                parameters=sum(math.prod(each.shape) for each in self._layers.parameters().values()),
                rank=None,
                alpha=None,
                scale=None,
                strength=f"{spec.tokens} tokens of {self.encoder.title} features of {of}, meant for scale 1",
            )
        ]

    def modules_per_block(self) -> dict[int, int]:
        blocks = [self.family.block_index(path) for path in self._layers.paths.values()]
        return modules_per_block(blocks, len(self.family.block_names()))

    @property
    def sentence(self) -> str:
        own, references = self.options.ip_adapter, self.options.dataset.conditioning_data_dir
        where = "the images themselves" if references is None else str(references)
        drops = (own.image_dropout_rate, own.text_dropout_rate, own.image_text_dropout_rate)
        shown = "image {:.3g} %, caption {:.3g} %, both {:.3g} %".format(*(100 * rate for rate in drops))
        text = f"references {where}; dropped: {shown}"
        if own.ip_adapter_scale_warmup_steps:
            text += f"; scale rises to 1 over {own.ip_adapter_scale_warmup_steps} steps"
        return text

    @property
    def identity(self) -> str:
        return f"{self.encoder.identity(feature_kind(self.spec))}/{references_digest(self._references)}"

    def check_data(self, index: DatasetIndex) -> None:
        own = self.options.ip_adapter
        self._references = find_references(index.in_use, self.options.dataset.conditioning_data_dir)
        if own.sample_ip_image is not None:
            try:
                verify_image(own.sample_ip_image)
            except ImageError as error:
                raise OptionError(f"sample_ip_image: {error}") from error

    # --- training ----------------------------------------------------------------------------------------------------

    def conditioner(self, options: TrainOptions, index: DatasetIndex, seed: int, report: Report) -> Conditioner:
        kind = feature_kind(self.spec)
        features = ImageFeatures(
            lambda images: self.encoder.encode(images, kind),
            lambda: self.encoder.identity(kind),
            dtype=DTYPES[options.run.mixed_precision],
            to_disk=options.ip_adapter.cache_image_features_to_disk,
            report=report,
        )
        return ReferenceConditioner(self, features, index, self._references, seed)

    def attach(self, family: Family, seed: int) -> AttachedIpAdapter:
        adapter = family.attach_ip_adapter(self.spec, derive_seed(seed, "ip_adapter"))
        if self.start is not None:
            adapter.load(self.start)
        naming = family.denoiser_naming
        named = [(f"{naming.component}.{name}", parameter) for name, parameter in adapter.named_parameters()]
        group = RateGroup(naming.log_name, self.learning_rate, [parameter for _, parameter in named])
        return AttachedIpAdapter([group], named, adapter=adapter)

    # --- metadata ----------------------------------------------------------------------------------------------------

    def network_facts(self) -> dict[str, Any]:
        return {"network_dim": 0, "network_alpha": 0, "network_module": "ip_adapter"}

    def refine_metadata(self, metadata: dict[str, str]) -> dict[str, str]:
        # A program that finds a LoRA's rank would take the file for one.
        of_lora = ("ss_network_dim", "ss_network_alpha", "ss_network_args", "ss_network_dropout")
        kept = {key: value for key, value in metadata.items() if key not in of_lora}
        kept["modelspec.architecture"] = metadata["modelspec.architecture"].replace("/lora", "/ip-adapter")
        return kept | {
            "maulstick_ip_adapter_type": self.spec.kind,
            "maulstick_ip_adapter_tokens": str(self.spec.tokens),
            "maulstick_ip_adapter_scale": f"{INTENDED_SCALE:g}",
            "maulstick_image_encoder": f"{self.encoder.title} {self.encoder.folder.name}",
        }


def _checked_spec(family: Family, own: IpAdapterOptions, encoder: ImageEncoder) -> IpAdapterSpec:
    wanted = family.ip_adapter_encoder
    if wanted is not None and encoder.kind != wanted:
        raise OptionError(
            f"image_encoder: {encoder.folder} is a {encoder.title} model, but IP-Adapters for {family.name} read "
            f"{'CLIP' if wanted == 'clip' else 'SigLIP'}. Name one of that kind."
        )
    if own.ip_adapter_type is not None and not family.ip_adapter_types:
        raise OptionError(f"ip_adapter_type: {family.name} has one type of IP-Adapter only. Remove it.")
    usual = family.ip_adapter_types[0] if family.ip_adapter_types else None
    kind = own.ip_adapter_type or usual
    width = encoder.width("pooled" if kind == "plain" else "patches")
    try:
        return family.ip_adapter_spec(kind, own.ip_adapter_tokens, width)
    except ModelError as error:
        raise OptionError(str(error)) from error


class ReferenceConditioner(Conditioner):
    """Image features with drops: without the image, without the caption, without either; draws follow the place.

    A dropped image is still given, as the features that stand for none: leaving it out would leave the parameters
    without gradient, on one process of several while the others wait.
    """

    title = "caching image features"
    further_captions = frozenset({""})

    def __init__(
        self,
        training: IpAdapterTraining,
        features: ImageFeatures,
        index: DatasetIndex,
        references: Mapping[Path, Reference],
        seed: int,
    ) -> None:
        self.training, self.features, self.index, self.references = training, features, index, references
        self.seed = seed
        self._negative: torch.Tensor | None = None

    @property
    def _own(self) -> IpAdapterOptions:
        return self.training.options.ip_adapter

    def prepare(self, progress: Progress | None = None) -> None:
        self.features.prepare([self.references[record.path] for record in self.index.in_use], progress)
        negative = self._negative_features()
        path = self._own.sample_ip_image
        if path is not None:
            encoder, kind = self.training.encoder, feature_kind(self.training.spec)
            self.sample_prompt = ImagePrompt(encoder.encode([read_rgb(path)], kind)[0], negative, INTENDED_SCALE)
        self.training.encoder.release()

    def at_step(self, step: int) -> None:
        """Set the scale of this step: the ramp begins above 0, where the branch would be left out."""
        adapter, ramp = self.training.family.ip_adapter, self._own.ip_adapter_scale_warmup_steps
        if adapter is not None:
            adapter.scale = min(1.0, (step + 1) / ramp) * INTENDED_SCALE if ramp else INTENDED_SCALE

    def as_saved(self) -> None:
        if self.training.family.ip_adapter is not None:
            self.training.family.ip_adapter.scale = INTENDED_SCALE

    def captions(self, items: Sequence[BatchItem]) -> list[str]:
        return ["" if self.dropped(item)[1] else item.caption for item in items]

    def about(self, items: Sequence[BatchItem]) -> Conditioning:
        features = self.features.features_of([self.references[item.record.path] for item in items])
        dropped = [place for place, item in enumerate(items) if self.dropped(item)[0]]
        if dropped:
            features[dropped] = self._negative_features()
        return {IMAGE_FEATURES: features}

    def dropped(self, item: BatchItem) -> tuple[bool, bool]:
        """Return whether the image and whether the caption is dropped when this item is trained; of one draw."""
        if item.judged:
            return False, False
        own = self._own
        draw = Random(derive_seed(self.seed, "image prompt drops", item.epoch, item.position)).random()
        image = draw < own.image_dropout_rate
        text = own.image_dropout_rate <= draw < own.image_dropout_rate + own.text_dropout_rate
        single = own.image_dropout_rate + own.text_dropout_rate
        both = single <= draw < single + own.image_text_dropout_rate
        return image or both, text or both

    def _negative_features(self) -> torch.Tensor:
        if self._negative is None:
            self._negative = negative_features(self.training.encoder, self.training.spec)
        return self._negative
