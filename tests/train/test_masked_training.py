"""Training with masks: the loss is the mean of masked errors, on every family and adapter, and resumes exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from maulstick.errors import OptionError
from maulstick.options.load import load_train_options
from maulstick.options.schema import ObjectiveOptions
from maulstick.train.console import QuietConsole
from maulstick.train.objective import NoisyBatch, image_losses, make_noisy
from maulstick.train.plan import plan_lines
from maulstick.train.run import TrainingRun
from tests.image_encoders import clip_encoder
from tests.models import model_folder
from tests.sd3_models import sd3_folder
from tests.sdxl_models import sdxl_folder

MakeRun = Callable[..., TrainingRun]


@pytest.fixture
def masks(images: Path, tmp_path: Path) -> Path:
    """Masks of the five images: number n leaves the upper 8 (n + 1) rows."""
    folder = tmp_path / "masks"
    folder.mkdir()
    for number in range(5):
        mask = np.zeros((64, 64), np.uint8)
        mask[: 8 * (number + 1)] = 255
        Image.fromarray(mask).save(folder / f"{number}.png")
    return folder


class _OneWeight:
    """A family without weights by timestep."""

    def loss_weights(self, timesteps, gamma):
        return torch.ones(len(timesteps))

    def signal_to_noise(self, timesteps):
        return None


@pytest.mark.parametrize("loss_type", ["l2", "l1", "huber", "smooth_l1"])
@pytest.mark.parametrize("channels", [4, 16])
def test_the_masked_loss_is_the_mean_of_masked_errors(loss_type: str, channels: int) -> None:
    generator = torch.Generator().manual_seed(1)
    prediction = torch.randn((3, channels, 4, 6), generator=generator, requires_grad=True)
    target = torch.randn((3, channels, 4, 6), generator=generator)
    mask = torch.rand((3, 1, 4, 6), generator=generator)
    mask[0, :, :2], mask[2] = 0, 0
    options = ObjectiveOptions(loss_type=loss_type, huber_schedule="constant", huber_c=0.3)
    batch = NoisyBatch(prediction, torch.tensor([1, 2, 3]), target)
    weights = torch.tensor([1.0, 0.25, 1.0])
    losses = image_losses(_OneWeight(), prediction, batch, options, weights, mask)  # type: ignore[arg-type]
    error = (prediction - target).detach().double().numpy()
    root = 2 * (np.sqrt(error**2 + 0.3**2) - 0.3)
    each = {"l2": error**2, "l1": abs(error), "huber": 0.3 * root, "smooth_l1": root}[loss_type]
    # Divided by all elements, masked ones too: no renormalisation.
    expected = (each * mask.double().numpy()).sum((1, 2, 3)) / (channels * 24) * [1, 0.25, 1]
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-5)
    losses.sum().backward()
    assert (prediction.grad[0, :, :2] == 0).all()
    assert (prediction.grad[2] == 0).all()
    assert (prediction.grad[1] != 0).all()
    torch.testing.assert_close(
        image_losses(_OneWeight(), prediction, batch, options, weights, torch.ones_like(mask)),  # type: ignore[arg-type]
        image_losses(_OneWeight(), prediction, batch, options, weights),  # type: ignore[arg-type]
    )


def test_the_loop_puts_each_mask_on_its_image(make_run: MakeRun, masks: Path) -> None:
    run = make_run("--masked_loss", "--conditioning_data_dir", str(masks), "--flip_aug", "--min_snr_gamma", "5")
    run.prepare()
    loop = run.loop
    line = next(line for line in plan_lines(run.prepared.plan) if "2_shape" in line)
    assert line.endswith("5 images x 2, 5 with masks")
    captured = []

    def capture(module, arguments, result):
        captured.append(result)

    loop.parts.trainee.register_forward_hook(capture)
    for (batch, latents), _ in ((window[0], images) for window, images in loop.windows(0)):
        losses = loop.forward(batch, latents, loop.noise_generator(0, 0))
        noisy = make_noisy(loop.parts.family, latents, loop.parts.options.objective, loop.noise_generator(0, 0))
        squared = (captured[-1].float() - noisy.target).detach() ** 2
        for place, item in enumerate(batch.items):
            rows = int(item.record.path.stem) + 1
            expected = squared[place, :, :rows].sum() / squared[place].numel()
            weight = loop.parts.family.loss_weights(noisy.timesteps, 5.0)[place]
            torch.testing.assert_close(losses[place], expected * weight)


@pytest.mark.parametrize("cached", [(), ("--cache_latents_to_disk",)])
def test_a_masked_run_resumes_exactly(make_run: MakeRun, masks: Path, images: Path, tmp_path: Path, cached) -> None:
    copy = tmp_path / "images"
    shutil.copytree(images, copy)
    given = (
        *("--masked_loss", "--conditioning_data_dir", str(masks), "--train_data_dir", str(copy), "--flip_aug"),
        *("--network_train_unet_only", "--save_state", "--save_every_n_steps", "1", "--max_train_steps", "2", *cached),
    )
    whole = make_run(*given)
    whole.train()
    state = ("--resume", str(tmp_path / "out/last-step00000001-state"))
    # The folder may have moved, as long as the masks are the same.
    moved = tmp_path / "moved"
    shutil.copytree(masks, moved)
    again = [str(moved) if each == str(masks) else each for each in given]
    resumed = make_run(*again, *state, output="resumed")
    resumed.train()
    pairs = zip(whole.loop.parts.named_parameters, resumed.loop.parts.named_parameters, strict=True)
    assert all(torch.equal(one[1], other[1]) for one, other in pairs)
    if cached:
        return
    Image.fromarray(np.full((64, 64), 7, np.uint8)).save(moved / "3.png")
    with pytest.raises(OptionError, match=r"1 changed \(pixels, mask, .*2_shape/3.png"):
        make_run(*again, *state, output="refused").prepare()


@pytest.mark.parametrize("network_type", ["dora", "oft"])
def test_other_adapters_and_alpha_masks(make_run: MakeRun, tmp_path: Path, network_type: str) -> None:
    folder = tmp_path / "images/1_a"
    folder.mkdir(parents=True)
    for number, alpha in enumerate((0, 255)):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 4), dtype=np.uint8)
        pixels[..., 3] = alpha
        Image.fromarray(pixels).save(folder / f"{number}.png")
    run = make_run(
        *("--train_data_dir", str(tmp_path / "images"), "--alpha_mask", "--network_type", network_type),
        *("--max_train_steps", "1", "--network_dim", "4", *(("--network_alpha", "1") if network_type == "oft" else ())),
    )
    run.prepare()
    window, _ = next(run.loop.windows(0))
    losses = run.loop.forward(*window[0], run.loop.noise_generator(0, 0))
    by_name = dict(zip((item.record.path.name for item in window[0][0].items), losses, strict=True))
    assert by_name["0.png"] == 0
    assert by_name["1.png"] > 0.1


FAMILIES = {"sdxl": sdxl_folder, "sd3": lambda: sd3_folder(with_t5=False), "ip_adapter": lambda: model_folder("tiny")}


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_and_ip_adapters(images: Path, masks: Path, tmp_path: Path, kind: str) -> None:
    description = tmp_path / "data.toml"
    subset = {"image_dir": str(images / "2_shape"), "conditioning_data_dir": str(masks)}
    datasets = [{"resolution": 64, "batch_size": 5, "subsets": [subset]}]
    description = description.with_suffix(".json")
    description.write_text(json.dumps({"datasets": datasets}))
    network = ["--network_train_unet_only"]
    if kind == "ip_adapter":
        network = ["--network_type", "ip_adapter", "--image_encoder", str(clip_encoder())]
    options = load_train_options(
        [
            *("--pretrained_model_name_or_path", str(FAMILIES[kind]()), "--dataset_config", str(description)),
            *("--output_dir", str(tmp_path / "out"), "--masked_loss", "--max_train_steps", "1", "--seed", "1"),
            *network,
        ]
    )
    run = TrainingRun(options, console=QuietConsole())
    run.prepare()
    window, _ = next(run.loop.windows(0))
    batch, latents = window[0]
    assert [int(item.mask.mean() * 64) for item in batch.items] == [
        8 * (int(item.record.path.stem) + 1) for item in batch.items
    ]
    noise = [run.loop.noise_generator(0, 0) for _ in range(2)]
    masked = run.loop.forward(batch, latents, noise[0])
    bare = replace(batch, items=tuple(replace(item, mask=None) for item in batch.items))
    whole = run.loop.forward(bare, latents, noise[1])
    assert (masked < whole).all()
    assert (masked > 0).all()
