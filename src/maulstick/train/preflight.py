"""Everything that is found before a run: checks of the options, a look at the latents, and one dry step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from maulstick.data.findings import Finding, Severity, by_severity
from maulstick.options.load import LoadedOptions
from maulstick.train.dry_step import DryStep, dry_step
from maulstick.train.preflight_model import (
    LatentSample,
    PredictionProbe,
    fp16_on_overflowing_family,
    look_at_latents,
    noise_without_signal,
    probe_prediction,
)
from maulstick.train.preflight_rates import learns_nothing, rates_that_do_not_fit, scale_too_large
from maulstick.train.prepare import Prepared
from maulstick.train.schedule_glance import ScheduleGlance, schedule_glance

Check = Callable[[Prepared], list[Finding]]

CHECKS: Sequence[Check] = (
    rates_that_do_not_fit,
    scale_too_large,
    learns_nothing,
    fp16_on_overflowing_family,
    noise_without_signal,
)
"""What needs no step; each check looks at one thing."""


@dataclass(frozen=True)
class Preflight:
    """What was found, besides what the plan says about the data.

    Attributes:
        findings: of the checks; an error among them means that the training would fail.
        latents, step, prediction: what was measured; None where nothing was.
    """

    findings: Sequence[Finding]
    schedule: ScheduleGlance
    latents: LatentSample | None = None
    step: DryStep | None = None
    prediction: PredictionProbe | None = None

    @property
    def exit_code(self) -> int:
        """1 where the training would fail, else 0."""
        return int(any(finding.severity is Severity.ERROR for finding in self.findings))

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        measured = {"latents": self.latents, "step": self.step, "prediction": self.prediction}
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "schedule": self.schedule.as_json(),
            **{name: None if value is None else value.as_json() for name, value in measured.items()},
        }


def preflight(loaded: LoadedOptions, prepared: Prepared, *, dry: bool = True) -> Preflight:
    """Run all checks; with ``dry`` also make a dry step and encode a few images. Nothing is written.

    The LoRA stays attached to the family's networks, with the values it starts from.
    """
    findings = [finding for check in CHECKS for finding in check(prepared)]
    glance = schedule_glance(prepared)
    if not dry:
        return Preflight(by_severity(findings), glance)
    run = dry_step(loaded, prepared)
    findings += run.findings
    if run.step is None or run.batch is None or run.latents is None:
        return Preflight(by_severity(findings), glance)
    prediction, found = probe_prediction(prepared, run.batch, run.latents)
    findings += found
    # Last, because a second VAE in fp32 would count as memory of the step.
    latents, found = look_at_latents(prepared)
    findings += found
    return Preflight(by_severity(findings), glance, latents, run.step, prediction)
