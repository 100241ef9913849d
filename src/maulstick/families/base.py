"""What the trainer asks of a model family. The loop knows this protocol and no family by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from maulstick.adapters.block_weights import NamedBlocks
from maulstick.adapters.ip_adapter_files import IpAdapterSpec
from maulstick.adapters.key_names import KeyNames
from maulstick.errors import ModelError, OptionError
from maulstick.families.framing import Framing
from maulstick.families.image_encoder import EncoderKind
from maulstick.families.ip_adapter import IpAdapter, Layers
from maulstick.options.generate import Sampler
from maulstick.options.schema import ObjectiveOptions

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from maulstick.families.merged_base import BaseChange

Conditioning = dict[str, Tensor]
"""Named conditioning tensors, each with the batch as its first dimension.

What is in it is between a family's ``encode_text`` and its ``predict``: text states, pooled text, sizes.
"""

VAE = "vae"
"""The VAE's name among a family's encoders."""


@dataclass(frozen=True)
class AdapterNaming:
    """How one component that can carry LoRA is called.

    Attributes:
        component: attribute name of the component in the pipeline, e.g. ``"unet"`` or ``"text_encoder"``.
        log_name: name in trackers, e.g. ``"unet"`` in ``lr/unet``.
    """

    component: str
    log_name: str


class Family(ABC):
    """A loaded model of one family, with what training needs of it.

    Encoders (the VAE and the text encoders) are loaded when they are first used, and can be released: a run whose
    caches hold everything never loads them.

    Attributes:
        name: what the model is, in words, such as "SD 1.x".
        base_model_version: ``ss_base_model_version`` of its LoRA files.
        architecture: ``modelspec.architecture`` of its LoRA files.
        prediction_type: what the denoiser predicts, as diffusers calls it.
        device, dtype: where the networks are, and the number format of the frozen denoiser and text encoders.
        denoiser: the frozen network that LoRA is put into (UNet or transformer).
        denoiser_naming, text_encoder_naming: where LoRA goes and how it is called.
        key_names: how all its modules are called in LoRA files, ours and others'.
        vae_scale: pixels per latent element along a side.
        latent_channels: channels of a latent.
        native_size: side in pixels of the square images the model was made for.
        size_multiple: pixels that the sides of a picture are a multiple of; ``vae_scale`` or more.
        largest_side: pixels that a side can have at most; None where the model sets no limit.
        network_module: what sd-scripts calls its network for LoRA.
        token_limits: what ``max_token_length`` may be.
        sampler_names: samplers that draw with it.
        notes: what the user should know about the model as it was found.
        merged: identifies the LoRA files that were merged into the base; "" for none.
        ip_adapter: the IP-Adapter in the denoiser, None without one.
        ip_adapter_encoder: whose vision model its IP-Adapters read; None where it has none.
        ip_adapter_types: the types of IP-Adapters to choose from, the usual one first; none where there is one only.
    """

    name: str
    base_model_version: str
    architecture: str
    prediction_type: str
    device: torch.device
    dtype: torch.dtype
    denoiser: nn.Module
    denoiser_naming: AdapterNaming
    text_encoder_naming: Mapping[str, AdapterNaming]
    key_names: KeyNames
    vae_scale: int
    latent_channels: int
    native_size: int
    network_module: str = "networks.lora"
    token_limits: Sequence[int] = (75, 150, 225)
    sampler_names: Sequence[str] = get_args(Sampler)
    notes: Sequence[str]
    merged: str = ""
    ip_adapter: IpAdapter | None = None
    ip_adapter_encoder: EncoderKind | None = None
    ip_adapter_types: Sequence[str] = ()

    @property
    def size_multiple(self) -> int:
        return self.vae_scale

    @property
    def largest_side(self) -> int | None:
        return None

    def refuse_sizes(self, sizes: Iterable[tuple[int, int]], what: str) -> None:
        """Raise OptionError for a (width, height) with a side that the model has no places for; ``what`` it is."""
        for width, height in sizes:
            if self.largest_side is not None and max(width, height) > self.largest_side:
                raise OptionError(
                    f"{what} of {width}x{height} pixels is too large: {self.name} knows positions up to "
                    f"{self.largest_side} pixels a side. Choose a smaller size."
                )

    def prepare_for_adapters(self) -> None:  # noqa: B027 (most families have nothing to do)
        """Bring the denoiser into the form whose modules adapter files name, where that is another; it stays so.

        To be called before an adapter is planned or put on. What the denoiser computes does not change.
        """

    @abstractmethod
    def change_base(self, changes: Mapping[str, Sequence[BaseChange]], identity: str) -> None:
        """Change weights of the frozen networks, by component; ``identity`` becomes ``merged``.

        Encoders that are loaded later are changed then. Raises ModelError where a change does not fit.
        """

    @abstractmethod
    def store_in_fp8(self, components: Collection[str]) -> None:
        """Keep the frozen weights of these networks in eight bits from now on; encoders that are loaded later too.

        To be called when everything that reads or changes weights is done: joining, merging, putting adapters in.
        """

    @abstractmethod
    def base_bytes(self, in_fp8: Collection[str] = ()) -> dict[str, int]:
        """Return component -> bytes of its frozen weights, with these in eight bits; nothing is loaded for it."""

    def check_objective(self, objective: ObjectiveOptions) -> None:  # noqa: B027 (a family may train with all of them)
        """Refuse options about noise and loss that mean nothing for this family (``OptionError``)."""

    @property
    @abstractmethod
    def text_encoders(self) -> Mapping[str, nn.Module]:
        """Component name -> frozen text encoder, in the order of their key prefixes; loaded when first asked for."""

    @property
    @abstractmethod
    def text_encoder_components(self) -> frozenset[str]:
        """Names of the text encoders; nothing is loaded for it."""

    @property
    @abstractmethod
    def latent_identity(self) -> str:
        """Identifies everything that latents depend on besides the image (VAE weights, precision, scaling)."""

    @property
    @abstractmethod
    def text_identity(self) -> str:
        """Identifies everything that text states depend on besides the caption (weights, layer taken, token length)."""

    @abstractmethod
    def encode_images(self, pixels: Tensor) -> Tensor:
        """Return fp32 latents (B, C, H / vae_scale, W / vae_scale) of pixels (B, 3, H, W) in [-1, 1].

        They are scaled as the denoiser wants them. The mean of the VAE's distribution is taken, so that a cached latent
        equals a fresh one.
        """

    @abstractmethod
    def encode_images_in_fp32(self, pixels: Tensor) -> Tensor:
        """The same with the VAE in fp32, for images whose latents were not finite in the chosen precision."""

    @abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Return fp32 pixels (B, 3, H, W), about [-1, 1], of latents as the denoiser knows them."""

    @abstractmethod
    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids of the captions, per text encoder, as long tensors (B, chunks * 77)."""

    @abstractmethod
    def count_tokens(self, caption: str) -> int:
        """Return the caption's number of tokens without start and end marks, uncut."""

    @abstractmethod
    def encode_text(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Run the text encoders; differentiable where their LoRA is trained."""

    def image_conditioning(self, framings: Sequence[Framing]) -> Conditioning:
        """Return what the denoiser is told about the pictures beside their captions, one row for each; often nothing.

        It joins what ``encode_text`` gives. A denoiser that is not told takes its pictures for whole images.
        """
        return {}

    @abstractmethod
    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` training timesteps on the CPU (the generator's device)."""

    @abstractmethod
    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noisy input of the denoiser."""

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return what the denoiser should predict."""

    def signal_to_noise(self, timesteps: Tensor) -> Tensor | None:
        """Return the ratio of the variances of image and noise in each noisy input, fp32; None where none is defined.

        Only a family that has it can be trained with the options that weigh timesteps by it.
        """
        return None

    @abstractmethod
    def loss_weights(self, timesteps: Tensor, min_snr_gamma: float | None) -> Tensor:
        """Return one weight per image, shape (B,)."""

    def objective_metadata(self) -> Mapping[str, Any]:
        """Return what sd-scripts writes about noise and loss of this family alone, by the name without ``ss_``."""
        return {}

    @abstractmethod
    def predict(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """Run the denoiser once."""

    @abstractmethod
    def block_index(self, path: str) -> int | None:
        """Return the index of the block that a denoiser module belongs to, None where it belongs to none."""

    @abstractmethod
    def block_names(self) -> Sequence[str]:
        """Return the names of all blocks in the order of their index."""

    def block_parts(self) -> Mapping[str, range]:
        """Return the parts that weights by block speak of (``down``, ``up``), each with its block indices.

        Families whose blocks are one plain row need not say more: their one part is ``block``.
        """
        return {"block": range(len(self.block_names()))}

    def block_layout(self) -> NamedBlocks:
        """Return names and parts together, as weights and ranks by block are read with."""
        return NamedBlocks(tuple(self.block_names()), self.block_parts())

    # --- image prompts -----------------------------------------------------------------------------------------------

    def ip_adapter_spec(self, kind: str | None, tokens: int | None, feature_width: int) -> IpAdapterSpec:
        """Return the sizes of a new IP-Adapter. Raises ModelError where the model can have none of this kind."""
        raise self._no_ip_adapter()

    def ip_adapter_layers(self, spec: IpAdapterSpec) -> Layers:
        """Return the modules of an IP-Adapter as shapes without memory (on the meta device), to be counted."""
        raise self._no_ip_adapter()

    def attach_ip_adapter(self, spec: IpAdapterSpec, seed: int = 0) -> IpAdapter:
        """Put an untrained IP-Adapter into the denoiser, freeze the rest of it, and return it.

        From then on ``predict`` takes image features (``IMAGE_FEATURES``); without them it is the base model's.

        Raises:
            ModelError: the model can have none, or has one already.
        """
        raise self._no_ip_adapter()

    def _no_ip_adapter(self) -> ModelError:
        return ModelError(f"There are no IP-Adapters for {self.name} here: SD 1.x, SD 2.x, SDXL and SD3 have them.")

    @abstractmethod
    def pipeline(self, sampler: str) -> DiffusionPipeline:
        """Return a diffusers pipeline over the live modules, with the named sampler; nothing is copied or cast.

        It brings the encoders onto the device; ``encoders_borrowed`` lets them go again.
        """

    @abstractmethod
    def pipeline_conditioning(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the pipeline's keyword arguments for these prompts, encoded exactly as captions are in training."""

    @abstractmethod
    def encoders_on_device(self) -> frozenset[str]:
        """Return the names of the encoders that are loaded and on the device: ``"vae"`` and component names."""

    @abstractmethod
    def release_encoders(self, *, vae: bool, text_encoders: bool) -> None:
        """Free the memory of encoders that are not needed now; they come back when they are used.

        A text encoder that carries an adapter is kept, on the CPU.
        """

    @contextmanager
    def encoders_borrowed(self) -> Iterator[None]:
        """Release at the end whatever encoders were brought onto the device inside."""
        before = self.encoders_on_device()
        try:
            yield
        finally:
            gained = self.encoders_on_device() - before
            self.release_encoders(vae=VAE in gained, text_encoders=bool(gained - {VAE}))
