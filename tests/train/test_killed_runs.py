"""Runs killed with SIGKILL at any moment, also while a state is written, end with the weights of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from maulstick.train.events import read_events
from maulstick.train.run import TrainingRun
from maulstick.train.state_folder import TEMPORARY_MARK
from tests.models import model_folder
from tests.processes import LEAVE, start_on_two

STEPS = 24
KILLS = 20
ARGUMENTS = (
    *("--max_train_steps", str(STEPS), "--save_every_n_steps", "1", "--save_last_n_steps", "3", "--save_state"),
    *("--lr_scheduler", "cosine", "--network_dropout", "0.1", "--cache_latents", "--cache_text_encoder_outputs"),
    *("--down_lr_weight", "zeros", "--network_train_unet_only", "--train_batch_size", "1", "--resume", "auto"),
)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "last.safetensors")


def assert_same_file(first: Path, second: Path) -> None:
    one, other = final_weights(first), final_weights(second)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def train_in_a_child(make_run: Callable[..., TrainingRun], output: str) -> int:
    """Train in a forked process, which starts at once; return its number."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(make_run(*ARGUMENTS, output=output).train().exit_code)
        finally:
            os._exit(99)
    return child


@pytest.mark.slow
def test_twenty_kills_change_nothing(make_run: Callable[..., TrainingRun], tmp_path: Path):
    make_run(*ARGUMENTS, output="whole").train()
    rng = random.Random(5)
    out = tmp_path / "killed"
    kills = in_a_save = 0
    resumed_at = []
    while True:
        child = train_in_a_child(make_run, "killed")
        if kills < KILLS:
            wait_for_a_moment(child, out, rng, in_a_save=kills % 2 == 0)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            if kills >= KILLS:
                break
            # It was done before its turn to be killed came: begin another life, which is compared too.
            assert_same_file(tmp_path / "whole", out)
            out.rename(tmp_path / f"done{kills}")
            continue
        kills += 1
        in_a_save += any(TEMPORARY_MARK in path.name for path in out.iterdir()) if out.exists() else 0
        resumed_at += [event["step"] for event in read_events(out / "last.events.jsonl") if event["event"] == "resume"]
    assert_same_file(tmp_path / "whole", out)
    assert kills == KILLS
    assert in_a_save >= 3
    assert len(set(resumed_at)) >= 5
    steps = [event["train/steps"] for event in read_events(out / "last.events.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    assert not [path for path in out.iterdir() if TEMPORARY_MARK in path.name]


def wait_for_a_moment(child: int, out: Path, rng: random.Random, *, in_a_save: bool) -> None:
    """Return at a random moment after training began in this life, ``in_a_save`` while a state is being written."""
    log = out / "last.events.jsonl"
    deadline = time.monotonic() + 120
    before = log.stat().st_ino if log.exists() else None
    states_to_see = rng.randrange(5)
    old = {path.name for path in out.glob("*-state")}
    seen: set[str] = set()
    while time.monotonic() < deadline and not has_ended(child):
        if log.exists() and log.stat().st_ino != before:
            seen |= {path.name for path in out.glob("*-state")} - old
            if read_events(log)[-1:] and len(seen) >= states_to_see:
                break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    while in_a_save and time.monotonic() < deadline and not has_ended(child):
        if any(TEMPORARY_MARK in path.name for path in out.iterdir()):
            return


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


TRAIN = """
import os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
from maulstick.options.load import load_train_options
from maulstick.train.run import TrainingRun
run = TrainingRun(load_train_options(sys.argv[1:]))
run.train()
"""


@pytest.mark.slow
def test_two_processes_go_on_as_they_were(images: Path, tmp_path: Path):
    def start(output: str) -> subprocess.Popen[str]:
        usual = ("--pretrained_model_name_or_path", str(model_folder()), "--train_data_dir", str(images))
        usual += ("--output_dir", str(tmp_path / output), "--resolution", "64", "--seed", "1", "--console", "plain")
        with (tmp_path / "output.txt").open("ab") as text:
            return start_on_two(tmp_path, TRAIN + LEAVE, [*usual, *ARGUMENTS], stdout=text, stderr=text)

    def finish(output: str) -> None:
        assert start(output).wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()[-3000:]

    finish("whole")
    killed = start("killed")
    log = tmp_path / "killed" / "last.events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if log.exists() and sum(event["event"] == "step" for event in read_events(log)) >= 3:
            break
        time.sleep(0.05)
    # torchrun's workers are in sessions of their own: killing its group would let them train to the end.
    launcher = psutil.Process(killed.pid)
    workers = launcher.children(recursive=True)
    assert len(workers) >= 2
    for process in [launcher, *workers]:
        process.kill()
    killed.wait()
    psutil.wait_procs(workers, timeout=30)
    assert not (tmp_path / "killed" / "last.safetensors").exists()
    finish("killed")
    resumed = [event["step"] for event in read_events(log) if event["event"] == "resume"]
    assert len(resumed) == 1
    assert 0 < resumed[0] < STEPS
    assert_same_file(tmp_path / "whole", tmp_path / "killed")
