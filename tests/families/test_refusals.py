"""What cannot be loaded is refused with a message that says what it is and what to do."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from maulstick.errors import ModelError, OptionError
from tests.families.conftest import Load
from tests.models import model_folder, original_layout, save_folder, single_file, small_model


def _save(path: Path, **shapes: tuple[int, ...]) -> Path:
    save_file({name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}, path)
    return path


def _with_input_channels(channels: int) -> dict[str, torch.Tensor]:
    name = "model.diffusion_model.input_blocks.0.0.weight"
    return original_layout(small_model()) | {name: torch.zeros(32, channels, 3, 3)}


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"lora_unet_mid_block.lora_down.weight": (4, 8), "lora_unet_mid_block.lora_up.weight": (8, 4)}, "LoRA"),
        ({"unet.mid_block.to_q.lora_A.weight": (4, 8)}, "LoRA"),
        ({"lora_unet_x.hada_w1_a": (4, 8)}, "LoRA"),
        ({"conditioner.embedders.0.model.x": (1,), "model.diffusion_model.x": (1,)}, "SDXL refiner"),
        ({"double_blocks.0.img_attn.qkv.weight": (3, 1), "single_blocks.0.linear1.weight": (1,)}, "FLUX"),
        ({"control_model.input_blocks.0.0.weight": (1,)}, "ControlNet"),
        ({"image_proj.proj.weight": (1,), "ip_adapter.1.to_k_ip.weight": (1,)}, "IP-Adapter"),
        ({"down_blocks.0.x": (1,), "time_embedding.linear_1.weight": (1,)}, "UNet alone"),
        ({"encoder.conv_in.weight": (1,), "decoder.conv_in.weight": (1,)}, "VAE alone"),
        ({"text_model.embeddings.x": (1,)}, "text encoder alone"),
        ({"something.else": (1,)}, "something.else"),
    ],
)
def test_files_of_other_kinds_are_called_what_they_are(
    load: Load, tmp_path: Path, tensors: dict[str, tuple[int, ...]], said: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, path)
    with pytest.raises(ModelError, match=said) as raised:
        load(path)
    assert "an SD 1.x, SD 2.x, SDXL or SD3 text-to-image model" in str(raised.value)


@pytest.mark.parametrize(
    "channels, said", [(9, "inpainting"), (5, "depth-to-image"), (8, "InstructPix2Pix"), (6, "6 input")]
)
def test_unets_with_other_inputs_are_refused(load: Load, tmp_path: Path, channels: int, said: str) -> None:
    save_file(_with_input_channels(channels), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "model.safetensors")
    unet = save_folder(small_model(), tmp_path / "folder") / "unet" / "config.json"
    unet.write_text(json.dumps(json.loads(unet.read_text()) | {"in_channels": channels}))
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "folder")


@pytest.mark.parametrize(
    "pipeline, said",
    [("StableDiffusion3Pipeline", "SD3"), ("FluxPipeline", "FLUX")],
)
def test_folders_of_other_families_are_called_what_they_are(
    load: Load, tmp_path: Path, pipeline: str, said: str
) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    with pytest.raises(ModelError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("missing", ["unet", "vae", "text_encoder", "tokenizer", "scheduler"])
def test_a_missing_part_of_a_folder_is_named(load: Load, tmp_path: Path, missing: str) -> None:
    save_folder(small_model(), tmp_path)
    (tmp_path / missing).rename(tmp_path / f"{missing}-away")
    with pytest.raises(ModelError, match=rf"lacks {missing}\."):
        load(tmp_path)


def test_missing_weights_and_tokenizer_files_are_named(load: Load, tmp_path: Path) -> None:
    save_folder(small_model(), tmp_path)
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "vae" / "other.safetensors")
    with pytest.raises(
        ModelError, match=r"vae has no weights.*diffusion_pytorch_model\.safetensors.*other\.safetensors"
    ):
        load(tmp_path)
    (tmp_path / "vae" / "other.safetensors").rename(tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "tokenizer" / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"lacks merges\.txt"):
        load(tmp_path)


def test_a_folder_that_is_none_points_to_what_was_meant(load: Load, tmp_path: Path) -> None:
    _save(tmp_path / "model.safetensors", a=(1,))
    with pytest.raises(ModelError, match=r"model\.safetensors; give the path of that file"):
        load(tmp_path)
    with pytest.raises(ModelError, match=r"give the folder above it"):
        load(model_folder() / "unet")


def test_a_name_on_the_hub_is_not_downloaded(load: Load) -> None:
    with pytest.raises(ModelError, match="never downloads"):
        load(Path("stable-diffusion-v1-5/stable-diffusion-v1-5"))


def test_no_model_at_all_names_the_option(load: Load) -> None:
    with pytest.raises(OptionError, match="--pretrained_model_name_or_path"):
        load("")  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [5, 100, 20_000, 1_000_000])
def test_truncated_files_are_reported_as_such(load: Load, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(single_file().read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"complete|not a safetensors"):
        load(path)
    torch.save({"state_dict": original_layout(small_model())}, tmp_path / "whole.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"cut\.ckpt"):
        load(tmp_path / "cut.ckpt")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"GGUF\x03\x00\x00\x00", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (struct.pack("<Q", 10) + b"not json!!", "damaged"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(load: Load, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "model.safetensors")


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return (_mark_as_run, ())


def _mark_as_run() -> dict[str, int]:
    raise AssertionError("code hidden in a checkpoint was run")


def test_a_checkpoint_that_would_run_code_is_refused_with_the_reason(load: Load, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(1)}, "callbacks": _RunsCode()}, tmp_path / "model.ckpt")
    with pytest.raises(ModelError, match=r"_mark_as_run.*could run code.*not loaded"):
        load(tmp_path / "model.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps({"callbacks": _RunsCode()}))
    with pytest.raises(ModelError, match=r"plain\.ckpt"):
        load(tmp_path / "plain.ckpt")


def test_missing_left_over_and_misshapen_weights_are_named(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = original_layout(small_model())
    block = "model.diffusion_model.middle_block.1.proj_in"
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith(block)}, path)
    with pytest.raises(ModelError, match=r"2 weights are missing \(mid_block\.attentions\.0\.proj_in\.bias"):
        load(path)
    save_file(tensors | {"model.diffusion_model.my_extra.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match=r"1 weights are left over \(model\.diffusion_model\.my_extra\.weight\)"):
        load(path)
    save_file(tensors | {f"{block}.weight": torch.zeros(96, 95, 1, 1)}, path)
    with pytest.raises(ModelError, match=r"proj_in\.weight has shape \[96, 95, 1, 1\], expected \[96, 96, 1, 1\]"):
        load(path)


def test_a_damaged_text_encoder_is_never_replaced_by_random_weights(load: Load, tmp_path: Path) -> None:
    weights = save_folder(small_model(), tmp_path) / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    save_file({f"wrong.{name}": tensor for name, tensor in tensors.items()}, weights)
    family = load(tmp_path)
    with pytest.raises(ModelError, match=r"text encoder .* weights are missing"):
        family.encode_text(family.tokenize(["a cat"]))


def test_a_checkpoint_without_vae_or_text_encoder_says_so(load: Load, tmp_path: Path) -> None:
    for prefix, part in (("first_stage_model.", "VAE"), ("cond_stage_model.", "text encoder")):
        tensors = {name: t for name, t in original_layout(small_model()).items() if not name.startswith(prefix)}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=f"has no {part}"):
            load(tmp_path / "model.safetensors")


def test_flags_that_contradict_the_model_are_errors_that_name_both(load: Load, tmp_path: Path) -> None:
    for path in (model_folder("sd1"), single_file("sd1")):
        with pytest.raises(OptionError, match=r"--v2 contradicts --pretrained_model_name_or_path.*SD 1\.x"):
            load(path, v2=True)
    with pytest.raises(OptionError, match=r"--v_parameterization contradicts .*scheduler_config\.json.*epsilon"):
        load(model_folder("sd2"), v_parameterization=True)
    save_file(original_layout(small_model("sd2")), tmp_path / "v.safetensors", {"modelspec.prediction_type": "v"})
    with pytest.raises(OptionError, match=r"predicts v .*--v_parameterization is not given"):
        load(tmp_path / "v.safetensors")


def test_a_prediction_type_that_cannot_be_trained_is_refused(load: Load, tmp_path: Path) -> None:
    config = save_folder(small_model(), tmp_path) / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"prediction_type": "sample"}))
    with pytest.raises(ModelError, match="prediction_type 'sample'"):
        load(tmp_path)


def test_a_vae_of_another_family_is_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load(model_folder(), vae=str(tmp_path / "none.safetensors"))
    config = save_folder(small_model(), tmp_path) / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"latent_channels": 16}))
    with pytest.raises(OptionError, match=r"--vae .* 16 channels.* 4"):
        load(model_folder(), vae=str(tmp_path / "vae"))
    _save(tmp_path / "lora.safetensors", lora_unet_x__lora_down__weight=(1,))
    with pytest.raises(ModelError, match="LoRA"):
        load(model_folder(), vae=str(tmp_path / "lora.safetensors"))


def test_a_clip_skip_beyond_the_layers_is_refused(load: Load) -> None:
    with pytest.raises(OptionError, match=r"clip_skip 13 .* 12"):
        load(model_folder(), clip_skip=13)


@pytest.mark.parametrize(
    "given, said",
    [
        ("models/sd15-prunde.safetensors", "Did you mean 'sd15-pruned.safetensors'. Paths are relative to the current"),
        ("absent/sd15.safetensors", "Paths are relative to the current folder"),
        ("someone/sd-1.5", "name on the Hugging Face hub; Maulstick never downloads"),
        ("models/other", "no model at models/other. Paths are relative to the current folder"),
        ("/absent/model.safetensors", "Look at how the path is written"),
    ],
)
def test_a_model_that_is_not_there(load: Load, tmp_path: Path, monkeypatch: Any, given: str, said: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "sd15-pruned.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=said) as raised:
        load(Path(given))
    assert ("Hugging Face" in str(raised.value)) is given.startswith("someone/")
