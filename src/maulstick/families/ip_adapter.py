"""What every IP-Adapter is to the rest of the program: parameters with names, a scale, and image features as input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maulstick.adapters.ip_adapter_files import (
    LAYERS,
    PROJECTION,
    IpAdapterFile,
    IpAdapterSpec,
    describe_misfit,
    from_file_names,
    to_file_names,
)
from maulstick.errors import ModelError
from maulstick.families.image_encoder import FeatureKind, ImageEncoder

IMAGE_FEATURES = "image_features"
"""Name of the image features among the conditioning: (B, D) pooled, or (B, T, D), fp32."""


def feature_kind(spec: IpAdapterSpec) -> FeatureKind:
    """Return which of an encoder's features an IP-Adapter reads."""
    return "pooled" if spec.kind == "plain" else "patches"


def negative_features(encoder: ImageEncoder, spec: IpAdapterSpec) -> Tensor:
    """Return what stands for "no image" in training and guidance, without batch dimension.

    Zeros, as diffusers' pipelines have it; for Plus alone they take the features of an image of zeros.
    """
    black = encoder.encode_black(feature_kind(spec))
    return black if spec.kind == "plus" else torch.zeros_like(black)


@dataclass(frozen=True)
class ImagePrompt:
    """A reference image as pictures are drawn with it.

    Attributes:
        features: (D) or (T, D), fp32.
        negative: what stands for "no image" in guidance, of the same shape.
        scale: of the attention to the image.
    """

    features: Tensor
    negative: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Layers:
    """The modules of an IP-Adapter, made for a denoiser and not yet in it.

    Attributes:
        processors: place among the denoiser's attention processors -> the processor that attends to the image.
        paths: the same place -> path of the attention module.
    """

    projection: nn.Module
    processors: Mapping[int, nn.Module]
    paths: Mapping[int, str]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter: ``image_proj.…`` and ``ip_adapter.N.…``, as diffusers' modules call the rest."""
        named = {PROJECTION + name: parameter for name, parameter in self.projection.named_parameters()}
        for place, processor in self.processors.items():
            named |= {f"{LAYERS}{place}.{name}": parameter for name, parameter in processor.named_parameters()}
        return named


class IpAdapter(ABC):
    """An IP-Adapter in a denoiser: its parameters are fp32, everything else of the denoiser is frozen.

    Attributes:
        scale: what the attention to the image is multiplied with; above 0, because diffusers leaves the branch out at 0
            and its parameters without gradient.
    """

    def __init__(self, denoiser: nn.Module, spec: IpAdapterSpec, layers: Layers) -> None:
        self.denoiser = denoiser
        self.spec = spec
        self.layers = layers
        self._scale = 1.0
        self.scale = 1.0

    # --- scale -------------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = scale
        for processor in self.layers.processors.values():
            self._set_scale(processor, scale)

    @staticmethod
    @abstractmethod
    def _set_scale(processor: Any, scale: float) -> None:
        """Set the scale of one processor."""

    @contextmanager
    def at_scale(self, scale: float) -> Iterator[None]:
        """Work at another scale inside."""
        before, self.scale = self.scale, scale
        try:
            yield
        finally:
            self.scale = before

    # --- weights -----------------------------------------------------------------------------------------------------

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter with its name, in the order of the layers."""
        return list(self.layers.parameters().items())

    def file_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the weights as a file has them, on the CPU, in ``dtype`` where given."""
        state = {name: parameter.detach().to("cpu", dtype) for name, parameter in self.named_parameters()}
        return to_file_names(self.spec.kind, state)

    @torch.no_grad()
    def load(self, file: IpAdapterFile) -> None:
        """Take over the weights of a file, in fp32.

        Raises:
            ModelError: it is of another kind, or names or shapes are not exactly those of this one; nothing is changed
                then.
        """
        if file.spec.kind != self.spec.kind:
            raise ModelError(f"{file.path} is an {file.spec.title}, not an {self.spec.title}.")
        misfit = describe_misfit(file.tensors, self.file_tensors())
        if misfit is not None:
            raise ModelError(f"{file.path} does not fit this model: {misfit}.")
        state = from_file_names(self.spec.kind, file.tensors)
        for name, parameter in self.named_parameters():
            parameter.copy_(state[name])

    # --- use ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, features: Tensor) -> dict[str, Any]:
        """Return what the denoiser is given for image features with the batch first."""

    @abstractmethod
    def pipeline_inputs(self, features: Tensor) -> dict[str, Any]:
        """Return what diffusers' pipeline is given for them; under guidance the negative half comes first."""

    @contextmanager
    def predicting(self, conditioning: Mapping[str, Tensor], count: int) -> Iterator[dict[str, Any]]:
        """Give the denoiser's further arguments for one prediction; without features it is the bare base."""
        features = conditioning.get(IMAGE_FEATURES)
        if features is not None:
            yield self.inputs(features)
            return
        with self.at_scale(0.0):
            yield self.inputs(self._no_features(count))

    def _no_features(self, count: int) -> Tensor:
        shape = (count, self.spec.feature_width) if self.spec.kind == "plain" else (count, 1, self.spec.feature_width)
        return torch.zeros(shape)

    @contextmanager
    def drawing(self, prompt: ImagePrompt, count: int, *, guided: bool) -> Iterator[dict[str, Any]]:
        """Give the pipeline's further arguments for ``count`` pictures with one reference image."""
        features = prompt.features.expand(count, *prompt.features.shape)
        if guided:
            # Two images for two prompts would be repeated by the pipeline; one row for each picture is not.
            features = torch.cat([prompt.negative.expand(features.shape), features])
        with self.at_scale(prompt.scale):
            yield self.pipeline_inputs(features)

    @property
    def device(self) -> torch.device:
        """Where the denoiser is."""
        return next(self.denoiser.parameters()).device


def freeze_all_but(denoiser: nn.Module, layers: Layers) -> None:
    """Freeze the denoiser and let the IP-Adapter's own parameters train."""
    denoiser.requires_grad_(False)
    for parameter in layers.parameters().values():
        parameter.requires_grad_(True)


def plain_weight(module: Any) -> Tensor:
    """Return the base's own weight of a linear layer, also where a LoRA lies around it."""
    weight: Tensor = getattr(module, "base_layer", module).weight
    return weight.detach().float()
