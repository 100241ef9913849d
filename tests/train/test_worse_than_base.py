"""An adapter that does harm ends the run, with the weights from before it did."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from maulstick.adapters.files import read_lora_file
from maulstick.train import worse_than_base
from maulstick.train.events import read_events
from maulstick.train.loop_parts import LoopState
from maulstick.train.worse_than_base import WorseThanBase, loss_without_adapter

SMALL = ("--network_train_unet_only", "--network_dim", "2", "--block_lr", "mid=1", "other=0", "--no-autopsy")


class Trial:
    """A watcher beside one weight, which every window raises by one; the base model's loss is 1."""

    def __init__(self, monkeypatch, watched=None):
        self.weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([self.weight], lr=1.0)
        events: list[tuple[str, dict]] = []
        self.events = events
        records = SimpleNamespace(events=SimpleNamespace(write=lambda kind, **facts: events.append((kind, facts))))
        accelerator = SimpleNamespace(device=torch.device("cpu"))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.parts = SimpleNamespace(
            accelerator=accelerator,
            optimizer=optimizer,
            named_parameters=[("weight", self.weight)],
            scaler=scaler,
            records=records,
        )
        self.loop = SimpleNamespace(parts=self.parts, state=LoopState())
        self.looks: list[int] = []
        monkeypatch.setattr(worse_than_base, "loss_without_adapter", self._base)
        self.watcher = WorseThanBase(self.parts)
        if watched is not None:
            self.watcher.load_state_dict(watched)
        self.watcher.before_training(self.loop)

    def _base(self, loop, done):
        self.looks.append(loop.state.step)
        return 1.0

    def windows(self, *losses: float, stepped: bool = True) -> None:
        for loss in losses:
            self.weight.data += 1
            self.loop.state.step += 1
            done = SimpleNamespace(loss=loss, outcome=SimpleNamespace(stepped=stepped))
            self.watcher.after_window(self.loop, done)


def test_a_healthy_run_is_looked_at_ever_more_rarely(monkeypatch):
    trial = Trial(monkeypatch)
    trial.windows(*[1.4] * 1100)
    assert trial.looks == [8, 16, 32, 64, 128, 256, 512, 768, 1024]
    assert (trial.loop.state.stopped_by, trial.events) == (None, [])


def test_eight_bad_windows_in_a_row_end_the_run_with_the_weights_of_the_last_good_look(monkeypatch):
    trial = Trial(monkeypatch)
    trial.windows(*[0.9] * 31)
    trial.windows(2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    assert trial.loop.state.stopped_by is None
    trial.windows(math.nan)
    trial.windows(100.0, stepped=False)
    trial.windows(9.0)
    assert trial.looks == [8, 16, *range(32, 39), 41]
    assert trial.weight.item() == 16
    reason = trial.loop.state.stopped_by
    assert (
        "in 8 steps in a row its loss was 2 to 9 times that of the base model on the same noise (median 5.5)" in reason
    )
    assert reason.endswith("The weights are those of step 16")
    assert trial.events == [
        ("worse_than_base", {"step": 41, "back_to": 16, "ratios": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]})
    ]


def test_a_good_window_in_between_begins_the_count_anew(monkeypatch):
    trial = Trial(monkeypatch)
    trial.windows(*[1.0] * 7, *[2.0] * 7, 1.0, *[2.0] * 14)
    # The good look at 15 put the next one off until 30.
    assert trial.looks == list(range(8, 16))
    assert trial.loop.state.stopped_by is None


def test_a_resumed_run_goes_on_looking_where_it_was(monkeypatch):
    first = Trial(monkeypatch)
    first.windows(*[1.0] * 15, *[2.0] * 5)
    again = Trial(monkeypatch, watched=first.watcher.state_dict())
    again.loop.state.step = 20
    again.windows(2.0, 2.0, 2.0)
    assert "The weights are those of step 8" in again.loop.state.stopped_by
    assert again.weight.item() == 8


def test_the_base_model_answers_with_the_draws_of_the_window(make_run):
    run = make_run(*SMALL, "--max_train_steps", "3", version="sd1")
    run.prepare()
    loop = run.loop
    found = []

    class Looks:
        name = "looks"

        def after_window(self, loop, done):
            found.append((done.loss, loss_without_adapter(loop, done)))

    loop.parts.watchers = [Looks()]
    run.loop.parts.save_state_at_end = lambda state: None
    wanted = [each.requires_grad for each in loop.parts.trainee.parameters()]
    run.train()
    # The first loss is that of an adapter that changes nothing yet.
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-6)
    assert all(abs(math.log(loss / base)) > 1e-6 for loss, base in found[1:])
    assert [each.requires_grad for each in loop.parts.trainee.parameters()] == wanted


def test_a_run_that_does_harm_ends_with_a_harmless_file_and_the_reason(make_run, tmp_path, monkeypatch):
    # The small model's random weights predict so badly that no adapter could be worse.
    monkeypatch.setattr(worse_than_base, "loss_without_adapter", lambda loop, done: done.loss / 3)
    run = make_run(*SMALL, "--max_train_steps", "20", "--save_state_on_train_end")
    result = run.train()
    assert (result.exit_code, result.state.step) == (1, 15)
    assert "loss was 3 to 3 times that of the base model" in result.state.stopped_by
    assert not any(bool(module.up.any()) for module in read_lora_file(result.path).modules.values())
    kinds = [event["event"] for event in read_events(tmp_path / "out" / "last.events.jsonl")]
    assert kinds.count("worse_than_base") == 1
    # No state that the next run would meet the same with.
    assert not list((tmp_path / "out").glob("*state"))


def test_only_with_rescue(make_run):
    for arguments, watched in (((), True), (("--no-rescue",), False)):
        run = make_run(*SMALL, *arguments, output=f"out{watched}")
        run.prepare()
        assert any(each.name == "worse_than_base" for each in run.loop.parts.watchers) == watched
