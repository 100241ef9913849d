"""The autopsy in the trainer: planted faults are named with image and caption, and the run goes on as without it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from maulstick.autopsy import Direction, Report
from maulstick.cli import main
from maulstick.errors import ModelError
from maulstick.train.autopsy import NOT_REPRODUCED, SPOILT_WEIGHTS, AutopsyWatcher
from maulstick.train.console import QuietConsole
from maulstick.train.events import read_events
from tests.models import model_folder
from tests.train.test_loop import UNET_ONLY, spoil_gradients_at


def plant_in_latents(run, number, places=(1,), value=math.nan):
    """Spoil some latents of one micro-batch of the first epoch; return a list that gets the spoilt items."""
    spoilt = []
    source = run.loop.parts.latents
    stream = source.stream

    def with_fault(schedule, epoch, start=0):
        for batch, latents in stream(schedule, epoch, start):
            if (epoch, batch.number) == (0, number):
                spoilt.extend(batch.items[place] for place in places)
                latents = latents.clone()
                latents[list(places), 0, 3, 3] = value
            yield batch, latents

    source.stream = with_fault
    return spoilt


def report_of(tmp_path, step, output="out"):
    return Report.from_json(json.loads((tmp_path / output / f"last-autopsy-step{step:08d}.json").read_text()))


def state_of(run):
    parts = run.loop.parts
    tensors = {name: parameter.detach().clone() for name, parameter in parts.named_parameters}
    for place, state in enumerate(parts.optimizer.state.values()):
        tensors |= {f"{place} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return tensors


def test_a_bad_latent_is_named_with_its_image_and_caption(make_run, tmp_path):
    run = make_run(*UNET_ONLY)
    run.prepare()
    spoilt = plant_in_latents(run, number=2)
    run.train()
    report = report_of(tmp_path, 3)
    (item,) = spoilt
    assert report.finding.direction is Direction.INPUT
    assert report.finding.tensor.name == "latents"
    assert report.finding.tensor.nan == 1
    (sample,) = report.samples
    assert (sample.place, sample.name, sample.caption) == (1, str(item.record.path), item.caption)
    assert sample.alone
    assert report.causes[0].id == "nan_latents"
    assert report.facts["mixed_precision"] == "no"
    assert report.title == "Autopsy of step 3"
    text = (tmp_path / "out" / "last-autopsy-step00000003.txt").read_text()
    assert str(item.record.path) in text
    (event,) = [one for one in read_events(tmp_path / "out" / "last.events.jsonl") if one["event"] == "autopsy"]
    assert (event["step"], event["direction"], event["causes"]) == (3, "input", ["nan_latents"])
    assert event["images"] == [str(item.record.path)]


def test_the_run_is_bit_for_bit_that_without_the_autopsy(make_run):
    states = []
    for output, *more in (("with",), ("without", "--no-autopsy")):
        arguments = ("--network_dropout", "0.3", "--gradient_accumulation_steps", "2", *more)
        run = make_run(*UNET_ONLY, *arguments, output=output)
        run.prepare()
        plant_in_latents(run, number=1)
        run.train()
        states.append(state_of(run) | {"random": torch.random.get_rng_state()})
    has_watcher = [isinstance(watcher, AutopsyWatcher) for watcher in run.loop.parts.watchers]
    assert not any(has_watcher)
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_the_micro_batch_of_a_window_is_named(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--gradient_accumulation_steps", "2")
    run.prepare()
    spoilt = plant_in_latents(run, number=3, value=math.inf)
    run.train()
    report = report_of(tmp_path, 2)
    assert report.title == "Autopsy of step 2, micro-batch 2 of 2"
    assert [sample.name for sample in report.samples] == [str(spoilt[0].record.path)]
    assert report.finding.tensor.plus_inf == 1


def test_a_bad_text_state_is_named_with_its_caption(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--max_train_steps", "3")
    run.prepare()
    states = run.loop.parts.text_states
    look_up, bad = states.states_for, "a shape, number 2, red"

    def with_fault(captions):
        found = {name: tensor.clone() for name, tensor in look_up(captions).items()}
        for place, caption in enumerate(captions):
            if caption == bad:
                next(iter(found.values()))[place, 0, 0] = math.nan
        return found

    states.states_for = with_fault
    run.train()
    (file, *_) = sorted((tmp_path / "out").glob("last-autopsy-*.json"))
    report = Report.from_json(json.loads(file.read_text()))
    assert report.finding.direction is Direction.INPUT
    assert report.finding.tensor.name.startswith("text states")
    assert {sample.caption for sample in report.samples} == {bad}
    assert report.causes[0].id == "nan_text_states"


class _InfinityOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + math.inf


class InfiniteBackward(nn.Module):
    def forward(self, x):
        return _InfinityOnTheWayBack.apply(x)


@pytest.mark.parametrize("more", [(), ("--gradient_checkpointing",)])
def test_an_infinite_backward_is_named_with_its_module(make_run, tmp_path, more):
    run = make_run(*UNET_ONLY, "--max_train_steps", "1", *more)
    run.prepare()
    run.loop.parts.family.denoiser.mid_block.resnets[1].nonlinearity = InfiniteBackward()
    run.train()
    report = report_of(tmp_path, 1)
    assert report.finding.direction is Direction.BACKWARD
    assert report.finding.module == "unet.mid_block.resnets.1.nonlinearity"
    assert report.finding.tensor.kind == "Inf"
    assert report.samples == ()
    assert "it is not the data" in report.text()
    assert math.isfinite(report.loss)
    assert report.causes[0].id == "custom_backward"


def test_without_the_guardian_the_spoilt_weight_is_named_and_said_so(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--grad_norm_mode", "off", "--no-rescue", "--autopsy_limit", "2")
    run.prepare()
    plant_in_latents(run, number=1)
    with pytest.raises(ModelError, match="not finite"):
        run.train()
    reports = sorted(path.name for path in (tmp_path / "out").glob("*autopsy*.json"))
    assert reports == ["last-autopsy-step00000002.json", "last-autopsy-step00000003.json"]
    first, second = report_of(tmp_path, 2), report_of(tmp_path, 3)
    assert SPOILT_WEIGHTS in first.notes
    assert second.finding.direction is Direction.WEIGHT
    assert second.finding.tensor.name.startswith("unet.")
    assert second.causes[0].id == "poisoned_weight"


def test_weights_that_an_optimizer_spoils_are_told_from_bad_gradients(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--max_train_steps", "3", "--no-rescue")
    run.prepare()
    update = run.loop.update

    def spoil_after_the_first(window, loss):
        outcome = update(window, loss)
        if run.loop.state.step == 0:
            run.loop.parts.named_parameters[4][1].data.view(-1)[0] = math.nan
        return outcome

    run.loop.update = spoil_after_the_first
    with pytest.raises(ModelError, match="not finite"):
        run.train()
    report = report_of(tmp_path, 2)
    assert report.finding.tensor.name == run.loop.parts.named_parameters[4][0]
    assert report.causes[0].id == "optimizer_wrote_weights"


def test_what_does_not_come_back_is_said_so(make_run, tmp_path):
    run = make_run(*UNET_ONLY)
    run.prepare()
    spoil_gradients_at(run, 2, math.nan)
    run.train()
    report = report_of(tmp_path, 3)
    assert report.healthy
    assert NOT_REPRODUCED in report.notes


class Listening(QuietConsole):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    result = say


def test_a_loss_scale_that_is_only_too_high_makes_no_report(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--mixed_precision", "fp16", "--max_train_steps", "2", "--autopsy_limit", "1")
    run.console = Listening()
    run.prepare()
    scaler = run.loop.parts.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**60})
    run.train()
    said = [line for line in run.console.said if "too high for this batch" in line]
    assert len(said) == 1
    assert not list((tmp_path / "out").glob("*autopsy*"))


def test_an_autopsy_that_fails_does_not_end_the_run(make_run, tmp_path):
    run = make_run(*UNET_ONLY)
    run.prepare()
    plant_in_latents(run, number=2)
    micro_batch_loss = run.loop.micro_batch_loss

    def fail_when_run_again(*arguments, step, **named):
        if step != run.loop.state.step:
            raise RuntimeError("no memory left")
        return micro_batch_loss(*arguments, step=step, **named)

    run.loop.micro_batch_loss = fail_when_run_again
    assert run.train().state.step == 6
    (event,) = [one for one in read_events(tmp_path / "out" / "last.events.jsonl") if one["event"] == "autopsy_failed"]
    assert "no memory left" in event["error"]
    assert len(run.loop.parts.watchers) > 0


def test_the_command_shows_stored_reports_and_runs_a_step_again(make_run, images, tmp_path, capsys):
    make_run(*UNET_ONLY).train()
    out = tmp_path / "out"
    again = ["autopsy", "--step", "3", "--pretrained_model_name_or_path", str(model_folder("tiny"))]
    again += ["--train_data_dir", str(images), "--output_dir", str(out), "--resolution", "64", "--seed", "1"]
    again += ["--train_batch_size", "2", "--network_train_unet_only", "--console", "quiet"]
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(again) == 0
    shown = capsys.readouterr().out
    assert "Autopsy of step 3: everything was finite" in shown
    assert "fp16 headroom" in shown
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name in before} == before
    assert main(["autopsy", str(out)]) == 0
    assert "everything was finite" in capsys.readouterr().out
    assert main(["autopsy", str(out), "--json"]) == 0
    report = Report.from_json(json.loads(capsys.readouterr().out))
    assert len(report.tightest) == 12
    assert main(["autopsy", str(tmp_path)]) == 2
    assert "no autopsy report" in capsys.readouterr().err
    assert main(["autopsy"]) == 2
