"""Sample pictures while training: the same as generate makes, and nothing of the training is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from maulstick.adapters.files import lora_tensors, save_lora_file
from maulstick.adapters.lora import inject_lora, lora_state
from maulstick.adapters.targets import plan_lora
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.options.generate import GenerateOptions, LoraOptions, OutputOptions, PictureOptions
from maulstick.options.schema import ModelOptions
from maulstick.pictures.picture_files import PictureFacts
from maulstick.pictures.prompts import Prompt, parse_prompt
from maulstick.tools.generate import generate
from maulstick.train.sample import SampleError, draw_samples
from tests.models import model_folder

LINES = ["a cat --n blurry --w 64 --h 64 --d 3 --l 4 --s 4", "a dog --w 64 --h 96 --d 9 --s 4 --ss euler_a"]
FACTS = PictureFacts("model", "float")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def model_options(**options: Any) -> ModelOptions:
    return ModelOptions(pretrained_model_name_or_path=str(model_folder("tiny")), **options)


def in_training(options: ModelOptions, dtype: torch.dtype = torch.float32) -> Family:
    """A family with LoRA of random weights, alpha unlike rank, on UNet (with convolutions) and text encoder."""
    family = load_family(options, device="cpu", dtype=dtype, gradient_checkpointing=True)
    for component, network in _components(family).items():
        conv = {"conv_dim": 2, "conv_alpha": 3.0} if component == "unet" else {}
        inject_lora(network, plan_lora(network, component=component, network_dim=4, network_alpha=2.0, **conv))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05, generator=generator)
        network.train()
    return family


def _components(family: Family) -> dict[str, nn.Module]:
    return {"unet": family.denoiser, **family.text_encoders}


def sample(family: Family, folder: Path, lines: list[str] = LINES, sampler: str = "euler") -> list[Path]:
    prompts = [parse_prompt(line) for line in lines]
    return draw_samples(family, prompts, sampler=sampler, output_dir=folder, label="step00000010", seed=7, facts=FACTS)


def values(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize("clip_skip", [None, 2])
def test_samples_are_what_generate_draws_with_the_saved_file(tmp_path: Path, clip_skip: int | None) -> None:
    """To the last digit of a pixel in fp32: the two add the same products in another order."""
    options = model_options(clip_skip=clip_skip, max_token_length=150)
    family = in_training(options)
    states = {name: lora_state(network) for name, network in _components(family).items()}
    save_lora_file(tmp_path / "lora.safetensors", lora_tensors(states, family.key_names), {})
    samples = sample(family, tmp_path / "samples")
    assert [path.name for path in samples] == ["step00000010_00.png", "step00000010_01.png"]

    def drawn(name: str, loras: list[str]) -> list[Path]:
        return generate(
            GenerateOptions(
                model=options,
                lora=LoraOptions(lora=loras),
                picture=PictureOptions(prompt=LINES),
                output=OutputOptions(output_dir=tmp_path / name, device="cpu"),
            )
        )

    with_lora, without = drawn("with", [str(tmp_path / "lora.safetensors")]), drawn("without", [])
    for ours, generated, base in zip(samples, with_lora, without, strict=True):
        assert abs(values(ours) - values(generated)).max() <= 1
        assert abs(values(ours) - values(base)).max() > 8


def test_training_goes_on_as_if_nothing_had_been_drawn(tmp_path: Path) -> None:
    family = in_training(model_options())
    family.denoiser.mid_block.eval()
    modes = {name: module.training for name, module in _modules(family)}
    weights = {name: tensor.clone() for name, tensor in _tensors(family)}
    wanted = {name: parameter.requires_grad for name, parameter in _tensors(family)}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sample(family, tmp_path, sampler="euler_a")
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: module.training for name, module in _modules(family)} == modes
    assert {name: parameter.requires_grad for name, parameter in _tensors(family)} == wanted
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _tensors(family))
    assert torch.is_grad_enabled()


def test_a_half_precision_base_and_its_fp32_lora_keep_their_formats(tmp_path: Path) -> None:
    family = in_training(model_options(), dtype=torch.bfloat16)
    formats = {name: parameter.dtype for name, parameter in _tensors(family)}
    assert set(formats.values()) == {torch.bfloat16, torch.float32}
    (first, _), (exact, _) = sample(family, tmp_path / "half"), sample(in_training(model_options()), tmp_path / "full")
    assert {name: parameter.dtype for name, parameter in _tensors(family)} == formats
    assert abs(values(first) - values(exact)).mean() < 3


def _modules(family: Family) -> list[tuple[str, nn.Module]]:
    return [
        (f"{part}.{name}", m) for part, network in _components(family).items() for name, m in network.named_modules()
    ]


def _tensors(family: Family) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{part}.{name}", p) for part, network in _components(family).items() for name, p in network.named_parameters()
    ]


def test_encoders_that_were_released_are_released_again(tmp_path: Path) -> None:
    family = load_family(model_options(), device="cpu", dtype=torch.float32)
    sample(family, tmp_path)
    assert family.encoders_on_device() == frozenset()


def test_it_is_told_which_picture_is_being_drawn(tmp_path: Path) -> None:
    told: list[str | None] = []
    prompts = [parse_prompt("a cat --s 1"), parse_prompt("a dog --s 1")]
    family = load_family(model_options(), device="cpu", dtype=torch.float32)
    draw_samples(
        family, prompts, sampler="euler", output_dir=tmp_path, label="x", seed=7, facts=FACTS, busy=told.append
    )
    assert told[0] == "drawing 1 of 2"
    assert told[1] == "drawing 2 of 2"
    assert told[-1] is None


def test_what_prompts_leave_open_is_the_same_at_every_call(tmp_path: Path) -> None:
    family = in_training(model_options())
    first, second = (sample(family, tmp_path / name, ["a cat --s 2", "a cat --s 2"]) for name in ("a", "b"))
    assert [(values(one) == values(other)).all() for one, other in zip(first, second, strict=True)] == [True, True]
    assert abs(values(first[0]) - values(first[1])).max() > 5
    with Image.open(first[1]) as image:
        assert "Seed: 8" in image.text["parameters"]
        assert image.size == (64, 64)


@pytest.mark.parametrize("fault", ["out of memory", "disk full", "sampler"])
def test_a_failure_is_a_named_error_and_leaves_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    family = in_training(model_options())
    lines, said = LINES, fault
    if fault == "out of memory":
        monkeypatch.setattr(family, "decode_latents", _raise(torch.OutOfMemoryError("out of memory")))
    elif fault == "disk full":
        monkeypatch.setattr(Image.Image, "save", _raise(OSError(28, "disk full")))
    else:
        lines, said = ["a cat --s 2 --ss nosuch"], "Unknown sampler 'nosuch'"
    with pytest.raises(SampleError, match=f"step00000010 failed after 0 of {len(lines)}: .*{said}"):
        sample(family, tmp_path, lines)
    assert all(module.training for _, module in _modules(family))
    assert list(tmp_path.iterdir()) == []


def _raise(error: Exception) -> Any:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


def test_an_interruption_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = in_training(model_options())
    monkeypatch.setattr(family, "decode_latents", _raise(KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        sample(family, tmp_path)
    assert all(module.training for _, module in _modules(family))


def test_incomplete_prompts_are_a_programming_error() -> None:
    from maulstick.pictures.drawing import draw_pictures

    family = load_family(model_options(), device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="not complete"):
        draw_pictures(family, [Prompt("a cat")], lambda picture: None)
