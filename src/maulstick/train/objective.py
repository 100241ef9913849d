"""What is minimised: noise, timesteps, targets and the loss of each image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from maulstick.families.base import Family
from maulstick.options.objective_schema import ObjectiveOptions

_MOST_SNR = 1000.0
"""Nearly clean timesteps of zero-terminal schedules have no bound of their own; sd-scripts takes this one."""
_TIMESTEPS = 1000


@dataclass(frozen=True)
class NoisyBatch:
    """One micro-batch as the denoiser sees it: input, timesteps and target, each with the batch first."""

    noisy: Tensor
    timesteps: Tensor
    target: Tensor


def draw_noise(latents: Tensor, options: ObjectiveOptions, generator: torch.Generator) -> Tensor:
    """Return noise of the latents' shape, with an offset or with coarser grids where the options ask for it.

    With an offset, each channel of each image is shifted as a whole, by a normal draw of standard deviation
    ``noise_offset`` (N. Guttenberg, "Diffusion with Offset Noise", 2023).
    """
    noise = torch.randn(latents.shape, generator=generator)
    if options.noise_offset is not None:
        strength: Tensor | float = options.noise_offset
        if options.noise_offset_random_strength:
            strength = strength * torch.rand(1, generator=generator)
        if options.adaptive_noise_scale is not None:
            means = latents.float().cpu().flatten(2).mean(2).abs()
            strength = strength + options.adaptive_noise_scale * means.view(*means.shape, *(1,) * (latents.dim() - 2))
            strength = strength.clamp(min=0)
        noise += strength * torch.randn(latents.shape[:2] + (1,) * (latents.dim() - 2), generator=generator)
    elif options.multires_noise_iterations is not None:
        noise = _with_coarser_grids(
            noise, options.multires_noise_iterations, options.multires_noise_discount, generator
        )
    return noise.to(latents.device)


def _with_coarser_grids(noise: Tensor, iterations: int, discount: float, generator: torch.Generator) -> Tensor:
    """Add noise of ever coarser grids, the i-th with weight discount**i, and scale the sum to deviation 1.

    Each grid is between two and four to the power i times as coarse (J. Whitaker, "Multi-Resolution Noise for Diffusion
    Model Training", 2023).
    """
    height, width = noise.shape[-2:]
    for number in range(iterations):
        factor = (2 + 2 * float(torch.rand(1, generator=generator))) ** number
        grid = max(1, int(height / factor)), max(1, int(width / factor))
        coarse = torch.randn((*noise.shape[:2], *grid), generator=generator)
        noise = noise + interpolate(coarse, (height, width), mode="bilinear") * discount**number
        if 1 in grid:
            break
    return noise / noise.std()


def make_noisy(family: Family, latents: Tensor, options: ObjectiveOptions, generator: torch.Generator) -> NoisyBatch:
    """Draw timesteps and noise for the latents (B, C, H, W) from a CPU generator.

    With ``ip_noise_gamma`` the input has more noise than the target knows of (Ning et al. 2023, eq. 6).
    """
    timesteps = family.sample_timesteps(latents.shape[0], generator).to(latents.device)
    noise = draw_noise(latents, options, generator)
    seen = noise
    if options.ip_noise_gamma is not None:
        strength = options.ip_noise_gamma
        if options.ip_noise_gamma_random_strength:
            strength *= float(torch.rand(1, generator=generator))
        seen = noise + strength * torch.randn(latents.shape, generator=generator).to(latents.device)
    return noisy_at(family, latents, noise, timesteps, seen)


def noisy_at(
    family: Family, latents: Tensor, noise: Tensor, timesteps: Tensor, seen: Tensor | None = None
) -> NoisyBatch:
    """Return latents (B, C, H, W) with this noise at these timesteps (B,); ``seen``: in the input in its place."""
    return NoisyBatch(
        noisy=family.add_noise(latents, noise if seen is None else seen, timesteps),
        timesteps=timesteps,
        target=family.target(latents, noise, timesteps),
    )


def image_losses(
    family: Family,
    prediction: Tensor,
    batch: NoisyBatch,
    options: ObjectiveOptions,
    image_weights: Tensor,
    masks: Tensor | None = None,
) -> Tensor:
    """Return the weighted error of each image, shape (B,), in fp32.

    ``image_weights`` (B,) holds 1 for training images and ``prior_loss_weight`` for regularisation images. ``masks``
    (B, 1, H, W) multiply the error of each element; the mean is over all of them, so that a small mask gives a small
    loss, as in sd-scripts.
    """
    error = prediction.float() - batch.target.float()
    if options.loss_type == "l2":
        loss = error**2
    elif options.loss_type == "l1":
        loss = error.abs()
    else:
        loss = _pseudo_huber(error, huber_widths(family, batch.timesteps, options), options.loss_type == "huber")
    if masks is not None:
        loss = loss * masks
    per_image = loss.flatten(1).mean(1)
    return per_image * loss_weights(family, batch.timesteps, options) * image_weights


def _pseudo_huber(error: Tensor, widths: Tensor, scaled: bool) -> Tensor:
    """Return 2 c (sqrt(e^2 + c^2) - c), about e^2 below c and 2 c |e| above; without the first c for smooth_l1."""
    c = widths.view(-1, *(1,) * (error.dim() - 1))
    loss = 2 * ((error**2 + c**2).sqrt() - c)
    return c * loss if scaled else loss


def huber_widths(family: Family, timesteps: Tensor, options: ObjectiveOptions) -> Tensor:
    """Return the c of each timestep, fp32 (B,).

    constant: huber_c. exponential: from 1 at timestep 0 down to huber_c at the last. snr: (1 - huber_c) / (1 + s)^2 +
    huber_c, with s^2 the ratio of noise to signal. All times huber_scale.
    """
    smallest = options.huber_c
    if options.huber_schedule == "exponential":
        widths = torch.exp(timesteps.float() * (math.log(smallest) / _TIMESTEPS))
    elif options.huber_schedule == "snr":
        snr = family.signal_to_noise(timesteps)
        if snr is None:
            raise RuntimeError("check_objective refuses huber_schedule = snr for such a family")
        widths = (1 - smallest) / (1 + snr.rsqrt()) ** 2 + smallest
    else:
        widths = torch.full(timesteps.shape, smallest, device=timesteps.device)
    return widths * options.huber_scale


def loss_weights(family: Family, timesteps: Tensor, options: ObjectiveOptions) -> Tensor:
    """Return the weight of each timestep, fp32 (B,): the family's own and those of the options, multiplied.

    With s the signal-to-noise ratio, at most 1000: scale_v_pred_loss_like_noise_pred is s / (s + 1); v_pred_like_loss
    of c is 1 + c (s + 1) / s; debiased_estimation_loss is 1 / sqrt(s) for noise (Yu et al. 2023) and 1 / (s + 1) for v.
    """
    weights = family.loss_weights(timesteps, options.min_snr_gamma).float()
    snr = family.signal_to_noise(timesteps)
    if snr is None:
        return weights
    snr = snr.clamp(max=_MOST_SNR)
    if options.scale_v_pred_loss_like_noise_pred:
        weights = weights * snr / (snr + 1)
    if options.v_pred_like_loss is not None:
        weights = weights * (1 + options.v_pred_like_loss * (snr + 1) / snr)
    if options.debiased_estimation_loss:
        predicts_v = family.prediction_type == "v_prediction"
        weights = weights * (1 / (snr + 1) if predicts_v else snr.rsqrt())
    return weights
