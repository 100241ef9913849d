"""What a run saves on its way and at its end: adapter files and state folders, and which older ones it removes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from maulstick.adapters.files import file_hash
from maulstick.errors import ModelError
from maulstick.options.schema import RunOptions
from maulstick.train.console import RunConsole
from maulstick.train.loop import TrainingLoop
from maulstick.train.loop_parts import LoopState
from maulstick.train.output import AdapterOutput
from maulstick.train.prepare import Prepared
from maulstick.train.records import RunRecords
from maulstick.train.resume import capture
from maulstick.train.state_folder import remove_leftovers, remove_state, state_name, write_state
from maulstick.train.upload import HubUpload

Kind = Literal["step", "epoch"]
Saved = dict[Kind, dict[int, Path]]
"""What this run wrote at a step and at the end of an epoch: number -> path."""


@dataclass
class RunSaver:
    """Writes the adapter and the state; only the first process writes, and all of them must call it.

    Only ``save_last_n_*`` lets it remove files, and only those that this run wrote, before or after a resume.
    """

    prepared: Prepared
    output: AdapterOutput
    console: RunConsole
    records: RunRecords
    accelerator: Accelerator
    upload: HubUpload | None = None
    loop: TrainingLoop | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What every state says about the run (``run_facts``)."""
    files: Saved = field(default_factory=lambda: {"step": {}, "epoch": {}})
    states: Saved = field(default_factory=lambda: {"step": {}, "epoch": {}})

    @property
    def _run(self) -> RunOptions:
        return self.prepared.options.run

    # --- the adapter -------------------------------------------------------------------------------------------------

    def save(self, label: str | None, step: int, epoch: int, dtype: torch.dtype | None = None) -> Path | None:
        """Write the adapter; return the file, None where nothing was trained yet and on the other processes.

        Raises ModelError when a trained value is not finite in the chosen format, OSError when the disk refuses.
        """
        if not self.accelerator.is_main_process or step == 0:
            return None
        path = self.output.save(label, step=step, epoch=epoch, dtype=dtype)
        earlier = self.output.written[path]
        aside = f" (the earlier file is now {earlier.name})" if earlier else ""
        # A quiet run names the file that it was for, and why it is not the whole.
        is_last = label is None or label.startswith("interrupted")
        (self.console.result if is_last else self.console.say)(f"saved {path}{aside}")
        self.records.events.write("save", file=path, step=step, earlier_file=earlier, sha256=file_hash(path))
        if self.upload is not None:
            self.upload.add(path)
        return path

    def save_intermediate(self, label: str, step: int, epoch: int) -> None:
        """Save on the way. A disk that is full now may not be at the end: report it and go on."""
        try:
            path = self.save(label, step, epoch)
        except OSError as error:
            self.console.say(f"step {step}: the adapter could not be saved ({error}); training goes on")
            self.records.events.write("save_failed", step=step, error=str(error))
            return
        if path is not None:
            kind, number = _kind(label, step, epoch)
            self.files[kind][number] = path
            self._remove_older_files(kind, number)

    def save_somehow(self, label: str, state: LoopState) -> Path | None:
        """Save in fp32 where the chosen format cannot hold the values, and elsewhere where output_dir has no room."""
        try:
            return self.save(label, state.step, state.epoch)
        except ModelError:
            return self.save(label, state.step, state.epoch, dtype=torch.float32)
        except OSError as error:
            self.console.say(f"output_dir cannot take the file ({error.strerror or error}); saving it elsewhere")
            self.output.folder = Path(tempfile.mkdtemp(prefix="maulstick-rescued-"))
            return self.save(label, state.step, state.epoch)

    def saved_files(self) -> dict[int, Path]:
        """Return step -> intermediate file that is still there."""
        steps = self.prepared.batches.steps_per_epoch
        found = {number * steps: path for number, path in self.files["epoch"].items()} | self.files["step"]
        return {step: path for step, path in sorted(found.items()) if path.exists()}

    def finish_upload(self) -> None:
        """Wait for uploads that are under way, and try again those that failed."""
        if self.upload is not None:
            self.upload.finish()

    # --- the state ---------------------------------------------------------------------------------------------------

    def save_state(self, label: str, state: LoopState) -> None:
        """Save the state beside an intermediate LoRA file where ``save_state`` asks for it; not of a run gone wrong."""
        if not self._run.save_state or not _may_go_on(state):
            return
        kind, number = _kind(label, state.step, state.epoch)
        others = self.states[kind]
        self.states[kind] = {**others, number: self._folder(label)}
        if self._write_state(label, state):
            self._remove_older_states(kind, number)
        else:
            self.states[kind] = others

    def save_state_at_end(self, state: LoopState) -> None:
        """Save the state at the end of training, and where the user stopped it; not of a run that went wrong."""
        wanted = self._run.save_state or self._run.save_state_on_train_end
        if wanted and state.step and _may_go_on(state):
            self._write_state(end_label(state), state)

    def _write_state(self, label: str | None, state: LoopState) -> bool:
        """Write a state folder; return whether it is there. What hinders it is reported, and the run goes on."""
        if self.loop is None:
            raise RuntimeError("the run sets the loop")
        captured = capture(self.loop)
        if not self.accelerator.is_main_process:
            return False
        if not all(torch.isfinite(tensor).all() for tensor in captured["parameters"].values()):
            self.console.say(f"step {state.step}: no state is saved, the weights hold NaN or infinite values")
            self.records.events.write("save_state_failed", step=state.step, error="weights are not finite")
            return False
        folder = self._folder(label)
        facts = {
            **self.facts,
            "step": state.step,
            "epoch": state.epoch,
            "total_steps": self.loop.parts.total_steps,
            "saved_at": time.time(),
            "records": self.records.state(),
            "saved": {"files": _as_json(self.files), "states": _as_json(self.states)},
        }
        try:
            earlier = write_state(folder, captured, facts)
        except (OSError, RuntimeError) as error:
            self.console.say(f"step {state.step}: the state could not be saved ({error}); training goes on")
            self.records.events.write("save_state_failed", step=state.step, error=str(error))
            return False
        aside = f" (the earlier one is now {earlier.name})" if earlier else ""
        self.console.say(f"saved {folder}{aside}")
        self.records.events.write("save_state", folder=folder, step=state.step, earlier_folder=earlier)
        return True

    def _folder(self, label: str | None) -> Path:
        if self._run.output_dir is None:
            raise RuntimeError("output_dir is checked when options are read")
        return self._run.output_dir / state_name(self._run.output_name, label)

    def go_on_from(self, facts: Mapping[str, Any]) -> None:
        """Take over what the run that saved these facts had written, and clean up what its last write left behind."""
        saved = facts.get("saved", {})
        folder = self._folder(None).parent
        for mine, theirs in ((self.files, saved.get("files", {})), (self.states, saved.get("states", {}))):
            for kind in mine:
                for number, name in theirs.get(kind, {}).items():
                    if (folder / name).exists():
                        mine[kind][int(number)] = folder / name
        if self.accelerator.is_main_process:
            remove_leftovers(folder, self._run.output_name)

    # --- removing ----------------------------------------------------------------------------------------------------

    def _remove_older_files(self, kind: Kind, number: int) -> None:
        run = self._run
        last = run.save_last_n_steps if kind == "step" else run.save_last_n_epochs
        for path in self._no_longer_kept(self.files, kind, number, last):
            if self._removed(path, Path.unlink):
                self.records.events.write("remove", file=path)

    def _remove_older_states(self, kind: Kind, number: int) -> None:
        run = self._run
        if kind == "step":
            last = run.save_last_n_steps_state or run.save_last_n_steps
        else:
            last = run.save_last_n_epochs_state or run.save_last_n_epochs
        for folder in self._no_longer_kept(self.states, kind, number, last):
            if self._removed(folder, remove_state):
                self.records.events.write("remove", folder=folder)

    def _no_longer_kept(self, saved: Saved, kind: Kind, number: int, last: int | None) -> list[Path]:
        """Take out of ``saved`` what ``save_last_n_*`` does not keep; return what of it is still there."""
        oldest = oldest_kept(kind, number, last, self._run.save_every_n_epochs or 1)
        older = [saved[kind].pop(each) for each in sorted(saved[kind]) if each < oldest]
        return [path for path in older if path.exists()]

    def _removed(self, path: Path, remove: Callable[[Path], None]) -> bool:
        """Remove ``path``; return whether that worked. What another program holds open must not end the run."""
        try:
            remove(path)
        except OSError as error:
            self.console.say(f"{path} could not be removed ({error.strerror or error}); it stays, and training goes on")
            self.records.events.write("remove_failed", file=path, error=str(error))
            return False
        return True


def _may_go_on(state: LoopState) -> bool:
    """Whether a run that goes on from here does not meet at once what has ended this one."""
    return state.stopped_by is None or state.stop_was_asked_for


def end_label(state: LoopState) -> str | None:
    """Return the label of what is saved at the end: none for a finished run."""
    return f"interrupted-step{state.step:08d}" if state.stopped_by else None


def oldest_kept(kind: Kind, number: int, last: int | None, every_n_epochs: int) -> int:
    """Return the smallest step or epoch that ``save_last_n_*`` keeps, as sd-scripts counts.

    ``save_last_n_steps`` is a distance in steps, ``save_last_n_epochs`` a number of saved files.
    """
    if not last:
        return 0
    return number - last if kind == "step" else number - every_n_epochs * last + 1


def _kind(label: str, step: int, epoch: int) -> tuple[Kind, int]:
    return ("step", step) if label.startswith("step") else ("epoch", epoch)


def _as_json(saved: Saved) -> dict[str, dict[int, str]]:
    return {kind: {number: path.name for number, path in paths.items()} for kind, paths in saved.items()}
