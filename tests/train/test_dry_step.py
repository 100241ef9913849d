"""The dry step measures and leaves no trace; `maulstick check` says what was found, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from maulstick.cli import main
from maulstick.train import dry_step as dry_step_module
from maulstick.train.console import QuietConsole
from maulstick.train.dry_step import dry_step, largest_batch
from maulstick.train.loop import TrainingLoop
from maulstick.train.prepare import prepare
from maulstick.train.run import TrainingRun
from tests.models import model_folder


def prepared_for(run):
    return prepare(run.loaded, QuietConsole(), device=torch.device("cpu"), seed=1)


def all_files(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--cache_latents_to_disk", "--network_train_unet_only", "--cache_text_encoder_outputs"),
        ("--mixed_precision", "fp16", "--gradient_accumulation_steps", "3"),
        ("--optimizer_type", "ProdigyPlusScheduleFree", "--learning_rate", "1", "--gradient_checkpointing"),
    ],
    ids=["plain", "caches", "fp16", "schedule-free"],
)
def test_the_dry_step_leaves_weights_and_files_as_they_were(make_run, images, tmp_path, monkeypatch, arguments):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = make_run(*arguments)
    prepared = prepared_for(run)
    before = {name: tensor.clone() for name, tensor in prepared.family.denoiser.state_dict().items()}
    files = all_files(tmp_path, images, model_folder("tiny"))
    kept = []
    original = TrainingLoop.update

    def update(self, window, loss):
        outcome = original(self, window, loss)
        kept.append((outcome.stepped, dict(self.parts.named_parameters)))
        return outcome

    monkeypatch.setattr(TrainingLoop, "update", update)
    found = dry_step(run.loaded, prepared)
    assert found.findings == []
    # In fp16 the first steps may well overflow at the scaler's first scale.
    assert "fp16" in arguments or [stepped for stepped, _ in kept] == [True, True]
    assert all_files(tmp_path, images, model_folder("tiny")) == files
    assert not (tmp_path / "out").exists()
    after = {name.replace(".base_layer", ""): t for name, t in prepared.family.denoiser.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for name, parameter in kept[-1][1].items():
        assert parameter.grad is None
        if name.endswith("lora_up.weight"):
            assert not parameter.any()


def test_the_adapter_starts_from_the_same_values_after_a_dry_step(make_run):
    run = make_run("--network_train_unet_only")
    prepared = prepared_for(run)
    dry_step(run.loaded, prepared)
    fresh = make_run("--network_train_unet_only", output="other")
    fresh.prepare()
    down = {name: tensor for name, tensor in prepared.family.denoiser.state_dict().items() if "lora_A" in name}
    expected = {
        name: tensor for name, tensor in fresh.prepared.family.denoiser.state_dict().items() if "lora_A" in name
    }
    assert down.keys() == expected.keys()
    assert len(down) == 48
    assert all(torch.equal(down[name], expected[name]) for name in down)


def test_the_step_is_made_on_the_largest_batch(images, tmp_path, make_run):
    config = tmp_path / "data.toml"
    config.write_text(
        "[[datasets]]\nresolution = 64\nbatch_size = 2\n"
        f'[[datasets.subsets]]\nimage_dir = "{images / "2_shape"}"\n'
        "[[datasets]]\nresolution = [128, 64]\nbatch_size = 2\n"
        f'[[datasets.subsets]]\nimage_dir = "{images / "2_shape"}"\n'
    )
    run = make_run("--dataset_config", str(config), "--train_data_dir", "", "--gradient_accumulation_steps", "2")
    prepared = prepared_for(run)
    assert largest_batch(prepared.batches).bucket == (128, 64)
    found = dry_step(run.loaded, prepared)
    assert (found.step.bucket, found.step.images) == ((128, 64), 4)
    assert found.latents.shape == (2, 4, 8, 16)


def test_too_little_memory_is_an_error_with_what_to_set(make_run, monkeypatch):
    def no_room(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore text")

    run = make_run()
    monkeypatch.setattr(TrainingRun, "build_loop", no_room)
    found = dry_step(run.loaded, prepared_for(run))
    assert found.step is None
    assert [finding.code for finding in found.findings] == ["out_of_memory"]
    assert "Tried to allocate 20.00 GiB." in found.findings[0].message
    assert "gradient_checkpointing" in found.findings[0].advice


def test_a_network_without_any_gradient_is_an_error(make_run, monkeypatch):
    original = TrainingLoop.accumulate_gradients

    def cut(self, window, images):
        loss = original(self, window, images)
        for name, parameter in self.parts.named_parameters:
            if name.startswith("text_encoder."):
                parameter.grad = None
        return loss

    run = make_run()
    monkeypatch.setattr(TrainingLoop, "accumulate_gradients", cut)
    found = dry_step(run.loaded, prepared_for(run))
    assert [finding.code for finding in found.findings] == ["no_gradient"]
    assert "None of the 48 tensors of the text_encoder" in found.findings[0].message
    assert found.step.without_gradient == {"text_encoder": (48, 48)}


def test_a_loss_that_is_not_finite_is_an_error(make_run):
    run = make_run()
    prepared = prepared_for(run)
    prepared.family.predict = lambda noisy, timesteps, conditioning: noisy * float("inf")
    found = dry_step(run.loaded, prepared)
    assert [finding.code for finding in found.findings if finding.code != "no_gradient"] == ["loss_not_finite"]


# ---------------------------------------------------------------------------------------------- maulstick check


def arguments_for(images, *further):
    usual = ["--pretrained_model_name_or_path", str(model_folder("tiny")), "--train_data_dir", str(images)]
    usual += ["--resolution", "64", "--console", "quiet", "--max_train_steps", "200", "--seed", "1"]
    return ["check", *usual, *further]


def test_check_needs_no_output_folder_and_shows_everything(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments_for(images, "--learning_rate", "1", "--lr_scheduler", "cosine")) == 0
    out = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "schedule   ████" in out
    assert "a step, about" in out
    assert "measured on one step of 1 image of 64x64" in out
    assert "latents    4 images encoded" in out
    assert "\n\nwarnings (1)\n- The learning rate of textencoder (1), unet (1) is far too high for AdamW.\n" in out
    assert "\n    why  A step moves every weight by about the learning rate" in out
    assert "\n    set  Set learning_rate" in out


def test_check_without_a_dry_step_measures_nothing(images, capsys, monkeypatch):
    monkeypatch.setattr(dry_step_module, "_dry_step", lambda *arguments: pytest.fail("a step was made"))
    assert main(arguments_for(images, "--no-dry_step", "--json")) == 0
    found = json.loads(capsys.readouterr().out)["preflight"]
    assert (found["step"], found["latents"], found["prediction"]) == (None, None, None)
    assert found["schedule"]["name"] == "constant"
    assert main(arguments_for(images, "--no-dry_step")) == 0
    out = capsys.readouterr().out
    assert "expected" not in out
    assert out.endswith("nothing was found that should be changed\n")


def test_json_has_the_same_content_and_an_error_ends_with_1(images, capsys, monkeypatch):
    def no_room(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(TrainingRun, "build_loop", no_room)
    assert main(arguments_for(images, "--json", "--learning_rate", "1")) == 1
    findings = json.loads(capsys.readouterr().out)["preflight"]["findings"]
    assert [finding["code"] for finding in findings] == ["out_of_memory", "learning_rate_too_high"]
    assert set(findings[0]) == {"severity", "code", "paths", "message", "why", "advice"}


def test_captions_that_are_cut_are_found_with_what_to_set(images, tmp_path, capsys):
    folder = tmp_path / "data" / "2_shape"
    folder.mkdir(parents=True)
    for file in (images / "2_shape").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "0.txt").write_text("word " * 90)
    (folder / "1.png").write_bytes((folder / "0.png").read_bytes())
    assert main(arguments_for(folder.parent, "--no-dry_step", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    found = {finding["code"]: finding for finding in plan["findings"]}
    assert found["caption_too_long"]["message"] == (
        "0.png: captions of more than 75 tokens (longest: 90); the rest is cut off."
    )
    assert found["caption_too_long"]["advice"] == "Shorten them, or set max_token_length to 150 or 225."
    assert found["duplicate_content"]["why"]
    assert main(arguments_for(folder.parent, "--no-dry_step")) == 0
    out = capsys.readouterr().out
    assert "warnings (2)" in out
    assert "\n    set  Shorten them" in out
