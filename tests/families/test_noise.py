"""Noisy inputs, targets and weights against diffusers and against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler

from maulstick.families.noise import NoiseSchedule, PredictionType
from tests.models import scheduler_config

CPU = torch.device("cpu")
TYPES: tuple[PredictionType, ...] = ("epsilon", "v_prediction")


def schedule(prediction_type: PredictionType = "epsilon", **changes: Any) -> NoiseSchedule:
    return NoiseSchedule(scheduler_config() | changes, prediction_type, CPU)


def test_the_schedule_is_the_scaled_linear_one() -> None:
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept = torch.cumprod(1 - betas, 0)
    torch.testing.assert_close(schedule().alphas_cumprod.double(), kept, rtol=1e-4, atol=1e-7)
    # The figures that are known of Stable Diffusion: nearly clean at 0, signal-to-noise 0.0047 at 999.
    assert schedule().alphas_cumprod[0].item() == pytest.approx(0.99915, abs=1e-6)
    assert schedule().alphas_cumprod[999].item() == pytest.approx(0.0046600, rel=1e-4)


@pytest.mark.parametrize("prediction_type", TYPES)
def test_inputs_and_targets_are_those_of_diffusers(prediction_type: PredictionType) -> None:
    generator = torch.Generator().manual_seed(1)
    latents, noise = torch.randn(2, 5, 4, 8, 8, generator=generator)
    timesteps = torch.tensor([0, 1, 500, 998, 999])
    theirs = DDPMScheduler.from_config(scheduler_config())
    ours = schedule(prediction_type)
    torch.testing.assert_close(ours.add_noise(latents, noise, timesteps), theirs.add_noise(latents, noise, timesteps))
    expected = noise if prediction_type == "epsilon" else theirs.get_velocity(latents, noise, timesteps)
    torch.testing.assert_close(ours.target(latents, noise, timesteps), expected)


def test_timesteps_are_uniform_and_follow_the_generator() -> None:
    drawn = schedule().sample_timesteps(200_000, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, schedule().sample_timesteps(200_000, torch.Generator().manual_seed(0)))
    assert (drawn.dtype, drawn.min().item(), drawn.max().item()) == (torch.int64, 0, 999)
    counts = torch.bincount(drawn // 100, minlength=10)
    assert counts.min() > 19_400
    assert counts.max() < 20_600


def test_without_min_snr_all_weights_are_one() -> None:
    assert schedule().loss_weights(torch.tensor([0, 999]), None).tolist() == [1.0, 1.0]


def test_min_snr_weights_follow_the_formulas() -> None:
    timesteps = torch.tensor([0, 100, 300, 600, 999])
    kept = schedule().alphas_cumprod[timesteps].double()
    snr = kept / (1 - kept)
    assert snr[0] > 5 > snr[-1]
    limited = torch.minimum(snr, torch.tensor(5.0))
    torch.testing.assert_close(schedule().loss_weights(timesteps, 5.0).double(), limited / snr, rtol=1e-5, atol=0)
    weights = schedule("v_prediction").loss_weights(timesteps, 5.0).double()
    torch.testing.assert_close(weights, limited / (snr + 1), rtol=1e-5, atol=0)
    assert schedule().loss_weights(torch.tensor([999]), 5.0).item() == 1.0


def test_no_signal_left_gives_finite_weights() -> None:
    zero_terminal = {"rescale_betas_zero_snr": True}
    last = torch.tensor([999])
    assert schedule(**zero_terminal).alphas_cumprod[999].item() == 0.0
    assert schedule(**zero_terminal).loss_weights(last, 5.0).item() == 1.0
    assert schedule("v_prediction", **zero_terminal).loss_weights(last, 5.0).item() == 0.0


def test_half_precision_latents_stay_half_precision() -> None:
    latents = torch.ones(1, 4, 2, 2, dtype=torch.float16)
    assert schedule().add_noise(latents, latents, torch.tensor([3])).dtype == torch.float16
