"""Train the quickstart's VAE, or only its decoder.

    python scripts/quickstart/train_vae.py IMAGES OUTPUT --minutes 19
    python scripts/quickstart/train_vae.py IMAGES OUTPUT --minutes 8 --start VAE --decoder-only

IMAGES is what fetch_images.py wrote. Learns from Twemoji, Noto and Fluent pictures; OpenMoji, the style of the quickstart's LoRA, is
never shown and only measured. The second command also shows random outlined shapes (line_art.py) and leaves the encoder, and with
it every latent the UNet was trained on, as it is.
"""

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from concepts import load_store
from diffusers import AutoencoderKL
from line_art import random_line_art
from torch import Tensor
from torch.nn import functional

SHOWN_STYLES = ("twitter", "google", "fluent3d")
MEASURED_STYLES = ("twitter", "openmoji")
LINE_ART_PICTURES = 6000
SD_SCALING_FACTOR = 0.18215
PATCH, SIZE = 32, 64
PATCH_SHARE = 0.7
KL_WEIGHT = 5e-4
WEIGHT_AVERAGE_DECAY = 0.998


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIZE,
    )


def to_pixels(images: np.ndarray) -> Tensor:
    """float [n, 3, h, w] in -1..1 of uint8 [n, h, w, 3]."""
    return torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def random_patch(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A patch that is not all white, if six tries find one."""
    for _ in range(6):
        top, left = rng.integers(0, SIZE - PATCH + 1, 2)
        patch = image[top : top + PATCH, left : left + PATCH]
        if patch.min() < 250:
            break
    return patch


def random_batch(images: np.ndarray, rng: np.random.Generator, patches: bool) -> Tensor:
    """16 patches or 8 whole pictures; half of the batches mirrored, some with exchanged or inverted colours."""
    chosen = images[rng.integers(0, len(images), 16 if patches else 8)]
    pixels = to_pixels(np.stack([random_patch(image, rng) for image in chosen]) if patches else chosen)
    if rng.random() < 0.5:
        pixels = pixels.flip(3)
    if rng.random() < 0.05:
        pixels = pixels[:, torch.from_numpy(rng.permutation(3))]
    if rng.random() < 0.1:
        pixels = -pixels
    return pixels


def picture_loss(drawn: Tensor, pixels: Tensor) -> Tensor:
    """Absolute and squared error, error of the differences between neighbours, and error of 4 px and 8 px averages."""
    error = drawn - pixels
    loss = error.abs().mean() + error.square().mean()
    loss = loss + 0.5 * (error.diff(dim=3).abs().mean() + error.diff(dim=2).abs().mean())
    for size in (4, 8):
        loss = loss + functional.avg_pool2d(error, size).abs().mean()
    return loss


@dataclass(frozen=True)
class Settings:
    images: Path
    output: Path
    seconds: float
    start: Path | None
    decoder_only: bool
    learning_rate: float


def load_pictures(settings: Settings) -> np.ndarray:
    pictures = [np.stack(list(load_store(settings.images, style).values())) for style in SHOWN_STYLES]
    if settings.decoder_only:
        rng = random.Random(3)
        pictures.append(np.stack([random_line_art(rng) for _ in range(LINE_ART_PICTURES)]))
    return np.concatenate(pictures)


def train(vae: AutoencoderKL, pictures: np.ndarray, settings: Settings) -> None:
    """Trains in place; leaves the averaged weights in `vae`."""
    encoder_parts = (vae.encoder, vae.quant_conv)
    for part in encoder_parts:
        part.requires_grad_(not settings.decoder_only)
    parameters = [p for p in vae.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, settings.learning_rate, betas=(0.9, 0.99), weight_decay=1e-3)
    average = [p.detach().clone() for p in parameters]
    rng = np.random.default_rng(0)
    started, step, used = time.monotonic(), 0, 0.0
    while (used := (time.monotonic() - started) / settings.seconds) < 1:
        falling = 0.5 * (1 + math.cos(math.pi * used)) * 0.98 + 0.02
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / 50) * falling
        pixels = random_batch(pictures, rng, patches=used < PATCH_SHARE)
        with torch.set_grad_enabled(not settings.decoder_only):
            posterior = vae.encode(pixels).latent_dist
        if settings.decoder_only:
            loss = picture_loss(vae.decode(posterior.mode() + 0.05 * torch.randn_like(posterior.mean)).sample, pixels)
        else:
            loss = picture_loss(vae.decode(posterior.sample()).sample, pixels)
            spread = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar)
            loss = loss + KL_WEIGHT * spread.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        decay = min(WEIGHT_AVERAGE_DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.data for p in parameters], 1 - decay)
        if step % 200 == 0:
            print(f"{used:6.1%} step {step} loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        for parameter, kept in zip(parameters, average, strict=True):
            parameter.copy_(kept)


@torch.no_grad()
def fold_scaling_factor(vae: AutoencoderKL, pictures: np.ndarray) -> None:
    """Scales quant_conv and post_quant_conv so that latents times SD 1.x's factor have unit variance."""
    latents = torch.cat([vae.encode(chunk).latent_dist.mean for chunk in to_pixels(pictures).split(64)])
    grow = 1 / (latents.std() * SD_SCALING_FACTOR)
    channels = vae.config.latent_channels
    vae.quant_conv.weight[:channels] *= grow
    vae.quant_conv.bias[:channels] *= grow
    vae.quant_conv.bias[channels:] += 2 * grow.log()
    vae.post_quant_conv.weight /= grow
    vae.register_to_config(scaling_factor=SD_SCALING_FACTOR)


@torch.no_grad()
def peak_signal_to_noise(vae: AutoencoderKL, pictures: np.ndarray) -> float:
    """Mean over pictures, in dB."""
    values = []
    for pixels in to_pixels(pictures).split(64):
        drawn = vae.decode(vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1)
        values.append(-10 * ((drawn - pixels) / 2).square().mean((1, 2, 3)).log10())
    return torch.cat(values).mean().item()


def parse_arguments() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=float, default=19.0)
    parser.add_argument("--start", type=Path, help="a diffusers VAE folder to train on from")
    parser.add_argument("--decoder-only", action="store_true", help="needs --start")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    given = parser.parse_args()
    if given.decoder_only and not given.start:
        parser.error("--decoder-only trains on from a VAE: name its folder with --start")
    return Settings(
        given.images, given.output, given.minutes * 60, given.start, given.decoder_only, given.learning_rate
    )


def main() -> None:
    settings = parse_arguments()
    torch.manual_seed(0)
    vae = AutoencoderKL.from_pretrained(settings.start, torch_dtype=torch.float32) if settings.start else build_vae()
    train(vae, load_pictures(settings), settings)
    vae.eval()
    if not settings.decoder_only:
        fold_scaling_factor(vae, np.stack(list(load_store(settings.images, "twitter").values())[::8]))
    for style in MEASURED_STYLES:
        pictures = np.stack(list(load_store(settings.images, style).values())[::40])
        print(f"{style}: {peak_signal_to_noise(vae, pictures):.2f} dB")
    vae.save_pretrained(settings.output)


if __name__ == "__main__":
    main()
