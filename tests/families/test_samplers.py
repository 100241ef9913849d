"""Samplers by name, for both prediction types, against diffusers."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from maulstick.errors import OptionError
from maulstick.families.samplers import SAMPLER_NAMES, make_sampler
from maulstick.options.generate import Sampler
from maulstick.options.schema import SampleOptions
from tests.families.conftest import Load
from tests.models import model_folder, scheduler_config, small_model


def test_the_options_offer_exactly_the_samplers_there_are() -> None:
    assert get_args(Sampler) == SAMPLER_NAMES
    assert get_args(get_type_hints(SampleOptions)["sample_sampler"]) == SAMPLER_NAMES
    assert SampleOptions().sample_sampler in SAMPLER_NAMES


def test_an_unknown_sampler_names_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"Unknown sampler 'eular'.* Did you mean 'euler'\?"):
        make_sampler("eular", scheduler_config())


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", SAMPLER_NAMES)
def test_every_sampler_recovers_the_picture_from_a_perfect_prediction(name: str, prediction_type: str) -> None:
    """With a denoiser that knows the picture, sampling from pure noise ends at the picture."""
    sampler = make_sampler(name, scheduler_config(prediction_type))  # type: ignore[arg-type]
    kept = sampler.alphas_cumprod
    generator = torch.Generator().manual_seed(0)
    picture = torch.randn(1, 4, 8, 8, generator=generator)
    sampler.set_timesteps(30)
    state = torch.randn(picture.shape, generator=generator) * sampler.init_noise_sigma
    for step in sampler.timesteps:
        seen = sampler.scale_model_input(state, step)
        signal = kept[int(step)].sqrt()
        spread = (1 - kept[int(step)]).sqrt()
        noise = (seen - signal * picture) / spread
        output = noise if prediction_type == "epsilon" else signal * noise - spread * picture
        extra = {"generator": generator} if name == "euler_a" else {}
        state = sampler.step(output, step, state, **extra).prev_sample
    # Samplers that stop just short of zero noise keep a little of it.
    assert (state - picture).abs().max() < 0.25


def test_a_v_prediction_config_reaches_every_sampler() -> None:
    for name in SAMPLER_NAMES:
        sampler = make_sampler(name, scheduler_config("v_prediction"))
        assert sampler.config.prediction_type == "v_prediction"
        assert (sampler.config.beta_start, sampler.config.beta_end) == (0.00085, 0.012)


def test_lms_coefficients_are_the_integrals_of_the_basis_polynomials() -> None:
    sampler = make_sampler("lms", scheduler_config())
    sampler.set_timesteps(20)
    for current in range(4):
        nodes = [float(sampler.sigmas[10 - place]) for place in range(4)]
        points = torch.linspace(float(sampler.sigmas[10]), float(sampler.sigmas[11]), 20_001, dtype=torch.float64)
        basis = torch.ones_like(points)
        for place, node in enumerate(nodes):
            if place != current:
                basis = basis * (points - node) / (nodes[current] - node)
        assert sampler.get_lms_coefficient(4, 10, current) == pytest.approx(
            torch.trapezoid(basis, points).item(), rel=1e-6
        )


def test_the_pipeline_holds_the_live_modules(load: Load) -> None:
    family = load(model_folder())
    pipeline = family.pipeline("euler")
    assert isinstance(pipeline, StableDiffusionPipeline)
    assert pipeline.unet is family.denoiser
    assert pipeline.vae is family.vae
    assert pipeline.text_encoder is family.text_encoders["text_encoder"]
    assert pipeline.safety_checker is None


def test_the_pipeline_draws_what_diffusers_draws(load: Load) -> None:
    family, model = load(model_folder()), small_model()
    theirs = StableDiffusionPipeline(
        vae=model.vae,
        text_encoder=model.text_encoder,
        tokenizer=family.tokenizer,
        unet=model.unet,
        scheduler=DDIMScheduler.from_config(scheduler_config()),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    theirs.set_progress_bar_config(disable=True)
    settings = {"width": 64, "height": 64, "num_inference_steps": 4, "output_type": "latent"}
    prompts, negatives = ["a cat", "two dogs"], ["blurry", ""]
    expected = theirs(prompts, negative_prompt=negatives, generator=torch.Generator().manual_seed(5), **settings).images
    conditioning = family.pipeline_conditioning(prompts, negatives)
    drawn = family.pipeline("ddim")(**conditioning, generator=torch.Generator().manual_seed(5), **settings).images
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-4)
