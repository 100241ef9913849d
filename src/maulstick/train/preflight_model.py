"""Pre-flight: what the base model does with these images in this precision, looked at before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maulstick.data.batches import MicroBatch
from maulstick.data.findings import Finding, Severity, counted, names
from maulstick.data.pixels import read_pixels
from maulstick.data.records import ImageRecord
from maulstick.families.base import Family
from maulstick.train.objective import loss_weights
from maulstick.train.precision import autocast
from maulstick.train.prepare import Prepared

SAMPLE_SIZE = 4
"""Images encoded twice: enough to meet an overflow that is there at all, few enough to wait for on a CPU."""
MOST_LATENT = 20.0
"""Latents are scaled to a deviation of about 1; healthy images stay below 6."""
MOST_DIFFERENCE = 0.1
"""Deviation from fp32 relative to the latents' own: bf16 has about 0.01, fp16 0.001."""
MOST_WEIGHT = 1000.0
"""Largest loss weight of a timestep relative to the median one; min-SNR stays far below."""
_DRAWS_OF_TIMESTEPS = 20_000
_NO_SIGNAL = 1e-3
_PROBE_SHARES = (0.5, 0.65, 0.8)
"""Timesteps of the probe, as shares of the schedule: noisy enough that noise and v differ, and not yet all noise."""

OVERFLOWS_IN_FP16 = {
    "SD3 medium": "Its attention has no norms of query and key, so logits grow with training; runs in fp16 turned NaN "
    "after two to three thousand steps.",
    "SD 2.x": "The attention of SD 2.x reaches values that fp16 cannot hold (65504); runs turned NaN at random.",
}
"""Family name -> why it should not be trained in fp16. Reports: diffusers #8599 and #2875, Tune-A-Video #103."""


def fp16_on_overflowing_family(prepared: Prepared) -> list[Finding]:
    """Find a family that is known to overflow in fp16, in fp16."""
    why = OVERFLOWS_IN_FP16.get(prepared.family.name)
    if prepared.options.run.mixed_precision != "fp16" or why is None:
        return []
    what = f"{prepared.family.name} in fp16 is known to overflow."
    advice = 'Set mixed_precision = "bf16" (or "no" where the device has no bf16).'
    return [Finding(Severity.WARNING, "fp16_overflows", (), what, why, advice)]


def noise_without_signal(prepared: Prepared) -> list[Finding]:
    """Find loss weights that are not finite, and what a schedule that ends in pure noise does with these options.

    Works with any family whose noisy input is a weighted sum of latents and noise.
    """
    family, gamma = prepared.family, prepared.options.objective.min_snr_gamma
    timesteps = family.sample_timesteps(_DRAWS_OF_TIMESTEPS, torch.Generator().manual_seed(0)).unique()
    findings = []
    weights = loss_weights(family, timesteps, prepared.options.objective)
    bad = timesteps[~torch.isfinite(weights).to(timesteps.device)]
    if len(bad):
        what = f"The loss weight is not finite at timestep {float(bad[0]):g} ({len(bad)} timesteps in all)."
        why = "The first image that is drawn there makes the loss, and with it the gradient, NaN."
        findings.append(Finding(Severity.ERROR, "loss_weight_not_finite", (), what, why, "Leave min_snr_gamma out."))
    elif float(weights.max() / weights.median()) > MOST_WEIGHT:
        heaviest = float(timesteps[int(weights.argmax())])
        what = (
            f"Timestep {heaviest:g} weighs {float(weights.max() / weights.median()):.2g} times as much as most others."
        )
        why = "A few images decide each gradient, and the loss shows spikes."
        advice = "Choose another weighting_scheme, such as logit_normal."
        findings.append(Finding(Severity.WARNING, "loss_weights_far_apart", (), what, why, advice))
    signal, _ = _signal_and_noise(family, timesteps)
    last = timesteps[signal < _NO_SIGNAL]
    if not len(last):
        return findings
    at = f"Nothing is left of the image at timestep {float(last[-1]):g} (zero terminal SNR)"
    if family.prediction_type == "epsilon":
        what = f"{at}, but the model predicts noise."
        why = "Input and target are the same there, so it learns nothing, and samples cannot begin from pure noise."
        advice = "Train it as v-prediction if that is what it is, or set rescale_betas_zero_snr to false."
        findings.append(Finding(Severity.WARNING, "zero_snr_with_noise_prediction", (), what, why, advice))
    elif gamma is not None:
        what = f"{at}, and min_snr_gamma = {gamma:g} gives it the weight 0."
        why = "What zero terminal SNR is for, very dark and very bright pictures, is learned at just these timesteps."
        findings.append(Finding(Severity.WARNING, "zero_snr_with_min_snr", (), what, why, "Leave min_snr_gamma out."))
    return findings


# ---------------------------------------------------------------------------------------------------------- latents


@dataclass(frozen=True)
class LatentSample:
    """What a few images gave in the chosen precision and in fp32.

    Attributes:
        largest: largest absolute value of a finite fp32 latent.
        difference: root mean square of (chosen precision - fp32), relative to the deviation of the fp32 latents; 0
            where the chosen precision is fp32.
    """

    images: int
    largest: float
    difference: float

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return vars(self)


def sample_records(records: Sequence[ImageRecord], count: int = SAMPLE_SIZE) -> list[ImageRecord]:
    """Return up to ``count`` different images, spread evenly over the buckets from small to large."""
    unique = {record.path: record for record in records}
    ordered = sorted(unique.values(), key=lambda r: (r.placement.bucket[0] * r.placement.bucket[1], r.placement.bucket))
    count = min(count, len(ordered))
    return [ordered[place * (len(ordered) - 1) // max(1, count - 1)] for place in range(count)]


def look_at_latents(prepared: Prepared) -> tuple[LatentSample, list[Finding]]:
    """Encode a few images in the chosen precision and in fp32, and compare."""
    family, precision = prepared.family, prepared.options.run.mixed_precision
    broken, made_again, extreme, far = [], [], [], []
    largest = difference = 0.0
    records = sample_records(prepared.index.records)
    with torch.no_grad(), family.encoders_borrowed():
        for record in records:
            pixels = as_pixels(record).to(family.device)
            chosen = family.encode_images(pixels).float()
            exact = chosen if precision == "no" else family.encode_images_in_fp32(pixels).float()
            if not torch.isfinite(exact).all():
                broken.append(record.path)
                continue
            top = float(exact.abs().max())
            largest = max(largest, top)
            if top > MOST_LATENT:
                extreme.append(record.path)
            if not torch.isfinite(chosen).all():
                made_again.append(record.path)
                continue
            off = float((chosen - exact).pow(2).mean().sqrt() / exact.std().clamp(min=1e-6))
            difference = max(difference, off)
            if off > MOST_DIFFERENCE:
                far.append(record.path)
    sample = LatentSample(len(records), largest, difference)
    findings = []
    of = f"of {counted(len(records), 'sample image')}"
    vae = "Name another VAE with vae (a folder or a file)."
    if broken:
        severity = Severity.ERROR if len(broken) == len(records) else Severity.WARNING
        what = f"The latents of {len(broken)} {of} are not finite, not even in fp32 ({names(broken)})."
        why = "Such images are left out of training; when all of them are, the VAE is damaged."
        findings.append(Finding(severity, "latents_not_finite", tuple(broken), what, why, vae))
    if made_again:
        what = f"The latents of {len(made_again)} {of} overflow in {precision} ({names(made_again)})."
        why = "Each of them is made again in fp32, which costs time and the memory of a second VAE."
        advice = f'{vae} Or set mixed_precision = "bf16".'
        findings.append(Finding(Severity.WARNING, "latents_overflow", tuple(made_again), what, why, advice))
    if extreme:
        what = f"The latents of {len(extreme)} {of} reach {largest:.3g} ({names(extreme)}); healthy ones stay below 6."
        why = "The denoiser never saw such values; it learns artefacts from them."
        advice = f"Look at these images. {vae}"
        findings.append(Finding(Severity.WARNING, "latents_extreme", tuple(extreme), what, why, advice))
    if far:
        what = f"The latents of {len(far)} {of} differ from fp32 by {difference:.0%} ({names(far)})."
        why = "The LoRA would learn the error of the number format; 1 % is usual for bf16."
        findings.append(Finding(Severity.WARNING, "latents_differ", tuple(far), what, why, vae))
    return sample, findings


def as_pixels(record: ImageRecord) -> Tensor:
    """Return the pixels of an image as they are trained, (1, 3, H, W) in -1..1."""
    pixels = torch.from_numpy(read_pixels(record, False)).permute(2, 0, 1)
    return pixels.to(torch.float32).div_(127.5).sub_(1)[None]


# ------------------------------------------------------------------------------------------------ noise or v


@dataclass(frozen=True)
class PredictionProbe:
    """How far the base model is from either target on noisy images of the data set.

    Attributes:
        epsilon, v_prediction: mean squared error relative to that of predicting nothing; a good model is well below 1,
            and one that predicts something else above it.
    """

    epsilon: float
    v_prediction: float

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return vars(self)


@torch.no_grad()
def probe_prediction(
    prepared: Prepared, batch: MicroBatch, latents: Tensor
) -> tuple[PredictionProbe | None, list[Finding]]:
    """Ask the model what it predicts: the loss under both targets at high noise, on one micro-batch of latents.

    None where the family predicts neither noise nor v.
    """
    family, precision = prepared.family, prepared.options.run.mixed_precision
    if family.prediction_type not in ("epsilon", "v_prediction"):
        return None, []
    latents = latents[:SAMPLE_SIZE].to(family.device)
    items = batch.items[:SAMPLE_SIZE]
    schedule = family.sample_timesteps(_DRAWS_OF_TIMESTEPS, torch.Generator().manual_seed(0)).unique()
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)).to(latents.device)
    errors = {"epsilon": 0.0, "v_prediction": 0.0}
    with family.encoders_borrowed(), autocast(family.device, precision):
        conditioning = family.encode_text(family.tokenize([item.caption for item in items]))
        conditioning |= family.image_conditioning([item.framing for item in items])
        for share in _PROBE_SHARES:
            timesteps = schedule[int(share * (len(schedule) - 1))].expand(len(items)).to(latents.device)
            signal, spread = _signal_and_noise(family, timesteps[:1])
            targets = {"epsilon": noise, "v_prediction": signal * noise - spread * latents}
            prediction = family.predict(family.add_noise(latents, noise, timesteps), timesteps, conditioning).float()
            for kind, target in targets.items():
                errors[kind] += float((prediction - target).pow(2).mean() / target.pow(2).mean()) / len(_PROBE_SHARES)
    probe = PredictionProbe(**errors)
    return probe, _probe_findings(prepared, probe)


def _probe_findings(prepared: Prepared, probe: PredictionProbe) -> list[Finding]:
    stated = prepared.family.prediction_type
    other = "epsilon" if stated == "v_prediction" else "v_prediction"
    own_error, other_error = getattr(probe, stated), getattr(probe, other)
    if own_error != own_error:
        what = f"The base model predicts NaN in mixed_precision {prepared.options.run.mixed_precision}."
        why = "Every step would be skipped: there is no gradient."
        advice = 'Set mixed_precision = "bf16" or "no"; if that does not help, the model file is damaged.'
        return [Finding(Severity.ERROR, "prediction_not_finite", (), what, why, advice)]
    # One that is worse than predicting nothing under its own target, and good under the other, is surely the other.
    if own_error < 1.0 or other_error > min(0.8, 0.5 * own_error):
        return []
    words = {"epsilon": "noise", "v_prediction": "v"}
    what = (
        f"The model is trained as one that predicts {words[stated]}, but it seems to predict {words[other]}: relative "
        f"error {own_error:.2f} against {other_error:.2f}."
    )
    why = "A LoRA trained for the wrong target gives noise."
    if stated == "epsilon":
        advice = (
            'Set v_parameterization = true; for a folder, write "prediction_type": "v_prediction" into its '
            "scheduler/scheduler_config.json."
        )
    else:
        advice = (
            'Leave v_parameterization out; for a folder, write "prediction_type": "epsilon" into its '
            "scheduler/scheduler_config.json."
        )
    return [Finding(Severity.WARNING, "prediction_type_mismatch", (), what, why, advice)]


def _signal_and_noise(family: Family, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of image and noise in the noisy input, shape (timesteps,), read off the family's own sum."""
    one = torch.ones(len(timesteps), 1, 1, 1, device=timesteps.device)
    zero = torch.zeros_like(one)
    return family.add_noise(one, zero, timesteps).flatten(), family.add_noise(zero, one, timesteps).flatten()
