"""The rates of a real run: one counter of windows, whatever accumulation and schedule are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maulstick.errors import OptionError
from maulstick.train.events import read_events
from maulstick.train.run import TrainingRun

MakeRun = Callable[..., TrainingRun]


def rates(folder: Path, name: str = "unet") -> list[float]:
    steps = [event for event in read_events(folder / "last.events.jsonl") if event["event"] == "step"]
    return [step[f"lr/{name}"] for step in steps]


@pytest.mark.parametrize("accumulation", ["1", "3"])
def test_a_schedule_counts_updates_not_micro_batches(make_run: MakeRun, tmp_path: Path, accumulation: str) -> None:
    """Three micro-batches of an epoch's five make a window; the two at its tail make one too."""
    run = make_run(
        *("--network_train_unet_only", "--lr_scheduler", "warmup_stable_decay", "--lr_warmup_steps", "2"),
        *("--lr_decay_steps", "50%", "--lr_scheduler_args", "decay_type=linear", "--lr_warmup_skip_zero"),
        *("--gradient_accumulation_steps", accumulation),
    )
    run.train()
    assert rates(tmp_path / "out") == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 2e-3 / 3, 1e-3 / 3], rel=1e-12)


def test_a_class_of_torch_schedules_both_networks(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(
        *("--text_encoder_lr", "1e-4", "--lr_scheduler_type", "ExponentialLR", "--lr_scheduler_args", "gamma=0.5"),
    )
    run.prepare()
    assert run.prepared is not None
    assert run.prepared.plan.lr_scheduler == "ExponentialLR"
    run.train()
    assert rates(tmp_path / "out") == pytest.approx([1e-3 * 0.5**n for n in range(6)], rel=1e-12)
    assert rates(tmp_path / "out", "textencoder") == pytest.approx([1e-4 * 0.5**n for n in range(6)], rel=1e-12)


def test_an_update_at_rate_0_changes_nothing(make_run: MakeRun) -> None:
    """Why lr_warmup_skip_zero is there; the textbook form is the default all the same."""
    moved = {}
    for arguments in ((), ("--lr_warmup_skip_zero",)):
        run = make_run(
            *("--network_train_unet_only", "--lr_scheduler", "linear", "--lr_warmup_steps", "3", *arguments),
            output=f"out{len(arguments)}",
        )
        run.prepare()
        assert run.loop is not None
        run.loop.parts.watchers = ()  # they expect a whole run
        before = [parameter.detach().clone() for _, parameter in run.loop.parts.named_parameters]
        window, images = next(run.loop.windows(0))
        run.loop.train_step(window, images)
        run.records.close("end")
        after = [parameter for _, parameter in run.loop.parts.named_parameters]
        moved[arguments] = any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert moved == {(): False, ("--lr_warmup_skip_zero",): True}


def test_what_does_not_fit_is_refused_before_training(make_run: MakeRun) -> None:
    with pytest.raises(OptionError, match="lr_warmup_steps is 4 and lr_decay_steps 3, together more than the 6 steps"):
        make_run(
            *("--lr_scheduler", "warmup_stable_decay", "--lr_warmup_steps", "4", "--lr_decay_steps", "0.5"),
        ).prepare()
    with pytest.raises(OptionError, match="lr_scheduler_type = StepLR cannot be used: it refused its arguments"):
        make_run("--lr_scheduler_type", "StepLR").prepare()
