"""What a state is refused for, what is left to do with it, and what begins anew beside it."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from maulstick.errors import ModelError, OptionError
from maulstick.rescue import RescueError
from maulstick.train import state_folder
from maulstick.train.events import read_events
from maulstick.train.rescue import RescueWatcher
from maulstick.train.resume import _restore_watchers, capture, restore
from maulstick.train.run import TrainingRun
from maulstick.train.same_run import refuse_other_encoders
from maulstick.train.state_folder import write_state
from tests.models import model_folder

MakeRun = Callable[..., TrainingRun]
SMALL = ("--network_dim", "2", "--network_train_unet_only", "--block_lr", "mid=1", "other=0", "--no-autopsy")
STATES = (*SMALL, "--save_state", "--save_every_n_steps", "2")


def said_by(run: TrainingRun) -> list[str]:
    """Return the list that the run's console writes its lines to."""
    lines: list[str] = []
    run.console.say = lines.append  # type: ignore[method-assign]
    return lines


def everything_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def test_a_finished_run_writes_nothing_again(make_run: MakeRun, tmp_path: Path):
    out, arguments = tmp_path / "out", (*SMALL, "--save_state_on_train_end", "--resume", "auto")
    make_run(*arguments, "--max_train_steps", "2").train()
    before = everything_in(out)
    again = make_run(*arguments, "--max_train_steps", "2")
    lines, result = said_by(again), again.train()
    assert (result.exit_code, result.path, result.state.step) == (0, out / "last.safetensors", 2)
    assert everything_in(out) == before
    assert f"finished already: all 2 steps were done, and {out / 'last.safetensors'} was saved." in lines[-1]
    with pytest.raises(OptionError, match=r"state after 2 steps, but training ends after 1 now \(max_train_steps or"):
        make_run(*arguments, "--max_train_steps", "1").prepare()
    assert everything_in(out) == before
    longer = make_run(*arguments, "--max_train_steps", "3").train()
    assert longer.state.step == 3


def test_a_run_killed_before_its_last_file_writes_it(make_run: MakeRun, tmp_path: Path):
    file = tmp_path / "out" / "last.safetensors"
    arguments = (*SMALL, "--save_state_on_train_end", "--resume", "auto", "--max_train_steps", "1")
    make_run(*arguments).train()
    wanted = load_file(file)
    file.unlink()
    assert make_run(*arguments).train().path == file
    # The file of an earlier run, with the state of one that was killed.
    os.utime(file, (1e9, 1e9))
    assert make_run(*arguments).train().path == file
    assert file.stat().st_mtime > 1e9 + 1
    written = load_file(file)
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in wanted.items())


def test_initial_step_beside_a_named_state_counts_anew(make_run: MakeRun, tmp_path: Path):
    make_run(*STATES, "--max_train_steps", "3").train()
    out, state = tmp_path / "out", str(tmp_path / "out" / "last-step00000002-state")
    log = (out / "last.events.jsonl").read_bytes()
    run = make_run(*STATES, "--resume", state, "--initial_step", "1", "--rescue_after", "2", "--max_train_steps", "4")
    run.prepare()
    loop = run.loop
    assert loop is not None
    assert (loop.state.step, loop.goes_on) == (1, False)
    forward = loop.forward
    loop.forward = lambda *given: forward(*given) * (float("nan") if loop.state.step in (1, 2) else 1.0)  # type: ignore
    run.train()
    events = read_events(out / "last.events.jsonl")
    assert [event["train/steps"] for event in events if event["event"] == "step"] == [2, 3, 4]
    [rescue] = [event for event in events if event["event"] == "rescue"]
    assert (rescue["step"], rescue["back_to"], rescue["windows_lost"]) == (3, 1, 2)
    assert (out / "last.events.old-1.jsonl").read_bytes() == log


def test_pictures_before_the_first_step_belong_to_the_beginning(make_run: MakeRun, tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a shape\n")
    arguments = (*STATES, "--sample_prompts", str(prompts), "--sample_at_first")
    drawn = []

    def labels(*more: str) -> list[str]:
        run = make_run(*arguments, *more)
        drawn[:], lines = [], said_by(run)
        run.prepare()
        assert run.loop is not None
        run.loop.parts.sample = lambda label, step: drawn.append(f"{label} {step}")
        run.train()
        return [*drawn, *(line for line in lines if "sample_at_first" in line)]

    assert labels("--initial_step", "1", "--max_train_steps", "3") == ["first 1"]
    assert labels("--resume", "auto", "--max_train_steps", "4") == [
        "note       sample_at_first: those pictures belong to the beginning of the run, and none are drawn now"
    ]


def test_a_state_belongs_to_its_text_encoders_and_vae():
    saved = {"text_encoder": "a", "text_encoder_2": "b", "vae": "c"}
    assert refuse_other_encoders(saved, dict(saved)) == []
    with pytest.raises(OptionError, match=r"same UNet but another text encoder 2 and another vae\. Name the model"):
        refuse_other_encoders(saved, {**saved, "text_encoder_2": "x", "vae": "y"})
    [note] = refuse_other_encoders(None, saved)
    assert "earlier version" in note


def test_a_model_with_another_text_encoder_is_refused(make_run: MakeRun, tmp_path: Path):
    make_run(*SMALL, "--save_state_on_train_end", "--max_train_steps", "1").train()
    state = tmp_path / "out" / "last-state"
    other = Path(shutil.copytree(model_folder("tiny"), tmp_path / "model"))
    [file] = (other / "text_encoder").glob("*.safetensors")
    tensors = {name: tensor + 0.1 if "layers.3" in name else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    given = ("--resume", str(state), "--max_train_steps", "2", "--pretrained_model_name_or_path", str(other))
    with pytest.raises(OptionError, match="the same UNet but another text encoder"):
        make_run(*SMALL, *given).prepare()
    facts = json.loads((state / "state.json").read_text())
    del facts["encoders"], facts["facts_version"]
    (state / "state.json").write_text(json.dumps(facts))
    run = make_run(*SMALL, *given)
    lines = said_by(run)
    run.prepare()
    assert any("whether they are the same cannot be checked" in line for line in lines)


def test_a_watchers_state_that_does_not_fit_is_named(make_run: MakeRun, tmp_path: Path, monkeypatch):
    def refuses(state):
        raise RescueError("This rescue state has version 0; 1 is needed.")

    def lacks(state):
        raise KeyError("ring")

    for load, reason in ((refuses, "This rescue state has version 0"), (lacks, "there is no 'ring'")):
        watcher = SimpleNamespace(name="rescue", load_state_dict=load)
        with pytest.raises(ModelError, match=f"resume: the state of rescue cannot be used here: {reason}"):
            _restore_watchers([watcher], {"rescue": {}, "another": {}})
    # The records of the run that could not begin are closed.
    make_run(*STATES, "--max_train_steps", "3").train()
    monkeypatch.setattr(RescueWatcher, "load_state_dict", lambda self, state: refuses(state))
    state = tmp_path / "out" / "last-step00000002-state"
    with pytest.raises(ModelError, match="version 0"):
        make_run(*STATES, "--max_train_steps", "3", "--resume", str(state)).prepare()
    last = read_events(tmp_path / "out" / "last.events.jsonl")[-1]
    assert (last["event"], last["error"].split(":")[0]) == ("failed", "ModelError")


def test_a_state_without_a_loss_scale_begins_with_the_usual_one(make_run: MakeRun):
    run = make_run(*SMALL, "--mixed_precision", "fp16")
    run.prepare()
    loop = run.loop
    assert loop is not None
    state = capture(loop)
    assert state["scaler"]["scale"] == 65536.0
    [note] = restore(loop, {**state, "scaler": {}})
    assert note == "resume: the state has no loss scale; it begins at 65536, as in a new run"
    assert restore(loop, {**state, "scaler": {**state["scaler"], "scale": 8.0}}) == []
    assert loop.parts.scaler.get_scale() == 8.0


def test_a_state_that_is_not_there(make_run: MakeRun, tmp_path):
    with pytest.raises(
        ModelError, match=r"no folder .*absent-state.*in output_dir whose names end in -state; resume = auto"
    ):
        make_run(*SMALL, "--resume", str(tmp_path / "absent-state")).prepare()


def test_what_is_not_finite_at_the_start_is_an_error_to_act_on(make_run: MakeRun):
    run = make_run(*SMALL)
    run.prepare()
    assert run.loop is not None
    run.loop.parts.named_parameters[0][1].data.view(-1)[0] = float("nan")
    with pytest.raises(ModelError, match=r"before the first step\. Look at network_weights"):
        run.train()


def test_after_an_error_watchers_see_the_weights_that_train(make_run: MakeRun, monkeypatch):
    run = make_run(*SMALL)
    run.prepare()
    loop = run.loop
    assert loop is not None
    modes = []

    def fails(window, images):
        # As in the middle of sample pictures.
        loop.read_mode()
        raise RuntimeError("out of memory")

    loop.train_step = fails  # type: ignore[method-assign]
    monkeypatch.setattr(type(loop), "before_last_save", lambda self: modes.append(self.parts.trainee.training))
    with pytest.raises(RuntimeError, match="out of memory"):
        run.train()
    assert modes == [True]
    assert not loop.parts.trainee.training


def test_a_state_that_cannot_be_written_says_why(tmp_path: Path, monkeypatch):
    folder = tmp_path / "a-state"
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            write_state(folder, {"tensor": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert refused.value.errno == errno.EFBIG

    def fails(state, file):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(state_folder.torch, "save", fails)
    with pytest.raises(RuntimeError, match=r"^CUDA error: unspecified launch failure$"):
        write_state(folder, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_state_belongs_to_what_was_merged_into_its_base(make_run, tmp_path):
    unet = ("--network_train_unet_only", "--cache_latents")
    lora = make_run("--max_train_steps", "1", *unet, output="first").train().path
    merged = ("--base_weights", str(lora), *unet)
    run = make_run("--save_state", "--max_train_steps", "2", *merged)
    run.train()
    (note,) = [each for each in run.prepared.plan.notices if "Merged" in each]
    assert note == "Merged into the base: last.safetensors times 1 (48 modules of the unet)."
    state = ("--resume", str(tmp_path / "out" / "last-state"))
    moved = tmp_path / "elsewhere.safetensors"
    lora.rename(moved)
    make_run(*state, "--base_weights", str(moved), *unet, "--max_train_steps", "3").prepare()
    for other in (unet, (*unet, "--base_weights", str(moved), "--base_weights_multiplier", "0.5")):
        with pytest.raises(OptionError, match="other LoRA files, or with other multipliers"):
            make_run(*state, *other, "--max_train_steps", "3").prepare()
