"""The SD3 family: three text encoders, T5's precision, the flow, the original code's layers, files and folders."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import nn

from maulstick.adapters.targets import plan_lora
from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Family
from maulstick.families.configs import shipped_config
from maulstick.families.flow import FlowSchedule
from maulstick.families.joint_layout import ShiftBeforeScale, join_layers
from maulstick.families.load import load_family
from maulstick.options.schema import ModelOptions, ObjectiveOptions
from tests.models import model_folder
from tests.sd3_models import SCALING, SHIFT, T5_WIDTH, encoder_file, sd3_file, sd3_folder, small_sd3

CAPTIONS = ["a photo of a cat", ""]
END = 49407


def load(path: Path, dtype: torch.dtype = torch.float32, objective: ObjectiveOptions | None = None, **options: Any):
    model = ModelOptions(pretrained_model_name_or_path=str(path), **options)
    return load_family(model, device="cpu", dtype=dtype, objective=objective)


@pytest.fixture(scope="module")
def family() -> Family:
    return load(sd3_folder())


def noisy(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 16, 8, 8, generator=torch.Generator().manual_seed(0))


def text(count: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(count, 20, T5_WIDTH, generator=generator)
    return {"encoder_hidden_states": states, "pooled_projections": torch.randn(count, 160, generator=generator)}


TIMES = torch.tensor([100.0, 900.0])

# --- what it is -------------------------------------------------------------------------------------------------------


def test_it_says_what_it_is(family: Family) -> None:
    assert (family.name, family.base_model_version) == ("SD3.5 medium", "3-5-medium")
    assert family.architecture == "stable-diffusion-3-5-medium/lora"
    assert (family.vae_scale, family.latent_channels, family.native_size, family.size_multiple) == (8, 16, 64, 16)
    assert family.prediction_type == "flow_prediction"
    assert list(family.text_encoders) == ["text_encoder", "text_encoder_2", "text_encoder_3"]
    assert list(family.text_encoder_naming) == ["text_encoder", "text_encoder_2"]
    assert family.block_names() == ("block.0", "block.1", "block.2")
    assert family.block_parts() == {"block": range(3)}
    plain = load(sd3_folder(qk_norm=False, with_t5=False))
    assert (plain.name, plain.base_model_version) == ("SD3 medium", "3-medium")


SIZES = {
    "medium": ({}, 237, 24),
    "3.5 medium": ({"qk_norm": "rms_norm", "dual_attention_layers": tuple(range(13))}, 263, 24),
    "3.5 large": ({"qk_norm": "rms_norm", "num_layers": 38, "num_attention_heads": 38}, 377, 38),
}


@pytest.mark.parametrize("size", SIZES)
def test_the_full_size_models_have_sd_scripts_modules_and_names(family: Family, size: str) -> None:
    changes, count, blocks = SIZES[size]
    config = shipped_config("sd3", "transformer") | changes
    config["caption_projection_dim"] = 64 * config["num_attention_heads"]
    with torch.device("meta"):
        transformer = SD3Transformer2DModel.from_config(config)
    join_layers(transformer)
    targets = plan_lora(transformer, component="transformer", network_dim=1, block_of=family.block_index)
    names = {family.key_names.name("transformer", target.path) for target in targets}
    assert len(targets) == len(names) == count
    tails = {"attn_qkv", "attn_proj", "mlp_fc1", "mlp_fc2", "adaLN_modulation_1"}
    dual = {"attn2_qkv", "attn2_proj"}
    expected = set()
    for block in range(blocks):
        of_text = {"attn_qkv", "adaLN_modulation_1"} if block == blocks - 1 else tails
        of_image = tails | dual if block in changes.get("dual_attention_layers", ()) else tails
        expected |= {f"lora_unet_joint_blocks_{block}_context_block_{tail}" for tail in of_text}
        expected |= {f"lora_unet_joint_blocks_{block}_x_block_{tail}" for tail in of_image}
    assert names == expected
    assert all(f"joint_blocks_{t.block}_" in family.key_names.name("transformer", t.path) for t in targets)
    located = {name: family.key_names.locate(name) for name in names}
    assert {location.path for location in located.values() if location} == {target.path for target in targets}


def test_text_encoder_modules_are_those_of_sd_scripts(family: Family) -> None:
    found = Counter()
    names = set()
    for component, encoder in family.text_encoders.items():
        for target in plan_lora(encoder, component=component, network_dim=1):
            found[component] += 1
            names.add(family.key_names.name(component, target.path))
            assert family.key_names.locate(family.key_names.name(component, target.path)).component == component
    # T5 of full size has 24 layers of 7 modules; the small one has two.
    assert found == {"text_encoder": 72, "text_encoder_2": 192, "text_encoder_3": 14}
    assert "lora_te3_encoder_block_1_layer_1_DenseReluDense_wi_0" in names
    assert "lora_te3_encoder_block_0_layer_0_SelfAttention_q" in names
    assert "lora_te2_text_model_encoder_layers_31_mlp_fc2" in names


# --- loading ----------------------------------------------------------------------------------------------------------


def assert_same_weights(network: nn.Module, expected: nn.Module) -> None:
    ours, theirs = network.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {"path": sd3_folder},
        {"path": lambda: sd3_file(with_t5=True), "t5xxl": sd3_folder},
        {"path": sd3_file, "t5xxl": sd3_folder},
        {
            "path": lambda: sd3_file(with_encoders=False),
            "clip_l": lambda: encoder_file("clip_l"),
            "clip_g": lambda: encoder_file("clip_g"),
            "t5xxl": sd3_folder,
        },
        {"path": sd3_folder, "t5xxl": lambda: encoder_file("t5xxl")},
    ],
    ids=["folder", "whole file", "file with CLIP", "files", "folder with another T5"],
)
def test_every_form_gives_the_weights_that_lie_in_it(options: dict[str, Any]) -> None:
    given = {name: make() for name, make in options.items()}
    family = load(given.pop("path"), **{name: str(path) for name, path in given.items()})
    model = small_sd3()
    assert_same_weights(family.denoiser, model.transformer)
    assert_same_weights(family.vae, model.vae)
    for name, encoder in family.text_encoders.items():
        assert_same_weights(encoder, getattr(model, name))
    t5: Any = family.text_encoders["text_encoder_3"]
    assert t5.encoder.embed_tokens is t5.shared
    assert list(family.text_encoders) == ["text_encoder", "text_encoder_2", "text_encoder_3"]


def test_a_file_without_a_vae_takes_the_one_that_is_named(tmp_path: Path) -> None:
    tensors = {name: t for name, t in load_file(sd3_file()).items() if not name.startswith("first_stage_model.")}
    save_file(tensors, tmp_path / "model.safetensors")
    family = load(tmp_path / "model.safetensors", vae=str(sd3_folder()))
    assert_same_weights(family.vae, small_sd3().vae)
    with pytest.raises(ModelError, match=r"has no VAE .* Name one with vae"):
        load(tmp_path / "model.safetensors")


def test_a_projection_that_a_file_leaves_out_is_an_identity(tmp_path: Path) -> None:
    tensors = load_file(encoder_file("clip_l"))
    del tensors["text_projection.weight"]
    save_file(tensors, tmp_path / "clip_l.safetensors")
    family = load(sd3_file(), clip_l=str(tmp_path / "clip_l.safetensors"))
    assert torch.equal(family.text_encoders["text_encoder"].text_projection.weight, torch.eye(64))


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (lambda: sd3_file(with_encoders=False), {}, "no text encoder clip_l and no clip_g. Name its file with clip_l"),
        (lambda: sd3_file(with_t5=True), {}, "its tokenizer is not.*leave T5 out with no_t5xxl"),
        (sd3_folder, {"no_t5xxl": True, "t5xxl": "x"}, "no_t5xxl and t5xxl contradict"),
        (lambda: sd3_folder(with_t5=False), {"t5xxl_max_token_length": 77}, "has no T5"),
        (sd3_file, {"clip_l": "clip_g"}, r"clip_l = .*clip_g.safetensors: that is no clip_l; it is a clip_g"),
        (sd3_file, {"clip_g": "t5xxl"}, "it is a t5xxl"),
        (sd3_folder, {"clip_skip": 2}, "clip_skip = 2: it means nothing for SD3"),
        (sd3_folder, {"v_parameterization": True}, "v_parameterization = True: it means nothing"),
        (sd3_folder, {"v2": True}, "v2 contradicts"),
        (sd3_folder, {"max_token_length": 150}, "t5xxl_max_token_length says how many T5 reads"),
        (model_folder, {"clip_l": "x"}, "clip_l is for SD3, but .* is an SD 1.x model"),
        (model_folder, {"no_t5xxl": True}, "no_t5xxl is for SD3"),
    ],
)
def test_what_cannot_be_used_is_refused(path: Any, options: dict[str, Any], said: str) -> None:
    files = {
        k: str(encoder_file(v)) if v in ("clip_l", "clip_g", "t5xxl") and k != "no_t5xxl" else v
        for k, v in options.items()
    }
    with pytest.raises((OptionError, ModelError), match=said):
        load(path(), **files)


def test_the_clip_skip_that_kohya_ss_writes_into_every_file_counts_as_not_given() -> None:
    assert load(sd3_folder(), clip_skip=1).text_identity == load(sd3_folder()).text_identity


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["joint_blocks.0.x_block.attn.qkv.weight"], "is an SD3 transformer alone"),
        (["model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight"], "has no VAE"),
    ],
)
def test_a_part_of_a_file_is_called_what_it_is(tmp_path: Path, names: list[str], said: str) -> None:
    save_file({name: torch.zeros(3, 1) for name in names}, tmp_path / "part.safetensors")
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "part.safetensors")


def test_an_incomplete_folder_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(sd3_folder(with_t5=False), tmp_path / "model")
    shutil.rmtree(folder / "tokenizer_2")
    with pytest.raises(ModelError, match=r"it lacks tokenizer_2. A diffusers folder for SD3 has"):
        load(folder)


# --- captions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_t5", [True, False])
def test_text_is_what_diffusers_own_pipeline_gives(with_t5: bool) -> None:
    folder = sd3_folder(with_t5=with_t5)
    without = {} if with_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, **without)
    family = load(folder)
    with torch.no_grad():
        ours = family.encode_text(family.tokenize(CAPTIONS))
        theirs, _, pooled, _ = pipeline.encode_prompt(
            CAPTIONS, None, None, device="cpu", do_classifier_free_guidance=False
        )
    assert ours["encoder_hidden_states"].shape == (2, 77 + 256, T5_WIDTH)
    torch.testing.assert_close(ours["encoder_hidden_states"], theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["pooled_projections"], pooled, rtol=0, atol=0)
    assert bool(ours["encoder_hidden_states"][:, 77:].any()) == with_t5


def test_t5_can_be_left_out_and_cut(family: Family) -> None:
    without = load(sd3_folder(), no_t5xxl=True)
    assert list(without.text_encoders) == ["text_encoder", "text_encoder_2"]
    assert "Without T5" in without.notes[0]
    states = without.encode_text(without.tokenize(CAPTIONS))["encoder_hidden_states"]
    assert states.shape[1] == 333
    assert not states[:, 77:].any()
    assert without.text_identity != family.text_identity
    short = load(sd3_folder(), t5xxl_max_token_length=20)
    tokens = short.tokenize(["a cat " * 20])
    assert tokens["text_encoder_3"].shape == (1, 20)
    assert tokens["text_encoder_3"][0, -1] == 1
    assert short.encode_text(tokens)["encoder_hidden_states"].shape[1] == 97
    assert short.text_identity != family.text_identity


@pytest.mark.parametrize("source", [sd3_folder, sd3_file])
def test_the_second_tokenizer_pads_with_token_zero(source: Any) -> None:
    tokens = load(source(), no_t5xxl=True).tokenize([""])
    assert tokens["text_encoder"][0, 1:].tolist() == [END] * 76
    assert tokens["text_encoder_2"][0, 1:].tolist() == [END] + [0] * 75


def test_t5_is_never_in_fp16(tmp_path: Path) -> None:
    folder = shutil.copytree(sd3_folder(), tmp_path / "model")
    file = folder / "text_encoder_3" / "model.safetensors"
    tensors = load_file(file)
    # As in the real T5: the feed-forward output of a layer is far beyond 65504.
    tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"] *= 1e7
    save_file(tensors, file, {"format": "pt"})
    family = load(folder, torch.float16)
    t5 = family.text_encoders["text_encoder_3"]
    assert {parameter.dtype for parameter in t5.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in family.text_encoders["text_encoder"].parameters()} == {torch.float16}
    assert any("T5 is kept in bf16" in note for note in family.notes)
    seen = []
    wo = t5.encoder.block[1].layer[1].DenseReluDense.wo
    handle = wo.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.autocast("cpu", dtype=torch.float16):
        states = family.encode_text(family.tokenize(CAPTIONS))["encoder_hidden_states"]
    handle.remove()
    assert seen[0].dtype == torch.bfloat16
    assert seen[0].abs().max() > 65504
    assert torch.isfinite(states).all()
    assert states[:, 77:].any()
    assert load(sd3_folder(), torch.bfloat16).notes == ()


# --- images -----------------------------------------------------------------------------------------------------------


def test_latents_are_shifted_and_scaled(family: Family) -> None:
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        mean = small_sd3().vae.encode(pixels).latent_dist.mean
    latents = family.encode_images(pixels)
    torch.testing.assert_close(latents, (mean - SHIFT) * SCALING)
    with torch.no_grad():
        torch.testing.assert_close(family.decode_latents(latents), small_sd3().vae.decode(mean).sample)
    assert family.latent_identity.endswith(f":{SCALING}:{SHIFT}")


# --- the transformer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_original_layers_compute_the_same(qk_norm: bool) -> None:
    family = load(sd3_folder(with_t5=False, qk_norm=qk_norm))
    before = family.predict(noisy(), TIMES, text())
    with torch.no_grad():
        theirs = small_sd3(qk_norm=qk_norm).transformer(noisy(), timestep=TIMES, **text()).sample
    torch.testing.assert_close(before, theirs, rtol=0, atol=0)
    values = sum(parameter.numel() for parameter in family.denoiser.parameters())
    family.prepare_for_adapters()
    family.prepare_for_adapters()
    torch.testing.assert_close(family.predict(noisy(), TIMES, text()), theirs, rtol=1e-4, atol=1e-5)
    assert sum(parameter.numel() for parameter in family.denoiser.parameters()) == values
    assert not any(parameter.requires_grad for parameter in family.denoiser.parameters())
    paths = [path for path, module in family.denoiser.named_modules() if isinstance(module, ShiftBeforeScale)]
    assert paths == ["transformer_blocks.2.norm1_context", "norm_out"]
    assert not any(path.endswith((".to_q", ".add_k_proj")) for path, _ in family.denoiser.named_modules())


def test_the_joined_layers_are_the_original_codes(family: Family) -> None:
    joined = load(sd3_folder(with_t5=False))
    joined.prepare_for_adapters()
    prefix = "model.diffusion_model."
    original = {name.removeprefix(prefix): t for name, t in load_file(sd3_file()).items() if name.startswith(prefix)}
    compared = 0
    for target in plan_lora(joined.denoiser, component="transformer", network_dim=1):
        name = joined.key_names.name("transformer", target.path).removeprefix("lora_unet_")
        (theirs,) = (t for key, t in original.items() if key.replace(".", "_") == f"{name}_weight")
        assert torch.equal(joined.denoiser.get_submodule(target.path).weight, theirs), name
        compared += 1
    assert compared == 29


def test_checkpointed_gradients_are_the_same() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = ModelOptions(pretrained_model_name_or_path=str(sd3_folder(with_t5=False)))
        family = load_family(model, device="cpu", dtype=torch.float32, gradient_checkpointing=checkpointing)
        family.prepare_for_adapters()
        weight = family.denoiser.get_submodule("transformer_blocks.0.attn2.to_qkv").weight.requires_grad_()
        family.predict(noisy(), TIMES, text()).square().mean().backward()
        gradients.append(weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-8)


# --- the flow ---------------------------------------------------------------------------------------------------------


def flow(shift: float = 3.0, **options: Any) -> FlowSchedule:
    return FlowSchedule({"shift": shift}, ObjectiveOptions(**options))


def drawn(schedule: FlowSchedule, count: int = 20_000) -> torch.Tensor:
    return schedule.sample_timesteps(count, torch.Generator().manual_seed(0))


def test_noisy_inputs_and_targets_are_straight_lines(family: Family) -> None:
    latents, noise, times = torch.full((2, 1, 1, 1), 3.0), torch.full((2, 1, 1, 1), -1.0), torch.tensor([250.0, 1000.0])
    assert family.add_noise(latents, noise, times).flatten().tolist() == [2.0, -1.0]
    assert family.target(latents, noise, times).flatten().tolist() == [-4.0, -4.0]


def test_timesteps_are_those_of_the_scheduler() -> None:
    for shift in (1.0, 3.0):
        grid = FlowMatchEulerDiscreteScheduler(shift=shift).timesteps.double()
        ours = drawn(flow(shift)).double()
        nearest = (ours[:500, None] - grid[None]).abs().amin(1)
        assert nearest.max() < 1e-3
    assert drawn(flow(shift=3.0)).equal(drawn(flow(shift=1.0, training_shift=3.0)))
    assert not drawn(flow()).equal(drawn(flow(training_shift=1.0)))


def normal_cdf(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1.0, 0.5), (-0.5, 2.0)])
def test_logit_normal_draws_have_that_distribution(mean: float, deviation: float) -> None:
    shares = drawn(flow(1.0, logit_mean=mean, logit_std=deviation)) / 1000
    for limit in (0.2, 0.5, 0.8):
        expected = normal_cdf((math.log(limit / (1 - limit)) - mean) / deviation)
        assert float((shares <= limit).float().mean()) == pytest.approx(expected, abs=0.012)
    # The median of u = 1/2 goes to 3/4 under a shift of 3.
    assert float(drawn(flow()).median()) == pytest.approx(750, abs=8)


def test_other_schemes_draw_evenly_or_by_the_mode() -> None:
    for scheme in ("uniform", "none", "sigma_sqrt", "cosmap"):
        shares = drawn(flow(1.0, weighting_scheme=scheme)) / 1000
        assert float(shares.mean()) == pytest.approx(0.5, abs=0.01)
        assert float(shares.std()) == pytest.approx(1 / math.sqrt(12), abs=0.005)
    # f(u) = 1 - u - s (cos^2(pi u / 2) - 1 + u), so that f(1/4) is exceeded by three quarters of the draws.
    quarter = 0.75 - 1.29 * (math.cos(math.pi / 8) ** 2 - 0.75)
    shares = drawn(flow(1.0, weighting_scheme="mode")) / 1000
    assert float((shares <= quarter).float().mean()) == pytest.approx(0.75, abs=0.01)
    stronger = drawn(flow(1.0, weighting_scheme="mode", mode_scale=1.7)) / 1000
    assert stronger.std() < shares.std()


def test_draws_depend_on_the_generator_alone() -> None:
    for scheme in ("logit_normal", "mode", "uniform"):
        first = drawn(flow(weighting_scheme=scheme), 4)
        torch.rand(3)
        assert drawn(flow(weighting_scheme=scheme), 4).equal(first)
    assert drawn(flow()).min() > 0
    assert drawn(flow()).max() <= 1000


def test_loss_weights() -> None:
    times = torch.tensor([100.0, 500.0, 1000.0])
    assert flow().loss_weights(times).tolist() == [1, 1, 1]
    torch.testing.assert_close(flow(weighting_scheme="sigma_sqrt").loss_weights(times), torch.tensor([100.0, 4.0, 1.0]))
    cosmap = [2 / (math.pi * (1 - 2 * s + 2 * s * s)) for s in (0.1, 0.5, 1.0)]
    torch.testing.assert_close(flow(weighting_scheme="cosmap").loss_weights(times), torch.tensor(cosmap))


@pytest.mark.parametrize(
    ("folder", "objective", "said"),
    [
        (sd3_folder, {"min_snr_gamma": 5.0}, "min_snr_gamma = 5: SD3.5 medium is trained by flow matching"),
        (sd3_folder, {"noise_offset": 0.1}, "noise_offset = 0.1: SD3.5 medium"),
        (model_folder, {"weighting_scheme": "mode"}, "weighting_scheme = mode: .* but this model is SD 1.x"),
        (model_folder, {"training_shift": 3.0}, "training_shift = 3.0"),
        (model_folder, {"logit_mean": 0.0}, "logit_mean = 0.0"),
    ],
)
def test_options_of_another_kind_of_noise_are_refused(folder: Any, objective: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        load(folder(), objective=ObjectiveOptions(**objective))


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_only_a_flow_sampler_draws(family: Family) -> None:
    assert family.sampler_names == ("euler",)
    assert family.pipeline("euler").scheduler.config.shift == 3.0
    with pytest.raises(OptionError, match=r"'ddim' does not fit SD3.5 medium, which follows a flow. Use euler"):
        family.pipeline("ddim")
