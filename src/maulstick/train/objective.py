"""What is minimised: noise, timesteps, targets and the loss of each image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maulstick.families.base import Family
from maulstick.options.schema import ObjectiveOptions


@dataclass(frozen=True)
class NoisyBatch:
    """One micro-batch as the denoiser sees it: input, timesteps and target, each with the batch first."""

    noisy: Tensor
    timesteps: Tensor
    target: Tensor


def draw_noise(latents: Tensor, noise_offset: float | None, generator: torch.Generator) -> Tensor:
    """Return noise of the latents' shape; with an offset, each channel of each image is shifted as a whole.

    The offset is a normal draw of standard deviation ``noise_offset`` (N. Guttenberg, "Diffusion with Offset
    Noise", 2023).
    """
    noise = torch.randn(latents.shape, generator=generator)
    if noise_offset:
        noise += noise_offset * torch.randn(latents.shape[:2] + (1,) * (latents.dim() - 2), generator=generator)
    return noise.to(latents.device)


def make_noisy(family: Family, latents: Tensor, options: ObjectiveOptions, generator: torch.Generator) -> NoisyBatch:
    """Draw timesteps and noise for the latents (B, C, H, W) from a CPU generator."""
    timesteps = family.sample_timesteps(latents.shape[0], generator).to(latents.device)
    noise = draw_noise(latents, options.noise_offset, generator)
    return NoisyBatch(
        noisy=family.add_noise(latents, noise, timesteps),
        timesteps=timesteps,
        target=family.target(latents, noise, timesteps),
    )


def image_losses(
    family: Family, prediction: Tensor, batch: NoisyBatch, options: ObjectiveOptions, image_weights: Tensor
) -> Tensor:
    """Return the weighted squared error of each image, shape (B,), in fp32.

    ``image_weights`` (B,) holds 1 for training images and ``prior_loss_weight`` for regularisation images.
    """
    squared = (prediction.float() - batch.target.float()) ** 2
    per_image = squared.flatten(1).mean(1)
    return per_image * family.loss_weights(batch.timesteps, options.min_snr_gamma).float() * image_weights
