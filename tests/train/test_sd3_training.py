"""Whole runs on a small SD3 model: the joint transformer and both CLIP encoders, fp16 under guard, files, pictures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file

from maulstick.adapters.factors import delta_weight
from maulstick.adapters.files import data_hash, read_lora_file
from maulstick.errors import OptionError
from maulstick.families.load import load_family
from maulstick.options.generate import GenerateOptions, LoraOptions, OutputOptions, PictureOptions
from maulstick.options.load import load_train_options
from maulstick.options.schema import ModelOptions
from maulstick.pictures.drawing import draw_pictures
from maulstick.pictures.prompts import Prompt
from maulstick.tools.generate import generate
from maulstick.train.attention_logits import LogitMeter
from maulstick.train.choice import Choice, choose_targets
from maulstick.train.events import read_events
from maulstick.train.preflight_model import fp16_on_overflowing_family, noise_without_signal
from maulstick.train.run import TrainingRun
from tests.sd3_models import sd3_file, sd3_folder

UNET_ONLY = ("--network_train_unet_only",)
PICTURE = {"width": 64, "height": 64, "steps": 2, "scale": 5.0}


@pytest.fixture
def make_sd3_run(make_run: Callable[..., TrainingRun]) -> Callable[..., TrainingRun]:
    """Return a function that makes a run of two steps on the small SD3 model without T5, with further arguments."""

    def make(*arguments: str, output: str = "out") -> TrainingRun:
        model = ("--pretrained_model_name_or_path", str(sd3_folder(with_t5=False)))
        length = () if "--max_train_steps" in arguments else ("--max_train_steps", "2")
        given = () if model[0] in arguments else model
        return make_run(*given, *length, *arguments, output=output)

    return make


@pytest.fixture(scope="module")
def choose() -> Callable[..., Choice]:
    options = ModelOptions(pretrained_model_name_or_path=str(sd3_folder(with_t5=False)))
    family = load_family(options, device=torch.device("cpu"), dtype=torch.float32)

    def choose(*arguments: str) -> Choice:
        required = ("--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o")
        return choose_targets(family, load_train_options([*required, "--learning_rate", "1e-3", *arguments]).options)

    return choose


def steps_of(output: Path) -> list[dict]:
    return [event for event in read_events(output / "last.events.jsonl") if event["event"] == "step"]


def blocks_of(choice: Choice) -> dict[int, int]:
    return dict(Counter(target.block for target in choice.targets["transformer"]))


# --- training ---------------------------------------------------------------------------------------------------------


def test_a_run_trains_every_module_and_says_what_it_is(make_sd3_run, tmp_path) -> None:
    path = make_sd3_run("--network_dim", "2", "--network_alpha", "1", "--max_train_steps", "3").train().path
    file = read_lora_file(path)
    prefixes = Counter("_".join(name.split("_")[:2]) for name in file.modules)
    assert prefixes == {"lora_unet": 29, "lora_te1": 72, "lora_te2": 192}
    # Nothing but the pooled text comes from the last layers, and both encoders have that.
    assert all(weights.up.any() for weights in file.modules.values())
    assert file.metadata["ss_base_model_version"] == "3-5-medium"
    assert file.metadata["ss_network_module"] == "networks.lora_sd3"
    assert file.metadata["modelspec.architecture"] == "stable-diffusion-3-5-medium/lora"
    assert "modelspec.prediction_type" not in file.metadata
    assert (file.metadata["ss_weighting_scheme"], file.metadata["ss_training_shift"]) == ("logit_normal", "3.0")
    steps = steps_of(tmp_path / "out")
    assert {(s["lr/unet"], s["lr/textencoder1"], s["lr/textencoder2"]) for s in steps} == {(1e-3, 1e-3, 1e-3)}
    assert all(s["norm/grad"] > 0 for s in steps)


@pytest.mark.slow
def test_the_loss_falls(make_sd3_run, tmp_path) -> None:
    # An untrained model knows nothing of the flow: a high rate learns the pictures' mean at least.
    arguments = (*UNET_ONLY, "--max_train_steps", "40", "--learning_rate", "1e-2", "--network_dim", "8")
    make_sd3_run(*arguments, "--network_alpha", "8").train()
    losses = [step["loss/current"] for step in steps_of(tmp_path / "out")]
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:3])


def test_the_saved_file_starts_another_run_where_it_ended(make_sd3_run) -> None:
    first = make_sd3_run(*UNET_ONLY).train().path
    start = (
        "--network_weights",
        str(first),
        "--dim_from_weights",
        "--learning_rate",
        "1e-30",
        "--max_train_steps",
        "1",
    )
    again = make_sd3_run(*UNET_ONLY, *start, output="again").train().path
    ours, theirs = read_lora_file(again).modules, read_lora_file(first).modules
    assert ours.keys() == theirs.keys()
    for name, weights in ours.items():
        torch.testing.assert_close(delta_weight(weights), delta_weight(theirs[name]), rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_fp16_with_loss_scale_and_guard_stays_finite(make_sd3_run, tmp_path) -> None:
    fp16 = ("--mixed_precision", "fp16", "--grad_norm_mode", "stable", "--pretrained_model_name_or_path")
    run = make_sd3_run(*fp16, str(sd3_folder()))
    prepared = run.prepare()
    assert any("T5 is kept in bf16" in notice for notice in prepared.plan.notices)
    tensors = load_file(run.train().path)
    assert prepared.family.denoiser.dtype == torch.float16
    # T5 would drop a tenth of its states in training mode.
    assert set(run.loop.parts.trainee.networks) == {"denoiser", "text_encoder", "text_encoder_2"}
    assert not prepared.family.text_encoders["text_encoder_3"].training
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert sum(tensor.any().item() for name, tensor in tensors.items() if name.endswith("up.weight")) == 29 + 264
    steps = steps_of(tmp_path / "out")
    assert all(math.isfinite(step["loss/current"]) and step["norm/grad"] > 0 for step in steps)
    assert steps[-1]["train/skipped_steps"] == 0


@pytest.mark.slow
def test_cached_text_states_change_nothing_under_dropout(make_sd3_run) -> None:
    captions = ("--shuffle_caption", "--caption_dropout_rate", "0.4", "--max_train_steps", "3")
    arguments = (*UNET_ONLY, "--train_block_indices", "2", *captions)
    t5 = ("--pretrained_model_name_or_path", str(sd3_folder()))
    plain = data_hash(make_sd3_run(*t5, *arguments).train().path)
    cached = make_sd3_run(*t5, *arguments, "--cache_text_encoder_outputs", "--cache_latents", output="cached")
    assert data_hash(cached.train().path) == plain
    known = make_sd3_run(*UNET_ONLY, "--cache_text_encoder_outputs", "--cache_latents", output="known")
    assert known.prepare().family.encoders_on_device() == frozenset()
    without = make_sd3_run(*t5, "--no_t5xxl", *arguments, output="without")
    assert data_hash(without.train().path) != plain


def test_attention_logits_are_watched_where_nothing_bounds_them() -> None:
    seen = []
    for joined in (False, True):
        options = ModelOptions(pretrained_model_name_or_path=str(sd3_folder(with_t5=False, qk_norm=False)))
        family = load_family(options, device="cpu", dtype=torch.float32)
        if joined:
            family.prepare_for_adapters()
        meter = LogitMeter({"transformer": family.denoiser})
        text = {"encoder_hidden_states": torch.ones(1, 9, 256), "pooled_projections": torch.ones(1, 160)}
        with meter.watching(), torch.no_grad():
            family.predict(torch.ones(1, 16, 8, 8), torch.tensor([500.0]), text)
        seen.append(meter.largest())
    (apart, where), (together, same) = seen
    assert together == pytest.approx(apart, rel=1e-4)
    assert where == same
    assert where.startswith("transformer.transformer_blocks.")


# --- options ----------------------------------------------------------------------------------------------------------


def test_blocks_are_chosen_and_weighed_by_number(choose) -> None:
    assert blocks_of(choose(*UNET_ONLY)) == {0: 12, 1: 10, 2: 7}
    assert blocks_of(choose(*UNET_ONLY, "--train_block_indices", "0,2")) == {0: 12, 2: 7}
    assert blocks_of(choose(*UNET_ONLY, "--network_args", "train_block_indices=1-2")) == {1: 10, 2: 7}
    assert choose("--train_block_indices", "none").targets.keys() == {"text_encoder", "text_encoder_2"}
    assert choose("--network_args", "train_block_indices=").targets.keys() == {"text_encoder", "text_encoder_2"}
    weighed = choose(*UNET_ONLY, "--block_lr", "block.0-1=0.5", "block.2=0")
    assert blocks_of(weighed) == {0: 12, 1: 10}
    rates = weighed.rates["transformer"].groups(weighed.targets["transformer"])
    assert rates == {"unet_block0": 5e-4, "unet_block1": 5e-4}
    ranks = choose(*UNET_ONLY, "--network_args", "block_dims=2,0,4")
    assert {(t.block, t.dim) for t in ranks.targets["transformer"]} == {(0, 2), (2, 4)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train_block_indices", "3"], "there are 0 to 2"),
        ([*UNET_ONLY, "--train_block_indices", "none"], "train_block_indices = none leaves out the denoiser"),
        (
            ["--network_args", "down_lr_weight=1"],
            "down_lr_weight: this model has no part 'down'. .* block_lr, by block",
        ),
        (["--conv_dim", "4"], "conv_dim is given, but SD3.5 medium has no convolutions"),
        (["--block_lr", "block.3=1"], "block has the blocks 0 to 2"),
    ],
)
def test_choices_that_the_model_does_not_have_are_refused(choose, arguments, said) -> None:
    with pytest.raises(OptionError, match=said):
        choose(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--logit_mean", "1", "--weighting_scheme", "mode"], "weighting_scheme = mode does not use it"),
        (["--mode_scale", "1"], "mode_scale is given, but weighting_scheme = logit_normal"),
        (["--training_shift", "0"], "training_shift = 0.0: expected above 0"),
        (["--network_args", "split_qkv=True"], "network_args 'split_qkv' .*trained as one"),
        (["--network_args", "context_attn_dim=4"], "ranks by kind of layer are not supported"),
        (["--min_snr_gamma", "5"], "min_snr_gamma = 5: SD3.5 medium is trained by flow matching"),
        (["--network_module", "networks.lora_flux"], "network_module = networks.lora_flux"),
        (["--resolution", "144"], "training picture of 144x144 pixels is too large: SD3.5 medium .* up to 128 pixels"),
        (["--resolution", "72"], "multiples of 16 pixels. Use 64 or 80"),
    ],
)
def test_options_that_mean_nothing_are_refused(make_sd3_run, arguments, said) -> None:
    with pytest.raises(OptionError, match=said):
        make_sd3_run(*arguments).prepare()


@pytest.mark.slow
def test_check_names_weights_that_make_spikes_and_fp16_without_norms(make_sd3_run) -> None:
    def codes(*arguments: str) -> set[str]:
        prepared = make_sd3_run(*UNET_ONLY, *arguments).prepare()
        return {found.code for found in (*noise_without_signal(prepared), *fp16_on_overflowing_family(prepared))}

    assert codes("--mixed_precision", "fp16") == set()
    assert codes("--weighting_scheme", "sigma_sqrt") == {"loss_weights_far_apart"}
    assert codes("--weighting_scheme", "cosmap") == set()
    medium = ("--pretrained_model_name_or_path", str(sd3_folder(with_t5=False, qk_norm=False)))
    assert codes(*medium, "--mixed_precision", "fp16") == {"fp16_overflows"}
    assert codes(*medium, "--mixed_precision", "bf16") == set()


def test_another_models_network_module_is_refused(make_run, make_sd3_run) -> None:
    with pytest.raises(OptionError, match=r"networks.lora_sd3, but the model is SD 1.x"):
        make_run("--network_module", "networks.lora_sd3").prepare()
    make_sd3_run("--network_module", "networks.lora_sd3").prepare()


def test_a_sampler_that_does_not_fit_is_refused_before_training(make_sd3_run, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat --ss ddim")
    sample = ("--sample_prompts", str(prompts), "--sample_every_n_steps", "1")
    with pytest.raises(OptionError, match=r"Sampler 'ddim' does not fit SD3.5 medium. Those that do: euler"):
        make_sd3_run(*sample).prepare()


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(output: Path, *loras: str, model: Path | None = None) -> np.ndarray:
    options = GenerateOptions(
        model=ModelOptions(pretrained_model_name_or_path=str(model or sd3_folder(with_t5=False))),
        lora=LoraOptions(lora=list(loras)),
        picture=PictureOptions(prompt=["a shape"], seed=7, **PICTURE),
        output=OutputOptions(output_dir=output, device="cpu"),
    )
    (path,) = generate(options)
    return np.asarray(Image.open(path)).astype(int)


@pytest.mark.slow
def test_pictures_with_the_saved_file_are_those_of_the_live_weights(make_sd3_run, tmp_path) -> None:
    run = make_sd3_run("--max_train_steps", "2", "--learning_rate", "1e-2")
    lora = run.train().path
    live: list[np.ndarray] = []
    prompt = Prompt("a shape", negative="", seed=7, sampler="euler", **PICTURE)
    draw_pictures(run.prepared.family, [prompt], lambda picture: live.append(np.asarray(picture.image).astype(int)))
    adapted, base = draw(tmp_path / "adapted", str(lora)), draw(tmp_path / "base")
    assert np.abs(base - adapted).max() > 8
    assert np.abs(adapted - live[0]).max() <= 1
    assert np.abs(draw(tmp_path / "off", f"{lora}:0") - base).max() <= 1
    assert np.abs(draw(tmp_path / "file", str(lora), model=sd3_file()) - adapted).max() <= 1


def test_pictures_are_those_of_diffusers_own_pipeline(tmp_path) -> None:
    ours = draw(tmp_path / "ours")
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        sd3_folder(with_t5=False), local_files_only=True, text_encoder_3=None, tokenizer_3=None
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(7))
    size = {"num_inference_steps": 2, "guidance_scale": 5.0, "width": 64, "height": 64}
    (theirs,) = pipeline("a shape", negative_prompt="", latents=noise, **size).images
    assert np.abs(np.asarray(theirs).astype(int) - ours).max() <= 1


def test_a_side_that_the_patches_do_not_divide_is_cut_and_said(tmp_path) -> None:
    said: list[str] = []
    options = GenerateOptions(
        model=ModelOptions(pretrained_model_name_or_path=str(sd3_folder(with_t5=False))),
        lora=LoraOptions(),
        picture=PictureOptions(prompt=["a shape --w 72 --h 80"], steps=1),
        output=OutputOptions(output_dir=tmp_path, device="cpu"),
    )
    (path,) = generate(options, say=said.append)
    assert Image.open(path).size == (64, 80)
    too_large = replace(options, picture=PictureOptions(prompt=["a shape"], width=144))
    with pytest.raises(OptionError, match=r"A picture of 144x64 pixels is too large: SD3.5 medium .* up to 128 pixels"):
        generate(too_large)
    assert "width 72 is drawn as 64: sides are multiples of 16, 64 at least" in said
