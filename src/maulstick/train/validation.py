"""The validation loss: measured on images that are held back, and on as many that are trained, with fixed noise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from maulstick.data.batches import BatchItem, MicroBatch
from maulstick.data.captions import steady_caption
from maulstick.data.held_back import drawn
from maulstick.data.records import DatasetIndex, ImageRecord
from maulstick.errors import DataError
from maulstick.families.base import Family
from maulstick.options.schema import TrainOptions
from maulstick.train.objective import draw_noise, noisy_at
from maulstick.train.over_fitting import Measured, best_of, over_fitting
from maulstick.train.seeds import derive_seed
from maulstick.train.watchers import WindowDone, as_saved, on_bare_networks

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop
    from maulstick.train.loop_parts import LoopParts

TIMESTEPS = 4
DRAWS_EACH = 250
KEPT_LATENTS_BYTES = 1 << 29


def fixed_timesteps(family: Family, seed: int) -> Tensor:
    """Return the timesteps of every image at every validation: ``TIMESTEPS`` quantiles of those that are trained.

    Of equal parts of the distribution each gives its middle, so that the mean over them is near that of training.
    """
    draws = family.sample_timesteps(TIMESTEPS * DRAWS_EACH, torch.Generator().manual_seed(derive_seed(seed, "times")))
    return draws.sort().values[DRAWS_EACH // 2 :: DRAWS_EACH]


def validation_seed(options: TrainOptions, seed: int) -> int:
    """Return the seed that chooses images and noise: ``validation_seed``, or that of the run."""
    return seed if options.dataset.validation_seed is None else options.dataset.validation_seed


def judged_images(
    index: DatasetIndex, options: TrainOptions, seed: int
) -> tuple[Sequence[ImageRecord], Sequence[ImageRecord]]:
    """Return the images to measure on: of those held back, as ``max_validation_steps`` allows, and as many trained."""
    most = options.validation.max_validation_steps
    largest = max(dataset.spec.batch_size for dataset in index.datasets)
    held_back = index.held_back if most is None else index.held_back[: most * largest]
    trained = drawn((image for image in index.records if not image.is_reg), seed, len(held_back))
    return held_back, trained


def judged_item(image: ImageRecord, seed: int) -> BatchItem:
    """Return an image as it is measured: not mirrored, with its whole caption, at full weight."""
    caption = steady_caption(image, Random(f"maulstick validation caption {seed} {image.content_hash}"))
    return BatchItem(image, epoch=0, position=0, flipped=False, caption=caption, loss_weight=1.0, judged=True)


def judged_captions(index: DatasetIndex, options: TrainOptions, seed: int) -> set[str]:
    """Return the captions that validations need."""
    seed = validation_seed(options, seed)
    return {judged_item(image, seed).caption for images in judged_images(index, options, seed) for image in images}


class ValidationWatcher:
    """Measures before the first step, after epochs, every so many steps and after the last one.

    Nothing of the training changes: no gradient, no random state, and the weights are put back to the bit. Images are
    shared among the processes; every process knows all losses.
    """

    name = "validation"

    def __init__(self, parts: LoopParts) -> None:
        self._schedule = parts.options.validation
        self.seed = validation_seed(parts.options, parts.seed)
        self.timesteps = fixed_timesteps(parts.family, self.seed)
        index = parts.batches.index
        self.held_back, self.trained = judged_images(index, parts.options, self.seed)
        self._batches = [
            batch for images in (self.held_back, self.trained) for batch in _batches_of(images, index, self.seed)
        ]
        self._kept: dict[int, tuple[BatchItem, Tensor]] = {}
        self.history: list[Measured] = []
        self.told = False

    # --- when --------------------------------------------------------------------------------------------------------

    def before_training(self, loop: TrainingLoop) -> None:
        """Measure the model as it is without training; a resumed run has done that."""
        if not self.history and not loop.goes_on:
            self._validate(loop, ("epoch", "step") if self._schedule.validate_every_n_steps else ("epoch",))

    def after_training(self, loop: TrainingLoop) -> None:
        """Do nothing; the last step was measured when it was made."""

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Measure when it is due."""
        state, every = loop.state, self._schedule
        if state.stopped_by is not None:
            return
        kinds = []
        if every.validate_every_n_steps and state.step % every.validate_every_n_steps == 0:
            kinds.append("step")
        ends_epoch = state.step_in_epoch >= loop.windows_per_epoch
        due = ends_epoch and (state.epoch + 1) % (every.validate_every_n_epochs or 1) == 0
        if due or state.step >= loop.parts.total_steps:
            kinds.append("epoch")
        if kinds:
            self._validate(loop, kinds)

    # --- what --------------------------------------------------------------------------------------------------------

    def _validate(self, loop: TrainingLoop, kinds: Sequence[str]) -> None:
        parts, step = loop.parts, loop.state.step
        losses = self.measure(loop)
        by_timestep = [_means(losses, images) for images in (self.held_back, self.trained)]
        now = Measured(step, *(fmean(means) for means in by_timestep))
        self.history.append(now)
        values = {}
        for kind in kinds:
            values[f"loss/validation/{kind}_average"] = now.loss
            values[f"loss/validation/{kind}_divergence"] = now.loss - now.training_loss
        parts.records.events.write(
            "validation",
            step=step,
            epoch=loop.state.epoch,
            loss=now.loss,
            training_loss=now.training_loss,
            images=len(self.held_back),
            timesteps=[float(each) for each in self.timesteps],
            losses=by_timestep[0],
            training_losses=by_timestep[1],
            **values,
        )
        parts.records.track(values, step=step, epoch=loop.state.epoch)
        parts.console.say(self._line(now))
        self._tell_of_over_fitting(loop)

    def _line(self, now: Measured) -> str:
        when = f"step {now.step}" if now.step else "before training"
        line = f"{when}: validation loss {now.loss:.4f}, on as many training images {now.training_loss:.4f}"
        best = best_of(self.history)
        if best is None or len(self.history) == 1:
            return line
        return f"{line} (best: {best.loss:.4f} {_place(best.step)})"

    def measure(self, loop: TrainingLoop) -> dict[int, list[float]]:
        """Return number of the image -> its loss at each of the timesteps; the same on all processes.

        Raises DataError when no image has finite latents.
        """
        parts = loop.parts
        rank, world = parts.accelerator.process_index, parts.accelerator.num_processes
        mine: list[tuple[int, list[float]]] = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]), as_saved(loop), on_bare_networks(loop):
            parts.conditioner.as_saved()
            # A spread base takes part on every process each time: whoever has nothing left repeats the first batch.
            for first in range(0, len(self._batches), world):
                number = first + rank
                batch = self._batches[number if number < len(self._batches) else 0]
                found = self._losses_of(loop, batch)
                if number < len(self._batches):
                    mine += found
        everyones = dict(gather_object(mine))
        for images in (self.held_back, self.trained):
            if not any(image.record_id in everyones for image in images):
                raise DataError("None of the images of the validation has finite latents, so that it says nothing.")
        return everyones

    def _losses_of(self, loop: TrainingLoop, batch: MicroBatch) -> list[tuple[int, list[float]]]:
        parts = loop.parts
        usable = [filled for item in batch.items if (filled := self._filled(loop, item)) is not None]
        if not usable:
            return []
        batch = MicroBatch(batch.epoch, batch.number, tuple(item for item, _ in usable))
        latents = torch.stack([latent for _, latent in usable]).to(parts.accelerator.device)
        columns = []
        for place, timestep in enumerate(self.timesteps):
            noise = [self._noise(item, latent, place, loop) for item, latent in usable]
            timesteps = timestep.repeat(len(usable)).to(latents.device)
            noisy = noisy_at(parts.family, latents, torch.cat(noise).to(latents.device), timesteps)
            columns.append(loop.losses_of(batch, noisy))
        rows = torch.stack(columns, dim=1).tolist()
        return [(item.record.record_id, row) for (item, _), row in zip(usable, rows, strict=True)]

    def _noise(self, item: BatchItem, latent: Tensor, place: int, loop: TrainingLoop) -> Tensor:
        """Draw for one image alone: its noise must not depend on the images beside it."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "validation", item.record.content_hash, place))
        return draw_noise(latent[None], loop.parts.options.objective, generator)

    def _filled(self, loop: TrainingLoop, item: BatchItem) -> tuple[BatchItem, Tensor] | None:
        """Return an image with its mask, and its fp32 latents (C, H, W).

        None where the latents are not finite, which the source reports.
        """
        number, source = item.record.record_id, loop.parts.latents
        if number in self._kept:
            return self._kept[number]
        if number in source.excluded:
            return None
        try:
            batch, latents = source.filled(MicroBatch(0, 0, (item,)))
        except DataError:
            if number in source.excluded:
                return None
            raise
        filled = batch.items[0], latents[0]
        used = sum(each.nelement() * each.element_size() for _, each in self._kept.values())
        if source.needs_vae and used < KEPT_LATENTS_BYTES:
            self._kept[number] = filled
        return filled

    # --- over-fitting ------------------------------------------------------------------------------------------------

    def _tell_of_over_fitting(self, loop: TrainingLoop) -> None:
        found = None if self.told else over_fitting(self.history)
        if found is None:
            return
        self.told = True
        best, now = found.best, found.now
        saved = loop.parts.saved_files()
        nearest = min(saved, key=lambda step: (abs(step - best.step), step), default=None)
        text = (
            f"over-fitting: the validation loss {found.how}: {best.loss:.4f} {_place(best.step)}, {now.loss:.4f} now; "
            f"on training images it fell from {best.training_loss:.4f} to {now.training_loss:.4f}. The run learns its "
            "images by heart; it goes on. "
        )
        if nearest is None:
            text += "No file was saved near the best validation; save_every_n_epochs or save_every_n_steps keeps some."
        else:
            text += f"The file saved nearest to the best validation is {saved[nearest].name} (step {nearest})."
        loop.parts.console.say(f"step {now.step}: {text}")
        loop.parts.records.events.write(
            "over_fitting",
            step=now.step,
            best_step=best.step,
            best_loss=best.loss,
            loss=now.loss,
            nearest_file=None if nearest is None else saved[nearest],
            text=text,
        )

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured so far."""
        rows = [[each.step, each.loss, each.training_loss] for each in self.history]
        return {"history": rows, "told": self.told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        self.history = [Measured(int(step), loss, training_loss) for step, loss, training_loss in state["history"]]
        self.told = bool(state["told"])


def _place(step: int) -> str:
    return f"at step {step}" if step else "before training"


def _means(losses: Mapping[int, Sequence[float]], images: Sequence[ImageRecord]) -> list[float]:
    """Return the mean at each timestep, summed in the order of the images and not in that of the processes."""
    rows = [losses[image.record_id] for image in images if image.record_id in losses]
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def _batches_of(images: Sequence[ImageRecord], index: DatasetIndex, seed: int) -> list[MicroBatch]:
    alike: dict[Any, list[BatchItem]] = defaultdict(list)
    for image in images:
        alike[image.dataset, image.placement.bucket].append(judged_item(image, seed))
    batches = []
    for (dataset, _), items in alike.items():
        size = index.datasets[dataset].spec.batch_size
        batches += [MicroBatch(0, 0, tuple(items[start : start + size])) for start in range(0, len(items), size)]
    return batches
