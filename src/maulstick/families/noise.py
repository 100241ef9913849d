"""The discrete noise schedule of SD 1.x, 2.x and SDXL: noisy inputs, targets, and weights by signal-to-noise ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from maulstick.errors import OptionError
from maulstick.options.objective_schema import ObjectiveOptions

PredictionType = Literal["epsilon", "v_prediction"]


class NoiseSchedule:
    """x_t = sqrt(a_t) x + sqrt(1 - a_t) n, with a_t the cumulative product of 1 - beta (Ho et al. 2020, eq. 4).

    Args:
        scheduler_config: a diffusers scheduler config (betas, number of timesteps, zero-terminal rescaling).
        prediction_type: what the denoiser predicts: the noise n, or v = sqrt(a_t) n - sqrt(1 - a_t) x (Salimans and Ho
            2022, appendix D).
        device: where timesteps usually are.
        objective: limits of the timesteps that are drawn, and whether the schedule is to end in pure noise (Lin et al.
            2023, algorithm 1).

    Raises:
        OptionError: no timestep lies between the limits.
    """

    def __init__(
        self,
        scheduler_config: Mapping[str, Any],
        prediction_type: PredictionType,
        device: torch.device,
        objective: ObjectiveOptions | None = None,
    ) -> None:
        from diffusers import DDPMScheduler

        self.prediction_type = prediction_type
        self.alphas_cumprod: Tensor = DDPMScheduler.from_config(dict(scheduler_config)).alphas_cumprod.to(device)
        lowest = (objective and objective.min_timestep) or 0
        beyond = (objective and objective.max_timestep) or self.length
        if not 0 <= lowest < beyond <= self.length:
            raise OptionError(
                f"min_timestep = {lowest}, max_timestep = {beyond}: expected a smaller and a larger number from 0 to "
                f"{self.length}, the number of this model's timesteps."
            )
        self._drawn = lowest, beyond

    @property
    def length(self) -> int:
        """Number of timesteps."""
        return len(self.alphas_cumprod)

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        """Return ``count`` uniformly drawn timesteps, long, on the generator's device."""
        return torch.randint(*self._drawn, (count,), generator=generator, device=generator.device)

    def signal_to_noise(self, timesteps: Tensor) -> Tensor:
        """Return a_t / (1 - a_t) of each timestep, fp32."""
        kept = self.alphas_cumprod.to(timesteps.device)[timesteps]
        return kept / (1 - kept)

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return x_t, in the dtype of the latents."""
        signal, spread = self._coefficients(timesteps, latents)
        return signal * latents + spread * noise

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return what the denoiser should predict."""
        if self.prediction_type == "epsilon":
            return noise
        signal, spread = self._coefficients(timesteps, latents)
        return signal * noise - spread * latents

    def loss_weights(self, timesteps: Tensor, min_snr_gamma: float | None) -> Tensor:
        """Return one weight per timestep, fp32: 1, or min-SNR (Hang et al. 2023, eq. 8 and its v-prediction form).

        With s = a_t / (1 - a_t): min(s, gamma) / s for noise, min(s, gamma) / (s + 1) for v. Where nothing is left of
        the signal (s = 0), the first form is taken at its limit 1.
        """
        if min_snr_gamma is None:
            return torch.ones(timesteps.shape, device=timesteps.device)
        snr = self.signal_to_noise(timesteps)
        limited = snr.clamp(max=min_snr_gamma)
        if self.prediction_type == "v_prediction":
            return limited / (snr + 1)
        return torch.where(snr > 0, limited / snr, 1.0)

    def _coefficients(self, timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.alphas_cumprod.to(like.device)[timesteps.to(like.device)]
        shape = (-1,) + (1,) * (like.ndim - 1)
        return kept.sqrt().to(like.dtype).view(shape), (1 - kept).sqrt().to(like.dtype).view(shape)
