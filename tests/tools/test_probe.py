"""The probe on a model of which it is known what is wrong: blocks were changed, and the target is the model before."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from torch import Tensor

from maulstick.adapters.block_table import read_block_table
from maulstick.adapters.lora import inject_lora, lora_parameters
from maulstick.cli import main
from maulstick.families.base import Conditioning
from maulstick.families.sd import StableDiffusion
from maulstick.options.load import load_train_options
from maulstick.options.probe import LoadedProbe, load_probe_options
from maulstick.tools.probe import options_to_probe
from maulstick.tools.probe_report import DOES_NOT_SAY, MEASURES, ProbeReport
from maulstick.tools.probe_run import probe_blocks
from maulstick.train.console import QuietConsole
from maulstick.train.prepare import Prepared, prepare
from tests.models import save_folder, small_model, unet_config

BLOCKS = ["IN01", "IN04", "MID", "OUT00", "OUT01", "OUT03", "OUT04"]
FAST = ("--probe_images", "6", "--probe_timesteps", "2", "--probe_batch_size", "6")
# Each changed block alone makes a loss of this size, so that none hides behind another.
LOSS_OF_EACH = 0.01


class Taught(StableDiffusion):
    """A family whose target is what its model predicted when ``teach`` was called; captions do not count."""

    def teach(self) -> None:
        self.teacher = copy.deepcopy(self.denoiser)
        self.fixed = self.encode_text(self.tokenize([""]))

    def predict(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        fixed = {name: states.expand(len(noisy), *states.shape[1:]) for name, states in self.fixed.items()}
        return super().predict(noisy, timesteps, fixed)

    @torch.no_grad()
    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        pupil, self.denoiser = self.denoiser, self.teacher
        try:
            return self.predict(self.add_noise(latents, noise, timesteps), timesteps, {})
        finally:
            self.denoiser = pupil


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a UNet of two levels, for speed."""
    levels = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D",) * 2,
        "up_block_types": ("CrossAttnUpBlock2D",) * 2,
        "attention_head_dim": 2,
        "layers_per_block": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        unet = UNet2DConditionModel(**{**unet_config("sd1"), **levels}).eval().requires_grad_(False)
    return save_folder(replace(small_model(), unet=unet), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    folder = root / "2_shape"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(7):
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"noise, number {number}")
    return root


@pytest.fixture(scope="module")
def arguments(model: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    places = {
        "--pretrained_model_name_or_path": model,
        "--train_data_dir": images,
        "--output_dir": tmp_path_factory.mktemp("out"),
    }
    usual = "--resolution 64 --train_batch_size 6 --network_dim 8 --network_alpha 8 --learning_rate 3e-3 --seed 1"
    return [*(str(part) for pair in places.items() for part in pair), *usual.split(), "--console", "quiet", *FAST]


def prepared(asked: LoadedProbe) -> Prepared:
    loaded, _ = options_to_probe(asked.loaded, asked.probe)
    return prepare(loaded, QuietConsole(), device=torch.device("cpu"), seed=1)


def changed_weights(made: Prepared, name: str) -> dict[str, Tensor]:
    """Return the attention weights of a block with a change of rank 2, which makes a loss of ``LOSS_OF_EACH`` alone."""
    family = made.family
    generator = torch.Generator().manual_seed(7)
    latents, noise = (torch.randn(8, 4, 8, 8, generator=generator) for _ in range(2))
    timesteps = torch.arange(60, 1000, 120)
    wanted = family.target(latents, noise, timesteps)
    weights = {
        f"{target.path}.weight": family.denoiser.get_submodule(target.path).weight
        for target in made.targets["unet"]
        if family.block_names()[target.block] == name and ".attn" in target.path
    }
    starts = {path: weight.clone() for path, weight in weights.items()}
    directions = {}
    for path, weight in weights.items():
        left, right = (torch.randn(side, 2, generator=generator) for side in weight.shape)
        directions[path] = left @ right.T * weight.std()
    strength, loss = 0.1, 0.0
    # The exponent is small enough to settle even where the loss grows faster than with the square.
    while abs(loss / LOSS_OF_EACH - 1) > 0.05:
        for path, weight in weights.items():
            weight.copy_(starts[path] + strength * directions[path])
        prediction = family.predict(family.add_noise(latents, noise, timesteps), timesteps, {})
        loss = float((prediction - wanted).square().mean())
        strength *= (LOSS_OF_EACH / loss) ** 0.3
    changed = {path: weight.clone() for path, weight in weights.items()}
    for path, weight in weights.items():
        weight.copy_(starts[path])
    return changed


@dataclass
class Probed:
    """A report, the run it was made on, and the denoiser's weights before."""

    report: ProbeReport
    made: Prepared
    before: dict[str, Tensor]


@pytest.fixture(scope="module")
def probe_changed(arguments: list[str]) -> Callable[[Sequence[str]], Probed]:
    """Return a function that changes blocks and probes the model, once for each choice."""
    known: dict[tuple[str, ...], Probed] = {}

    def probe(names: Sequence[str]) -> Probed:
        if tuple(names) not in known:
            asked = load_probe_options(arguments)
            made = prepared(asked)
            made.family.__class__ = Taught
            made.family.teach()
            changes = [changed_weights(made, name) for name in names]
            for path, weight in (item for change in changes for item in change.items()):
                made.family.denoiser.get_parameter(path).copy_(weight)
            before = {name: tensor.clone() for name, tensor in made.family.denoiser.state_dict().items()}
            report = probe_blocks(made, asked.probe, QuietConsole())
            known[tuple(names)] = Probed(report, made, before)
        return known[tuple(names)]

    return probe


# ---------------------------------------------------------------------------------------- what it finds


@pytest.mark.parametrize("names", [("IN01", "OUT03"), pytest.param(("IN04", "OUT01"), marks=pytest.mark.slow)])
def test_the_blocks_that_were_changed_come_first(probe_changed: Callable[..., Probed], names: tuple[str, str]) -> None:
    report = probe_changed(names).report
    assert [block.name for block in report.blocks] == BLOCKS
    first, second, third = report.ranked[:3]
    assert {first.name, second.name} == set(names)
    assert second.trial.change < 0
    # Not by a hair: the gap to the next block is larger than the error of either.
    assert third.trial.change - second.trial.change > max(second.trial.error, third.trial.error)
    by_snr = sorted(report.blocks, key=lambda block: block.gradient.snr or 0.0, reverse=True)
    assert {block.name for block in by_snr[:2]} == set(names)
    assert first.weight == 1.0


def test_everything_is_put_back_bit_for_bit(probe_changed: Callable[..., Probed], arguments: list[str]) -> None:
    probed = probe_changed(("IN01", "OUT03"))
    denoiser = probed.made.family.denoiser
    after = {name.replace(".base_layer", ""): tensor for name, tensor in denoiser.state_dict().items()}
    assert probed.before.keys() <= after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in probed.before.items())
    fresh = prepared(load_probe_options(arguments))
    inject_lora(fresh.family.denoiser, fresh.targets["unet"], seed=fresh.seed)
    for found, started in zip(lora_parameters(denoiser), lora_parameters(fresh.family.denoiser), strict=True):
        assert found.name == started.name
        assert torch.equal(found.parameter, started.parameter)
        assert not found.parameter.requires_grad
        assert found.parameter.grad is None


def test_the_suggestion_is_what_training_takes(probe_changed: Callable[..., Probed], arguments: list[str]) -> None:
    report = probe_changed(("IN01", "OUT03")).report
    family = probe_changed(("IN01", "OUT03")).made.family
    weights = read_block_table(family.block_layout(), report.suggestion)
    assert [weights.values[block.index] for block in report.blocks] == [block.weight for block in report.blocks]
    own = arguments[: arguments.index(FAST[0])]
    loaded = load_train_options([*own, "--network_train_unet_only", "--block_lr", *report.suggestion])
    made = prepare(loaded, QuietConsole(), device=torch.device("cpu"), seed=1)
    trained = {family.block_names()[target.block] for target in made.targets["unet"]}
    assert trained == {block.name for block in report.blocks if block.weight}


# ---------------------------------------------------------------------------------------- the command


def test_the_command_writes_the_same_numbers_twice_and_overwrites_nothing(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--probe_images", "2", "--probe_timesteps", "2", "--probe_steps", "1", "--probe_output", str(tmp_path)]
    quick = [*arguments[: arguments.index(FAST[0])], *own]
    assert main(["probe", *quick, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "probe.json").read_text())
    assert [block["block"] for block in printed["blocks"]] == BLOCKS
    assert sorted(block["rank"] for block in printed["blocks"]) == list(range(1, len(BLOCKS) + 1))
    assert set(MEASURES) <= set(printed["blocks"][0])
    assert printed["does_not_say"] == list(DOES_NOT_SAY)
    assert printed["settings"]["gradient_draws"] == 8  # two images, twice, in two parts of the timesteps
    assert len(printed["settings"]["learned_from"]) == len(printed["settings"]["judged_on"]) == 1
    assert not set(printed["settings"]["learned_from"]) & set(printed["settings"]["judged_on"])
    assert any("Only 2 images" in note for note in printed["notes"])
    with Image.open(tmp_path / "probe.png") as picture:
        assert picture.width > picture.height > 500

    assert main(["probe", *quick, "--block_lr", "mid=0"]) == 0
    text = capsys.readouterr().out
    assert "What this does not say:" in text
    assert "block_lr: not used here" in text
    again, earlier = (json.loads((tmp_path / name).read_text()) for name in ("probe.json", "probe.old-1.json"))
    assert earlier == printed
    assert (tmp_path / "probe.old-1.png").is_file()
    assert _without_seconds(again["blocks"]) == _without_seconds(printed["blocks"])


def _without_seconds(blocks: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in block.items() if k not in ("seconds_per_image", "share_of_cost")} for block in blocks]
