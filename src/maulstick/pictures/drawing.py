"""Drawing pictures with a loaded model: the one way that ``generate`` and samples in training share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maulstick.errors import OptionError
from maulstick.families.base import Family
from maulstick.families.ip_adapter import ImagePrompt
from maulstick.pictures.prompts import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Picture:
    """A drawn picture and the prompt, complete in all fields, that it was drawn from."""

    image: Image
    prompt: Prompt


def draw_pictures(
    family: Family,
    prompts: Sequence[Prompt],
    finished: Callable[[Picture], None],
    *,
    batch_size: int = 1,
    image_prompt: ImagePrompt | None = None,
) -> None:
    """Draw one picture for each prompt and hand it to ``finished``; every field of the prompts must be set.

    A picture's noise comes from its own seed, on the CPU in fp32: neither the device, nor the precision, nor its
    neighbours in the batch, nor any random state of the process has a part in it. Prompts that follow each other with
    the same size, steps, scale and sampler are drawn together, ``batch_size`` at a time. Networks are put in evaluation
    mode and back; live modules are used as they are. ``image_prompt`` is for the family's IP-Adapter, which needs one.
    """
    with family.encoders_borrowed():
        for settings, group in groupby(prompts, key=_settings):
            alike = list(group)
            for start in range(0, len(alike), batch_size):
                for picture in _draw_batch(family, settings, alike[start : start + batch_size], image_prompt):
                    finished(picture)


def refuse_samplers(family: Family, samplers: Iterable[str | None]) -> None:
    """Raise OptionError for a sampler that cannot draw with this family; None stands for the usual one."""
    for sampler in samplers:
        if sampler is not None and sampler not in family.sampler_names:
            known = ", ".join(family.sampler_names)
            raise OptionError(f"Sampler '{sampler}' does not fit {family.name}. Those that do: {known}.")


def refuse_sizes(family: Family, prompts: Iterable[Prompt], what: str = "A picture") -> None:
    """Raise OptionError for a picture that is larger than this family can draw."""
    family.refuse_sizes([(prompt.width or 0, prompt.height or 0) for prompt in prompts], what)


@contextmanager
def evaluation_mode(networks: Sequence[nn.Module]) -> Iterator[None]:
    """Put networks in evaluation mode, and every module back into its own mode at the end."""
    training = [module for network in networks for module in network.modules() if module.training]
    for network in networks:
        network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class _Settings:
    """What pictures drawn in one batch must have in common."""

    sampler: str
    width: int
    height: int
    steps: int
    scale: float


def _settings(prompt: Prompt) -> _Settings:
    sampler, width, height, steps, scale = prompt.sampler, prompt.width, prompt.height, prompt.steps, prompt.scale
    if sampler is None or width is None or height is None or steps is None or scale is None or prompt.seed is None:
        raise ValueError(f"the prompt is not complete: {prompt}")
    return _Settings(sampler, width, height, steps, scale)


def _draw_batch(
    family: Family, settings: _Settings, prompts: Sequence[Prompt], image_prompt: ImagePrompt | None
) -> list[Picture]:
    generators = [torch.Generator().manual_seed(prompt.seed or 0) for prompt in prompts]
    size = (1, family.latent_channels, settings.height // family.vae_scale, settings.width // family.vae_scale)
    noise = torch.cat([torch.randn(size, generator=generator) for generator in generators])
    with torch.no_grad(), _untouched_random_state(family.device):
        pipeline = family.pipeline(settings.sampler)
        networks = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
        with evaluation_mode(networks):
            with _half_precision(family), _image_arguments(family, image_prompt, len(prompts), settings.scale) as image:
                conditioning = family.pipeline_conditioning(
                    [prompt.text for prompt in prompts], [prompt.negative or "" for prompt in prompts]
                )
                latents = pipeline(
                    **conditioning,
                    **image,
                    latents=noise.to(family.device, family.dtype),
                    generator=generators,
                    width=settings.width,
                    height=settings.height,
                    num_inference_steps=settings.steps,
                    guidance_scale=settings.scale,
                    output_type="latent",
                ).images
            pixels = family.decode_latents(latents)
        images = pipeline.image_processor.postprocess(pixels.cpu(), output_type="pil")
    return [Picture(image, prompt) for image, prompt in zip(images, prompts, strict=True)]


def _image_arguments(
    family: Family, prompt: ImagePrompt | None, count: int, guidance: float
) -> AbstractContextManager[dict[str, Any]]:
    if family.ip_adapter is None or prompt is None:
        return nullcontext({})
    return family.ip_adapter.drawing(prompt, count, guided=guidance > 1)


def _half_precision(family: Family) -> AbstractContextManager[object]:
    """As in training: a half-precision base with an adapter in fp32 needs autocast between the two."""
    if family.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(family.device.type, dtype=family.dtype)


def _untouched_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Some samplers draw from the process's own generators; training must go on as if nothing had been drawn."""
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)
