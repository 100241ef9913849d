"""A training run from its options to its files: puts the parts together, and leaves a usable file whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from maulstick import __version__
from maulstick.data.findings import Finding
from maulstick.data.latents import LatentSource
from maulstick.guard import GradientGuard
from maulstick.options.check import guard_config
from maulstick.options.load import LoadedOptions
from maulstick.options.schema import SampleOptions, flat_values
from maulstick.pictures.drawing import refuse_samplers, refuse_sizes
from maulstick.pictures.picture_files import PictureFacts
from maulstick.pictures.prompts import Prompt, check_prompts, read_prompts
from maulstick.train.average import weight_average
from maulstick.train.conditioner import Conditioner
from maulstick.train.console import RunConsole, SilentConsole, make_console
from maulstick.train.environment import environment
from maulstick.train.interrupt import StopSignals
from maulstick.train.loop import TrainingLoop
from maulstick.train.loop_parts import LoopParts, LoopState
from maulstick.train.optim import build_optimizer
from maulstick.train.output import AdapterOutput, author_facts, dataset_facts
from maulstick.train.plan import plan_lines
from maulstick.train.precision import gradient_scaler, in_fp8
from maulstick.train.prepare import Prepared, draw_seed, make_plan, prepare
from maulstick.train.processes import make_accelerator, without_effect_alone, wrap_for_gradients
from maulstick.train.records import RunRecords
from maulstick.train.result import RunResult
from maulstick.train.resume import (
    Start,
    begin_at,
    check_same_run,
    find_start,
    finished_file,
    finished_text,
    restore,
    run_facts,
    sets_counters,
)
from maulstick.train.sample import SampleError, draw_samples
from maulstick.train.saving import RunSaver, end_label
from maulstick.train.schedule import learning_rate_factor, schedule_settings
from maulstick.train.sharding import average_gradients, shard_frozen
from maulstick.train.sources import Sources
from maulstick.train.state_folder import read_state
from maulstick.train.trainee import Trainee
from maulstick.train.upload import HubUpload
from maulstick.train.watch_list import build_watchers

MANY_SKIPS = 3
SAMPLERS = get_args(get_type_hints(SampleOptions)["sample_sampler"])


def run_training(loaded: LoadedOptions, when_closed: Callable[[Path], str | None] | None = None) -> int:
    """Run ``maulstick train``; return its exit code. ``when_closed``: see ``RunRecords``."""
    run = TrainingRun(loaded)
    run.records.when_closed = when_closed
    exit_code = run.train().exit_code
    if run.accelerator.num_processes > 1:
        # gloo's threads can abort an interpreter that shuts down while they still wait for the others.
        run.accelerator.wait_for_everyone()
        run.accelerator.end_training()
    return exit_code


class TrainingRun:
    """One run: ``prepare`` makes everything ready, ``train`` trains and writes (and prepares first, where due)."""

    def __init__(self, loaded: LoadedOptions, console: RunConsole | None = None) -> None:
        self.loaded = loaded
        self.options = loaded.options
        self.accelerator = make_accelerator(self.options)
        writes = self.accelerator.is_main_process
        self.console = console or (make_console(self.options.log.console) if writes else SilentConsole())
        self.records = RunRecords(self.options, self._output_dir(), self.console, writes=writes)
        self._sources = Sources(self.options, self.accelerator, self.console, self._report)
        self.prepared: Prepared | None = None
        self._conditioner: Conditioner | None = None
        self.loop: TrainingLoop | None = None
        self.saver: RunSaver | None = None
        self.finished: RunResult | None = None
        self._prompts: list[Prompt] = []

    # --- making ready ------------------------------------------------------------------------------------------------

    def prepare(self) -> Prepared:
        """Open model and data, show the plan, fill the caches, put the adapter in."""
        with StopSignals(at_once=True):
            try:
                return self._prepare()
            except BaseException as error:
                self.records.close("failed", step=0, error=f"{type(error).__name__}: {error}")
                raise

    def _prepare(self) -> Prepared:
        self.records.check()
        author_facts(self.options.metadata)
        if self.options.sample.sample_prompts is not None:
            # A misspelt prompt option must not surface after an hour of training.
            self._prompts = read_prompts(self.options.sample.sample_prompts)
            check_prompts(self._prompts, SAMPLERS)
        start = find_start(self.options.run)
        seed = start.facts.get("seed", broadcast_object_list([draw_seed(self.options)])[0])
        prepared = prepare(
            self.loaded,
            self.console,
            device=self.accelerator.device,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            seed=seed,
        )
        family = prepared.family
        refuse_samplers(family, [prompt.sampler for prompt in self._prompts])
        self._prompts = [prompt.fitted(family.size_multiple) for prompt in self._prompts]
        refuse_sizes(family, self._prompts, "sample_prompts: a picture")
        run = self.options.run
        uses_states = bool(run.resume or run.save_state or run.save_state_on_train_end)
        facts = run_facts(prepared, self.accelerator.num_processes) if uses_states else {}
        changes = check_same_run(start.facts, facts, prepared) if start.found is not None else []
        self.prepared = prepared
        if file := broadcast_object_list([finished_file(start, prepared)])[0]:
            self.finished = RunResult(file, LoopState(step=start.facts["step"]), "")
            self.console.say(finished_text(start, file))
            return prepared
        # Only now is it sure that there will be a run: a misspelt option must not move an earlier log aside.
        guard = GradientGuard(guard_config(self.options)[0])
        self.records.open(guard, None if sets_counters(start, run) else start.facts.get("records"))
        about_samples = [f"sample_prompts: {note}" for prompt in self._prompts for note in prompt.notes]
        alone = without_effect_alone(self.options, self.accelerator.num_processes)
        self._announce(prepared, [*start.notes, *changes, *alone, *dict.fromkeys(about_samples)])
        latents = self._sources.latents(prepared)
        if prepared.index is not latents.index:
            self._leave_out_excluded(prepared, latents)
        self._conditioner = self._sources.conditioner(prepared)
        self.loop = self.build_loop(prepared, latents, guard)
        self._saver().facts = facts
        self._go_on_from(start, self.loop)
        return prepared

    def _go_on_from(self, start: Start, loop: TrainingLoop) -> None:
        run, notes = self.options.run, []
        if start.found is not None:
            anew = sets_counters(start, run)
            notes = restore(loop, read_state(start.found), counts_anew=anew)
            if not anew:
                self._saver().go_on_from(start.facts)
            done = f"{loop.state.step} of {loop.parts.total_steps} steps done"
            self.console.say(f"resume     {start.found.folder}: {done}")
            self.records.events.write("resume", folder=start.found.folder, step=loop.state.step)
        for note in [*notes, begin_at(loop, run, resumed=start.found is not None)]:
            if note:
                self.console.say(f"note       {note}")

    def _announce(self, prepared: Prepared, notes: Sequence[str]) -> None:
        for line in [*plan_lines(prepared.plan), *(f"note       {note}" for note in notes)]:
            self.console.say(line)
        self.records.events.write(
            "start",
            maulstick=__version__,
            torch=torch.__version__,
            environment=environment(self.accelerator.device, self.accelerator.num_processes),
            options=flat_values(self.options),
            plan=prepared.plan.as_json(),
        )

    def _leave_out_excluded(self, prepared: Prepared, latents: LatentSource) -> None:
        """Images that have no finite latents are out: count and plan anew."""
        prepared.index = latents.index
        before = prepared.batches
        prepared.batches = type(before)(
            latents.index, prepared.seed, rank=before.rank, world=before.world, accumulation=before.accumulation
        )
        prepared.plan = make_plan(
            self.loaded,
            prepared.family,
            prepared.index,
            prepared.batches,
            prepared.trains,
            seed=prepared.seed,
        )
        plan = prepared.plan
        prepared.batches.total_steps = plan.total_steps
        self.console.say(f"without them: {plan.images} images, {plan.train_images} per epoch, {plan.total_steps} steps")

    def _report(self, finding: Finding) -> None:
        self.console.say(f"{finding.severity}: {finding.text}")
        self.records.events.write("finding", **finding.as_json())

    def build_loop(self, prepared: Prepared, latents: LatentSource, guard: GradientGuard) -> TrainingLoop:
        """Put the adapter in and build everything that the loop works with; nothing is written."""
        options, family = self.options, prepared.family
        text_trained = any(name in prepared.targets for name in family.text_encoder_naming)
        conditioner = self._conditioner or self._sources.new_conditioner(prepared)
        small = in_fp8(family, options.run)
        family.store_in_fp8(small - prepared.targets.keys() - {family.denoiser_naming.component})
        text_states = None if text_trained else self._sources.text_states(prepared, conditioner)
        attached = prepared.trains.attach(family, prepared.seed)
        # Only now: what was merged, joined and put in has read the whole weights.
        family.store_in_fp8(small)
        for note in attached.notes:
            self.console.say(f"note       {note}")
        optimizer = build_optimizer(options.optimizer.optimizer_type, options.optimizer.optimizer_args, attached.groups)
        has_modes = callable(getattr(optimizer, "train", None))
        trainee: nn.Module = Trainee(
            family, trains_text_encoders=text_trained, precision=options.run.mixed_precision
        ).to(self.accelerator.device)
        exchange: Callable[[], None] | None = None
        if options.run.fsdp_base:
            shard_frozen(family.denoiser, self.accelerator.device)
            exchange = partial(average_gradients, [parameter for _, parameter in attached.named_parameters])
        else:
            trainee = wrap_for_gradients(trainee, self.accelerator, in_fp8=bool(small))
        if not latents.needs_vae:
            family.release_encoders(vae=True, text_encoders=False)
        output = AdapterOutput(
            options,
            prepared.plan,
            family,
            prepared.trains,
            attached,
            prepared.seed,
            dataset_facts(prepared),
            self.records.started_at,
        )
        self.saver = RunSaver(prepared, output, self.console, self.records, self.accelerator, self._upload())
        guard.know_names(attached.named_parameters)
        parts = LoopParts(
            options=options,
            seed=prepared.seed,
            accelerator=self.accelerator,
            family=family,
            trainee=trainee,
            named_parameters=attached.named_parameters,
            optimizer=optimizer,
            optimizer_has_modes=has_modes,
            scaler=gradient_scaler(self.accelerator.device, options.run.mixed_precision),
            schedule=learning_rate_factor(schedule_settings(options, prepared.plan.total_steps)),
            batches=prepared.batches,
            latents=latents,
            text_states=text_states,
            conditioner=conditioner,
            exchange_gradients=exchange,
            guard=guard,
            total_steps=prepared.plan.total_steps,
            console=self.console,
            records=self.records,
            save=self.saver.save_intermediate,
            saved_files=self.saver.saved_files,
            save_state=self.saver.save_state,
            save_state_at_end=self.saver.save_state_at_end,
            sample=self._sample if options.sample.sample_prompts is not None else None,
            after_update=attached.after_update,
            stop_requested=lambda: None,
            average=weight_average(
                options.optimizer.ema_decay,
                attached.named_parameters,
                optimizer_has_modes=has_modes,
                optimizer_type=options.optimizer.optimizer_type,
            ),
        )
        parts.watchers = build_watchers(parts)
        self.saver.loop = TrainingLoop(parts)
        return self.saver.loop

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self) -> RunResult:
        """Train to the end, to a stop request or to an error; the adapter trained so far is saved in every case."""
        if self.loop is None:
            self.prepare()
        if self.finished is not None:
            return self.finished
        loop = self._loop()
        with StopSignals() as signals:
            loop.parts.stop_requested = signals.requested
            self.console.begin("training", loop.parts.total_steps, loop.state.step)
            try:
                state = loop.run()
                self.console.end()
                return self._finish(state)
            except BaseException as error:
                self.console.end()
                self._save_what_there_is(error)
                raise

    def _finish(self, state: LoopState) -> RunResult:
        summary = self._loop().parts.guard.summary()
        path = self._saver().save(end_label(state), state.step, state.epoch)
        self._saver().finish_upload()
        self.console.say(summary)
        if state.stopped_by:
            self.console.result(f"stopped after {state.step} steps: {state.stopped_by}")
        elif state.skips_in_a_row >= MANY_SKIPS:
            self.console.say(
                f"warning: the last {state.skips_in_a_row} steps were all skipped, so nothing was learned since step "
                f"{state.step - state.skips_in_a_row}; the weights have probably diverged. Try a lower learning rate."
            )
        stopped = {"stopped_by": state.stopped_by} if state.stopped_by else {}
        event = "interrupted" if state.stopped_by else "end"
        self.records.close(event, step=state.step, summary=summary, file=path, **stopped)
        return RunResult(path, state, summary)

    def _save_what_there_is(self, error: BaseException) -> None:
        """Save the adapter after an error, in fp32 where the chosen format cannot hold it, and close the records."""
        state = self._loop().state
        label = f"interrupted-step{state.step:08d}"
        path = None
        try:
            self._loop().train_mode()
            self._loop().before_last_save()
            self._loop().read_mode()
            path = self._saver().save_somehow(label, state)
            self._saver().finish_upload()
        except Exception as second:
            # Whatever this is, the first error is the one to be seen.
            self.console.say(f"The adapter could not be saved: {second}")
        self.records.close("failed", step=state.step, error=f"{type(error).__name__}: {error}", file=path)

    def _sample(self, label: str, step: int) -> None:
        prepared, sample = self.prepared, self.options.sample
        if not self.accelerator.is_main_process or prepared is None or sample.sample_prompts is None:
            return
        facts = PictureFacts(
            model=Path(prepared.plan.model).stem,
            precision=self.options.run.mixed_precision,
            vae=Path(self.options.model.vae).stem if self.options.model.vae else None,
            clip_skip=self.options.model.clip_skip,
        )
        try:
            paths = draw_samples(
                prepared.family,
                self._prompts,
                sampler=sample.sample_sampler,
                output_dir=self._output_dir() / "sample",
                label=f"{self.options.run.output_name}_{label}",
                seed=prepared.seed,
                facts=facts,
                image_prompt=None if self._conditioner is None else self._conditioner.sample_prompt,
                busy=self.console.busy,
            )
        except SampleError as error:
            self.console.say(f"step {step}: {error}; training goes on")
            self.records.events.write("sample_failed", step=step, error=str(error))
            return
        self.records.samples(paths, [prompt.text for prompt in self._prompts], step=step, label=label)

    def _upload(self) -> HubUpload | None:
        options = self.options.upload
        if options.huggingface_repo_id is None:
            return None
        token = self.loaded.secrets.get("huggingface_token")
        return HubUpload(options, token, self.console.say, self.records.events.write)

    # --- small things ------------------------------------------------------------------------------------------------

    def _output_dir(self) -> Path:
        if self.options.run.output_dir is None:
            raise RuntimeError("output_dir is checked when options are read")
        return self.options.run.output_dir

    def _loop(self) -> TrainingLoop:
        if self.loop is None:
            raise RuntimeError("prepare() builds the loop")
        return self.loop

    def _saver(self) -> RunSaver:
        if self.saver is None:
            raise RuntimeError("prepare() builds the saver")
        return self.saver
