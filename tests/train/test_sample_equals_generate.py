"""The pictures of a run's last step are those that `maulstick generate` draws with the file it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maulstick.cli import main
from tests.models import model_folder
from tests.sdxl_models import sdxl_folder

PROMPTS = (
    "a red shape --n blurry --d 3 --l 4 --s 4 --w 64 --h 96",
    "a blue shape --d 7 --s 3 --ss euler_a",
    "a shape --d 8 --g 3.5 --s 2 --l 1",
)
CASES: dict[str, tuple[str, ...]] = {
    "clip skip, convolutions, long captions": ("--clip_skip", "2", "--conv_dim", "2", "--max_token_length", "150"),
    "released encoders": ("--cache_text_encoder_outputs", "--network_train_unet_only"),
    "average of the weights": ("--ema_decay", "0.9"),
    "dora": ("--network_type", "dora"),
}


def values(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def sampled_and_generated(
    make_run: Any, tmp_path: Path, model: Path, *arguments: str
) -> tuple[list[Path], list[Path], list[Path]]:
    """Train with samples at the last step; draw with the saved file, and without it."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    usual = ("--learning_rate", "2e-2", "--sample_prompts", str(prompts), "--sample_every_n_steps", "6")
    run = make_run(*usual, *arguments, "--pretrained_model_name_or_path", str(model))
    lora = run.train().path
    samples = sorted((tmp_path / "out" / "sample").glob("*.png"))
    assert [path.name for path in samples] == [f"last_step00000006_{place:02d}.png" for place in range(3)]
    about_the_model = [
        token
        for name in ("clip_skip", "max_token_length")
        if f"--{name}" in arguments
        for token in (f"--{name}", arguments[arguments.index(f"--{name}") + 1])
    ]
    drawn = []
    for name, with_lora in (("with", ["--lora", str(lora)]), ("without", [])):
        command = ["generate", "--pretrained_model_name_or_path", str(model), "--prompt_file", str(prompts)]
        command += ["--output_dir", str(tmp_path / name), "--device", "cpu", *about_the_model, *with_lora]
        assert main(command) == 0
        drawn.append(sorted((tmp_path / name).glob("*.png"), key=lambda path: path.stat().st_mtime_ns))
    return samples, drawn[0], drawn[1]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if place < 2 else [pytest.mark.slow]) for place, case in enumerate(CASES)],
)
def test_samples_of_the_last_step_are_what_generate_draws_with_the_saved_file(
    make_run: Any, tmp_path: Path, case: str
) -> None:
    """To one step of a pixel's 255: in training W x + s B(A x) is added up, in generate the same in another order."""
    samples, generated, base = sampled_and_generated(make_run, tmp_path, model_folder("tiny"), *CASES[case])
    for ours, theirs, without in zip(samples, generated, base, strict=True):
        assert values(ours).shape == values(theirs).shape
        assert abs(values(ours) - values(theirs)).max() <= 1
        assert abs(values(ours) - values(without)).max() > 8


@pytest.mark.slow
def test_it_is_so_for_sdxl_too(make_run: Any, tmp_path: Path) -> None:
    samples, generated, base = sampled_and_generated(make_run, tmp_path, sdxl_folder())
    for ours, theirs, without in zip(samples, generated, base, strict=True):
        assert abs(values(ours) - values(theirs)).max() <= 1
        assert abs(values(ours) - values(without)).max() > 8


def test_a_table_of_prompts_is_drawn_while_training(make_run: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.toml"
    prompts.write_text(
        '[prompt]\nwidth = 64\nheight = 96\nsample_steps = 1\n[[prompt.subset]]\nprompt = "a red shape"\nseed = 5\n'
    )
    make_run("--sample_prompts", str(prompts), "--sample_every_n_steps", "6").train()
    with Image.open(tmp_path / "out" / "sample" / "last_step00000006_00.png") as image:
        assert image.size == (64, 96)
        assert "Seed: 5" in image.text["parameters"]
        assert "Sampler: Euler" in image.text["parameters"]
