"""Where a resumed run could have been another one: images left out, moved folders, earlier runs, what is not saved."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from maulstick.data.latents import CachedLatents
from maulstick.files_io import set_aside
from maulstick.train import saving
from maulstick.train.events import read_events
from maulstick.train.optim import RateGroup, build_optimizer
from maulstick.train.rescue import RescueWatcher
from maulstick.train.resume import _restore_optimizer
from maulstick.train.run import TrainingRun
from maulstick.train.state_folder import find_latest

MakeRun = Callable[..., TrainingRun]
USUAL = ("--network_dim", "2", "--network_train_unet_only", "--down_lr_weight", "zeros", "--save_state_on_train_end")


def weights(run: TrainingRun) -> list[torch.Tensor]:
    assert run.loop is not None
    return [parameter.detach().clone() for _, parameter in run.loop.parts.named_parameters]


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in read_events(folder / "last.events.jsonl") if event["event"] == kind]


def test_a_run_that_left_images_out_for_their_latents_goes_on(make_run: MakeRun, tmp_path: Path, monkeypatch):
    encode = CachedLatents._encode

    def spoil(self, records, pictures):
        results = encode(self, records, pictures)
        for place, record in enumerate(records):
            if record.path.name == "3.png":
                results[place] = None
                self._exclude(record)
        return results

    monkeypatch.setattr(CachedLatents, "_encode", spoil)
    arguments = (*USUAL, "--cache_latents", "--save_state", "--save_every_n_steps", "2")
    whole = make_run(*arguments)
    whole.train()
    assert whole.prepared is not None
    assert len(whole.prepared.index.records) == 4
    resumed = make_run(*arguments, "--resume", str(tmp_path / "out" / "last-step00000002-state"), output="resumed")
    resumed.train()
    assert all(torch.equal(one, other) for one, other in zip(weights(whole), weights(resumed), strict=True))


def test_auto_takes_the_run_that_was_cut_short_and_not_the_end_of_an_earlier_one(make_run: MakeRun, tmp_path: Path):
    make_run(*USUAL).train()
    second = make_run(*USUAL, "--save_state", "--save_every_n_steps", "2")
    second.prepare()
    assert second.loop is not None
    original = second.loop.train_step

    def die_in_the_fourth(*arguments):
        if second.loop is not None and second.loop.state.step == 3:
            raise RuntimeError("the machine went down")
        return original(*arguments)

    second.loop.train_step = die_in_the_fourth  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="went down"):
        second.train()
    found, notes = find_latest(tmp_path / "out", "last")
    assert notes == []
    assert found is not None
    assert found.folder.name == "last-step00000002-state"


def test_initial_step_does_not_begin_again_at_every_restart(make_run: MakeRun, tmp_path: Path):
    arguments = (*USUAL, "--initial_step", "2", "--save_state", "--save_every_n_steps", "1")
    make_run(*arguments, "--resume", "auto").train()
    shutil.rmtree(tmp_path / "out" / "last-state")
    again = make_run(*arguments, "--resume", "auto")
    again.prepare()
    assert again.loop is not None
    assert again.loop.state.step == 5
    chosen = make_run(*arguments, "--resume", str(tmp_path / "out" / "last-step00000004-state"), output="chosen")
    chosen.prepare()
    assert chosen.loop is not None
    assert chosen.loop.state.step == 2


def test_a_state_with_a_dot_in_its_name_is_found_where_a_crash_left_it_aside(make_run: MakeRun, tmp_path: Path):
    make_run(*USUAL, "--output_name", "face_v1.5", "--max_train_steps", "1").train()
    aside = set_aside(tmp_path / "out" / "face_v1.5-state")
    assert aside is not None
    assert aside.name == "face_v1.5-state.old-1"
    found, _ = find_latest(tmp_path / "out", "face_v1.5")
    assert found is not None
    assert found.folder == aside


def test_a_run_gone_wrong_leaves_no_state_that_auto_would_take(make_run: MakeRun, tmp_path: Path):
    run = make_run(*USUAL, "--save_state", "--save_every_n_steps", "1", "--max_train_steps", "6")
    run.prepare()
    assert run.loop is not None
    original = run.loop.train_step

    def give_up(*arguments):
        outcome = original(*arguments)
        if run.loop is not None and run.loop.state.step == 2:
            run.loop.state.stopped_by = "nothing helped"
        return outcome

    run.loop.train_step = give_up  # type: ignore[method-assign]
    assert run.train().exit_code == 1
    assert [path.name for path in (tmp_path / "out").glob("*-state")] == ["last-step00000001-state"]


def test_weights_that_are_not_finite_are_no_state(make_run: MakeRun, tmp_path: Path):
    run = make_run(*USUAL)
    run.prepare()
    assert run.loop is not None
    assert run.saver is not None
    with torch.no_grad():
        run.loop.parts.named_parameters[0][1].view(-1)[0] = math.nan
    run.loop.state.step = 1
    run.saver.save_state_at_end(run.loop.state)
    assert list((tmp_path / "out").glob("*state*")) == []
    assert [event["error"] for event in events(tmp_path / "out", "save_state_failed")] == ["weights are not finite"]


def test_a_file_that_cannot_be_removed_does_not_end_the_run(make_run: MakeRun, tmp_path: Path, monkeypatch):
    unlink = Path.unlink

    def held_open(self, missing_ok=False):
        if self.name == "last-step00000001.safetensors":
            raise PermissionError(13, "Permission denied")
        unlink(self, missing_ok=missing_ok)

    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", held_open)
    monkeypatch.setattr(saving, "remove_state", refuse)
    run = make_run(*USUAL, "--save_state", "--save_every_n_steps", "1", "--save_last_n_steps", "1")
    assert run.train().exit_code == 0
    out = tmp_path / "out"
    assert (out / "last-step00000001.safetensors").exists()
    assert not (out / "last-step00000002.safetensors").exists()
    failed = [Path(str(event["file"])).name for event in events(out, "remove_failed")]
    assert failed == [
        *("last-step00000001.safetensors", "last-step00000001-state"),
        *("last-step00000002-state", "last-step00000003-state"),
    ]


def test_images_that_are_left_out_stay_out_where_the_dataset_was_moved(make_run: MakeRun, images: Path, tmp_path: Path):
    first, moved = make_run(*USUAL), tmp_path / "elsewhere"
    shutil.copytree(images, moved)
    second = make_run(*USUAL, "--train_data_dir", str(moved), output="moved")
    watchers = []
    for run in (first, second):
        run.prepare()
        assert run.loop is not None
        watchers.append(next(each for each in run.loop.parts.watchers if isinstance(each, RescueWatcher)))
    before, after = watchers
    assert first.loop is not None
    assert second.loop is not None
    before.before_training(first.loop)
    one, two = (str(images / "2_shape" / f"{number}.png") for number in (1, 2))
    before.quarantine.images, before.quarantine.strikes[two] = frozenset({one}), 1
    before._recent.append((4, [one, two]))
    after.load_state_dict(before.state_dict())
    after.before_training(second.loop)
    one, two = (str(moved / "2_shape" / f"{number}.png") for number in (1, 2))
    assert second.loop.left_out == {one}
    assert after.quarantine.strikes == {two: 1}
    assert list(after._recent) == [(4, [one, two])]


def test_optimizer_state_keeps_its_number_format():
    pytest.importorskip("prodigyplus")

    def start(values: torch.Tensor) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(values.clone())
        optimizer = build_optimizer("ProdigyPlusScheduleFree", [], [RateGroup("unet", 1.0, [parameter])])
        optimizer.train()  # type: ignore[attr-defined]
        return parameter, optimizer

    def train(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            parameter.grad = parameter.detach() - 3
            optimizer.step()

    parameter, optimizer = start(torch.linspace(-1, 1, 32).reshape(4, 8))
    train(parameter, optimizer, 5)
    saved, values = deepcopy(optimizer.state_dict()), parameter.detach().clone()
    other, resumed = start(values)
    _restore_optimizer(resumed, saved)
    formats = [
        {key: each.dtype for key, each in o.state[p].items() if isinstance(each, torch.Tensor)}
        for p, o in ((parameter, optimizer), (other, resumed))
    ]
    assert torch.bfloat16 in formats[0].values()
    assert formats[0] == formats[1]
    assert resumed.state[other]["s"].data_ptr() != optimizer.state[parameter]["s"].data_ptr()
    train(parameter, optimizer, 60)
    train(other, resumed, 60)
    assert torch.equal(parameter, other)
    assert optimizer.param_groups[0]["d"] > optimizer.param_groups[0]["d0"]
