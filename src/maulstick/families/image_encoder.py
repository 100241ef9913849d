"""The frozen network that turns reference images into features: CLIP's or SigLIP's vision model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maulstick.errors import ModelError
from maulstick.families.build import build_module
from maulstick.families.libraries import quiet_libraries
from maulstick.families.recognise import JsonObject, read_json
from maulstick.families.source import find_weights
from maulstick.weight_files import NamedWeights, Slot, open_weights

EncoderKind = Literal["clip", "siglip"]
FeatureKind = Literal["pooled", "patches"]
"""``pooled``: one projected vector of an image; ``patches``: the states before the last layer, one for each patch."""

_MODEL_TYPES: dict[str, EncoderKind] = {
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
}
_TITLES = {"clip": "CLIP", "siglip": "SigLIP"}
_STEMS = ("model", "pytorch_model")
_PROCESSOR_FILE = "preprocessor_config.json"
_IMAGES_AT_ONCE = 8


class ImageEncoder:
    """A vision model in fp32 with its preprocessing. Only its config is read until it is used.

    Attributes:
        folder: where it lies.
        kind: whose vision model it is.
    """

    def __init__(self, folder: Path, *, device: torch.device | str = "cpu") -> None:
        """Open a folder with a config and weights; a ``preprocessor_config.json`` in it says how images are prepared.

        The folder may be that of a whole CLIP or SigLIP; its text model is not read.

        Raises:
            ModelError: it is no such folder.
        """
        folder = folder.expanduser()
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"image_encoder: {folder} has no config.json. Name a local folder of a CLIP vision model (SD 1.x, "
                "SDXL) or a SigLIP vision model (SD3); nothing is downloaded."
            )
        config = read_json(folder / "config.json")
        kind = _MODEL_TYPES.get(str(config.get("model_type")))
        if kind is None:
            raise ModelError(
                f"image_encoder: {folder} is a '{config.get('model_type')}' model; a CLIP "
                "(CLIPVisionModelWithProjection) or SigLIP (SiglipVisionModel) vision model is needed."
            )
        self.folder, self.kind, self.device = folder, kind, torch.device(device)
        vision = config.get("vision_config", config)
        self._config: JsonObject = {**vision, "projection_dim": _projection_width(config, vision)}
        self._weights: NamedWeights | None = None
        self._model: Any = None
        self._preparation: Any = None

    @property
    def title(self) -> str:
        """Name for people."""
        return _TITLES[self.kind]

    def width(self, features: FeatureKind) -> int:
        """Width of the features."""
        return int(self._config["projection_dim"] if features == "pooled" else self._built_config().hidden_size)

    def identity(self, features: FeatureKind) -> str:
        """Identify everything that features depend on besides the image: weights, preparation, layer taken."""
        prepared = json.dumps(self._processor_settings(), sort_keys=True)
        digest = sha256(prepared.encode()).hexdigest()[:16]
        return f"{self.kind}:{self._named_weights().content_hash()}:{features}:prepared-{digest}"

    # --- use ---------------------------------------------------------------------------------------------------------

    def encode(self, images: Sequence[NDArray[np.uint8]], features: FeatureKind) -> Tensor:
        """Return fp32 features of RGB images (H, W, 3), on the CPU: (B, D) pooled, or (B, T, D) patches."""
        encoded = [
            self._features(self._prepared(images[start : start + _IMAGES_AT_ONCE]), features)
            for start in range(0, len(images), _IMAGES_AT_ONCE)
        ]
        return torch.cat(encoded)

    def encode_black(self, features: FeatureKind) -> Tensor:
        """Return the features of an image of zeros as it reaches the network, without the batch dimension."""
        grey = np.zeros((8, 8, 3), np.uint8)
        return self._features(torch.zeros_like(self._prepared([grey])), features)[0]

    def release(self) -> None:
        """Free its memory; it comes back when it is used."""
        self._model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _features(self, pixels: Tensor, features: FeatureKind) -> Tensor:
        model = self._loaded()
        with torch.autocast(self.device.type, enabled=False):
            if features == "pooled":
                found: Tensor = model(pixels.to(self.device)).image_embeds
            else:
                found = model(pixels.to(self.device), output_hidden_states=True).hidden_states[-2]
        found = found.float().cpu()
        if not torch.isfinite(found).all():
            raise ModelError(f"image_encoder: {self.folder} gives features that are not finite; it is damaged.")
        return found

    def _prepared(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        if self._preparation is None:
            self._preparation = self._processor()
        pixels: Tensor = self._preparation(images=list(images), return_tensors="pt", input_data_format="channels_last")[
            "pixel_values"
        ]
        return pixels

    # --- parts -------------------------------------------------------------------------------------------------------

    def _built_config(self) -> Any:
        from transformers import CLIPVisionConfig, SiglipVisionConfig

        return (CLIPVisionConfig if self.kind == "clip" else SiglipVisionConfig).from_dict(self._config)

    def _named_weights(self) -> NamedWeights:
        if self._weights is None:
            file = open_weights(find_weights(self.folder, _STEMS))
            # A whole CLIP or SigLIP has a text model beside it, and temperatures.
            wanted = ("vision_model.", "visual_projection.") if self.kind == "clip" else ("vision_model.",)
            unused = ("position_ids", "logit_scale", "logit_bias")
            slots = {
                name: Slot(name, shape)
                for name, shape in file.shapes.items()
                if not name.startswith(("text_model.", "text_projection.")) and not name.endswith(unused)
            }
            named = NamedWeights(file, slots)
            if self.kind == "siglip":
                named = named.renamed(lambda name: name.removeprefix("vision_model."))
            elif "visual_projection.weight" not in slots or not any(name.startswith(wanted) for name in slots):
                raise ModelError(
                    f"image_encoder: {self.folder} has no visual_projection.weight: it is a bare vision model. Use a "
                    "CLIPVisionModelWithProjection, such as the image_encoder folder that IP-Adapters come with."
                )
            self._weights = named
        return self._weights

    def _loaded(self) -> Any:
        if self._model is None:
            with quiet_libraries():
                from transformers import CLIPVisionModelWithProjection, SiglipVisionModel

            kind = CLIPVisionModelWithProjection if self.kind == "clip" else SiglipVisionModel
            self._model = build_module(
                lambda: kind(self._built_config()),
                self._named_weights(),
                what=f"{self.title} image encoder",
                dtype=torch.float32,
                device=self.device,
            )
        return self._model

    def _processor(self) -> Any:
        # Always the one that works with Pillow: torchvision's, which transformers prefers where it is installed, gives
        # slightly other pixels, and cached features must not depend on what else is installed.
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        kind = CLIPImageProcessorPil if self.kind == "clip" else SiglipImageProcessorPil
        return kind(**self._processor_settings())

    def _processor_settings(self) -> JsonObject:
        file = self.folder / _PROCESSOR_FILE
        if file.is_file():
            names = {"_processor_class", "processor_class", "image_processor_type", "feature_extractor_type"}
            return {name: value for name, value in read_json(file).items() if name not in names}
        side = self._built_config().image_size
        if self.kind == "clip":
            return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return {"size": {"height": side, "width": side}}


def _projection_width(config: JsonObject, vision: JsonObject) -> int:
    # The config of a whole CLIP has the width outside of its vision part, which may state another one.
    widths: list[Any] = [each["projection_dim"] for each in (config, vision) if "projection_dim" in each]
    return int(widths[0]) if widths else 512
