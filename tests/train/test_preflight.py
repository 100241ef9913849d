"""Each check of the pre-flight fires on what it is for, and is silent on a healthy run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from maulstick.data.findings import Severity
from maulstick.train import preflight_model
from maulstick.train.console import QuietConsole
from maulstick.train.preflight import CHECKS, preflight
from maulstick.train.preflight_model import look_at_latents, probe_prediction, sample_records
from maulstick.train.prepare import prepare
from maulstick.train.schedule_glance import schedule_glance
from tests.models import model_folder


@pytest.fixture
def prepared_with(make_run):
    """Return a function that prepares a run as ``check`` does, and returns it with its options."""

    def prepared_with(*arguments, **model):
        loaded = make_run(*arguments, **model).loaded
        return loaded, prepare(loaded, QuietConsole(), device=torch.device("cpu"), seed=1)

    return prepared_with


def found_by_checks(prepared):
    return {finding.code: finding for check in CHECKS for finding in check(prepared)}


def with_scheduler(folder: Path, target: Path, **changes) -> str:
    shutil.copytree(folder, target)
    config = target / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return str(target)


@pytest.mark.parametrize("version", ["sd1", "sd2"])
def test_a_healthy_run_has_no_finding(prepared_with, version):
    found = preflight(*prepared_with(version=version))
    assert list(found.findings) == []
    assert found.exit_code == 0
    assert found.step.seconds > 0
    assert found.step.bucket == (64, 64)
    assert found.step.images == 2
    assert found.step.peak_bytes > 100 << 20
    assert 0 < found.step.loss < 10
    assert found.latents.images == 4
    assert found.latents.difference == 0.0


@pytest.mark.parametrize(
    ("optimizer", "rate", "code"),
    [
        ("Prodigy", "1e-4", "learning_rate_too_low"),
        ("DAdaptAdam", "2e-3", "learning_rate_too_low"),
        ("Prodigy", "50", "learning_rate_too_high"),
        ("AdamW", "1.0", "learning_rate_too_high"),
        ("Lion", "5e-3", "learning_rate_too_high"),
        ("Adafactor", "1e-4", "learning_rate_too_low"),
        ("AdamW", "1e-3", None),
        ("Lion", "1e-4", None),
        ("Prodigy", "1", None),
        ("Adafactor", "1e-2", None),
        ("SGD", "1", None),
        ("torch.optim.RAdam", "1", None),
    ],
)
def test_rates_are_judged_by_what_the_optimizer_does_with_them(prepared_with, optimizer, rate, code):
    rates = ("--optimizer_type", optimizer, "--learning_rate", rate)
    _, prepared = prepared_with("--network_train_unet_only", *rates)
    found = found_by_checks(prepared)
    assert list(found) == ([code] if code else [])
    if code:
        assert "unet" in found[code].message
        assert optimizer in found[code].message
        assert found[code].why
        assert "learning_rate" in found[code].advice


def test_adafactor_without_scaling_is_judged_by_the_rate_as_it_is(prepared_with):
    as_given = ("--optimizer_type", "Adafactor", "--optimizer_args", "scale_parameter=False")
    _, prepared = prepared_with("--network_train_unet_only", *as_given, "--learning_rate", "4e-4")
    assert found_by_checks(prepared) == {}
    _, prepared = prepared_with("--network_train_unet_only", *as_given, "--learning_rate", "0.1")
    assert list(found_by_checks(prepared)) == ["learning_rate_too_high"]


def test_a_block_whose_rate_is_too_high_is_named(prepared_with):
    _, prepared = prepared_with(
        "--network_train_unet_only", "--up_lr_weight", "0,0,0,1,1,1,1,1,1,1,1,50", version="sd1"
    )
    assert found_by_checks(prepared)["learning_rate_too_high"].message == (
        "The learning rate of unet_block24 (0.05) is far too high for AdamW."
    )


def test_alpha_far_above_the_rank_is_found_with_the_rate_it_amounts_to(prepared_with):
    _, prepared = prepared_with("--network_train_unet_only", "--network_alpha", "64")
    found = found_by_checks(prepared)
    assert list(found) == ["scale_too_large"]
    assert "alpha 64 at rank 4" in found["scale_too_large"].message
    assert "acts like 0.016" in found["scale_too_large"].why
    assert found_by_checks(prepared_with("--network_alpha", "16")[1]) == {}


def test_a_run_that_cannot_learn_anything_is_found(prepared_with):
    _, prepared = prepared_with("--unet_lr", "1e-5", "--text_encoder_lr", "1e-3")
    # alpha 4 times 6 steps of 1e-5.
    assert found_by_checks(prepared)["learns_nothing"].message == (
        "unet: its weights can change by about 0.0002 of their size at most in the whole run."
    )


def test_fp16_is_warned_of_where_the_family_overflows(prepared_with):
    fp16, bf16 = ("--mixed_precision", "fp16"), ("--mixed_precision", "bf16")
    assert list(found_by_checks(prepared_with(*fp16, version="sd2")[1])) == ["fp16_overflows"]
    assert found_by_checks(prepared_with(*bf16, version="sd2")[1]) == {}
    assert found_by_checks(prepared_with(*fp16)[1]) == {}


def test_zero_terminal_snr_is_judged_with_what_is_predicted(prepared_with, tmp_path):
    zero = {"rescale_betas_zero_snr": True}
    noise = with_scheduler(model_folder("sd1"), tmp_path / "noise", **zero)
    v = with_scheduler(model_folder("sd2", "v_prediction"), tmp_path / "v", **zero)
    model, gamma = "--pretrained_model_name_or_path", ("--min_snr_gamma", "5")
    found = found_by_checks(prepared_with(model, noise)[1])
    assert list(found) == ["zero_snr_with_noise_prediction"]
    assert "timestep 999" in found["zero_snr_with_noise_prediction"].message
    assert list(found_by_checks(prepared_with(model, v, *gamma)[1])) == ["zero_snr_with_min_snr"]
    assert found_by_checks(prepared_with(model, v)[1]) == {}
    assert found_by_checks(prepared_with(*gamma)[1]) == {}


def test_a_loss_weight_that_is_not_finite_is_an_error(prepared_with):
    _, prepared = prepared_with()
    prepared.family.loss_weights = lambda timesteps, gamma: torch.where(timesteps == 999, math.nan, 1.0)
    finding = found_by_checks(prepared)["loss_weight_not_finite"]
    assert finding.severity is Severity.ERROR
    assert finding.message == "The loss weight is not finite at timestep 999 (1 timesteps in all)."


# ---------------------------------------------------------------------------------------------------------- latents


def spoiled(prepared, *, chosen=lambda latents: latents, exact=lambda latents: latents):
    """Let the VAE give other latents in the chosen precision, or in fp32."""
    encode, encode_exact = prepared.family.encode_images, prepared.family.encode_images_in_fp32
    prepared.family.encode_images = lambda pixels: chosen(encode(pixels))
    prepared.family.encode_images_in_fp32 = lambda pixels: exact(encode_exact(pixels))
    return look_at_latents(prepared)


@pytest.mark.parametrize(
    ("chosen", "exact", "code", "severity"),
    [
        (lambda latents: latents * math.inf, lambda latents: latents, "latents_overflow", "warning"),
        (lambda latents: latents, lambda latents: latents * math.nan, "latents_not_finite", "error"),
        (lambda latents: latents * 1e4, lambda latents: latents * 1e4, "latents_extreme", "warning"),
        (lambda latents: latents * 1.5, lambda latents: latents, "latents_differ", "warning"),
    ],
    ids=["overflow", "broken", "extreme", "different"],
)
def test_latents_that_are_wrong_are_found(prepared_with, chosen, exact, code, severity):
    _, prepared = prepared_with("--mixed_precision", "bf16")
    sample, findings = spoiled(prepared, chosen=chosen, exact=exact)
    assert [(finding.code, finding.severity) for finding in findings] == [(code, severity)]
    assert "4 of 4 sample images" in findings[0].message
    assert sample.images == 4


def test_a_healthy_vae_in_bf16_differs_from_fp32_by_about_a_percent(prepared_with):
    sample, findings = look_at_latents(prepared_with("--mixed_precision", "bf16")[1])
    assert findings == []
    assert 1e-4 < sample.difference < preflight_model.MOST_DIFFERENCE


def test_the_sample_reaches_from_the_smallest_bucket_to_the_largest(prepared_with):
    records = prepared_with()[1].index.records
    assert len({record.path for record in sample_records(records)}) == 4
    assert len(sample_records(records, 100)) == 5
    assert sample_records(records, 1)


# ------------------------------------------------------------------------------------------------ noise or v


def wired_for(prepared, kind):
    """Let the model predict noise or v, nearly perfectly."""
    family, seen = prepared.family, {}
    add_noise = family.add_noise

    def remember(latents, noise, timesteps):
        seen.update(latents=latents, noise=noise)
        return add_noise(latents, noise, timesteps)

    def predict(noisy, timesteps, conditioning):
        kept = family.noise.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        v = kept.sqrt() * seen["noise"] - (1 - kept).sqrt() * seen["latents"]
        return (seen["noise"] if kind == "epsilon" else v) * 0.9

    family.add_noise, family.predict = remember, predict


@pytest.mark.parametrize("stated", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_a_model_that_predicts_something_else_than_is_trained_is_found(prepared_with, stated, kind):
    _, prepared = prepared_with(version="sd2", prediction=stated)
    batch = prepared.batches.batch(0, 0)
    wired_for(prepared, kind)
    latents = torch.randn(len(batch.items), 4, 8, 8, generator=torch.Generator().manual_seed(0))
    probe, findings = probe_prediction(prepared, batch, latents)
    assert getattr(probe, kind) == pytest.approx(0.01, abs=1e-3)
    assert [finding.code for finding in findings] == ([] if kind == stated else ["prediction_type_mismatch"])
    if kind != stated:
        word = "v" if kind == "v_prediction" else "noise"
        assert f"but it seems to predict {word}: relative error" in findings[0].message
        assert "v_parameterization" in findings[0].advice


def test_a_prediction_that_is_not_finite_is_an_error(prepared_with):
    _, prepared = prepared_with()
    prepared.family.predict = lambda noisy, timesteps, conditioning: noisy * math.nan
    batch = prepared.batches.batch(0, 0)
    _, findings = probe_prediction(prepared, batch, torch.randn(len(batch.items), 4, 8, 8))
    assert [(finding.code, finding.severity) for finding in findings] == [("prediction_not_finite", "error")]


# ------------------------------------------------------------------------------------------------ the schedule


def test_the_schedule_at_a_glance(prepared_with):
    schedule = ("--lr_scheduler", "linear", "--lr_warmup_steps", "100", "--max_train_steps", "1000")
    glance = schedule_glance(prepared_with(*schedule)[1])
    # A triangle: 100 steps up, 900 down; half of each in factors, a third of each in squares.
    assert glance.factor_sum == pytest.approx(500, rel=2e-3)
    assert glance.rate_squared_sum == pytest.approx(1e-6 * 1000 / 3, rel=5e-3)
    assert len(glance.sparkline) == 40
    assert (glance.sparkline[0], glance.sparkline[4], glance.sparkline[-1]) == ("▁", "█", "▁")
    assert glance.sentence().startswith("linear: warm-up 100 steps, decay from step 100 to 1000; factor 0 at first")
    short = schedule_glance(prepared_with("--max_train_steps", "1")[1])
    assert (short.sparkline, short.factor_sum) == ("█", 1.0)


def test_a_long_schedule_is_sampled_and_sums_up_alike(prepared_with):
    schedule = ("--lr_scheduler", "cosine", "--max_train_steps", "1000000")
    glance = schedule_glance(prepared_with(*schedule)[1])
    assert glance.factor_sum == pytest.approx(5e5, rel=1e-3)
