"""Held-out denoising loss: fixed images, timesteps and noise, so that two figures differ by the weights alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from maulstick.families.base import Family

TIMESTEPS = tuple(range(50, 1000, 100))


@torch.no_grad()
def denoising_loss(family: Family, latents: Tensor, captions: Sequence[str], *, batch_size: int = 20) -> float:
    """Return the mean squared error of the denoiser over ten timesteps (50, 150, …, 950) of all images.

    Args:
        latents: (N, C, H, W), scaled for the denoiser.
        captions: N captions.
        batch_size: images per forward pass; the noise does not depend on it.
    """
    was_training = family.denoiser.training
    family.denoiser.eval()
    conditioning = family.encode_text(family.tokenize(list(captions)))
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for timestep in TIMESTEPS:
        noise = torch.randn(latents.shape, generator=generator).to(latents.device)
        for start in range(0, len(latents), batch_size):
            part = slice(start, start + batch_size)
            clean, noise_part = latents[part], noise[part]
            timesteps = torch.full((len(clean),), timestep, device=latents.device)
            prediction = family.predict(
                family.add_noise(clean, noise_part, timesteps),
                timesteps,
                {name: tensor[part] for name, tensor in conditioning.items()},
            )
            target = family.target(clean, noise_part, timesteps)
            total += float(mse_loss(prediction.float(), target.float())) * len(clean)
    family.denoiser.train(was_training)
    return total / (len(latents) * len(TIMESTEPS))
