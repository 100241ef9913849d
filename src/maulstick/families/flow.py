"""Rectified flow as SD3 was trained with it (Esser et al. 2024): straight lines from images to noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from maulstick.options.objective import USUAL_SCHEME
from maulstick.options.schema import ObjectiveOptions

LENGTH = 1000
"""Timesteps are 1000 times the share of noise."""
_USUAL_SHIFT, _USUAL_MODE_SCALE = 3.0, 1.29


class FlowSchedule:
    """x_s = (1 - s) x + s n with s the share of noise; the denoiser predicts n - x, whatever s is.

    A draw u from 0 to 1 (0 an image, 1 noise) is put on the grid of 1/1000, 2/1000, … 1 and shifted to
    s = k u / (1 + (k - 1) u) with the shift k (ibid., eq. 23): these are the timesteps of diffusers' scheduler. The
    training scripts of diffusers count u the other way round, which only ``logit_mean`` shows: here, as in the paper
    (eq. 19) and in sd-scripts, a mean above 0 is noisier.

    Args:
        scheduler_config: a diffusers scheduler config, for its ``shift``.
        objective: how timesteps are drawn and weighed.
    """

    def __init__(self, scheduler_config: Mapping[str, Any], objective: ObjectiveOptions) -> None:
        def given(value: float | None, usual: float) -> float:
            return usual if value is None else value

        self.scheme = objective.weighting_scheme or USUAL_SCHEME
        self.logit_mean = given(objective.logit_mean, 0.0)
        self.logit_std = given(objective.logit_std, 1.0)
        self.mode_scale = given(objective.mode_scale, _USUAL_MODE_SCALE)
        self.shift = given(objective.training_shift, float(scheduler_config.get("shift", _USUAL_SHIFT)))

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        """Return ``count`` timesteps above 0 and up to 1000, fp32, on the generator's device."""
        from diffusers.training_utils import compute_density_for_timestep_sampling

        drawn = compute_density_for_timestep_sampling(
            self.scheme,
            count,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            mode_scale=self.mode_scale,
            device=generator.device,
            generator=generator,
        )
        share = (drawn * LENGTH).ceil().clamp(1, LENGTH) / LENGTH
        shifted: Tensor = self.shift * share / (1 + (self.shift - 1) * share)
        return shifted * LENGTH

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return x_s, in the dtype of the latents."""
        share = _noise_share(timesteps, latents)
        return (1 - share) * latents + share * noise

    def target(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Return what the denoiser should predict."""
        return noise - latents

    def loss_weights(self, timesteps: Tensor) -> Tensor:
        """Return one weight per timestep, fp32: s^-2 for ``sigma_sqrt``, 2 / (pi (1 - 2 s + 2 s^2)) for ``cosmap``,
        1 for the others, which weigh by how often a timestep is drawn."""
        from diffusers.training_utils import compute_loss_weighting_for_sd3

        weights: Tensor = compute_loss_weighting_for_sd3(self.scheme, timesteps.float() / LENGTH)
        return weights


def _noise_share(timesteps: Tensor, like: Tensor) -> Tensor:
    share = timesteps.to(like.device, torch.float32) / LENGTH
    return share.to(like.dtype).view((-1,) + (1,) * (like.ndim - 1))
