"""Options about noise, timesteps and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cyclopts import Parameter

from maulstick.options import groups

WeightingScheme = Literal["logit_normal", "uniform", "none", "mode", "sigma_sqrt", "cosmap"]
LossType = Literal["l2", "l1", "huber", "smooth_l1"]
HuberSchedule = Literal["constant", "exponential", "snr"]


@Parameter(name="*", group=groups.OBJECTIVE)
@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    min_snr_gamma: float | None = None
    """Limit the weight of nearly clean timesteps (min-SNR); 5 is the paper's value."""
    noise_offset: float | None = None
    """Add a per-channel offset to the noise, of this standard deviation, to reach dark and bright images."""
    noise_offset_random_strength: bool = False
    """Draw the strength of the offset between 0 and noise_offset each time."""
    adaptive_noise_scale: float | None = None
    """Add this times the mean of a channel's latents (without sign) to its noise_offset."""
    multires_noise_iterations: int | None = None
    """Add noise of so many coarser grids, enlarged; 6 to 10 are usual. Instead of noise_offset."""
    multires_noise_discount: float = 0.3
    """Weight of each coarser grid, as a multiple of the one before."""
    ip_noise_gamma: float | None = None
    """Add noise of this strength to the input alone (input perturbation); 0.1 is the paper's value."""
    ip_noise_gamma_random_strength: bool = False
    """Draw that strength between 0 and ip_noise_gamma each time."""
    zero_terminal_snr: bool = False
    """Stretch the noise schedule until its last timestep is pure noise; for models that predict v."""
    min_timestep: int | None = None
    """Draw no timestep below this one."""
    max_timestep: int | None = None
    """Draw timesteps below this one only (1000 are all)."""
    loss_type: LossType = "l2"
    """Error that is minimised: l2 (squared), l1 (absolute), huber or smooth_l1 (squared where small)."""
    huber_schedule: HuberSchedule = "snr"
    """How huber_c depends on the timestep: constant, exponential or snr (smaller the more noise there is)."""
    huber_c: float = 0.1
    """Error up to which huber and smooth_l1 are about squared."""
    huber_scale: float = 1.0
    """Multiply the scheduled huber_c by this."""
    scale_v_pred_loss_like_noise_pred: bool = False
    """Weigh timesteps of a v-prediction as if noise were predicted."""
    v_pred_like_loss: float | None = None
    """Add so much of the weighting that v-prediction gives; for models that predict noise."""
    debiased_estimation_loss: bool = False
    """Weigh timesteps by 1/sqrt(signal-to-noise), for v-prediction by 1/(signal-to-noise + 1)."""
    weighting_scheme: WeightingScheme | None = None
    """SD3: how timesteps are drawn and weighed: logit_normal (the default), uniform, none, mode, sigma_sqrt, cosmap."""
    logit_mean: float | None = None
    """SD3: mean of logit_normal (0); above 0 noisier timesteps are drawn more often."""
    logit_std: float | None = None
    """SD3: standard deviation of logit_normal (1)."""
    mode_scale: float | None = None
    """SD3: how far mode moves from uniform (1.29)."""
    training_shift: float | None = None
    """SD3: moves drawn timesteps towards noise; without it the model's own (3), 1 leaves them where they are."""
