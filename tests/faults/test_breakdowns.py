"""Faults around the run: damaged caches, vanished images, full disks, signals. Guard and rescue have no part there."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import maulstick.files_io
from maulstick.data.cache import CACHE_SUFFIX
from maulstick.train.run import TrainingRun
from tests.faults.plants import image_gone, signal_at
from tests.faults.table import AddRow
from tests.faults.trials import STEPS, Workshop, same_weights

pytestmark = pytest.mark.long
AT = 18
STATES = ("--save_every_n_steps", "12", "--save_state")


def test_damaged_cache_files_are_made_anew(workshop: Workshop, add_row: AddRow):
    fault_free = workshop.fault_free()
    images = Path(shutil.copytree(workshop.images, workshop.root / "damaged"))
    torn, flipped, *_ = sorted(images.rglob(f"*{CACHE_SUFFIX}"))
    # Clones: what load_file returns are the pages of the file, which is about to be damaged.
    wanted = [load_file(path)["latents"].clone() for path in (torn, flipped)]
    content = flipped.read_bytes()
    torn.write_bytes(torn.read_bytes()[:100])
    flipped.write_bytes(content[:-1] + bytes([content[-1] ^ 0x40]))
    outcome = workshop.trained(images=images)
    add_row("two corrupt cache files", "both are named and made anew", outcome, None, fault_free)
    rebuilt = [event["paths"] for event in outcome.of("finding") if event["code"] == "cache_rebuilt"]
    assert sorted(rebuilt) == sorted([[str(torn)], [str(flipped)]])
    # Encoded in another company than the first time, they may differ in the last bits.
    assert all(
        torch.allclose(load_file(path)["latents"], one, atol=1e-5)
        for path, one in zip((torn, flipped), wanted, strict=True)
    )
    assert (outcome.ended, outcome.step, outcome.finite) == ("0", STEPS, True)
    assert outcome.loss == pytest.approx(fault_free.loss, rel=1e-3)


def test_a_vanished_image_ends_the_run_with_what_was_learned(workshop: Workshop, add_row: AddRow):
    images = workshop.copy_of_images("vanishing")
    outcome = workshop.trained("--no-cache", plant=image_gone(5, later=20), images=images)
    add_row("an image vanishes", "an error names it; the adapter so far is saved", outcome, None, workshop.fault_free())
    assert outcome.ended == "DataError"
    assert ".png cannot be read any more (No such file or directory)" in outcome.said
    assert 5 < outcome.step <= 20
    assert (outcome.path.name, outcome.finite) == (f"last-interrupted-step{outcome.step:08d}.safetensors", True)
    assert outcome.loss < workshop.untrained


def disk_is_full(monkeypatch: pytest.MonkeyPatch, run: TrainingRun, until: int) -> None:
    """Let no LoRA file, no state and no event be written into the output folder before step ``until`` is done."""
    options, loop = run.options.run, run.loop
    fsync, folder = os.fsync, str(options.output_dir)
    events: Any = run.records.events
    full = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    real = events._file

    def refuses(descriptor: int) -> None:
        if loop.state.step < until and Path(f"/proc/self/fd/{descriptor}").resolve().is_relative_to(folder):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    def before(window: Any, images: float) -> Any:
        events._file = full if loop.state.step < until - 1 else real
        return train_step(window, images)

    train_step = loop.train_step
    loop.train_step = before
    monkeypatch.setattr(maulstick.files_io.os, "fsync", refuses)


def test_a_disk_that_is_full_for_a_while(workshop: Workshop, add_row: AddRow, monkeypatch: pytest.MonkeyPatch):
    fault_free = workshop.fault_free()
    run = workshop.ready(*STATES)
    disk_is_full(monkeypatch, run, until=20)
    outcome = workshop.finish(run)
    add_row("disk full for a while", "said, and training goes on; all is written later", outcome, None, fault_free)
    assert outcome.ended == "0"
    assert (
        "step 12: the adapter could not be saved ([Errno 28] No space left on device); training goes on" in outcome.said
    )
    assert "step 12: the state could not be saved" in outcome.said
    assert "last.events.jsonl cannot be written (No space left on device); lines are kept for later" in outcome.said
    assert same_weights(outcome.path, fault_free.path)
    # Nothing half-written stays, and the log misses no step.
    assert [
        path.name for path in outcome.path.parent.iterdir() if "tmp" in path.name or "step00000012" in path.name
    ] == []
    assert [event["train/steps"] for event in outcome.of("step")] == list(range(1, STEPS + 1))


def test_a_disk_that_stays_full(workshop: Workshop, add_row: AddRow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fault_free = workshop.fault_free()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = workshop.ready()
    disk_is_full(monkeypatch, run, until=1000)
    outcome = workshop.finish(run)
    add_row("disk full to the end", "the adapter is saved elsewhere", outcome, None, fault_free)
    assert outcome.ended == "OSError"
    assert "output_dir cannot take the file (No space left on device); saving it elsewhere" in outcome.said
    assert outcome.path.parent.parent == tmp_path
    assert f"saved {outcome.path}" in outcome.said
    assert same_weights(outcome.path, fault_free.path)


def test_sigterm_and_resume(workshop: Workshop, add_row: AddRow):
    fault_free = workshop.fault_free()
    output = workshop.new_folder()
    stopped = workshop.trained(*STATES, plant=signal_at(AT, signal.SIGTERM), output=output)
    resumed = workshop.trained(*STATES, "--resume", "auto", output=output)
    add_row("SIGTERM", "saves adapter and state, ends 143", stopped, None, fault_free)
    add_row("SIGTERM, then resume auto", "as if it had never stopped", resumed, None, fault_free)
    assert (stopped.ended, stopped.step, stopped.finite) == ("143", AT + 1, True)
    assert stopped.path.name == f"last-interrupted-step{AT + 1:08d}.safetensors"
    assert [event["step"] for event in resumed.of("resume")] == [AT + 1]
    assert (resumed.ended, resumed.step) == ("0", STEPS)
    assert same_weights(resumed.path, fault_free.path)


def test_sigkill_and_resume(workshop: Workshop, add_row: AddRow):
    fault_free = workshop.fault_free()
    output = workshop.new_folder()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            workshop.trained(*STATES, plant=signal_at(AT, signal.SIGKILL), output=output)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (output / "last.safetensors").exists()
    resumed = workshop.trained(*STATES, "--resume", "auto", output=output)
    add_row("SIGKILL, then resume auto", "from the last state, as if undisturbed", resumed, None, fault_free)
    assert [event["step"] for event in resumed.of("resume")] == [12]
    assert (resumed.ended, resumed.step) == ("0", STEPS)
    assert same_weights(resumed.path, fault_free.path)
