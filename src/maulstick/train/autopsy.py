"""The autopsy in the trainer: re-runs a window that gave NaN or infinity, and names module, tensor, image and cause."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from maulstick.autopsy import Direction, Report, Sample, bisect_batch, examine
from maulstick.autopsy.examination import healthy_loss
from maulstick.data.batches import BatchItem, MicroBatch
from maulstick.files_io import atomic_write, set_aside
from maulstick.train.objective import loss_weights, make_noisy
from maulstick.train.watchers import WindowDone, networks_of, on_bare_networks

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop
    from maulstick.train.loop_parts import LoopParts, Window

"""Puts the state from before the window back for the length of a ``with`` block."""

NOT_REPRODUCED = (
    "the same weights, data and random numbers give finite values now: look at the device, at a kernel that does not "
    "give the same result twice, or at the exchange of gradients"
)
SPOILT_WEIGHTS = "the bad gradient was applied (the guardian was off), so these are the weights after it"


class AutopsyWatcher:
    """Re-runs the micro-batches of a window whose gradient or loss was not finite; changes nothing.

    A skipped window leaves the weights as they were and every draw depends on its place in the run only, so that the
    re-run is exact. A healthy window costs one comparison. Overflows that only say that the loss scale is too high are
    told apart by a run at scale 1, and do not count for the limit.
    """

    name = "autopsy"

    def __init__(self, parts: LoopParts) -> None:
        self.limit = parts.options.autopsy.autopsy_limit
        self.made = self.ordinary = 0
        self._last_finite = -1

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Do nothing after a finite window; after another one, find out why."""
        verdict = done.outcome.verdict
        loss_is_finite = verdict.loss is None or math.isfinite(verdict.loss)
        if verdict.finite and loss_is_finite:
            self._last_finite = done.step
            return
        scaled = loss_is_finite and (verdict.scale or 1.0) > 1
        if self.made >= self.limit or (scaled and self.ordinary >= self.limit):
            return
        results = self._on_all_processes(loop, self._examined(loop, done, scaled=scaled))
        if all(result["ordinary"] for result in results):
            self.ordinary += 1
            loop.parts.console.say(
                f"step {loop.state.step}: the loss scale {verdict.scale:g} was too high for this batch and is lowered; "
                "nothing is broken"
            )
            return
        self.made += 1
        _write_down(loop.parts, loop.state.step, results)

    def state_dict(self) -> dict[str, Any]:
        """Return how many were made."""
        return {"made": self.made, "ordinary": self.ordinary, "last_finite": self._last_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        self.made, self.ordinary = int(state["made"]), int(state["ordinary"])
        self._last_finite = int(state["last_finite"])

    def _examined(self, loop: TrainingLoop, done: WindowDone, *, scaled: bool) -> dict[str, Any]:
        """Return this process's result as plain values. Nothing that goes wrong here may end the run."""
        scale = done.outcome.verdict.scale or 1.0
        spoilt = done.outcome.stepped
        facts = {} if spoilt else {"window_before_was_finite": done.step > 0 and self._last_finite == done.step - 1}
        try:
            if scaled and _healthy_at_scale_one(loop, done):
                return {"ordinary": True, "report": None, "error": None}
            report = examine_window(loop, done.window, done.images, done.step, loss_scale=scale, facts=facts)
        except Exception as error:  # whatever it is, training goes on
            return {"ordinary": False, "report": None, "error": f"{type(error).__name__}: {error}"}
        if spoilt:
            report = report.with_notes(SPOILT_WEIGHTS)
        return {"ordinary": False, "report": report.as_json(), "error": None}

    def _on_all_processes(self, loop: TrainingLoop, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own] if loop.parts.accelerator.num_processes == 1 else list(gather_object([own]))


def examine_window(
    loop: TrainingLoop,
    window: Window,
    images: float,
    step: int,
    *,
    loss_scale: float = 1.0,
    facts: Mapping[str, Any] | None = None,
    try_step: bool = False,
) -> Report:
    """Re-run the window ``step`` (from 0) on this process and return the report of its first bad micro-batch.

    Where all are healthy, the last one's report is returned. No process waits for another. ``try_step``: let the
    optimizer make a step on trial too.
    """
    with on_bare_networks(loop):
        report = Report(None, math.nan)
        for place, (batch, latents) in enumerate(window):
            report = _examine_micro_batch(
                loop, batch, latents, images, step, place, loss_scale, facts or {}, try_step=try_step
            )
            where = f", micro-batch {place + 1} of {len(window)}" if len(window) > 1 else ""
            report = replace(report, title=f"Autopsy of step {step + 1}{where}")
            if not report.healthy:
                break
    return report


def _examine_micro_batch(
    loop: TrainingLoop,
    batch: MicroBatch,
    latents: Tensor,
    images: float,
    step: int,
    place: int,
    loss_scale: float,
    facts: Mapping[str, Any],
    *,
    try_step: bool,
) -> Report:
    parts = loop.parts
    drawn = _drawn(loop, latents, step, place)

    def run(only: Sequence[int] | None = None) -> Tensor:
        return loop.micro_batch_loss(batch, latents, images, step=step, place=place, only=only)

    def is_bad(places: Sequence[int]) -> bool:
        return not healthy_loss(lambda: run(places), parts.named_parameters, loss_scale)

    report = examine(
        run,
        networks_of(loop),
        parts.named_parameters,
        parts.optimizer,
        _inputs(parts, batch, latents),
        loss_scale=loss_scale,
        facts={**_run_facts(parts), **drawn, **facts},
        try_step=try_step,
    )
    finding = report.finding
    of_the_batch = (Direction.INPUT, Direction.FORWARD, Direction.BACKWARD)
    if finding is None or finding.direction not in of_the_batch:
        return report
    with torch.random.fork_rng():
        search = bisect_batch(is_bad, len(batch.items))
    samples = () if search.all_of_them and search.size > 1 else (search.alone or search.together)
    named = [_sample(batch.items[one], one, drawn["timesteps"][one], alone=bool(search.alone)) for one in samples]
    return replace(report, samples=tuple(named), samples_in_batch=len(batch.items))


def _sample(item: BatchItem, place: int, timestep: float, *, alone: bool) -> Sample:
    flipped = ", mirrored" if item.flipped else ""
    detail = f"timestep {timestep:g}{flipped}"
    return Sample(place, str(item.record.path), item.caption, alone=alone, detail=detail)


def _healthy_at_scale_one(loop: TrainingLoop, done: WindowDone) -> bool:
    with on_bare_networks(loop), torch.random.fork_rng():
        return all(
            healthy_loss(
                lambda place=place, batch=batch, latents=latents: loop.micro_batch_loss(  # type: ignore[misc]
                    batch, latents, done.images, step=done.step, place=place
                ),
                loop.parts.named_parameters,
            )
            for place, (batch, latents) in enumerate(done.window)
        )


# ---------------------------------------------------------------------------------------- what the report is made from


def _inputs(parts: LoopParts, batch: MicroBatch, latents: Tensor) -> dict[str, Any]:
    inputs: dict[str, Any] = {"latents": latents}
    if parts.text_states is not None:
        inputs["text states"] = parts.text_states.states_for(parts.conditioner.captions(batch.items))
    return inputs | {name.replace("_", " "): each for name, each in parts.conditioner.about(batch.items).items()}


def _drawn(loop: TrainingLoop, latents: Tensor, step: int, place: int) -> dict[str, Any]:
    """Return what was drawn for the micro-batch, and what follows from its timesteps."""
    parts = loop.parts
    family, objective = parts.family, parts.options.objective
    latents = latents.to(parts.accelerator.device)
    noisy = make_noisy(family, latents, objective, loop.noise_generator(step, place))
    signal = family.add_noise(torch.ones_like(latents), torch.zeros_like(latents), noisy.timesteps).flatten(1).mean(1)
    return {
        "timesteps": noisy.timesteps.tolist(),
        "zero_terminal_snr": bool((signal == 0).any()),
        "loss_weights": loss_weights(family, noisy.timesteps, objective).tolist(),
    }


def _run_facts(parts: LoopParts) -> dict[str, Any]:
    options = parts.options
    return {
        "model": parts.family.name,
        "prediction_type": parts.family.prediction_type,
        "mixed_precision": options.run.mixed_precision,
        "min_snr_gamma": options.objective.min_snr_gamma,
        "debiased_estimation_loss": options.objective.debiased_estimation_loss,
        "optimizer_type": options.optimizer.optimizer_type,
        "cached_latents": options.dataset.cache_latents,
        "cached_text_states": options.dataset.cache_text_encoder_outputs,
    }


# ---------------------------------------------------------------------------------------- what is written down


def _write_down(parts: LoopParts, step: int, results: Sequence[Mapping[str, Any]]) -> None:
    """Show the report on the console, and write it into files and the event log, on the process that writes."""
    if not parts.accelerator.is_main_process:
        return
    reports = [None if result["report"] is None else Report.from_json(result["report"]) for result in results]
    errors = [f"process {rank}: {result['error']}" for rank, result in enumerate(results) if result["error"]]
    found = [(rank, report) for rank, report in enumerate(reports) if report is not None and not report.healthy]
    if not found:
        first = next((report for report in reports if report is not None), None)
        if first is None:
            parts.console.say(f"step {step}: the autopsy failed ({'; '.join(errors)}); training goes on")
            parts.records.events.write("autopsy_failed", step=step, error="; ".join(errors))
            return
        report = first.with_notes(NOT_REPRODUCED)
    else:
        rank, report = found[0]
        if len(reports) > 1:
            report = replace(report, title=f"{report.title}, process {rank}")
        others = [f"process {rank} as well: {each.finding.headline()}" for rank, each in found[1:] if each.finding]
        report = report.with_notes(*others)
    report = report.with_notes(*(f"the autopsy failed on {error}" for error in errors))
    parts.console.say(report.text(table=False))
    file = _write_files(parts, step, report)
    parts.records.events.write(
        "autopsy",
        step=step,
        text=report.text(table=False).splitlines()[0],
        direction=None if report.finding is None else str(report.finding.direction),
        module=None if report.finding is None else report.finding.module,
        causes=[cause.id for cause in report.causes],
        images=[sample.name for sample in report.samples],
        file=file,
    )


def _write_files(parts: LoopParts, step: int, report: Report) -> Path | None:
    folder = parts.options.run.output_dir
    if folder is None:
        return None
    try:
        return write_report(folder / report_name(parts.options.run.output_name, step), report)
    except OSError as error:
        parts.console.say(f"step {step}: the autopsy's report could not be written ({error}); training goes on")
        return None


def report_name(output_name: str, step: int) -> str:
    """Return the file name of a report, without its ending; ``step`` counts from 1, as everywhere it is shown."""
    return f"{output_name}-autopsy-step{step:08d}"


def write_report(path: Path, report: Report) -> Path:
    """Write ``path``.json and ``path``.txt; earlier ones are set aside. Returns the JSON file."""
    json_file, text_file = path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.txt")
    for file in (json_file, text_file):
        set_aside(file)
    atomic_write(json_file, json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n")
    atomic_write(text_file, report.text(table=True) + "\n")
    return json_file
