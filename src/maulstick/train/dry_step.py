"""One step of a run that is not going to happen: how long it takes and how much memory it needs on this device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maulstick.data.batches import BatchSchedule, MicroBatch
from maulstick.data.findings import Finding, Severity
from maulstick.data.latents import FreshLatents
from maulstick.guard import GradientGuard
from maulstick.options.check import guard_config
from maulstick.options.load import LoadedOptions
from maulstick.train.console import QuietConsole
from maulstick.train.loop import TrainingLoop
from maulstick.train.memory import peak_memory
from maulstick.train.prepare import Prepared
from maulstick.train.run import TrainingRun
from maulstick.train.sources import how_to_make

_BATCHES_LOOKED_AT = 1000


@dataclass(frozen=True)
class DryStep:
    """What one step took: forward, backward and update of one window, the second of two.

    Attributes:
        bucket: (width, height) of the images, the largest of the data.
        images: images of the step.
        peak_bytes: most memory in use, on the GPU or of this process; None where that cannot be told.
        memory_of: what ``peak_bytes`` counts.
        loss: of the first of the two, before any update.
        without_gradient: network -> (tensors that got no gradient, all its tensors), where there are any.
    """

    seconds: float
    bucket: tuple[int, int]
    images: int
    peak_bytes: int | None
    memory_of: str
    loss: float
    without_gradient: Mapping[str, tuple[int, int]]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return vars(self) | {"bucket": list(self.bucket), "without_gradient": dict(self.without_gradient)}


@dataclass(frozen=True)
class DryRun:
    """A dry step and what it was made with; ``step`` is None where it failed."""

    step: DryStep | None
    batch: MicroBatch | None
    latents: Tensor | None
    findings: list[Finding]


def dry_step(loaded: LoadedOptions, prepared: Prepared) -> DryRun:
    """Put the run together as ``train`` would, make one step twice, and put the trained weights back.

    Nothing is written: no cache, no log, no file. The adapter stays attached, with the values it starts from.
    """
    try:
        return _dry_step(loaded, prepared)
    except torch.OutOfMemoryError as error:
        what = f"One step needs more memory than this device has: {str(error).splitlines()[0]}"
        advice = (
            'Set gradient_checkpointing, mixed_precision = "bf16", cache_latents, network_train_unet_only with '
            "cache_text_encoder_outputs, or a lower train_batch_size or resolution."
        )
        why = "Training would end at its first step."
        return DryRun(None, None, None, [Finding(Severity.ERROR, "out_of_memory", (), what, why, advice)])


def _dry_step(loaded: LoadedOptions, prepared: Prepared) -> DryRun:
    options = loaded.options
    unwritten = replace(
        options,
        run=replace(options.run, output_dir=options.run.output_dir or Path()),
        # Only the captions of one batch are needed.
        dataset=replace(options.dataset, cache_text_encoder_outputs=False),
    )
    run = TrainingRun(replace(loaded, options=unwritten), console=QuietConsole())
    family, device = prepared.family, prepared.family.device
    source = FreshLatents(prepared.index, family, device=device, making=how_to_make(options.dataset))
    source.needs_vae = not options.dataset.cache_latents
    batch = largest_batch(prepared.batches)
    batch, latents = source.filled(batch)
    loop = run.build_loop(prepared, source, GradientGuard(guard_config(options)[0]))
    if loop.parts.text_states is not None:
        loop.parts.text_states.states_for([item.caption for item in batch.items])
        if options.dataset.cache_text_encoder_outputs:
            family.release_encoders(vae=False, text_encoders=True)
    before = [parameter.detach().clone() for _, parameter in loop.parts.named_parameters]
    loop.train_mode()
    try:
        step = _second_of_two(loop, source, batch, latents, encode_each_time=source.needs_vae)
    finally:
        loop.read_mode()
        with torch.no_grad():
            for (_, parameter), start in zip(loop.parts.named_parameters, before, strict=True):
                parameter.copy_(start)
                parameter.grad = None
    return DryRun(step, batch, latents, _findings(prepared, step))


def _second_of_two(
    loop: TrainingLoop, source: FreshLatents, batch: MicroBatch, latents: Tensor, *, encode_each_time: bool
) -> DryStep:
    parts = loop.parts
    device = parts.accelerator.device
    size = parts.options.run.gradient_accumulation_steps
    images = len(batch.items) * size
    losses = []
    _begin_peak(device)
    for _ in range(2):
        _wait_for(device)
        started = time.perf_counter()
        window = [source.filled(batch) if encode_each_time else (batch, latents) for _ in range(size)]
        loss = loop.accumulate_gradients(window, float(images))
        losses.append(float(loss))
        without = _without_gradient(loop)
        loop.update(window, loss)
        parts.after_update()
        _wait_for(device)
        seconds = time.perf_counter() - started
    peak, memory_of = peak_memory(device)
    return DryStep(seconds, batch.bucket, images, peak, memory_of, losses[0], without)


def _without_gradient(loop: TrainingLoop) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for name, parameter in loop.parts.named_parameters:
        network = name.split(".", 1)[0]
        missing, total = counts.get(network, (0, 0))
        counts[network] = (missing + (parameter.grad is None), total + 1)
    return {network: pair for network, pair in counts.items() if pair[0]}


def _findings(prepared: Prepared, step: DryStep) -> list[Finding]:
    findings = []
    if step.loss != step.loss or step.loss in (float("inf"), float("-inf")):
        what = f"The loss of the first step is {step.loss}."
        why = "Every such step is skipped, and a run of nothing else is stopped."
        advice = 'Set mixed_precision = "bf16" or "no"; if that does not help, the model or a cached file is damaged.'
        findings.append(Finding(Severity.ERROR, "loss_not_finite", (), what, why, advice))
    for network, (missing, total) in step.without_gradient.items():
        # Some tensors may well be left out: dropped modules, layers behind the one that clip_skip reads.
        if missing == total and not prepared.options.network.module_dropout:
            what = f"None of the {total} tensors of the {network} gets a gradient."
            why = "Nothing of it would be trained, although the loss looks healthy."
            advice = "Leave gradient_checkpointing out if it is on, and report this: it should not happen."
            findings.append(Finding(Severity.ERROR, "no_gradient", (), what, why, advice))
    return findings


def largest_batch(batches: BatchSchedule) -> MicroBatch:
    """Return the micro-batch of the first epoch with the most pixels, as far as one need look."""
    count = min(batches.batches_per_epoch, _BATCHES_LOOKED_AT)
    candidates = (batches.batch(0, number) for number in range(count))
    return max(candidates, key=lambda batch: batch.bucket[0] * batch.bucket[1] * len(batch.items))


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
