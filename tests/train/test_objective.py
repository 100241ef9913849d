"""Noise, timesteps, errors and weights of the objective, against values worked out by hand or in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from maulstick.errors import OptionError
from maulstick.families.load import load_family
from maulstick.families.noise import NoiseSchedule
from maulstick.options.objective_schema import ObjectiveOptions
from maulstick.options.schema import ModelOptions
from maulstick.train.objective import draw_noise, huber_widths, image_losses, loss_weights, make_noisy
from tests.models import model_folder

SCHEDULER = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}


class Noise:
    """The part of a family that the objective asks, over a real noise schedule."""

    def __init__(self, prediction_type: Any = "epsilon", **objective: Any) -> None:
        self.prediction_type = prediction_type
        self.noise = NoiseSchedule(SCHEDULER, prediction_type, torch.device("cpu"), ObjectiveOptions(**objective))
        self.signal_to_noise = self.noise.signal_to_noise
        self.loss_weights = self.noise.loss_weights
        self.sample_timesteps = self.noise.sample_timesteps
        self.add_noise, self.target = self.noise.add_noise, self.noise.target


def ratio_at(timestep: int) -> float:
    """The signal-to-noise ratio, in float64 from the betas."""
    kept = 1.0
    for number in range(timestep + 1):
        share = number / 999
        kept *= 1 - (math.sqrt(0.00085) + share * (math.sqrt(0.012) - math.sqrt(0.00085))) ** 2
    return kept / (1 - kept)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_at(timesteps: list[int], prediction_type: str = "epsilon", **objective: Any) -> list[float]:
    options = ObjectiveOptions(**objective)
    return loss_weights(Noise(prediction_type), torch.tensor(timesteps), options).tolist()  # type: ignore[arg-type]


TIMES = [0, 100, 500, 999]


def test_without_options_every_timestep_counts_alike() -> None:
    assert weights_at(TIMES) == [1.0] * 4


def test_debiased_estimation_for_noise_and_for_v() -> None:
    ratios = [min(ratio_at(t), 1000) for t in TIMES]
    assert ratios[0] == 1000
    assert weights_at(TIMES, debiased_estimation_loss=True) == pytest.approx([s**-0.5 for s in ratios], rel=1e-4)
    of_v = weights_at(TIMES, "v_prediction", debiased_estimation_loss=True)
    assert of_v == pytest.approx([1 / (s + 1) for s in ratios], rel=1e-4)


def test_weights_between_noise_and_v_prediction() -> None:
    ratios = [min(ratio_at(t), 1000) for t in TIMES]
    like_noise = weights_at(TIMES, "v_prediction", scale_v_pred_loss_like_noise_pred=True)
    assert like_noise == pytest.approx([s / (s + 1) for s in ratios], rel=1e-4)
    like_v = weights_at(TIMES, v_pred_like_loss=0.5)
    assert like_v == pytest.approx([1 + 0.5 * (s + 1) / s for s in ratios], rel=1e-4)
    # They multiply with min-SNR.
    both = weights_at(TIMES, v_pred_like_loss=0.5, min_snr_gamma=5)
    limited = [min(ratio_at(t), 5) / ratio_at(t) for t in TIMES]
    assert both == pytest.approx([one * other for one, other in zip(like_v, limited, strict=True)], rel=1e-4)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", lambda t: 0.2),
        ("exponential", lambda t: 0.2 ** (t / 1000)),
        ("snr", lambda t: 0.8 / (1 + ratio_at(t) ** -0.5) ** 2 + 0.2),
    ],
)
def test_where_the_robust_losses_bend(schedule: Any, expected: Any) -> None:
    options = ObjectiveOptions(loss_type="huber", huber_schedule=schedule, huber_c=0.2, huber_scale=3.0)
    widths = huber_widths(Noise(), torch.tensor(TIMES), options)  # type: ignore[arg-type]
    assert widths.tolist() == pytest.approx([3 * expected(t) for t in TIMES], rel=1e-4)


@pytest.mark.parametrize("loss_type", ["l2", "l1", "huber", "smooth_l1"])
def test_errors_of_each_kind(loss_type: Any) -> None:
    class Batch:
        timesteps = torch.tensor([10, 500])
        target = torch.zeros(2, 4, 8, 8)

    error = torch.randn(2, 4, 8, 8, generator=generator())
    options = ObjectiveOptions(loss_type=loss_type, huber_schedule="constant", huber_c=0.3)
    losses = image_losses(Noise(), error, Batch(), options, torch.tensor([1.0, 0.5]))  # type: ignore[arg-type]
    exact = error.double()
    root = (exact**2 + 0.3**2).sqrt() - 0.3
    expected = {"l2": exact**2, "l1": exact.abs(), "huber": 2 * 0.3 * root, "smooth_l1": 2 * root}[loss_type]
    assert losses.tolist() == pytest.approx([float(expected[0].mean()), 0.5 * float(expected[1].mean())], rel=1e-5)


def test_coarser_grids_leave_the_deviation_at_one_and_correlate_neighbours() -> None:
    latents = torch.zeros(8, 4, 32, 32)

    def neighbours(noise: Tensor) -> float:
        return float((noise[..., 1:] * noise[..., :-1]).mean())

    plain = draw_noise(latents, ObjectiveOptions(), generator())
    rich = draw_noise(latents, ObjectiveOptions(multires_noise_iterations=6, multires_noise_discount=0.8), generator())
    assert abs(neighbours(plain)) < 0.02
    assert neighbours(rich) > 0.2
    assert float(rich.std()) == pytest.approx(1, abs=1e-5)
    # The first grid is as fine as the noise itself: at discount 0 it alone is added.
    none = draw_noise(latents, ObjectiveOptions(multires_noise_iterations=3, multires_noise_discount=0.0), generator())
    assert abs(neighbours(none)) < 0.02


def test_strength_of_the_offset_by_chance_and_by_image() -> None:
    latents = torch.stack([torch.full((2, 8, 8), -2.0), torch.zeros(2, 8, 8)] * 300)
    plain = draw_noise(latents, ObjectiveOptions(), generator())
    adaptive = ObjectiveOptions(noise_offset=0.1, adaptive_noise_scale=0.2)
    offset = (draw_noise(latents, adaptive, generator()) - plain)[:, :, 0, 0]
    assert float(offset[::2].std()) == pytest.approx(0.1 + 0.2 * 2, rel=0.1)
    assert float(offset[1::2].std()) == pytest.approx(0.1, rel=0.1)
    shrinking = ObjectiveOptions(noise_offset=0.1, adaptive_noise_scale=-0.2)
    assert float((draw_noise(latents, shrinking, generator()) - plain)[::2].abs().max()) == 0
    random = ObjectiveOptions(noise_offset=0.5, noise_offset_random_strength=True)
    draws = [
        (draw_noise(latents, random, generator(seed)) - draw_noise(latents, ObjectiveOptions(), generator(seed)))[
            :, :, 0, 0
        ].std()
        for seed in range(20)
    ]
    assert 0 < min(draws) < 0.2 < 0.35 < max(draws) < 0.55


def test_input_perturbation_is_not_in_the_target() -> None:
    latents = torch.randn(64, 4, 8, 8, generator=generator(1))
    family = Noise(min_timestep=500, max_timestep=501)
    plain = make_noisy(family, latents, ObjectiveOptions(), generator())  # type: ignore[arg-type]
    options = ObjectiveOptions(ip_noise_gamma=0.2)
    perturbed = make_noisy(family, latents, options, generator())  # type: ignore[arg-type]
    assert torch.equal(plain.target, perturbed.target)
    spread = math.sqrt(1 / (1 + ratio_at(500)))
    assert float((perturbed.noisy - plain.noisy).std()) == pytest.approx(0.2 * spread, rel=0.02)


def test_limits_of_the_timesteps() -> None:
    drawn = Noise(min_timestep=200, max_timestep=203).sample_timesteps(500, generator())
    assert set(drawn.tolist()) == {200, 201, 202}
    with pytest.raises(OptionError, match="min_timestep = 500, max_timestep = 400: expected a smaller and a larger"):
        Noise(min_timestep=500, max_timestep=400)
    with pytest.raises(OptionError, match="max_timestep = 1001"):
        Noise(max_timestep=1001)


def test_zero_terminal_snr_stretches_the_schedule_for_training_and_samples() -> None:
    folder = ModelOptions(pretrained_model_name_or_path=str(model_folder("sd1", "v_prediction")))
    family: Any = load_family(
        folder, device="cpu", dtype=torch.float32, objective=ObjectiveOptions(zero_terminal_snr=True)
    )
    ratios = family.signal_to_noise(torch.tensor([0, 999]))
    assert ratios[1] == 0 < ratios[0]
    assert family.pipeline("euler").scheduler.config.rescale_betas_zero_snr is True


@pytest.mark.parametrize(
    "objective, message",
    [
        ({"scale_v_pred_loss_like_noise_pred": True}, "is for models that predict v, but this SD 1.x model predicts"),
        ({"weighting_scheme": "mode"}, "it is for models trained by flow matching"),
    ],
)
def test_what_a_model_cannot_mean_is_refused(objective: dict[str, Any], message: str) -> None:
    folder = ModelOptions(pretrained_model_name_or_path=str(model_folder()))
    with pytest.raises(OptionError, match=message):
        load_family(folder, device="cpu", dtype=torch.float32, objective=ObjectiveOptions(**objective))
