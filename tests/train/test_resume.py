"""A resumed run is the interrupted one, bit for bit; a state that does not fit is refused with the difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maulstick.errors import MaulstickError
from maulstick.train.events import read_events
from maulstick.train.run import TrainingRun
from maulstick.train.state_folder import FoundState, find_latest, read_facts, read_state

MakeRun = Callable[..., TrainingRun]
USUAL = (
    *("--optimizer_type", "AdamW", "--lr_scheduler", "cosine", "--network_dropout", "0.2", "--network_dim", "2"),
    *("--unet_lr", "1e-3", "--text_encoder_lr", "0", "--down_lr_weight", "zeros"),
)


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    assert run.loop is not None
    return {name: parameter.detach().clone() for name, parameter in run.loop.parts.named_parameters}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def trained(run: TrainingRun) -> dict[str, torch.Tensor]:
    run.train()
    return weights(run)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--mixed_precision", "fp16", "--gradient_accumulation_steps", "2", "--shuffle_caption", "--cache_latents"),
        ("--optimizer_type", "AdamWScheduleFree", "--grad_norm_mode", "stable", "--flip_aug"),
    ],
    ids=["plain", "fp16, accumulation, cached", "schedule-free"],
)
def test_every_state_of_a_run_leads_to_its_end(make_run: MakeRun, tmp_path: Path, arguments: tuple[str, ...]):
    usual = [token for pair in zip(USUAL[::2], USUAL[1::2], strict=True) if pair[0] not in arguments for token in pair]
    if "AdamWScheduleFree" in arguments:
        pytest.importorskip("pytorch_optimizer")
        usual[usual.index("cosine")] = "constant"
    # Saving is part of the run: schedule-free optimizers round their weights each time they are read.
    saves = ("--save_every_n_steps", "1", "--save_every_n_epochs", "1", "--save_state")
    whole = trained(make_run(*usual, *arguments, *saves))
    states = sorted((tmp_path / "out").glob("last-*-state"))
    assert len(states) >= 5
    # After the first step, at the end of the epoch (saved twice: in it and behind it), and before the last step.
    for number, state in enumerate([states[0], *states[-3:]] if not arguments else [states[0], states[-1]]):
        resumed = make_run(*usual, *arguments, *saves, "--resume", str(state), output=f"resumed{number}")
        assert_same(trained(resumed), whole)
        assert resumed.loop is not None
        assert resumed.loop.state.step == 6


def test_an_interrupted_run_goes_on_with_auto(make_run: MakeRun, tmp_path: Path):
    whole = trained(make_run(*USUAL, "--grad_norm_log", output="whole"))
    first = make_run(*USUAL, "--save_state_on_train_end", "--resume", "auto", "--grad_norm_log")
    first.prepare()
    assert first.loop is not None
    original = first.loop.train_step

    def stop_after_three(*arguments):
        outcome = original(*arguments)
        if first.loop.state.step == 3:
            first.loop.parts.stop_requested = lambda: "SIGTERM"
        return outcome

    first.loop.train_step = stop_after_three
    assert first.train().exit_code == 143
    second = make_run(*USUAL, "--save_state_on_train_end", "--resume", "auto", "--grad_norm_log")
    assert_same(trained(second), whole)
    events = read_events(tmp_path / "out" / "last.events.jsonl")
    assert [event["train/steps"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in events if event["event"] == "resume"] == [3]
    rows = (tmp_path / "out" / "gradient_logs+last.txt").read_text().splitlines()
    assert len(rows) == 7
    # The end of the second run was saved last: a third has nothing left to do.
    third = make_run(*USUAL, "--resume", "auto", "--grad_norm_log")
    assert (third.train().path, third.loop) == (tmp_path / "out" / "last.safetensors", None)


def test_a_changed_learning_rate_counts_from_there_on(make_run: MakeRun, tmp_path: Path):
    trained(make_run("--save_every_n_steps", "3", "--save_state"))
    resumed = make_run("--resume", str(tmp_path / "out" / "last-step00000003-state"), "--learning_rate", "5e-4")
    trained(resumed)
    events = read_events(tmp_path / "out" / "last.events.jsonl")
    rates = [event["lr/unet"] for event in events if event["event"] == "step"]
    assert rates == [1e-3] * 3 + [5e-4] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--network_dim", "3"), "network_dim = 4, but network_dim is 3"),
        (("--optimizer_type", "SGD"), "optimizer_type = AdamW, but optimizer_type is SGD"),
        (("--seed", "2"), "seed = 1, but seed is 2"),
        (("--train_batch_size", "1"), "train_batch_size = 2"),
        (("--network_train_unet_only",), "network_train_unet_only = False"),
        (("--grad_norm_mode", "gamble"), "grad_norm_mode = None, but grad_norm_mode is gamble"),
    ],
)
def test_a_state_of_other_options_is_refused(saved_state: Path, make_run: MakeRun, arguments, message):
    with pytest.raises(MaulstickError, match=message):
        make_run("--resume", str(saved_state), *arguments, output="other").prepare()


@pytest.fixture(scope="module")
def saved_state(tmp_path_factory, images: Path) -> Path:
    from maulstick.options.load import load_train_options
    from maulstick.train.console import QuietConsole
    from tests.models import model_folder

    output = tmp_path_factory.mktemp("state")
    arguments = [
        "--pretrained_model_name_or_path",
        str(model_folder("tiny")),
        "--train_data_dir",
        str(images),
    ]
    arguments += [
        "--output_dir",
        str(output),
        "--resolution",
        "64",
        "--train_batch_size",
        "2",
        "--max_train_steps",
        "2",
    ]
    arguments += ["--learning_rate", "1e-3", "--network_alpha", "4", "--seed", "1", "--save_state_on_train_end"]
    TrainingRun(load_train_options(arguments), console=QuietConsole()).train()
    return output / "last-state"


def test_a_state_of_another_model_is_refused(saved_state: Path, make_run: MakeRun):
    with pytest.raises(MaulstickError, match="belongs to another base model"):
        make_run("--resume", str(saved_state), version="sd2", prediction="epsilon").prepare()


def test_a_state_of_other_images_is_refused_with_their_names(saved_state: Path, make_run: MakeRun, images, tmp_path):
    other = tmp_path / "images"
    shutil.copytree(images, other)
    (other / "2_shape" / "4.txt").write_text("another caption")
    (other / "2_shape" / "3.png").unlink()
    with pytest.raises(MaulstickError, match=r"1 gone: 2_shape/3.png; 1 changed .*: 2_shape/4.png"):
        make_run("--resume", str(saved_state), "--train_data_dir", str(other)).prepare()


def test_a_moved_dataset_is_the_same_dataset(saved_state: Path, make_run: MakeRun, images, tmp_path):
    shutil.copytree(images, tmp_path / "elsewhere")
    run = make_run("--resume", str(saved_state), "--train_data_dir", str(tmp_path / "elsewhere"))
    run.prepare()
    assert run.loop is not None
    assert run.loop.state.step == 2


def test_a_damaged_state_is_refused_and_auto_takes_the_one_before(make_run: MakeRun, tmp_path: Path):
    make_run("--save_every_n_steps", "2", "--save_state").train()
    out = tmp_path / "out"
    names = [path.name for path in sorted(out.glob("*-state"))]
    assert names == ["last-state", "last-step00000002-state", "last-step00000004-state"]
    damaged = out / "last-state" / "state.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    facts = read_facts(out / "last-state")
    with pytest.raises(MaulstickError, match="is damaged"):
        read_state(FoundState(out / "last-state", facts))
    cut = out / "last-step00000004-state" / "state.pt"
    cut.write_bytes(cut.read_bytes()[:-100])
    (out / ".last-step00000006-state.maulstick-tmp-x").mkdir()
    found, notes = find_latest(out, "last")
    assert found is not None
    assert found.folder.name == "last-step00000002-state"
    assert len(notes) == 2
    assert "bytes" in notes[0]
    assert "checksum" in notes[1]


def test_states_of_another_name_are_not_taken(make_run: MakeRun, tmp_path: Path):
    make_run("--save_state_on_train_end", "--output_name", "last-2", "--max_train_steps", "1").train()
    assert find_latest(tmp_path / "out", "last")[0] is None
    found, _ = find_latest(tmp_path / "out", "last-2")
    assert found is not None
    assert found.facts["step"] == 1


def test_only_the_last_files_and_states_of_this_run_are_kept(make_run: MakeRun, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    foreign = out / "last-step00000001.safetensors"
    foreign.write_bytes(b"somebody's")
    arguments = (
        "--save_every_n_steps",
        "1",
        "--save_state",
        "--save_last_n_steps",
        "2",
        "--save_last_n_steps_state",
        "1",
    )
    make_run(*arguments, "--max_train_steps", "5").train()
    # Saved at steps 1 to 4; at 4 those from 2 on are kept, and of the states those from 3 on.
    assert sorted(path.name for path in out.glob("last-step*")) == [
        "last-step00000001.old-1.safetensors",
        "last-step00000002.safetensors",
        "last-step00000003-state",
        "last-step00000003.safetensors",
        "last-step00000004-state",
        "last-step00000004.safetensors",
    ]
    assert (out / "last-step00000001.old-1.safetensors").read_bytes() == b"somebody's"
    resumed = make_run(*arguments, "--resume", str(out / "last-step00000004-state"), "--max_train_steps", "8")
    resumed.train()
    assert sorted(path.name for path in out.glob("last-step*-state")) == [
        "last-step00000006-state",
        "last-step00000007-state",
    ]


def test_the_last_epochs_are_counted_as_files(make_run: MakeRun, tmp_path: Path):
    make_run("--save_every_n_epochs", "1", "--save_last_n_epochs", "2", "--max_train_epochs", "5").train()
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == [
        "last-000003.safetensors",
        "last-000004.safetensors",
        "last.safetensors",
    ]


def test_a_full_disk_keeps_the_last_good_state(make_run: MakeRun, tmp_path: Path, monkeypatch):
    import maulstick.train.state_folder as state_folder

    run = make_run("--save_every_n_steps", "2", "--save_state")
    save, calls = torch.save, []

    def fill_up(state, file):
        calls.append(state["counters"]["step"])
        if len(calls) > 1:
            file.write(b"x" * 100)
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(state_folder.torch, "save", fill_up)
    assert run.train().exit_code == 0
    assert calls == [2, 4, 6]
    assert [path.name for path in (tmp_path / "out").glob("*state*")] == ["last-step00000002-state"]
    failed = [
        e["step"] for e in read_events(tmp_path / "out" / "last.events.jsonl") if e["event"] == "save_state_failed"
    ]
    assert failed == [4, 6]
    assert list((tmp_path / "out").glob(".*")) == []


def test_initial_step_moves_counter_and_rate_and_on_request_the_images(make_run: MakeRun, tmp_path: Path):
    def images_of_first_window(*arguments: str, output: str) -> tuple[list[str], int, int]:
        run = make_run("--lr_scheduler", "linear", *arguments, output=output)
        run.prepare()
        assert run.loop is not None
        state = run.loop.state
        window, _ = next(iter(run.loop.windows(state.epoch, state.step_in_epoch)))
        return [item.record.path.name for item in window[0][0].items], state.step, state.epoch

    whole = make_run(output="whole")
    whole.prepare()
    assert whole.loop is not None
    # 10 images in batches of 2: five windows an epoch.
    order = [[item.record.path.name for item in window[0][0].items] for window, _ in whole.loop.windows(0)]
    assert images_of_first_window("--initial_step", "3", output="a") == (order[0], 3, 0)
    assert images_of_first_window("--initial_step", "3", "--skip_until_initial_step", output="b") == (order[3], 3, 0)
    assert images_of_first_window("--initial_epoch", "2", output="c")[1:] == (5, 1)
    run = make_run("--lr_scheduler", "linear", "--initial_step", "3", output="d")
    run.train()
    rows = [event for event in read_events(tmp_path / "d" / "last.events.jsonl") if event["event"] == "step"]
    assert [row["train/steps"] for row in rows] == [4, 5, 6]
    assert rows[0]["lr/unet"] == pytest.approx(1e-3 * (6 - 3) / 6)
    with pytest.raises(MaulstickError, match="initial_step 6 is not before the end of training"):
        make_run("--initial_step", "6", output="e").prepare()


def test_a_state_folder_of_sd_scripts_is_named_as_such(make_run: MakeRun, tmp_path: Path):
    folder = tmp_path / "old-state"
    folder.mkdir()
    (folder / "train_state.json").write_text(json.dumps({"current_epoch": 1, "current_step": 5}))
    with pytest.raises(MaulstickError, match=r"state of sd-scripts"):
        make_run("--resume", str(folder)).prepare()
