"""Whole runs on a small SDXL model: both text encoders, sizes, fp16 under guard, blocks, files that others load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from safetensors.torch import load_file

from maulstick.adapters.factors import delta_weight
from maulstick.adapters.files import data_hash, read_lora_file
from maulstick.errors import OptionError
from maulstick.families.framing import Framing
from maulstick.families.load import load_family
from maulstick.families.samplers import make_sampler
from maulstick.families.sdxl import StableDiffusionXL
from maulstick.options.generate import GenerateOptions, LoraOptions, OutputOptions, PictureOptions
from maulstick.options.load import load_train_options
from maulstick.options.schema import ModelOptions
from maulstick.tools.generate import generate
from maulstick.train.choice import Choice, choose_targets
from maulstick.train.events import read_events
from maulstick.train.run import TrainingRun
from tests.models import scheduler_config
from tests.sdxl_models import sdxl_folder

pytestmark = pytest.mark.slow

UNET_ONLY = ("--network_train_unet_only",)
# Two blocks: as good as all where the question is another one, and ten times as fast.
FEW_MODULES = ("--block_lr", "up.4-5=1", "other=0")


@pytest.fixture
def make_sdxl_run(make_run: Callable[..., TrainingRun]) -> Callable[..., TrainingRun]:
    """Return a function that makes a run of two steps on the small SDXL model, with further arguments."""

    def make(*arguments: str, output: str = "out") -> TrainingRun:
        length = () if "--max_train_steps" in arguments else ("--max_train_steps", "2")
        return make_run("--pretrained_model_name_or_path", str(sdxl_folder()), *length, *arguments, output=output)

    return make


@pytest.fixture(scope="module")
def choose() -> Callable[..., Choice]:
    """Return a function that makes the choice for the small model, at a learning rate of 1e-3."""
    options = ModelOptions(pretrained_model_name_or_path=str(sdxl_folder()))
    family = load_family(options, device=torch.device("cpu"), dtype=torch.float32)

    def choose(*arguments: str) -> Choice:
        required = ("--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o")
        return choose_targets(family, load_train_options([*required, "--learning_rate", "1e-3", *arguments]).options)

    return choose


def steps_of(output: Path) -> list[dict]:
    return [event for event in read_events(output / "last.events.jsonl") if event["event"] == "step"]


# ---------------------------------------------------------------------------------------------------------------------
# What a run writes


def test_a_run_trains_both_text_encoders_and_diffusers_loads_every_module(make_sdxl_run, tmp_path):
    rates = ("--unet_lr", "2e-3", "--text_encoder_lr", "5e-4", "1e-4")
    path = make_sdxl_run(*rates, "--network_dim", "2", "--network_alpha", "1").train().path
    file = read_lora_file(path)
    prefixes = Counter("_".join(name.split("_")[:2]) for name in file.modules)
    assert prefixes == {"lora_unet": 722, "lora_te1": 72, "lora_te2": 192}
    blocks = ("lora_unet_input_blocks_", "lora_unet_middle_block_1_", "lora_unet_output_blocks_")
    assert all(name.startswith(blocks) for name in file.modules if name.startswith("lora_unet"))
    # Nothing reads the last layer of the first encoder; that of the second makes the pooled text.
    untrained = {name for name, weights in file.modules.items() if not weights.up.any()}
    assert untrained == {name for name in file.modules if name.startswith("lora_te1_text_model_encoder_layers_11_")}
    assert file.metadata["ss_base_model_version"] == "sdxl_base_v1-0"
    assert file.metadata["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert file.metadata["ss_text_encoder_lr"] == "[0.0005, 0.0001]"
    steps = steps_of(tmp_path / "out")
    assert {(s["lr/unet"], s["lr/textencoder1"], s["lr/textencoder2"]) for s in steps} == {(2e-3, 5e-4, 1e-4)}
    assert all(s["norm/grad"] > 0 for s in steps)

    pipeline = StableDiffusionXLPipeline.from_pretrained(sdxl_folder(), local_files_only=True, add_watermarker=False)
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="it")
    names = StableDiffusionXL.key_names
    loaded = {
        names.name(component, module_path): module.get_delta_weight("it")
        for component in ("unet", "text_encoder", "text_encoder_2")
        for module_path, module in getattr(pipeline, component).named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert loaded.keys() == file.modules.keys()
    for name, weights in file.modules.items():
        expected = delta_weight(weights).reshape(loaded[name].shape)
        torch.testing.assert_close(loaded[name], expected, rtol=1e-4, atol=1e-9)


def test_rates_by_number_and_an_encoder_without_one(choose, make_sdxl_run):
    numbered = choose("--text_encoder_lr1", "1e-5", "--text_encoder_lr2", "0")
    assert {name: rates.learning_rate for name, rates in numbered.rates.items()} == {
        "text_encoder": 1e-5,
        "unet": 1e-3,
    }
    both = choose("--text_encoder_lr", "3e-4")
    assert [both.rates[name].learning_rate for name in ("text_encoder", "text_encoder_2")] == [3e-4, 3e-4]
    half = choose("--text_encoder_lr2", "2e-4")
    assert [half.rates[name].learning_rate for name in ("text_encoder", "text_encoder_2")] == [1e-3, 2e-4]
    arguments = ("--text_encoder_lr1", "0", "--text_encoder_lr2", "2e-4", "--max_train_steps", "1")
    file = read_lora_file(make_sdxl_run(*arguments, *FEW_MODULES).train().path)
    assert {"_".join(name.split("_")[:2]) for name in file.modules} == {"lora_unet", "lora_te2"}
    assert file.metadata["ss_text_encoder_lr"] == "[0.0, 0.0002]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text_encoder_lr", "1e-4", "1e-5"], r"text_encoder_lr has 2 values, but this model has one text encoder"),
        (["--text_encoder_lr2", "1e-5"], r"text_encoder_lr2 is given, but this model has one text encoder"),
        (["--text_encoder_lr", "1e-4", "--text_encoder_lr1", "1e-5"], "contradict each other"),
        (["--network_train_unet_only", "--text_encoder_lr2", "1e-5"], r"text_encoder_lr = 1e-05 contradict"),
    ],
)
def test_rates_that_the_model_cannot_have_are_refused(make_run, arguments, said):
    with pytest.raises(OptionError, match=said):
        make_run(*arguments).prepare()


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def test_weights_by_block_are_nine_three_nine(choose):
    down, up = "0,0,0,0,0.1,0.2,0,0.3,0.4", "1,0,0,0.5,0,0,0,0,0"
    lists = [f"down_lr_weight={down}", "mid_lr_weight=0,0.7,0", f"up_lr_weight={up}"]
    choice = choose(*UNET_ONLY, "--network_args", *lists)
    counts = Counter(target.block for target in choice.targets["unet"])
    assert counts == {5: 22, 6: 22, 8: 102, 9: 102, 11: 102, 13: 102, 16: 22}
    rates = choice.rates["unet"].groups(choice.targets["unet"])
    assert {name: round(rate / 1e-3, 6) for name, rate in rates.items()} == {
        "unet_block5": 0.1,
        "unet_block6": 0.2,
        "unet_block8": 0.3,
        "unet_block9": 0.4,
        "unet_block11": 0.7,
        "unet_block13": 1,
        "unet_block16": 0.5,
    }
    one_middle = choose(*UNET_ONLY, "--network_args", "down_lr_weight=0", "mid_lr_weight=0.7", "up_lr_weight=0")
    assert Counter(target.block for target in one_middle.targets["unet"]) == {11: 102}
    with pytest.raises(OptionError, match=r"down_lr_weight.* 9"):
        choose("--network_args", "down_lr_weight=1,1,1,1,1,1,1,1,1,1,1,1")


def test_blocks_and_two_text_encoders_train_together_under_one_step_size(make_sdxl_run, tmp_path):
    arguments = ("--optimizer_type", "Prodigy", "--learning_rate", "1", "--max_train_steps", "1", *FEW_MODULES)
    file = read_lora_file(make_sdxl_run(*arguments).train().path)
    assert Counter("_".join(name.split("_")[:2]) for name in file.modules) == {
        "lora_unet": 44,
        "lora_te1": 72,
        "lora_te2": 192,
    }
    (step,) = steps_of(tmp_path / "out")
    expected = {"lr/textencoder1", "lr/textencoder2", "lr/unet_block17", "lr/unet_block18"}
    assert {name for name in step if name.startswith("lr/") and "d*lr" not in name} == expected


# ---------------------------------------------------------------------------------------------------------------------
# Precision and caches


def test_fp16_with_loss_scale_and_guard_stays_finite(make_sdxl_run, tmp_path):
    run = make_sdxl_run("--mixed_precision", "fp16", "--grad_norm_mode", "stable")
    prepared = run.prepare()
    scaler = run.loop.parts.scaler
    assert scaler.is_enabled()
    # So high that both steps overflow. `stable` lets such steps pass, as the original does; the scaler holds them back.
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**40})
    result = run.train()
    assert prepared.family.vae.dtype == torch.float32
    assert prepared.family.denoiser.dtype == torch.float16
    tensors = load_file(result.path)
    assert len(tensors) == 3 * (722 + 264)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    steps = steps_of(tmp_path / "out")
    assert [step["norm/grad"] for step in steps] == ["nan", "nan"]
    assert not any(tensor.any() for name, tensor in tensors.items() if name.endswith("up.weight"))
    assert [step["train/loss_scale"] for step in steps] == [2.0**39, 2.0**38]

    result = make_sdxl_run("--mixed_precision", "fp16", "--grad_norm_mode", "stable", output="again").train()
    tensors = load_file(result.path)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert any(tensor.any() for name, tensor in tensors.items() if "unet" in name and name.endswith("up.weight"))
    steps = steps_of(tmp_path / "again")
    assert steps[-1]["train/skipped_steps"] == 0
    assert all(math.isfinite(step["loss/current"]) and step["norm/grad"] > 0 for step in steps)


def test_cached_text_states_change_nothing_under_shuffling_and_dropout(make_sdxl_run):
    captions = ("--shuffle_caption", "--keep_tokens", "1", "--caption_dropout_rate", "0.4")
    arguments = (*UNET_ONLY, *FEW_MODULES, *captions, "--max_train_steps", "3")
    plain = data_hash(make_sdxl_run(*arguments).train().path)
    cached = make_sdxl_run(*arguments, "--cache_text_encoder_outputs", "--cache_latents", output="cached")
    assert data_hash(cached.train().path) == plain
    # Without shuffling all captions are known beforehand, and no encoder is needed any more.
    known = make_sdxl_run(*UNET_ONLY, *FEW_MODULES, "--cache_text_encoder_outputs", "--cache_latents", output="known")
    assert known.prepare().family.encoders_on_device() == frozenset()
    other = make_sdxl_run(*UNET_ONLY, *FEW_MODULES, "--max_train_steps", "3", output="other")
    assert data_hash(other.train().path) != plain


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def test_the_unet_is_told_where_each_picture_was_cut_out(make_sdxl_run, tmp_path, monkeypatch):
    folder = tmp_path / "wide" / "1_shape"
    folder.mkdir(parents=True)
    Image.fromarray(np.zeros((128, 203, 3), np.uint8)).save(folder / "a.png")
    told: list[list[float]] = []
    predict = StableDiffusionXL.predict

    def recorded(self, noisy, timesteps, conditioning):
        told.extend(conditioning["time_ids"].tolist())
        return predict(self, noisy, timesteps, conditioning)

    monkeypatch.setattr(StableDiffusionXL, "predict", recorded)
    data = ("--train_data_dir", str(tmp_path / "wide"), "--flip_aug", "--max_train_steps", "6")
    run = make_sdxl_run(*UNET_ONLY, *FEW_MODULES, *data)
    run.train()
    # 203 x 128 becomes 102 x 64 and is cut to 64 x 64: 19 columns go on the left, 19 on the right.
    flips = {item.flipped for epoch in range(6) for item in run.prepared.batches.batch(epoch, 0).items}
    assert flips == {True, False}
    assert len(told) >= 6
    assert {tuple(row) for row in told} == {(128, 203, 0, 19, 64, 64)}


def test_a_mirrored_picture_has_the_crop_of_its_mirrored_image(make_sdxl_run, tmp_path):
    folder = tmp_path / "wide" / "1_shape"
    folder.mkdir(parents=True)
    Image.fromarray(np.zeros((64, 101, 3), np.uint8)).save(folder / "a.png")
    data = ("--train_data_dir", str(tmp_path / "wide"), "--flip_aug")
    batches = make_sdxl_run(*UNET_ONLY, *FEW_MODULES, *data).prepare().batches
    items = [batches.batch(epoch, 0).items[0] for epoch in range(8)]
    by_side = {item.flipped: item.framing for item in items}
    assert by_side[False] == Framing((101, 64), (18, 0), (64, 64))
    assert by_side[True] == Framing((101, 64), (19, 0), (64, 64))


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and checkpoints


def test_pictures_are_those_of_diffusers_own_pipeline(make_sdxl_run, tmp_path):
    lora = make_sdxl_run(*UNET_ONLY, *FEW_MODULES, "--max_train_steps", "1", "--learning_rate", "1").train().path

    def draw(name: str, *loras: str) -> np.ndarray:
        options = GenerateOptions(
            model=ModelOptions(pretrained_model_name_or_path=str(sdxl_folder())),
            lora=LoraOptions(lora=list(loras)),
            picture=PictureOptions(prompt=["a shape"], seed=7, steps=2, width=64, height=64, scale=5.0),
            output=OutputOptions(output_dir=tmp_path / name, device="cpu"),
        )
        (path,) = generate(options)
        return np.asarray(Image.open(path)).astype(int)

    base, adapted = draw("base"), draw("adapted", str(lora))
    assert np.abs(base - adapted).max() > 8
    pipeline = StableDiffusionXLPipeline.from_pretrained(sdxl_folder(), local_files_only=True, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = make_sampler("euler", scheduler_config())
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(7))
    settings = SimpleNamespace(num_inference_steps=2, guidance_scale=5.0, width=64, height=64)
    # An empty negative prompt is encoded, not set to zero.
    (theirs,) = pipeline("a shape", negative_prompt="", latents=noise, **vars(settings)).images
    assert np.abs(np.asarray(theirs).astype(int) - base).max() <= 1
    pipeline.load_lora_weights(str(lora.parent), weight_name=lora.name)
    (theirs,) = pipeline("a shape", negative_prompt="", latents=noise, **vars(settings)).images
    assert np.abs(np.asarray(theirs).astype(int) - adapted).max() <= 1
