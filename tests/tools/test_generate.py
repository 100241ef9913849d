"""Pictures from a base model and LoRA files, on a small model with an adapter of random weights."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from maulstick.adapters.files import data_hash
from maulstick.errors import ModelError, OptionError
from maulstick.families.load import load_family
from maulstick.options.generate import GenerateOptions, LoraOptions, OutputOptions, PictureOptions
from maulstick.options.schema import ModelOptions
from maulstick.pictures.prompts import PromptError
from maulstick.tools.apply_lora import LoraChoice, apply_loras, parse_lora_choice
from maulstick.tools.generate import generate
from tests.models import model_folder, single_file, small_model


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something reached for the network")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def lora_tensors(seed: int = 0, alpha: float | None = 2.0) -> dict[str, Tensor]:
    """A LoRA of rank 4 on two UNet layers (one a 1x1 convolution, one with another alpha) and one text layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q": ((4, 96), (96, 4), alpha),
        "lora_unet_up_blocks_3_attentions_2_proj_in": ((4, 32, 1, 1), (32, 4, 1, 1), alpha and 4 * alpha),
        "lora_te_text_model_encoder_layers_11_mlp_fc1": ((4, 64), (128, 4), alpha),
    }
    tensors: dict[str, Tensor] = {}
    for name, (down, up, own_alpha) in shapes.items():
        tensors[f"{name}.lora_down.weight"] = torch.randn(down, generator=generator) * 0.5
        tensors[f"{name}.lora_up.weight"] = torch.randn(up, generator=generator) * 0.5
        if own_alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(own_alpha)
    return tensors


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    path = tmp_path / "my.style.safetensors"
    save_file(lora_tensors(), path)
    return path


def draw(tmp_path: Path, *loras: str, model: Path | None = None, name: str = "out", **settings: Any) -> list[Path]:
    output = {key: settings.pop(key) for key in ("grid", "precision", "device") if key in settings}
    model_options = {key: settings.pop(key) for key in ("clip_skip", "max_token_length") if key in settings}
    options = GenerateOptions(
        model=ModelOptions(pretrained_model_name_or_path=str(model or model_folder()), **model_options),
        lora=LoraOptions(lora=list(loras)),
        picture=PictureOptions(**{"prompt": ["a cat"], "seed": 5, "steps": 3, **settings}),
        output=OutputOptions(output_dir=tmp_path / name, device=output.pop("device", "cpu"), **output),
    )
    return generate(options)


def values(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def text(path: Path) -> dict[str, Any]:
    with Image.open(path) as image:
        return json.loads(image.text["maulstick"])


def test_a_person_in_a_hurry_gets_a_picture_of_the_models_size(tmp_path: Path) -> None:
    (path,) = draw(tmp_path)
    assert path.parent == tmp_path / "out"
    assert values(path).shape == (64, 64, 3)
    assert text(path)["seed"] == 5
    assert text(path)["sampler"] == "euler"


def test_pictures_follow_from_their_seed_alone(tmp_path: Path) -> None:
    together = draw(tmp_path, prompt=["a cat", "a dog"], images_per_prompt=2, batch_size=4)
    torch.manual_seed(99)
    single = draw(tmp_path, prompt=["a cat", "a dog"], images_per_prompt=2, batch_size=1)
    assert [text(path)["seed"] for path in together] == [5, 6, 5, 6]
    assert [text(path)["prompt"] for path in together] == ["a cat", "a cat", "a dog", "a dog"]
    for one, other in zip(together, single, strict=True):
        assert abs(values(one) - values(other)).max() <= 1
    assert abs(values(together[0]) - values(together[1])).max() > 10


@pytest.mark.parametrize("sampler", ["ddim", "pndm", "lms", "euler", "euler_a", "dpmsolver", "dpmsolver++"])
def test_every_sampler_draws_and_repeats_itself(tmp_path: Path, sampler: str) -> None:
    first, again = (draw(tmp_path, sampler=sampler, steps=4)[0] for _ in range(2))
    assert (values(first) == values(again)).all()
    assert values(first).std() > 1


def test_options_behind_a_prompt_win_over_those_of_the_command(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog --n ugly --w 128 --h 64 --d 77 --l 3 --s 2 --ss ddim\n")
    plain, own = draw(tmp_path, prompt=[], prompt_file=prompts, negative_prompt="blurry")
    assert (text(plain)["negative_prompt"], text(plain)["steps"]) == ("blurry", 3)
    record = text(own)
    assert (record["negative_prompt"], record["seed"], record["scale"], record["steps"]) == ("ugly", 77, 3.0, 2)
    assert record["sampler"] == "ddim"
    assert values(own).shape == (64, 128, 3)


def test_a_lora_changes_the_picture_with_its_weight_and_not_at_all_at_zero(tmp_path: Path, lora: Path) -> None:
    (base,) = draw(tmp_path)
    pictures = {weight: values(draw(tmp_path, f"{lora}:{weight}")[0]) for weight in (0, 0.5, 1)}
    assert (pictures[0] == values(base)).all()
    half, full = (abs(pictures[weight] - pictures[0]).mean() for weight in (0.5, 1))
    assert 0.2 < half < full


def test_a_lora_draws_what_its_weights_added_to_the_base_draw(tmp_path: Path, lora: Path) -> None:
    """Different alphas in one file included, which diffusers reads wrongly by itself."""
    model = model_folder()
    merged = tmp_path / "merged"
    for part in ("unet", "text_encoder", "vae", "tokenizer", "scheduler"):
        (merged / part).mkdir(parents=True)
        for file in (model / part).iterdir():
            (merged / part / file.name).write_bytes(file.read_bytes())
    tensors = lora_tensors()
    for name in {key.split(".")[0] for key in tensors}:
        component, path, file = _place(name)
        weights = load_file(merged / component / file)
        down, up = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
        delta = (up.flatten(1) @ down.flatten(1)).reshape(weights[f"{path}.weight"].shape)
        weights[f"{path}.weight"] = weights[f"{path}.weight"] + 0.7 * tensors[f"{name}.alpha"] / 4 * delta
        save_file(weights, merged / component / file, {"format": "pt"})
    (ours,), (expected,), (base,) = draw(tmp_path, f"{lora}:0.7"), draw(tmp_path, model=merged), draw(tmp_path)
    assert abs(values(ours) - values(expected)).max() <= 1
    assert abs(values(ours) - values(base)).max() > 5


def _place(name: str) -> tuple[str, str, str]:
    unet = {"lora_unet_" + path.replace(".", "_"): path for path in _linear_paths("unet")}
    if name in unet:
        return "unet", unet[name], "diffusion_pytorch_model.safetensors"
    return "text_encoder", "text_model.encoder.layers.11.mlp.fc1", "model.safetensors"


def _linear_paths(component: str) -> list[str]:
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    return [path for path, m in small_model().networks()[component].named_modules() if isinstance(m, kinds)]


def test_several_loras_add_up(tmp_path: Path, lora: Path) -> None:
    save_file(lora_tensors(seed=1), tmp_path / "second.safetensors")
    both = values(draw(tmp_path, f"{lora}:0.5", f"{tmp_path / 'second.safetensors'}:0.5")[0])
    one, base = values(draw(tmp_path, f"{lora}:0.5")[0]), values(draw(tmp_path)[0])
    assert abs(both - one).mean() > 0.1
    assert abs(one - base).mean() > 0.1
    twice = values(draw(tmp_path, f"{lora}:0.25", f"{lora}:0.25")[0])
    assert abs(twice - one).max() <= 1


def test_the_picture_names_its_loras(tmp_path: Path, lora: Path) -> None:
    (path,) = draw(tmp_path, f"{lora}:0.8", clip_skip=2)
    assert text(path)["loras"] == [{"name": "my.style", "weight": 0.8, "data_hash": data_hash(lora)}]
    with Image.open(path) as image:
        parameters = image.text["parameters"]
    assert "<lora:my.style:0.8>" in parameters
    assert f'Lora hashes: "my.style: {data_hash(lora)[:12]}"' in parameters
    assert "Clip skip: 2" in parameters


def test_a_single_file_model_draws_what_its_folder_draws(tmp_path: Path) -> None:
    size = {"width": 64, "height": 64}
    (folder,), (file,) = draw(tmp_path, **size), draw(tmp_path, model=single_file(), **size)
    assert abs(values(folder) - values(file)).max() <= 1


def test_a_model_that_predicts_v_draws(tmp_path: Path) -> None:
    v, eps = (draw(tmp_path, model=model_folder("sd2", kind))[0] for kind in ("v_prediction", "epsilon"))
    assert abs(values(v) - values(eps)).max() > 5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_draws_nearly_the_same(tmp_path: Path, lora: Path, precision: str) -> None:
    half, full = draw(tmp_path, str(lora), precision=precision), draw(tmp_path, str(lora))
    assert abs(values(half[0]) - values(full[0])).mean() < 2
    assert text(half[0])["precision"] == precision


def test_long_prompts_and_clip_skip_reach_the_picture(tmp_path: Path) -> None:
    prompt = ["a cat, " * 40 + "in the snow"]
    pictures = [
        values(draw(tmp_path, prompt=prompt, **options)[0])
        for options in ({}, {"max_token_length": 150}, {"clip_skip": 2})
    ]
    assert abs(pictures[0] - pictures[1]).max() > 0
    assert abs(pictures[0] - pictures[2]).max() > 0


def test_the_grid_is_the_last_file_and_holds_all_pictures(tmp_path: Path) -> None:
    paths = draw(tmp_path, prompt=["a cat", "a dog"], images_per_prompt=2, grid=True)
    assert [path.name for path in paths] == [
        "00001-5.png",
        "00002-6.png",
        "00003-5.png",
        "00004-6.png",
        "00005-grid.png",
    ]
    sheet = values(paths[-1])
    for picture in map(values, paths[:-1]):
        corners = np.argwhere((sheet == picture[0, 0]).all(-1))
        assert any(np.array_equal(sheet[y : y + 64, x : x + 64], picture) for y, x in corners)


def test_what_is_printed_names_every_picture_and_what_was_not_used(tmp_path: Path, lora: Path) -> None:
    lines: list[str] = []
    save_file(lora_tensors() | _module("lora_unet_no_such_layer", 8), tmp_path / "extra.safetensors")
    options = GenerateOptions(
        model=ModelOptions(pretrained_model_name_or_path=str(model_folder())),
        lora=LoraOptions(lora=[str(tmp_path / "extra.safetensors")]),
        picture=PictureOptions(prompt=["a cat --g 3"], steps=1),
        output=OutputOptions(output_dir=tmp_path, device="cpu"),
    )
    (path,) = generate(options, say=lines.append)
    assert "3 modules; 1 have no place in this model and are left out (lora_unet_no_such_layer)" in lines[0]
    assert "--g 3" in lines[1]
    assert str(path) in lines[2]
    assert f"seed {text(path)['seed']}" in lines[2]


def _module(name: str, width: int) -> dict[str, Tensor]:
    return {f"{name}.lora_down.weight": torch.zeros(4, width), f"{name}.lora_up.weight": torch.zeros(width, 4)}


@pytest.mark.parametrize(
    "settings, error, said",
    [
        ({"prompt": []}, OptionError, "Nothing to draw"),
        ({"prompt": ["a --x 3"]}, PromptError, "--prompt: unknown prompt option '--x'"),
        ({"prompt": ["a --ss eulr"]}, PromptError, "Did you mean 'euler'"),
        ({"steps": 0}, OptionError, "--steps is 0"),
        ({"scale": math.nan}, OptionError, "--scale is nan; it must be a finite number"),
        ({"seed": 2**63}, OptionError, "--seed is 9223372036854775808; it must be a whole number from 0"),
        ({"seed": -1}, OptionError, "--seed is -1; .* Leave it out to draw one"),
        ({"batch_size": 0}, OptionError, "--batch_size is 0"),
        ({"device": "toaster"}, OptionError, "--device toaster"),
        ({"device": "cuda:77"}, OptionError, "--device cuda:77 cannot be used here"),
    ],
)
def test_unusable_options_are_named(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        draw(tmp_path, **settings)
    assert not (tmp_path / "out").exists()


def test_loras_for_other_models_are_refused_by_name_and_shape(tmp_path: Path) -> None:
    save_file(_module("lora_te2_text_model_encoder_layers_0_mlp_fc1", 8), tmp_path / "xl.safetensors")
    with pytest.raises(ModelError, match=r"xl\.safetensors is a LoRA for .*exists in this SD 1\.x model"):
        draw(tmp_path, str(tmp_path / "xl.safetensors"))
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    tensors = {f"{name}.lora_down.weight": torch.zeros(4, 1024), f"{name}.lora_up.weight": torch.zeros(96, 4)}
    save_file(tensors, tmp_path / "sd2.safetensors")
    with pytest.raises(ModelError, match=r"attn2\.to_k.* shape \[96, 1024\], but that weight is \[96, 64\] here"):
        draw(tmp_path, str(tmp_path / "sd2.safetensors"))
    with pytest.raises(ModelError, match="There is no LoRA file"):
        draw(tmp_path, "absent.safetensors:0.5")
    with pytest.raises(ModelError, match=r"Did you mean 'sd2\.safetensors'\? Give it as"):
        draw(tmp_path, str(tmp_path / "sd_2.safetensors:0.5"))


def test_factors_of_1x1_convolutions_are_taken_in_both_forms(tmp_path: Path, lora: Path) -> None:
    flat = {name: tensor.flatten(1) if tensor.ndim == 4 else tensor for name, tensor in lora_tensors().items()}
    save_file(flat, tmp_path / "flat.safetensors")
    (ours,), (theirs,) = draw(tmp_path, str(lora)), draw(tmp_path, str(tmp_path / "flat.safetensors"))
    assert (values(ours) == values(theirs)).all()


def test_applying_trains_nothing_and_counts_modules(lora: Path) -> None:
    options = ModelOptions(pretrained_model_name_or_path=str(model_folder()))
    family = load_family(options, device="cpu", dtype=torch.float32)
    (applied,) = apply_loras(family, [LoraChoice(lora, 1.0)])
    assert (applied.modules, applied.unmatched) == (3, ())
    assert not any(p.requires_grad for p in family.denoiser.parameters())
    assert sum("lora_A" in name for name, _ in family.denoiser.named_parameters()) == 2
    assert sum("lora_A" in name for name, _ in family.text_encoders["text_encoder"].named_parameters()) == 1


def test_weights_behind_a_file_name_are_read_with_care(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "a.safetensors"
    odd = tmp_path / "b:0.5"
    for path in (plain, odd):
        path.write_bytes(b"")
    assert parse_lora_choice(str(plain)) == LoraChoice(plain, 1.0)
    assert parse_lora_choice(f"{plain}:-0.25") == LoraChoice(plain, -0.25)
    assert parse_lora_choice(str(odd)) == LoraChoice(odd, 1.0)
    assert parse_lora_choice(f"{odd}:2") == LoraChoice(odd, 2.0)
    with pytest.raises(ModelError, match="FILE:WEIGHT"):
        parse_lora_choice(f"{plain}:strong")
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    monkeypatch.setattr(Path, "exists", lambda self, **_: False)
    windows = r"C:\models\style.safetensors"
    assert parse_lora_choice(windows) == LoraChoice(Path(windows), 1.0)
    assert parse_lora_choice(f"{windows}:0.8") == LoraChoice(Path(windows), 0.8)
