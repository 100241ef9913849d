"""The training loop of every family, top to bottom: epochs, windows, micro-batches, one guarded update per window."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from accelerate.utils import gather_object
from torch import Tensor

from maulstick.data.batches import MicroBatch
from maulstick.data.latents import masks_of
from maulstick.guard import StepOutcome, guarded_step
from maulstick.train.console import StepLine
from maulstick.train.details import blocks_as_groups
from maulstick.train.loop_parts import LoopParts, LoopState, Window
from maulstick.train.memory import peak_memory
from maulstick.train.objective import NoisyBatch, image_losses, make_noisy
from maulstick.train.rescue import images_in, with_stand_ins
from maulstick.train.seeds import derive_seed
from maulstick.train.watchers import SeesBothEnds, WindowDone


class TrainingLoop:
    """Trains until the planned number of steps is reached or a stop is requested.

    A step is one update window: ``gradient_accumulation_steps`` micro-batches (fewer at the tail of an epoch), one
    verdict of the guard, and one optimizer step or none. Skipped windows count as steps. ``goes_on``: it had begun in
    another process, and everything that comes before the first step was done there.
    """

    def __init__(self, parts: LoopParts) -> None:
        self.parts = parts
        self.state = LoopState()
        self.rate_scales: dict[str, float] = {}
        self.left_out: frozenset[str] = frozenset()
        self.measured = blocks_as_groups(parts.family, parts.named_parameters)
        self._draws: list[tuple[Tensor, Tensor]] = []
        self.goes_on = False
        self.base_rates = [group["lr"] for group in parts.optimizer.param_groups]

    def run(self) -> LoopState:
        """Train; return where the run ended."""
        parts, state = self.parts, self.state
        self._set_modes(training=True)
        for watcher in parts.watchers:
            if isinstance(watcher, SeesBothEnds):
                watcher.before_training(self)
        if parts.options.sample.sample_at_first and not self.goes_on:
            self._sample("first")
        while state.step < parts.total_steps and state.stopped_by is None:
            for window, images in self.windows(state.epoch, state.step_in_epoch):
                self.train_step(window, images)
                self._stop_where_asked()
                self._save_and_sample_after_step()
                if state.step >= parts.total_steps or state.stopped_by is not None:
                    break
            if state.step_in_epoch >= self.windows_per_epoch:
                # A resumed run may begin here: its state was saved after the last window, before the epoch was closed.
                state.epoch, state.step_in_epoch = state.epoch + 1, 0
                self._save_and_sample_after_epoch()
        if state.step_in_epoch and state.stopped_by is None:
            # max_train_steps ended the last epoch early: it has its pictures all the same, as in sd-scripts.
            self._sample_after_epoch(state.epoch + 1)
        self.before_last_save()
        parts.save_state_at_end(state)
        self._set_modes(training=False)
        return state

    def before_last_save(self) -> None:
        """Let watchers put right what is about to be saved; to be called in training mode."""
        for watcher in self.parts.watchers:
            if isinstance(watcher, SeesBothEnds):
                watcher.after_training(self)

    def train_step(self, window: Window, images: float) -> StepOutcome:
        """Train on one window; its losses are divided by ``images``, so that their sum is a mean over images."""
        started = time.perf_counter()
        self._set_learning_rates()
        loss = self.accumulate_gradients(window, images)
        outcome = self.update(window, loss)
        extra = self.parts.after_update() if outcome.stepped else {}
        # The guard has read the loss, over all processes, together with the norm: no second wait for the device.
        loss_value = math.nan if outcome.verdict.loss is None else outcome.verdict.loss
        done = WindowDone(self.state.step, self.state.epoch, window, images, outcome, loss_value, tuple(self._draws))
        self._record(done, extra, time.perf_counter() - started)
        for watcher in self.parts.watchers:
            watcher.after_window(self, done)
        return outcome

    def accumulate_gradients(self, window: Window, images: float) -> Tensor:
        """Run forward and backward over the window's micro-batches; return the mean loss, detached."""
        parts = self.parts
        total = torch.zeros((), device=parts.accelerator.device)
        self._draws = []
        for place, (batch, latents) in enumerate(window):
            with self._gradient_exchange(last=place == len(window) - 1):
                loss = self.micro_batch_loss(batch, latents, images, step=self.state.step, place=place)
                parts.scaler.scale(loss).backward()
            total += loss.detach()
        if parts.exchange_gradients is not None:
            parts.exchange_gradients()
        return total

    def micro_batch_loss(
        self,
        batch: MicroBatch,
        latents: Tensor,
        images: float,
        *,
        step: int,
        place: int,
        only: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the sum of a micro-batch's losses over ``images``, with the draws of its place in the run.

        ``only`` leaves all but these samples out; each keeps the noise that it has in the whole micro-batch.
        """
        parts = self.parts
        # Reseeding makes every draw of this micro-batch, dropout included, a function of its place in the run.
        torch.manual_seed(derive_seed(parts.seed, "dropout", *self._draw_place(step, place)))
        parts.conditioner.at_step(step)
        loss = self.forward(batch, latents, self.noise_generator(step, place), only).sum() / images
        if not loss.requires_grad:
            # module_dropout left every module out; the gradient is zero, but there must be one.
            loss = loss + sum((parameter * 0).sum() for _, parameter in parts.named_parameters)
        return loss

    def noise_generator(self, step: int, place: int) -> torch.Generator:
        """Return what this process draws noise and timesteps of a micro-batch from, on the CPU."""
        return torch.Generator().manual_seed(derive_seed(self.parts.seed, "noise", *self._draw_place(step, place)))

    def _draw_place(self, step: int, place: int) -> tuple[int, int, int]:
        """Say where a micro-batch of this process stands in the run, however many processes share the window.

        Two processes of two micro-batches draw what one process of four does. The last number was the process once; it
        stays, so that a seed goes on giving the same draws.
        """
        accelerator = self.parts.accelerator
        return step, place * accelerator.num_processes + accelerator.process_index, 0

    def forward(
        self, batch: MicroBatch, latents: Tensor, generator: torch.Generator, only: Sequence[int] | None = None
    ) -> Tensor:
        """Return the weighted loss of each image of a micro-batch, shape (B,). Noise comes from the generator.

        ``only``: of these images alone; noise is drawn for all of them.
        """
        parts = self.parts
        noisy = make_noisy(parts.family, latents.to(parts.accelerator.device), parts.options.objective, generator)
        if only is not None:
            batch = replace(batch, items=tuple(batch.items[place] for place in only))
            chosen = list(only)
            noisy = NoisyBatch(noisy.noisy[chosen], noisy.timesteps[chosen], noisy.target[chosen])
        losses = self.losses_of(batch, noisy)
        self._draws.append((noisy.timesteps, losses.detach()))
        return losses

    def losses_of(self, batch: MicroBatch, noisy: NoisyBatch) -> Tensor:
        """Return the weighted loss of each image of a micro-batch, shape (B,), for noise that was drawn already."""
        parts = self.parts
        device = parts.accelerator.device
        captions = parts.conditioner.captions(batch.items)
        if parts.text_states is not None:
            text = {"conditioning": parts.text_states.states_for(captions)}
        else:
            text = {"tokens": {name: ids.to(device) for name, ids in parts.family.tokenize(captions).items()}}
        about_images = parts.family.image_conditioning([item.framing for item in batch.items])
        about_images |= parts.conditioner.about(batch.items)
        prediction = parts.trainee(noisy.noisy, noisy.timesteps, about_images=about_images, **text)
        weights = torch.tensor([item.loss_weight for item in batch.items], device=device)
        masks = masks_of(batch.items)
        masks = None if masks is None else masks.to(device)
        return image_losses(parts.family, prediction, noisy, parts.options.objective, weights, masks)

    def update(self, window: Window, loss: Tensor) -> StepOutcome:
        """Unscale, measure, judge, clip, step or skip, update the scaler: the order that keeps all of them healthy."""
        parts = self.parts
        outcome = guarded_step(
            parts.guard,
            parts.optimizer,
            loss=loss,
            scaler=parts.scaler,
            max_grad_norm=parts.options.optimizer.max_grad_norm or None,
            source=self.measured,
            images=[item.record.path.name for batch, _ in window for item in batch.items],
        )
        if outcome is None:
            raise RuntimeError("only accelerate's accumulation, which this loop does not use, leaves a window open")
        return outcome

    def read_mode(self) -> None:
        """Put networks and optimizer into the state in which weights are read: saved, or used for images."""
        self._set_modes(training=False)

    def train_mode(self) -> None:
        """Put networks and optimizer into the state in which they train."""
        self._set_modes(training=True)

    # --- parts of a step ---------------------------------------------------------------------------------------------

    @property
    def windows_per_epoch(self) -> int:
        """Windows in an epoch; the last one may be shorter."""
        return -(-self.parts.batches.batches_per_epoch // self.parts.options.run.gradient_accumulation_steps)

    def windows(self, epoch: int, start: int = 0) -> Iterator[tuple[Window, float]]:
        """Yield this process's windows of an epoch from number ``start`` on.

        Each comes with the mean number of images per process in it.
        """
        parts = self.parts
        size = parts.options.run.gradient_accumulation_steps
        world = parts.accelerator.num_processes
        window: list[tuple[MicroBatch, Tensor]] = []
        for batch, latents in parts.latents.stream(parts.batches, epoch, start * size):
            window.append(with_stand_ins(batch, latents, self.left_out))
            if len(window) == size or batch.number == parts.batches.batches_per_epoch - 1:
                if world == 1:
                    images = sum(images_in(member, self.left_out) for member, _ in window)
                else:
                    everyones = parts.batches.of_all_processes
                    batches = [each.batch(epoch, member.number) for each in everyones for member, _ in window]
                    images = sum(images_in(each, self.left_out) for each in batches)
                yield window, max(images, 1) / world
                window = []

    def _set_learning_rates(self) -> None:
        factor = self.parts.schedule(self.state.step) * math.prod(self.rate_scales.values())
        for group, base_rate in zip(self.parts.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base_rate * factor

    def _gradient_exchange(self, *, last: bool) -> AbstractContextManager[None]:
        """Let processes exchange gradients on the last micro-batch of a window only."""
        return nullcontext() if last else self.parts.accelerator.no_sync(self.parts.trainee)

    def _set_modes(self, *, training: bool) -> None:
        self.parts.trainee.train(training)
        if self.parts.average is not None:
            (self.parts.average.hide if training else self.parts.average.show)()
        if self.parts.optimizer_has_modes:
            # Schedule-free optimizers keep two sets of weights; reading and training want different ones.
            (self.parts.optimizer.train if training else self.parts.optimizer.eval)()  # type: ignore[attr-defined]

    def _stop_where_asked(self) -> None:
        reason = self._agreed_stop()
        if reason is not None and self.state.stopped_by is None:
            self.state.stopped_by, self.state.stop_was_asked_for = reason, True

    def _agreed_stop(self) -> str | None:
        """Return the reason to stop, once any process has one."""
        reason = self.parts.stop_requested()
        if self.parts.accelerator.num_processes == 1:
            return reason
        if reason is not None:
            self.parts.accelerator.set_trigger()
        return (reason or "another process stopped") if self.parts.accelerator.check_trigger() else None

    # --- what is written down ----------------------------------------------------------------------------------------

    def _record(self, done: WindowDone, extra: dict[str, float], seconds: float) -> None:
        parts, state = self.parts, self.state
        outcome, loss = done.outcome, done.loss
        parts.records.gradient(state.epoch, state.step_in_epoch, outcome.verdict)
        state.step += 1
        state.step_in_epoch += 1
        state.skipped += outcome.skipped
        state.skips_in_a_row = state.skips_in_a_row + 1 if outcome.skipped else 0
        if outcome.verdict.escalate and not outcome.verdict.finite and not parts.options.rescue.rescue:
            state.stopped_by = (
                f"the gradient was NaN or infinite in {outcome.verdict.consecutive_skips} steps in a row. The weights "
                "are those before them; look for bad data, lower the learning rate, or train in bf16"
            )
        if math.isfinite(loss) and not outcome.skipped:
            # A skipped step's loss is in loss/current alone: one spike would lift the average for a hundred steps.
            state.recent_losses.append(loss)
        average = sum(state.recent_losses) / len(state.recent_losses) if state.recent_losses else math.nan
        rates = learning_rates(parts.optimizer)
        values = {
            "loss/current": loss,
            "loss/average": average,
            **rates,
            "norm/grad": outcome.verdict.norm,
            "norm/threshold": outcome.verdict.threshold,
            "train/skipped_steps": float(state.skipped),
            **extra,
        }
        if parts.scaler.is_enabled():
            values["train/loss_scale"] = parts.scaler.get_scale()
        parts.records.step(values, step=state.step, epoch=state.epoch, seconds=seconds)
        if outcome.skipped:
            self._report_skip(done.window, outcome)
        for alarm in outcome.alarms:
            parts.console.say(f"step {state.step}: {alarm}")
            parts.records.events.write("alarm", step=state.step, text=alarm)
        rate, verdict = next(iter(rates.values())), outcome.verdict
        parts.console.advance(
            line=StepLine(average, verdict.norm, verdict.threshold, rate, state.skipped, self._memory_in_use)
        )

    def _memory_in_use(self) -> int | None:
        return peak_memory(self.parts.accelerator.device)[0]

    def _report_skip(self, window: Window, outcome: StepOutcome) -> None:
        images = [str(item.record.path) for batch, _ in window for item in batch.items]
        if self.parts.accelerator.num_processes > 1:
            # All processes skip together, and the bad image may be on any of them.
            images = gather_object(images)
        self.parts.console.say(f"step {self.state.step} skipped: {outcome.describe()}")
        self.parts.records.events.write(
            "skip",
            step=self.state.step,
            reason=str(outcome.verdict.reason),
            text=outcome.describe(),
            images=images,
        )

    def _save_and_sample_after_step(self) -> None:
        run, sample = self.parts.options.run, self.parts.options.sample
        label = f"step{self.state.step:08d}"
        save = _is_due(self.state.step, run.save_every_n_steps) and self.state.step < self.parts.total_steps
        if save:
            self._save(label)
        if _is_due(self.state.step, sample.sample_every_n_steps):
            self._sample(label)
        if save:
            # Last: schedule-free optimizers change their weights, by rounding, each time they switch modes.
            self.parts.save_state(label, self.state)

    def _save_and_sample_after_epoch(self) -> None:
        every = self.parts.options.run.save_every_n_epochs
        save = _is_due(self.state.epoch, every) and self.state.step < self.parts.total_steps
        if save:
            self._save(f"{self.state.epoch:06d}")
        self._sample_after_epoch(self.state.epoch)
        if save:
            self.parts.save_state(f"{self.state.epoch:06d}", self.state)

    def _save(self, label: str) -> None:
        self._set_modes(training=False)
        self.parts.save(label, self.state.step, self.state.epoch)
        self._set_modes(training=True)

    def _sample_after_epoch(self, number: int) -> None:
        if _is_due(number, self.parts.options.sample.sample_every_n_epochs):
            self._sample(f"epoch{number:06d}")

    def _sample(self, label: str) -> None:
        if self.parts.sample is not None:
            self._set_modes(training=False)
            self.parts.sample(label, self.state.step)
            self._set_modes(training=True)


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return ``lr/NAME`` of every group, and ``lr/d*lr/NAME`` where the optimizer estimates a step size ``d``.

    A group that stands for several networks (``textencoder+unet``) gives a value for each.
    """
    rates = {}
    for group in optimizer.param_groups:
        for name in group["name"].split("+"):
            rates[f"lr/{name}"] = float(group["lr"])
            # Adafactor has a "d" of another meaning; those that estimate a step size remember where it began.
            if "d" in group and "d0" in group:
                rates[f"lr/d*lr/{name}"] = float(group["d"]) * float(group["lr"])
                if type(optimizer).__name__ == "ProdigyPlusScheduleFree":
                    # sd-scripts' name for it, which has the first group's.
                    rates.setdefault("lr/d*lr", rates[f"lr/d*lr/{name}"])
    return rates


def _is_due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0
