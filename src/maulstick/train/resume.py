"""Exact resume: what a run must know to go on as if it had never stopped, taken from a loop and put back into one.

Order of the images, captions, noise and dropout are functions of (seed, step), and the learning rate of the step, so
the counters stand for all of them. What has state of its own is here: what trains, the optimizer, the loss scaler, the
guard, the watchers, and the global random generators that an optimizer might draw from.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from maulstick import __version__
from maulstick.errors import ModelError, OptionError
from maulstick.families.base import VAE
from maulstick.guard.errors import GuardError
from maulstick.options.schema import RunOptions
from maulstick.train.loop import TrainingLoop
from maulstick.train.loop_parts import LoopState
from maulstick.train.output import lora_path
from maulstick.train.prepare import Prepared
from maulstick.train.same_run import (
    changed_options,
    dataset_facts,
    fingerprint,
    option_values,
    refuse_other_dataset,
    refuse_other_encoders,
    refuse_other_parameters,
)
from maulstick.train.state_folder import FoundState, find_latest, read_facts
from maulstick.train.watchers import Watcher

AUTO = "auto"
FACTS_VERSION = 2
"""2: with the text encoders and the VAE. A state without a version is of version 1."""
LENGTH = ("max_train_steps", "max_train_epochs")
"""Options that say how long a run is."""
CLOCKS_DIFFER = 2.0
"""Seconds that the time of a file may be behind the clock, by rounding."""


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        found: the state it goes on from, None for a run from the beginning.
        notes: lines for the user.
    """

    found: FoundState | None
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the state, empty where there is none."""
        return {} if self.found is None else self.found.facts


def find_start(run: RunOptions) -> Start:
    """Find the state that ``resume`` names. Raises ModelError when a named folder is not a whole state."""
    if not run.resume:
        return Start(None)
    if run.resume != AUTO:
        folder = Path(run.resume)
        return Start(FoundState(folder, read_facts(folder)))
    if run.output_dir is None:
        raise RuntimeError("output_dir is checked when options are read")
    found, notes = find_latest(run.output_dir, run.output_name)
    if found is None:
        notes.append(
            f"resume: {run.output_dir} holds no state of '{run.output_name}': training starts at the beginning"
        )
    return Start(found, tuple(notes))


# ---------------------------------------------------------------------------------------- facts


def run_facts(prepared: Prepared, world: int) -> dict[str, Any]:
    """Return what a state says about its run.

    To be taken before any image is left out for its latents: a resumed run reads, and leaves out, the same.
    """
    family = prepared.family
    with family.encoders_borrowed():
        encoders = {name: fingerprint(encoder) for name, encoder in family.text_encoders.items()}
    encoders[VAE] = family.latent_identity
    return {
        "maulstick": __version__,
        "torch": torch.__version__,
        "output_name": prepared.options.run.output_name,
        "seed": prepared.seed,
        "processes": world,
        "facts_version": FACTS_VERSION,
        "family": family.base_model_version,
        "model": fingerprint(family.denoiser),
        "merged": family.merged,
        "encoders": encoders,
        "dataset": dataset_facts(prepared.index),
        "trained_from": prepared.trains.identity,
        "options": option_values(prepared.options),
    }


def check_same_run(facts: Mapping[str, Any], now: Mapping[str, Any], prepared: Prepared) -> list[str]:
    """Return lines about options that changed and count from now on.

    Raises:
        OptionError: model, images, number of processes or options are not those of the state; the message has the
            difference.
    """
    notes = changed_options(facts["options"], prepared.options)
    if facts.get("merged", "") != now["merged"]:
        raise OptionError(
            "resume: other LoRA files, or with other multipliers, were merged into the base of the state. Set "
            "base_weights and base_weights_multiplier back, or begin a new run with network_weights."
        )
    if facts["family"] != now["family"] or facts["model"] != now["model"]:
        raise OptionError(
            f"resume: the state belongs to another base model ({facts['family']}, weights {facts['model'][:8]}; "
            f"{prepared.plan.model} is {now['family']}, weights {now['model'][:8]})."
        )
    if facts["processes"] != now["processes"]:
        raise OptionError(
            f"resume: the state was saved by {facts['processes']} processes, this run has {now['processes']}. Each of "
            "them trains its share of the images, so the run could not go on as it was; start as many."
        )
    notes += refuse_other_encoders(facts.get("encoders"), now["encoders"])
    refuse_other_dataset(facts["dataset"], prepared.index)
    if facts.get("trained_from", "") != now["trained_from"]:
        raise OptionError(
            "resume: the reference images or the image encoder are not those of the state. Put them back, or begin a "
            "new run with network_weights."
        )
    if facts["torch"] != now["torch"]:
        notes.append(
            f"resume: torch was {facts['torch']} and is {now['torch']}; results can differ in their last digits"
        )
    return notes


# ---------------------------------------------------------------------------------------- what there is to do


def finished_file(start: Start, prepared: Prepared) -> Path | None:
    """Return the LoRA file of a run that had finished when its state was saved; None where there is something to do.

    A run that was killed between the last state and the file has its file still to write.

    Raises:
        OptionError: the run would end before the state's step.
    """
    run = prepared.options.run
    if start.found is None or run.output_dir is None or sets_counters(start, run):
        return None
    step, total = int(start.facts["step"]), planned_steps(start.facts, prepared)
    if step > total:
        raise OptionError(
            f"resume: {start.found.folder} is the state after {step} steps, but training ends after {total} now "
            f"({' or '.join(LENGTH)}). Set a number above {step}, or resume from an earlier state."
        )
    file = lora_path(run, None)
    try:
        is_later = file.stat().st_mtime + CLOCKS_DIFFER >= float(start.facts["saved_at"])
    except FileNotFoundError:
        return None
    return file if step == total and is_later else None


def finished_text(start: Start, file: Path) -> str:
    """Return what the user is told about a run that has nothing left to do."""
    return (
        f"finished already: all {start.facts['step']} steps were done, and {file} was saved. Nothing is written. To "
        "train longer, raise max_train_steps or max_train_epochs; to begin anew, leave resume out or give another "
        "output_name."
    )


def planned_steps(facts: Mapping[str, Any], prepared: Prepared) -> int:
    """Return the length of a resumed run: as planned when the state was saved, unless it was changed.

    ``prepared`` may count images that are left out when their latents are made.
    """
    now = option_values(prepared.options)
    changed = any(facts["options"].get(name) != now[name] for name in LENGTH)
    return prepared.plan.total_steps if changed else int(facts.get("total_steps", prepared.plan.total_steps))


def sets_counters(start: Start, run: RunOptions) -> bool:
    """Whether ``initial_step`` or ``initial_epoch`` gives a state, named by its folder, another place in training.

    Then the state gives what trains, the optimizer, the loss scale and the guard, to a run that counts for itself: it
    has records of its own, and its rescue and alarms know nothing of earlier steps.
    """
    given = run.initial_step is not None or run.initial_epoch is not None
    return start.found is not None and given and run.resume != AUTO


# ---------------------------------------------------------------------------------------- state


def capture(loop: TrainingLoop) -> dict[str, Any]:
    """Return the state of the run; every process must call it, and all get the same."""
    parts = loop.parts
    return {
        "counters": counters(loop.state),
        "parameters": {name: parameter.detach().clone().cpu() for name, parameter in parts.named_parameters},
        "optimizer": parts.optimizer.state_dict(),
        "scaler": parts.scaler.state_dict(),
        "guard": parts.guard.state_dict(),
        "watchers": {watcher.name: watcher.state_dict() for watcher in parts.watchers},
        "random": gather_object([_random_state()]),
    }


def restore(loop: TrainingLoop, state: Mapping[str, Any], *, counts_anew: bool = False) -> list[str]:
    """Put a captured state into a loop that was just built; return lines for the user.

    Learning rates stay those of the options: the loop sets them from them in every step. With ``counts_anew``
    (``sets_counters``) the watchers stay as they are.

    Raises:
        OptionError: the state does not fit what is trained now.
        ModelError: a part of the state is missing or holds values that are not finite.
    """
    parts = loop.parts
    missing = {"counters", "parameters", "optimizer", "scaler", "guard", "watchers", "random"} - state.keys()
    if missing:
        raise ModelError(f"resume: the state lacks {', '.join(sorted(missing))}.")
    parameters = dict(parts.named_parameters)
    saved = state["parameters"]
    refuse_other_parameters({n: t.shape for n, t in saved.items()}, {n: p.shape for n, p in parameters.items()})
    bad = [name for name, tensor in saved.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise ModelError(
            f"resume: the state holds NaN or infinite values in {len(bad)} tensors, the first is {bad[0]}."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    try:
        _restore_optimizer(parts.optimizer, state["optimizer"])
    except (ValueError, KeyError) as error:
        raise OptionError(f"resume: the optimizer's state does not fit ({error}).") from error
    notes = []
    if parts.scaler.is_enabled() and state["scaler"]:
        parts.scaler.load_state_dict(state["scaler"])
    elif parts.scaler.is_enabled():
        # Saved where the device had no use for one.
        scale = parts.scaler.get_scale()
        notes.append(f"resume: the state has no loss scale; it begins at {scale:g}, as in a new run")
    try:
        parts.guard.load_state_dict(state["guard"])
    except GuardError as error:
        raise OptionError(f"resume: {error}") from error
    if not counts_anew:
        _restore_watchers(parts.watchers, state["watchers"])
    restore_counters(loop.state, state["counters"])
    loop.goes_on = not counts_anew
    if loop.goes_on and parts.options.sample.sample_at_first:
        notes.append("sample_at_first: those pictures belong to the beginning of the run, and none are drawn now")
    _restore_random_state(state["random"][parts.accelerator.process_index])
    return notes


def _restore_watchers(watchers: Sequence[Watcher], saved: Mapping[str, Any]) -> None:
    for watcher in watchers:
        if watcher.name not in saved:
            continue
        try:
            watcher.load_state_dict(saved[watcher.name])
        except (ValueError, KeyError, TypeError) as error:
            # Among them RescueError, which is no error of ours.
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            raise ModelError(f"resume: the state of {watcher.name} cannot be used here: {reason}") from error


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the state, each tensor in the number format it was saved in: torch alone takes the parameter's."""
    optimizer.load_state_dict(dict(saved))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, values in saved["state"].items():
        live = optimizer.state[parameters[place]] if isinstance(place, int) else {}
        for key, value in values.items():
            now = live.get(key)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                live[key] = value.to(now.device, copy=True)


def counters(state: LoopState) -> dict[str, Any]:
    """Return a loop's counters as plain values; a reason to stop belongs to the run that stopped."""
    values = {name: value for name, value in vars(state).items() if name not in ("stopped_by", "stop_was_asked_for")}
    return {**values, "recent_losses": list(state.recent_losses)}


def restore_counters(state: LoopState, saved: Mapping[str, Any]) -> None:
    """Take counters back."""
    for name, value in saved.items():
        setattr(state, name, deque(value, maxlen=state.recent_losses.maxlen) if name == "recent_losses" else value)


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_state(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# ---------------------------------------------------------------------------------------- initial_step


def begin_at(loop: TrainingLoop, run: RunOptions, *, resumed: bool = False) -> str | None:
    """Set the counters to ``initial_step`` or ``initial_epoch``; return a line for the user, None without them.

    Where ``resume = auto`` has found a state (``resumed``), its counters stay: the same command, given again after a
    crash, would otherwise begin at that step every time. With a folder named, they are set as in sd-scripts
    (``sets_counters``).

    With ``skip_until_initial_step`` the data goes on there as well, as if the steps before had been made; without it
    the data begins with the first image of an epoch, as in sd-scripts. The learning rate follows the counter.

    Raises:
        OptionError: the step is not before the end of training.
    """
    if run.initial_step is None and run.initial_epoch is None:
        return None
    if resumed and run.resume == AUTO:
        return "initial_step and initial_epoch are not used: training goes on from a state"
    per_epoch = loop.windows_per_epoch
    step = run.initial_step if run.initial_step is not None else (int(run.initial_epoch or 1) - 1) * per_epoch
    name = "initial_step" if run.initial_step is not None else f"initial_epoch = {run.initial_epoch}: step"
    if step >= loop.parts.total_steps:
        raise OptionError(f"{name} {step} is not before the end of training ({loop.parts.total_steps} steps).")
    loop.state.step, loop.state.epoch = step, step // per_epoch
    loop.state.step_in_epoch = step % per_epoch if run.skip_until_initial_step else 0
    return f"training begins at step {step}, in epoch {loop.state.epoch + 1}; the learning rate is that of this step"
