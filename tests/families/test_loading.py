"""Weights arrive in the right place, from every form a model comes in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maulstick.families.sd import StableDiffusion
from tests.families.conftest import Load
from tests.models import (
    SmallModel,
    Version,
    model_folder,
    original_layout,
    save_folder,
    single_file,
    small_model,
)

VERSIONS: tuple[Version, ...] = ("sd1", "sd2")


def assert_same_weights(network: nn.Module, expected: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    ours, theirs = network.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, theirs[name].to(dtype)), name


def assert_is(family: StableDiffusion, model: SmallModel, dtype: torch.dtype = torch.float32) -> None:
    assert_same_weights(family.denoiser, model.unet, dtype)
    assert_same_weights(family.vae, model.vae, dtype)
    assert_same_weights(family.text_encoders["text_encoder"], model.text_encoder, dtype)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_folder_gives_the_weights_that_lie_in_it(load: Load, version: Version) -> None:
    family = load(model_folder(version))
    assert_is(family, small_model(version))
    assert family.name == {"sd1": "SD 1.x", "sd2": "SD 2.x"}[version]
    assert family.base_model_version == {"sd1": "sd_v1", "sd2": "sd_v2"}[version]
    assert family.architecture == {"sd1": "stable-diffusion-v1/lora", "sd2": "stable-diffusion-v2-512/lora"}[version]
    assert (family.vae_scale, family.latent_channels, family.native_size) == (8, 4, 64)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_original_checkpoint_gives_the_same_weights_and_predictions(load: Load, version: Version) -> None:
    from_folder, from_file = load(model_folder(version)), load(single_file(version))
    assert_is(from_file, small_model(version))
    assert from_file.base_model_version == from_folder.base_model_version
    noisy, steps = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([10, 900])
    predictions = [
        family.predict(noisy, steps, family.encode_text(family.tokenize(["a cat", ""])))
        for family in (from_folder, from_file)
    ]
    torch.testing.assert_close(*predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text_prefix", ["text_model.", ""])
def test_text_encoders_of_both_naming_schemes_are_really_loaded(load: Load, tmp_path: Path, text_prefix: str) -> None:
    family = load(save_folder(small_model(), tmp_path, text_prefix=text_prefix))
    assert_same_weights(family.text_encoders["text_encoder"], small_model().text_encoder)


def test_half_precision_variants_are_found_and_brought_to_the_wanted_precision(load: Load, tmp_path: Path) -> None:
    folder = save_folder(small_model(), tmp_path, variant=".fp16", dtype=torch.float16)
    family = load(folder)
    half = {name: tensor.half().float() for name, tensor in small_model().unet.state_dict().items()}
    assert all(torch.equal(tensor, half[name]) for name, tensor in family.denoiser.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_precision_asked_for_is_the_precision_loaded(load: Load, dtype: torch.dtype) -> None:
    family = load(model_folder(), dtype=dtype, vae_dtype=torch.float32)
    assert_same_weights(family.denoiser, small_model().unet, dtype)
    assert_same_weights(family.text_encoders["text_encoder"], small_model().text_encoder, dtype)
    assert_same_weights(family.vae, small_model().vae, torch.float32)


def test_full_precision_is_preferred_to_the_half_variant_beside_it(load: Load, tmp_path: Path) -> None:
    save_folder(small_model(), tmp_path, variant=".fp16", dtype=torch.float16)
    save_folder(small_model(), tmp_path)
    assert_is(load(tmp_path), small_model())


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("is_archive", [True, False])
def test_pickled_checkpoints_load_as_plain_tensors(load: Load, tmp_path: Path, nested: bool, is_archive: bool) -> None:
    tensors = original_layout(small_model())
    content: Mapping[str, object] = {"state_dict": tensors, "global_step": 7} if nested else tensors
    torch.save(content, tmp_path / "model.ckpt", _use_new_zipfile_serialization=is_archive)
    assert_is(load(tmp_path / "model.ckpt"), small_model())


def test_pickled_weights_in_a_folder_load_too(load: Load, tmp_path: Path) -> None:
    save_folder(small_model(), tmp_path)
    for part, old, new in (
        ("unet", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
        ("text_encoder", "model.safetensors", "pytorch_model.bin"),
    ):
        torch.save(load_file(tmp_path / part / old), tmp_path / part / new)
        (tmp_path / part / old).unlink()
    assert_is(load(tmp_path), small_model())


def test_sharded_weights_are_joined(load: Load, tmp_path: Path) -> None:
    unet = save_folder(small_model(), tmp_path) / "unet"
    tensors = load_file(unet / "diffusion_pytorch_model.safetensors")
    (unet / "diffusion_pytorch_model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, unet / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (unet / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert_is(load(tmp_path), small_model())


def test_running_averages_schedules_and_unused_buffers_are_passed_over(load: Load, tmp_path: Path) -> None:
    extra = {
        "model_ema.decay": torch.tensor(0.9999),
        "model_ema.diffusion_modelinput_blocks00weight": torch.zeros(3),
        "betas": torch.zeros(1000),
        "sqrt_one_minus_alphas_cumprod": torch.zeros(1000),
        "cond_stage_model.logit_scale": torch.tensor(1.0),
        "first_stage_model.loss.logvar": torch.zeros(1),
    }
    save_file(original_layout(small_model()) | extra, tmp_path / "model.safetensors")
    family = load(tmp_path / "model.safetensors")
    assert_is(family, small_model())
    assert family.notes == ()


def test_tensors_of_no_known_use_outside_the_parts_are_named_in_a_note(load: Load, tmp_path: Path) -> None:
    save_file(original_layout(small_model()) | {"my_tool.thing": torch.zeros(1)}, tmp_path / "model.safetensors")
    (note,) = load(tmp_path / "model.safetensors").notes
    assert "my_tool.thing" in note


def test_vae_attention_under_its_old_names_is_found(load: Load, tmp_path: Path) -> None:
    vae = save_folder(small_model(), tmp_path) / "vae" / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed: dict[str, Tensor] = {}
    for name, tensor in load_file(vae).items():
        for new_name, old_name in old.items():
            name = name.replace(f".{new_name}.", f".{old_name}.")
        renamed[name] = tensor
    assert any(".proj_attn." in name for name in renamed)
    save_file(renamed, vae)
    assert_same_weights(load(tmp_path).vae, small_model().vae)


def test_weights_that_need_no_change_are_not_copied_and_the_file_is_safe_from_changes(
    load: Load, tmp_path: Path
) -> None:
    weights = save_folder(small_model(), tmp_path) / "unet" / "diffusion_pytorch_model.safetensors"
    before = weights.read_bytes()
    mapped_before = _mapped_bytes(weights)
    family = load(tmp_path)
    assert _mapped_bytes(weights) - mapped_before >= len(before)
    for parameter in family.denoiser.parameters():
        parameter.data.add_(1.0)
    assert weights.read_bytes() == before


def _mapped_bytes(path: Path) -> int:
    """Bytes of a file that are mapped into this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    spans = [line.split()[0].split("-") for line in maps.read_text().splitlines() if line.endswith(str(path))]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@pytest.mark.parametrize("form", ["folder", "vae folder", "original file", "checkpoint", "diffusers file"])
def test_another_vae_comes_in_every_form(load: Load, tmp_path: Path, form: str) -> None:
    other = {name: tensor * 1.5 for name, tensor in small_model().vae.state_dict().items()}
    model = SmallModel("sd1", small_model().unet, _copy_with(small_model().vae, other), small_model().text_encoder)
    path = save_folder(model, tmp_path / "other")
    if form == "vae folder":
        path = path / "vae"
    elif form != "folder":
        original = original_layout(model)
        tensors = {
            "original file": {
                name.removeprefix("first_stage_model."): tensor
                for name, tensor in original.items()
                if name.startswith("first_stage_model.")
            },
            "checkpoint": original,
            "diffusers file": other,
        }[form]
        path = tmp_path / "vae.safetensors"
        save_file(tensors, path)
    family = load(model_folder(), vae=str(path))
    assert_same_weights(family.vae, model.vae)
    assert_same_weights(family.denoiser, small_model().unet)
    assert family.latent_identity != load(model_folder()).latent_identity


def _copy_with(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    copy = type(network).from_config(network.config)
    copy.load_state_dict(tensors)
    return copy.eval()


def test_a_model_that_predicts_v_is_known_from_its_folder_or_from_the_flag(load: Load) -> None:
    for family in (
        load(model_folder("sd2", "v_prediction")),
        load(model_folder("sd2", "v_prediction"), v2=True, v_parameterization=True),
        load(single_file("sd2"), v_parameterization=True),
    ):
        assert family.prediction_type == "v_prediction"
        assert family.base_model_version == "sd_v2_v"
        assert family.architecture == "stable-diffusion-v2-768-v/lora"
        assert family.pipeline("euler").scheduler.config.prediction_type == "v_prediction"
    assert load(single_file("sd1"), v_parameterization=True).base_model_version == "sd_v1_v"


def test_a_single_file_of_sd2_says_that_noise_prediction_is_assumed(load: Load) -> None:
    family = load(single_file("sd2"))
    assert family.prediction_type == "epsilon"
    assert "--v_parameterization" in family.notes[0]


def test_the_model_can_be_deleted_while_it_is_in_use(load: Load, tmp_path: Path) -> None:
    family = load(save_folder(small_model(), tmp_path / "model"))
    shutil.rmtree(tmp_path / "model" / "unet")
    assert_same_weights(family.denoiser, small_model().unet)


def test_frozen_in_evaluation_mode_and_without_meta_tensors(load: Load) -> None:
    family = load(model_folder())
    for network in (family.denoiser, family.vae, *family.text_encoders.values()):
        assert not network.training
        assert not any(parameter.requires_grad for parameter in network.parameters())
        assert not any(tensor.is_meta for tensor in [*network.parameters(), *network.buffers()])
