"""An adapter that does harm goes back to before it did, with a lower rate; in the end the run stops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from maulstick.adapters.files import read_lora_file
from maulstick.guard import GradientGuard
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
        self.said: list[str] = []
        records = SimpleNamespace(
            events=SimpleNamespace(write=lambda kind, **facts: events.append((kind, facts))),
            console=SimpleNamespace(say=self.said.append),
        )
        accelerator = SimpleNamespace(device=torch.device("cpu"))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.parts = SimpleNamespace(
            accelerator=accelerator,
            optimizer=optimizer,
            named_parameters=[("weight", self.weight)],
            scaler=scaler,
            records=records,
            guard=GradientGuard.from_preset("steady"),
            average=None,
        )
        self.loop = SimpleNamespace(parts=self.parts, state=LoopState(), rate_scales={})
        self.looks: list[int] = []
        monkeypatch.setattr(worse_than_base, "loss_without_adapter", self._base)
        self.returned: list[int] = []
        self.watcher = WorseThanBase(self.parts, lambda loop: self.returned.append(loop.state.step))
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


def test_eight_bad_windows_in_a_row_go_back_to_the_last_good_look_with_a_tenth_of_the_rate(monkeypatch):
    trial = Trial(monkeypatch)
    trial.windows(*[0.9] * 31)
    trial.windows(2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    assert (trial.returned, trial.loop.rate_scales) == ([], {"worse_than_base": 1.0})
    trial.windows(math.nan)
    trial.windows(100.0, stepped=False)
    trial.windows(9.0)
    assert trial.looks == [8, 16, *range(32, 39), 41]
    assert trial.weight.item() == 16
    assert trial.loop.state.stopped_by is None
    assert trial.loop.rate_scales == {"worse_than_base": 0.1}
    assert trial.returned == [41]
    [said] = trial.said
    assert said.startswith("step 41: rescued: with the adapter the model predicts worse than without it")
    assert "in 8 steps in a row its loss was 2 to 9 times that of the base model on the same noise (median 5.5)" in said
    assert said.endswith("back to the state of step 16, and on with 0.1 times the rate")
    [(kind, facts)] = trial.events
    assert (kind, facts["cause"]) == ("rescue", "worse_than_base")
    assert (facts["step"], facts["back_to"], facts["windows_lost"], facts["lr_scale"]) == (41, 16, 25, 0.1)
    assert facts["ratios"] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    trial.windows(*[1.0] * 8)
    assert (trial.looks[-1], trial.weight.item()) == (49, 24)


def test_harm_at_every_rate_ends_the_run(monkeypatch):
    trial = Trial(monkeypatch)
    trial.windows(*[3.0] * 59)
    assert trial.returned == [15, 30, 45]
    assert trial.loop.rate_scales["worse_than_base"] == pytest.approx(1e-3)
    assert trial.loop.state.stopped_by is None
    trial.windows(3.0)
    assert trial.weight.item() == 0
    reason = trial.loop.state.stopped_by
    assert reason.endswith("at 0.001 times the learning rate too. The weights are those of step 0")
    assert [kind for kind, _ in trial.events] == ["rescue"] * 3 + ["worse_than_base"]


def test_a_good_window_in_between_begins_the_count_anew(monkeypatch):
    trial = Trial(monkeypatch)
    trial.windows(*[1.0] * 7, *[2.0] * 7, 1.0, *[2.0] * 14)
    # The good look at 15 put the next one off until 30.
    assert trial.looks == list(range(8, 16))
    assert trial.loop.state.stopped_by is None


def test_a_resumed_run_goes_on_looking_where_it_was(monkeypatch):
    first = Trial(monkeypatch)
    first.windows(*[3.0] * 15, *[1.0] * 8, *[2.0] * 12)
    assert first.returned == [15]
    again = Trial(monkeypatch, watched=first.watcher.state_dict())
    assert again.loop.rate_scales == {"worse_than_base": 0.1}
    again.loop.state.step = 35
    again.windows(*[2.0] * 18)
    assert again.looks[0] == 46
    assert again.returned == [53]
    assert again.loop.rate_scales["worse_than_base"] == pytest.approx(0.01)
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


def test_a_run_that_does_harm_goes_on_with_a_lower_rate(make_run, tmp_path, monkeypatch):
    # The small model's random weights predict so badly that no adapter could be worse.
    harm = {"until": 15}
    monkeypatch.setattr(
        worse_than_base,
        "loss_without_adapter",
        lambda loop, done: done.loss / 3 if loop.state.step <= harm["until"] else done.loss,
    )
    run = make_run(*SMALL, "--max_train_steps", "18", "--learning_rate", "1e-2")
    run.prepare()
    kept = {}
    start = {name: p.detach().clone() for name, p in run.loop.parts.named_parameters}
    forget = run.loop.parts.watchers[-1].begin_again
    went_back = run.loop.parts.watchers[-2]._went_back

    def sees(loop):
        assert went_back == forget
        went_back(loop)
        kept["unmoved"] = all(torch.equal(p, start[name]) for name, p in loop.parts.named_parameters)
        kept["slots"] = [slot.step for slot in loop.parts.watchers[-1].rescuer.ring.slots]

    run.loop.parts.watchers[-2]._went_back = sees
    result = run.train()
    assert (result.exit_code, result.state.step) == (0, 18)
    assert kept["unmoved"]
    assert kept["slots"] == [15]
    events = read_events(tmp_path / "out" / "last.events.jsonl")
    rates = {
        event["train/steps"]: next(value for key, value in event.items() if key.startswith("lr/"))
        for event in events
        if event["event"] == "step"
    }
    assert rates[15] == pytest.approx(1e-2)
    assert rates[16] == pytest.approx(1e-3)
    assert [event["cause"] for event in events if event["event"] == "rescue"] == ["worse_than_base"]
    assert any(bool(module.up.any()) for module in read_lora_file(result.path).modules.values())


def test_a_run_that_does_harm_to_the_end_leaves_a_harmless_file_and_the_reason(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(worse_than_base, "loss_without_adapter", lambda loop, done: done.loss / 3)
    monkeypatch.setattr(worse_than_base, "LOWERINGS", 0)
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
