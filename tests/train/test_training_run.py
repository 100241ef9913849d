"""Whole runs on a small model: what they write, and what must not change the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from maulstick.adapters.files import data_hash, read_lora_file
from maulstick.errors import ModelError, OptionError
from maulstick.train import run as run_module
from maulstick.train import saving
from maulstick.train.events import read_events


def steps_of(output: Path, name: str = "last") -> list[dict]:
    return [event for event in read_events(output / f"{name}.events.jsonl") if event["event"] == "step"]


def test_a_run_writes_the_lora_its_metadata_and_a_log_of_every_step(make_run, tmp_path):
    result = make_run(
        "--unet_lr", "2e-3", "--text_encoder_lr", "5e-4", "--training_comment", "hello", version="sd1"
    ).train()
    assert result.path == tmp_path / "out" / "last.safetensors"
    file = read_lora_file(result.path)
    assert sum(name.startswith("lora_unet_") for name in file.modules) == 192
    assert sum(name.startswith("lora_te_text_model_encoder_layers_") for name in file.modules) == 72
    assert {weights.down.dtype for weights in file.modules.values()} == {torch.float32}
    assert all(float(weights.up.abs().max()) > 0 for name, weights in file.modules.items() if "unet" in name)
    meta = file.metadata
    assert (meta["ss_network_dim"], meta["ss_network_alpha"], meta["ss_network_module"]) == (
        "4",
        "4.0",
        "networks.lora",
    )
    assert (meta["ss_base_model_version"], meta["ss_steps"], meta["ss_training_comment"]) == ("sd_v1", "6", "hello")
    assert json.loads(meta["ss_dataset_dirs"]) == {"2_shape": {"n_repeats": 2, "img_count": 5}}
    assert json.loads(meta["ss_tag_frequency"])["2_shape"]["red"] == 5
    assert meta["sshs_model_hash"] == data_hash(result.path)
    steps = steps_of(tmp_path / "out")
    assert [step["train/steps"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["epoch"] for step in steps] == [0, 0, 0, 0, 0, 1]
    assert {(step["lr/unet"], step["lr/textencoder"]) for step in steps} == {(2e-3, 5e-4)}
    assert all(step["norm/grad"] > 0 and step["loss/current"] > 0 for step in steps)
    events = [event["event"] for event in read_events(tmp_path / "out" / "last.events.jsonl")]
    assert events[0] == "start"
    assert events[-1] == "end"


@pytest.fixture
def hash_of(make_run, tmp_path):
    """Train with the arguments and return the hash of the file's tensors."""

    def train(*arguments, output, **kwargs):
        return data_hash(make_run(*arguments, output=output, **kwargs).train().path)

    return train


def test_the_seed_decides_everything(hash_of):
    first = hash_of(output="a")
    assert hash_of(output="b") == first
    assert hash_of("--seed", "2", output="c") != first


UNET_ONLY = ("--network_train_unet_only",)


def test_caches_and_samples_change_nothing(hash_of, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a shape --w 64 --h 64 --s 2\n")
    plain = hash_of(*UNET_ONLY, "--caption_dropout_rate", "0.3", output="plain")
    changes = {
        "latents": ("--cache_latents",),
        "text": ("--cache_text_encoder_outputs",),
        "samples": ("--sample_prompts", str(prompts), "--sample_every_n_steps", "2", "--sample_at_first"),
        "saves": ("--save_every_n_steps", "1"),
    }
    for output, change in changes.items():
        assert hash_of(*UNET_ONLY, "--caption_dropout_rate", "0.3", *change, output=output) == plain, output
    assert len(list((tmp_path / "samples" / "sample").glob("*.png"))) == 4
    assert [path.name for path in sorted((tmp_path / "saves").glob("*.safetensors"))] == [
        *(f"last-step{step:08d}.safetensors" for step in range(1, 6)),
        "last.safetensors",
    ]


def test_latents_on_disk_are_used_again(hash_of, images, tmp_path):
    first = hash_of(*UNET_ONLY, "--cache_latents_to_disk", output="first")
    caches = sorted(images.rglob("*.maulstick.safetensors"))
    assert len(caches) == 5
    written = [path.stat().st_mtime_ns for path in caches]
    assert hash_of(*UNET_ONLY, "--cache_latents_to_disk", output="second") == first
    assert [path.stat().st_mtime_ns for path in caches] == written
    for path in caches:
        path.unlink()


def test_gradient_checkpointing_gives_the_same_weights(make_run):
    plain = load_file(make_run(*UNET_ONLY, output="plain").train().path)
    saved = load_file(make_run(*UNET_ONLY, "--gradient_checkpointing", output="saved").train().path)
    for key, tensor in plain.items():
        torch.testing.assert_close(saved[key], tensor, rtol=1e-3, atol=1e-6)


def test_an_earlier_file_and_log_are_kept(make_run, tmp_path):
    first = make_run(*UNET_ONLY).train()
    content = first.path.read_bytes()
    make_run(*UNET_ONLY, "--seed", "5").train()
    assert (tmp_path / "out" / "last.old-1.safetensors").read_bytes() == content
    assert (tmp_path / "out" / "last.safetensors").read_bytes() != content
    earlier_log = read_events(tmp_path / "out" / "last.events.old-1.jsonl")
    assert [event["event"] for event in earlier_log].count("step") == 6


def test_a_stop_request_saves_under_a_name_that_says_so(make_run, tmp_path, monkeypatch):
    run = make_run(*UNET_ONLY)
    run.prepare()
    monkeypatch.setattr(
        run_module.StopSignals, "requested", lambda self: "SIGTERM" if run.loop.state.step >= 3 else None
    )
    result = run.train()
    assert result.exit_code == 143
    assert result.path == tmp_path / "out" / "last-interrupted-step00000003.safetensors"
    assert read_lora_file(result.path).metadata["ss_steps"] == "3"
    assert read_events(tmp_path / "out" / "last.events.jsonl")[-1]["event"] == "interrupted"


def test_an_error_in_training_saves_what_there_is(make_run, tmp_path, monkeypatch):
    run = make_run(*UNET_ONLY)
    run.prepare()
    forward = run.loop.forward

    def fail_at_the_fourth(*arguments):
        if run.loop.state.step == 3:
            raise RuntimeError("out of memory")
        return forward(*arguments)

    monkeypatch.setattr(run.loop, "forward", fail_at_the_fourth)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.train()
    assert read_lora_file(tmp_path / "out" / "last-interrupted-step00000003.safetensors").metadata["ss_steps"] == "3"
    last = read_events(tmp_path / "out" / "last.events.jsonl")[-1]
    assert (last["event"], last["error"]) == ("failed", "RuntimeError: out of memory")


def test_a_full_disk_at_an_intermediate_save_does_not_end_the_run(make_run, tmp_path, monkeypatch):
    run = make_run(*UNET_ONLY, "--save_every_n_steps", "2")
    run.prepare()
    save = run.saver.output.save

    def full_at_first(label, **place):
        if label == "step00000002":
            raise OSError(28, "No space left on device")
        return save(label, **place)

    monkeypatch.setattr(run.saver.output, "save", full_at_first)
    assert run.train().path.name == "last.safetensors"
    events = read_events(tmp_path / "out" / "last.events.jsonl")
    failed = [event for event in events if event["event"] == "save_failed"]
    assert [event["step"] for event in failed] == [2]
    assert "No space left" in failed[0]["error"]


def test_text_encoder_only_and_rate_zero_leave_the_other_part_out(make_run):
    only_text = read_lora_file(make_run("--network_train_text_encoder_only", output="te").train().path)
    assert len(only_text.modules) == 24
    assert all(name.startswith("lora_te_") for name in only_text.modules)
    rate_zero = read_lora_file(make_run("--text_encoder_lr", "0", output="unet").train().path)
    assert len(rate_zero.modules) == 48


def test_a_run_goes_on_from_a_file_with_its_ranks(make_run):
    first = make_run(*UNET_ONLY, "--network_dim", "3", "--network_alpha", "2", output="first").train()
    start = ("--network_weights", str(first.path))
    run = make_run(*UNET_ONLY, *start, "--dim_from_weights", "--learning_rate", "1e-12", output="second")
    second = read_lora_file(run.train().path)
    for name, weights in read_lora_file(first.path).modules.items():
        assert (second.modules[name].rank, second.modules[name].alpha) == (3, 2.0)
        torch.testing.assert_close(second.modules[name].down, weights.down, rtol=0, atol=1e-9)
        torch.testing.assert_close(second.modules[name].up, weights.up, rtol=0, atol=1e-9)


def test_start_weights_of_another_rank_are_refused_before_anything_is_cached(make_run, tmp_path):
    first = make_run(*UNET_ONLY, "--network_dim", "3", "--max_train_steps", "1", output="first").train()
    with pytest.raises(OptionError, match=r"has rank 3, but this run plans rank 4.*dim_from_weights"):
        make_run(*UNET_ONLY, "--network_weights", str(first.path), output="second").prepare()
    assert not list((tmp_path / "second").glob("*"))


def test_an_output_dir_that_cannot_be_written_is_refused_at_once(make_run, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OptionError, match=r"output_dir: .*out cannot be written"):
        make_run(*UNET_ONLY).prepare()


def test_a_value_that_fp16_cannot_hold_is_saved_in_fp32_instead(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--save_precision", "fp16")
    run.prepare()
    update = run.loop.update

    def grow(*arguments):
        outcome = update(*arguments)
        with torch.no_grad():
            run.loop.parts.named_parameters[0][1].view(-1)[0] = 1e6
        return outcome

    run.loop.update = grow
    with pytest.raises(ModelError, match=r"not finite|float16|fp16"):
        run.train()
    (saved,) = (tmp_path / "out").glob("last-interrupted-*.safetensors")
    assert {weights.down.dtype for weights in read_lora_file(saved).modules.values()} == {torch.float32}


def test_a_full_disk_at_the_end_saves_the_adapter_elsewhere(make_run, tmp_path, monkeypatch):
    run = make_run(*UNET_ONLY)
    run.prepare()
    save, monkey_folder = run.saver.output.save, tmp_path / "elsewhere"
    monkey_folder.mkdir()
    monkeypatch.setattr(saving.tempfile, "mkdtemp", lambda prefix: str(monkey_folder))

    def full_unless_elsewhere(label, **place):
        if run.saver.output.folder is None:
            raise OSError(28, "No space left on device")
        return save(label, **place)

    monkeypatch.setattr(run.saver.output, "save", full_unless_elsewhere)
    with pytest.raises(OSError, match="No space left"):
        run.train()
    assert len(read_lora_file(monkey_folder / "last-interrupted-step00000006.safetensors").modules) == 48
    assert read_events(tmp_path / "out" / "last.events.jsonl")[-1]["file"].startswith(str(monkey_folder))


def test_a_run_whose_every_gradient_is_nan_stops_with_the_reason(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--max_train_steps", "40", "--no-rescue", "--no-autopsy")
    run.prepare()
    accumulate = run.loop.accumulate_gradients

    def spoil(window, images):
        loss = accumulate(window, images)
        if run.loop.state.step >= 2:
            run.loop.parts.named_parameters[0][1].grad.fill_(float("nan"))
        return loss

    run.loop.accumulate_gradients = spoil
    result = run.train()
    assert result.exit_code == 1
    assert (result.state.step, result.state.skipped) == (18, 16)
    assert "NaN or infinite in 16 steps in a row" in result.state.stopped_by
    assert all(bool(torch.isfinite(weights.up).all()) for weights in read_lora_file(result.path).modules.values())


def test_every_module_may_drop_out_at_once(make_run):
    run = make_run(*UNET_ONLY, "--module_dropout", "0.999")
    assert run.train().state.step == 6


def test_convolutions_and_dropouts_are_trained(make_run):
    arguments = ["--network_args", "conv_dim=2", "conv_alpha=1", "rank_dropout=0.2", "module_dropout=0.1"]
    result = make_run(*UNET_ONLY, "--network_dropout", "0.1", *arguments, version="sd1").train()
    file = read_lora_file(result.path)
    assert len(file.modules) == 278
    three_by_three = [weights for weights in file.modules.values() if weights.down.shape[-2:] == (3, 3)]
    assert {weights.rank for weights in three_by_three} == {2}
    assert json.loads(file.metadata["ss_network_args"])["rank_dropout"] == "0.2"


def test_norms_stay_within_scale_weight_norms(make_run, tmp_path):
    result = make_run(*UNET_ONLY, "--scale_weight_norms", "0.001", "--learning_rate", "1e-2").train()
    for weights in read_lora_file(result.path).modules.values():
        delta = weights.up.flatten(1) @ weights.down.flatten(1) * weights.alpha / weights.rank
        assert float(delta.norm()) <= 0.001 * 1.0001
    assert steps_of(tmp_path / "out")[-1]["max_norm/max_key_norm"] == pytest.approx(0.001, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_keeps_the_adapter_in_fp32(make_run, precision):
    run = make_run("--mixed_precision", precision, "--save_precision", "fp16")
    run.prepare()
    assert {parameter.dtype for _, parameter in run.loop.parts.named_parameters} == {torch.float32}
    base = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert run.prepared.family.denoiser.conv_in.weight.dtype == base
    result = run.train()
    with safe_open(result.path, "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118


def test_an_sd2_model_that_predicts_v(make_run):
    result = make_run(*UNET_ONLY, version="sd2", prediction="v_prediction").train()
    file = read_lora_file(result.path)
    assert file.metadata["ss_base_model_version"] == "sd_v2_v"
    assert file.metadata["modelspec.prediction_type"] == "v"
    assert len(file.modules) == 192


def test_a_schedule_reaches_its_end_and_is_logged(make_run, tmp_path):
    make_run(*UNET_ONLY, "--lr_scheduler", "linear", "--lr_warmup_steps", "2").train()
    rates = [step["lr/unet"] for step in steps_of(tmp_path / "out")]
    assert rates == pytest.approx([0.0, 0.5e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3], abs=1e-15)


def test_epochs_and_the_tail_of_an_epoch(make_run, tmp_path):
    """10 images in batches of 2, three to a window: windows of 3 and 2 micro-batches, two steps an epoch."""
    run = make_run(*UNET_ONLY, "--max_train_epochs", "2", "--gradient_accumulation_steps", "3")
    prepared = run.prepare()
    assert (prepared.plan.steps_per_epoch, prepared.plan.total_steps, prepared.plan.epochs) == (2, 4, 2)
    windows = [(len(window), images) for window, images in run.loop.windows(0)]
    run.records.close("end")
    assert windows == [(3, 6.0), (2, 4.0)]


def test_what_cannot_work_is_refused_before_anything_is_written(make_run, tmp_path):
    with pytest.raises(OptionError, match=r"'Prodigy' uses one step size.*textencoder 0.5, unet 1.*ProdigyPlus"):
        make_run("--optimizer_type", "Prodigy", "--unet_lr", "1", "--text_encoder_lr", "0.5").prepare()
    assert not list((tmp_path / "out").glob("*"))


def test_prodigy_with_one_rate_logs_its_own_step_size(make_run, tmp_path):
    make_run("--optimizer_type", "Prodigy", "--learning_rate", "1").train()
    last = steps_of(tmp_path / "out")[-1]
    assert (last["lr/unet"], last["lr/textencoder"]) == (1.0, 1.0)
    assert 0 < last["lr/d*lr/unet"] == last["lr/d*lr/textencoder"] < 1
