"""The quickstart's yardstick: denoising loss of a folder of captioned images, and a grid of pictures.

Loss: for ten timesteps 50, 150 … 950 the latents (posterior mean) of all images, in the order of their names, get noise drawn from
one generator with seed 0; the mean of the squared errors of the predicted noise, averaged over timesteps. No image is cropped and
no caption dropped, so the same weights always give the same number.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL import Image
from torch import Tensor
from torch.nn import functional

MEASURED_TIMESTEPS = range(50, 1000, 100)


def read_folder(folder: Path) -> tuple[np.ndarray, list[str]]:
    """uint8 [n, h, w, 3] and the captions beside, in the order of the file names."""
    paths = sorted(folder.glob("*.png"))
    images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
    return images, [path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in paths]


@torch.no_grad()
def text_states(pipeline: StableDiffusionPipeline, captions: Sequence[str]) -> Tensor:
    tokens = pipeline.tokenizer(
        list(captions), padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    )
    return pipeline.text_encoder(tokens.input_ids).last_hidden_state


@torch.no_grad()
def latents_of(pipeline: StableDiffusionPipeline, images: np.ndarray) -> Tensor:
    pixels = torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pipeline.vae.encode(pixels).latent_dist.mean * pipeline.vae.config.scaling_factor


@torch.no_grad()
def denoising_losses(unet: torch.nn.Module, latents: Tensor, states: Tensor, scheduler: DDPMScheduler) -> Tensor:
    """One loss an image [n]; their mean is the yardstick."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(len(latents))
    for timestep in MEASURED_TIMESTEPS:
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.full((len(latents),), timestep)
        predicted = unet(scheduler.add_noise(latents, noise, timesteps), timesteps, states).sample
        total += functional.mse_loss(predicted, noise, reduction="none").mean((1, 2, 3))
    return total / len(MEASURED_TIMESTEPS)


def draw(
    pipeline: StableDiffusionPipeline, prompts: Sequence[str], seeds: Sequence[int], steps: int, guidance: float
) -> np.ndarray:
    """uint8 [n, h, w, 3]; a prompt's picture depends on its seed alone, not on its place in the batch."""
    pictures = pipeline(
        list(prompts),
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        height=64,
        width=64,
        output_type="np",
    ).images
    return (pictures * 255).round().astype("uint8")


def grid(rows: Sequence[Sequence[np.ndarray]], scale: int = 2, gap: int = 4) -> Image.Image:
    """Rows of pictures of one size on white, enlarged without smoothing."""
    height, width = rows[0][0].shape[:2]
    step_x, step_y = width * scale + gap, height * scale + gap
    page = Image.new("RGB", (max(map(len, rows)) * step_x, len(rows) * step_y), "white")
    for line, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            enlarged = Image.fromarray(picture).resize((width * scale, height * scale), Image.Resampling.NEAREST)
            page.paste(enlarged, (column * step_x, line * step_y))
    return page
