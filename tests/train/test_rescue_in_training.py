"""The rescue in the trainer: planted faults, and a finite file at the end of every run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from maulstick.adapters.files import read_lora_file
from maulstick.errors import OptionError
from maulstick.options.load import load_train_options
from maulstick.train.events import read_events
from maulstick.train.rescue import images_in, with_stand_ins
from maulstick.train.watch_list import build_watchers

SMALL = ("--network_train_unet_only", "--network_dim", "2", "--block_lr", "mid=1", "other=0", "--no-autopsy")


class Fault:
    """A watcher that does harm after the windows with the given numbers (steps done)."""

    name = "fault"

    def __init__(self, harm, *steps):
        self.harm, self.steps, self.seen = harm, steps, {}

    def after_window(self, loop, done):
        self.seen[loop.state.step] = {name: p.detach().clone() for name, p in loop.parts.named_parameters}
        if loop.state.step in self.steps:
            self.harm(loop)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def nan_in_a_weight(loop):
    loop.parts.named_parameters[3][1].data.view(-1)[1] = math.nan


def infinite_second_moment(loop):
    loop.parts.optimizer.state[loop.parts.named_parameters[3][1]]["exp_avg_sq"].view(-1)[1] = math.inf


def prepared(make_run, *arguments, fault=None, last=False):
    """A run that is ready, with a fault before (or, where ``last``, after) all its watchers."""
    every = () if "--rescue_every" in arguments else ("--rescue_every", "4")
    run = make_run(*SMALL, *every, *arguments)
    run.prepare()
    parts = run.loop.parts
    if fault is not None:
        parts.watchers = [*parts.watchers, fault] if last else [fault, *parts.watchers]
    return run


def spoil_losses(run, bad):
    """Make the loss NaN in every window whose number (from 0) ``bad`` holds of."""
    forward = run.loop.forward

    def spoiled(*arguments):
        return forward(*arguments) * (math.nan if bad(run.loop.state.step) else 1.0)

    run.loop.forward = spoiled


def events_of(tmp_path, kind):
    return [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if event["event"] == kind]


def rates_of(tmp_path):
    """The learning rate of every step."""
    steps = events_of(tmp_path, "step")
    return [next(value for name, value in step.items() if name.startswith("lr/")) for step in steps]


def file_of(result):
    """The file of a run, which can only be read when it is finite."""
    return read_lora_file(result.path)


def test_a_nan_in_a_weight_costs_a_few_steps(make_run, tmp_path):
    fault = Fault(nan_in_a_weight, 10)
    result = prepared(make_run, "--max_train_steps", "20", fault=fault).train()
    assert (result.exit_code, result.state.step) == (0, 20)
    assert file_of(result).modules
    [event] = events_of(tmp_path, "rescue")
    assert (event["step"], event["back_to"], event["windows_lost"]) == (11, 8, 3)
    assert event["cause"] == "non_finite_state"
    assert event["lr_scale"] == 0.5
    # Three windows of two images; which they are follows from the seed.
    assert 3 <= event["images_in_all"] == len(event["images"]) <= 5
    assert all(image.endswith(".png") for image in event["images"])
    assert event["left_out"] == []
    assert rates_of(tmp_path) == [1e-3] * 11 + [5e-4] * 9
    assert [step["train/steps"] for step in events_of(tmp_path, "step")] == list(range(1, 21))


def test_the_weights_of_the_kept_state_are_those_of_its_step(make_run):
    fault = Fault(nan_in_a_weight, 10)
    run = prepared(make_run, "--max_train_steps", "12", "--rescue_lr_factor", "1", fault=fault)
    kept = {}
    update = run.loop.update

    def remember(window, loss):
        kept[run.loop.state.step] = {name: p.detach().clone() for name, p in run.loop.parts.named_parameters}
        return update(window, loss)

    run.loop.update = remember
    run.train()
    # The window with number 11 is the first after going back; it begins with what the window with number 7 left.
    assert all(torch.equal(value, fault.seen[8][name]) for name, value in kept[11].items())


def test_an_infinite_second_moment_is_found_at_the_next_look(make_run, tmp_path):
    result = prepared(make_run, "--max_train_steps", "16", fault=Fault(infinite_second_moment, 9)).train()
    [event] = events_of(tmp_path, "rescue")
    assert (event["step"], event["back_to"], event["cause"]) == (12, 8, "non_finite_state")
    assert result.exit_code == 0
    assert file_of(result).modules


@pytest.mark.slow
def test_forty_bad_windows_do_not_end_the_run(make_run, tmp_path):
    run = prepared(make_run, "--max_train_steps", "56", "--rescue_lr_restore_after", "3")
    spoil_losses(run, lambda step: 9 <= step < 49)
    result = run.train()
    assert (result.exit_code, result.state.step, result.state.skipped) == (0, 56, 40)
    found = events_of(tmp_path, "rescue")
    assert [(event["step"], event["back_to"], event["cause"]) for event in found] == [
        (25, 8, "bad_windows"),
        (41, 4, "bad_windows"),
    ]
    # Nothing was trained between the two, so there was one cut; three good steps after the bad ones it was taken back.
    assert [round(1e3 * rate, 6) for rate in rates_of(tmp_path)[24:]] == [1.0] + [0.5] * 27 + [1.0] * 4
    assert file_of(result).modules


@pytest.mark.slow
def test_the_loss_scale_is_one_that_trains(make_run, tmp_path):
    run = prepared(make_run, "--max_train_steps", "10", "--rescue_after", "3", "--mixed_precision", "fp16")
    spoil_losses(run, lambda step: 5 <= step < 8)
    assert run.train().exit_code == 0
    [event] = events_of(tmp_path, "rescue")
    scales = [step["train/loss_scale"] for step in events_of(tmp_path, "step")]
    # Brought down by three NaN windows, and put back to half of what the kept state had.
    assert (scales[4], scales[7], event["loss_scale"]) == (65536.0, 8192.0, 32768.0)
    assert scales[8:] == [32768.0] * 2


def test_without_rescue_the_run_ends_at_the_guards_word(make_run, tmp_path):
    run = prepared(make_run, "--no-rescue", "--max_train_steps", "60")
    assert all(each.name != "rescue" for each in run.loop.parts.watchers)
    spoil_losses(run, lambda step: step >= 2)
    result = run.train()
    assert (result.exit_code, result.state.step) == (1, 18)
    assert events_of(tmp_path, "rescue") == []


def test_a_fault_that_stays_ends_with_a_good_file_and_exit_code_1(make_run, tmp_path):
    fault = Fault(nan_in_a_weight, *range(10, 100))
    result = prepared(make_run, "--max_train_steps", "90", "--rescue_limit", "2", fault=fault).train()
    assert (result.exit_code, result.state.step) == (1, 15)
    assert len(events_of(tmp_path, "rescue")) == 2
    [event] = events_of(tmp_path, "gave_up")
    assert (event["step"], event["back_to"]) == (15, 8)
    assert event["text"] in result.state.stopped_by
    assert events_of(tmp_path, "interrupted")
    file = file_of(result)
    assert any(bool(module.up.any()) for module in file.modules.values())


def test_a_fault_from_the_first_step_on_leaves_the_start(make_run, tmp_path):
    run = prepared(make_run, "--max_train_steps", "90", fault=Fault(nan_in_a_weight, *range(1, 90)))
    start = {name: p.detach().clone() for name, p in run.loop.parts.named_parameters}
    result = run.train()
    assert (result.exit_code, result.state.step) == (1, 12)
    assert all(torch.equal(p, start[name]) for name, p in run.loop.parts.named_parameters)
    assert not any(bool(module.up.any()) for module in file_of(result).modules.values())


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWScheduleFree"])
def test_a_nan_after_the_last_look_is_not_saved(make_run, tmp_path, optimizer):
    fault = Fault(nan_in_a_weight, 10)
    result = prepared(
        make_run, "--max_train_steps", "10", "--optimizer_type", optimizer, fault=fault, last=True
    ).train()
    assert result.exit_code == 0
    assert file_of(result).modules
    [event] = events_of(tmp_path, "rescue")
    assert (event["cause"], event["back_to"]) == ("end_of_training", 8)


def test_a_nan_is_found_before_a_file_is_written_on_the_way(make_run, tmp_path):
    result = prepared(
        make_run, "--max_train_steps", "8", "--save_every_n_steps", "3", fault=Fault(nan_in_a_weight, 3)
    ).train()
    assert result.exit_code == 0
    assert [event["step"] for event in events_of(tmp_path, "rescue")] == [3]
    assert read_lora_file(tmp_path / "out" / "last-step00000003.safetensors").modules


def test_the_file_after_an_error_is_finite_too(make_run, tmp_path):
    def break_down(loop):
        nan_in_a_weight(loop)
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        prepared(make_run, "--max_train_steps", "9", fault=Fault(break_down, 7), last=True).train()
    [path] = (tmp_path / "out").glob("*.safetensors")
    assert read_lora_file(path).modules


def test_a_healthy_run_is_the_same_with_and_without(make_run, tmp_path):
    weights = []
    for arguments in ((), ("--no-rescue",)):
        run = prepared(make_run, "--max_train_steps", "9", *arguments)
        run.train()
        weights.append({name: p.detach().clone() for name, p in run.loop.parts.named_parameters})
        assert events_of(tmp_path, "rescue") == []
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_guards_memory_goes_back_and_its_counts_do_not(make_run):
    run = prepared(make_run, "--max_train_steps", "20", "--rescue_after", "5")
    spoil_losses(run, lambda step: 10 <= step < 15)
    run.train()
    guard = run.loop.parts.guard
    assert (guard.observed, guard.skipped, guard.judge.longest_streak) == (20, 5, 5)
    assert guard.judge.non_finite_in_a_row == 0
    # Eight norms of the kept state, and the five good ones since: the two between are gone with their weights.
    assert len(guard.judge.policy.logs) == 8 + 5


@pytest.mark.slow
def test_a_resumed_run_is_rescued_as_the_uninterrupted_one(make_run, tmp_path):
    def trained(*arguments):
        run = prepared(make_run, "--max_train_steps", "24", "--rescue_after", "4", "--rescue_limit", "9", *arguments)
        spoil_losses(run, lambda step: 9 <= step < 14 or 16 <= step < 22)
        run.train()
        return {name: p.detach().clone() for name, p in run.loop.parts.named_parameters}

    whole = trained("--save_every_n_steps", "11", "--save_state")
    assert [event["step"] for event in events_of(tmp_path, "rescue")] == [13, 20]
    state = tmp_path / "out" / "last-step00000011-state"
    resumed = trained("--resume", str(state))
    assert [name for name, value in whole.items() if not torch.equal(value, resumed[name])] == []


def test_an_image_that_is_left_out_has_no_part_in_the_gradient(make_run):
    run = prepared(make_run, "--train_batch_size", "4")
    loop = run.loop
    [(batch, latents)], count = next(loop.windows(0))
    out = str(batch.items[1].record.path)
    changed, blank = with_stand_ins(batch, latents, {out})
    places = [place for place, item in enumerate(batch.items) if str(item.record.path) == out]
    assert 1 in places
    assert images_in(batch, {out}) == count - len(places)
    assert [item.loss_weight for item in changed.items] == [0.0 if n in places else 1.0 for n in range(4)]
    assert not blank[places].any()
    assert latents[places].all(dim=(1, 2, 3)).all()
    assert with_stand_ins(batch, latents, {"other.png"}) == (batch, latents)

    loop.left_out = frozenset({out})
    [(again, _)], remaining = next(loop.windows(0))
    assert again == changed
    assert remaining == count - len(places)

    def gradient(members, images):
        for _, parameter in loop.parts.named_parameters:
            parameter.grad = None
        loss = loop.accumulate_gradients(members, images)
        return loss, [p.grad.clone() for _, p in loop.parts.named_parameters]

    loss, gradients = gradient([(changed, blank)], remaining)
    weights = [item.loss_weight for item in changed.items]
    weighted = replace(
        batch, items=tuple(replace(item, loss_weight=w) for item, w in zip(batch.items, weights, strict=True))
    )
    expected, wanted = gradient([(weighted, latents)], remaining)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert all(torch.allclose(g, w, rtol=1e-4, atol=1e-8) for g, w in zip(gradients, wanted, strict=True))
    # Even an image that makes everything NaN does no harm now.
    poison = latents.clone()
    poison[places] = math.nan
    _, harmless = gradient([with_stand_ins(batch, poison, {out})], remaining)
    assert all(torch.equal(g, h) for g, h in zip(gradients, harmless, strict=True))


def test_an_image_that_ruins_the_run_twice_is_left_out(make_run, tmp_path):
    """Every window with 3.png puts a NaN into a weight, as a broken optimizer would; single images, two per epoch."""

    def harm(loop):
        items = [item for batch, _ in window_of["it"] for item in batch.items]
        if any(item.record.path.name == "3.png" and item.loss_weight for item in items):
            nan_in_a_weight(loop)

    fault, window_of = Fault(harm, *range(1, 100)), {}
    after_window = fault.after_window

    def remember(loop, done):
        window_of["it"] = done.window
        after_window(loop, done)

    fault.after_window = remember
    arguments = ("--max_train_steps", "40", "--train_batch_size", "1", "--rescue_every", "1")
    run = prepared(make_run, *arguments, fault=fault)
    result = run.train()
    found = events_of(tmp_path, "rescue")
    assert [[name.rpartition("/")[2] for name in event["left_out"]] for event in found] == [[], ["3.png"]]
    assert {name.rpartition("/")[2] for name in run.loop.left_out} == {"3.png"}
    assert "left out from here on" in found[1]["text"]
    assert (result.exit_code, result.state.step) == (0, 40)


BASE = ("--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rescue_after", "0"], "rescue_after = 0: expected at least 1"),
        (["--rescue_lr_factor", "2"], "rescue_lr_factor = 2.0: expected above 0 and at most 1"),
        (["--rescue_lr_restore_after", "-1"], "rescue_lr_restore_after = -1: expected 0 or more"),
        (["--rescue_evry", "5"], "rescue_every"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        load_train_options([*BASE, *arguments])


def test_options_without_effect_are_named():
    loaded = load_train_options([*BASE, "--no-rescue", "--rescue_every", "5", "--rescue_limit", "2"])
    assert any("rescue_every, rescue_limit have no effect with no-rescue" in line for line in loaded.notices)
    assert not loaded.options.rescue.rescue
    factor = load_train_options([*BASE, "--rescue_lr_factor", "1", "--rescue_lr_restore_after", "7"])
    assert any("rescue_lr_restore_after has no effect" in line for line in factor.notices)


def test_the_options_reach_the_rescue(make_run):
    numbers = {"after": 7, "every": 6, "keep": 2, "lr_factor": 0.25, "lr_restore_after": 9, "limit": 4}
    run = make_run("--network_train_unet_only", *(t for n, v in numbers.items() for t in (f"--rescue_{n}", str(v))))
    run.prepare()
    [watcher] = [each for each in build_watchers(run.loop.parts) if each.name == "rescue"]
    assert {name: getattr(watcher.rescuer.config, name) for name in numbers} == numbers
    assert watcher.rescuer.ring.keep == 2
