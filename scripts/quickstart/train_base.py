"""Train the quickstart's base model (UNet and CLIP text encoder) on Twemoji, from scratch or from a model folder.

    python scripts/quickstart/train_base.py IMAGES VAE TOKENIZER OUTPUT --minutes 40 [--start MODEL]

IMAGES is what fetch_images.py wrote, VAE a diffusers VAE folder, TOKENIZER a folder with vocab.json and merges.txt. Two processes
of one thread each train on halves of every batch and exchange gradients through shared memory: on two cores that is faster than
one process of two threads, because tensors of 16 x 16 positions are too small to share out. Writes a diffusers folder with the
averaged weights. Pictures shown, with their captions:

- plain and mirrored Twemoji: the label, or the label and some tags;
- shrunken and shifted Twemoji: the same with "small", so that size and place are not fused with the subject;
- Noto and Fluent pictures: the same with "android" or "3d", so that style is not fused with the subject.
"""

import argparse
import os
import random
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from base_model import CompactTextEncoder, build_noise_scheduler, build_text_encoder, build_unet, save_pipeline
from concepts import Concept, drawing_weight, held_out_keys, load_concepts, load_store, plain_caption, random_caption
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional
from transformers import CLIPTextModel, CLIPTokenizer

PROCESSES = 2
SHORT_CAPTION, FULL_CAPTION = 24, 77
FULL_CAPTION_EVERY = 10
EMPTY_CAPTION_RATE = 0.1
MIN_SNR_GAMMA = 5.0
WARM_UP_STEPS = 150
STEADY_SHARE = 0.5
WEIGHT_AVERAGE_DECAY = 0.998
MEASURED_TIMESTEPS = range(50, 1000, 100)
# how often each kind of picture is drawn; the word is added to its caption
VARIANTS = {
    ("twitter", "plain"): (0.55, ""),
    ("twitter", "mirrored"): (0.13, ""),
    ("twitter", "small"): (0.12, "small"),
    ("google", "plain"): (0.10, "android"),
    ("fluent3d", "plain"): (0.10, "3d"),
}


@dataclass(frozen=True)
class Settings:
    images: Path
    vae: Path
    tokenizer: Path
    output: Path
    seconds: float
    start: Path | None
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class TrainingSet:
    """Latents [n, 4, 16, 16] with, for each, its concept, the word its variant adds, and how often it is drawn."""

    latents: Tensor
    concepts: list[Concept]
    words: list[str]
    chances: np.ndarray


def small_copy(image: np.ndarray, rng: random.Random) -> np.ndarray:
    """The picture at 70 to 90 % of its size somewhere on a white page."""
    from PIL import Image

    side = rng.randint(45, 58)
    page = Image.new("RGB", (64, 64), "white")
    shrunken = Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS)
    page.paste(shrunken, (rng.randint(0, 64 - side), rng.randint(0, 64 - side)))
    return np.asarray(page)


def variant_images(images: dict[str, np.ndarray], variant: str, keys: list[str]) -> list[np.ndarray]:
    rng = random.Random(7)
    if variant == "mirrored":
        return [images[key][:, ::-1] for key in keys]
    if variant == "small":
        return [small_copy(images[key], rng) for key in keys]
    return [images[key] for key in keys]


@torch.no_grad()
def encode(vae: AutoencoderKL, images: np.ndarray) -> Tensor:
    """Scaled latents [n, 4, h/4, w/4] (the mean of the posterior) of uint8 images [n, h, w, 3]."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    means = [vae.encode(chunk).latent_dist.mean for chunk in pixels.split(64)]
    return torch.cat(means) * vae.config.scaling_factor


def build_training_set(
    folder: Path, vae: AutoencoderKL, concepts: dict[str, Concept]
) -> tuple[TrainingSet, TrainingSet]:
    """What is trained on, and the held-out concepts as plain Twemoji."""
    stores = {style: load_store(folder, style) for style in {style for style, _ in VARIANTS}}
    held_out = held_out_keys(concepts, list(stores["twitter"]))
    drawn = [key for key in stores["twitter"] if key not in held_out and drawing_weight(concepts[key]) > 0]
    pictures: list[np.ndarray] = []
    members: list[Concept] = []
    words: list[str] = []
    chances: list[float] = []
    for (style, variant), (share, word) in VARIANTS.items():
        keys = [key for key in drawn if key in stores[style]]
        total = sum(drawing_weight(concepts[key]) for key in keys)
        pictures += variant_images(stores[style], variant, keys)
        members += [concepts[key] for key in keys]
        words += [word] * len(keys)
        chances += [share * drawing_weight(concepts[key]) / total for key in keys]
    train = TrainingSet(encode(vae, np.stack(pictures)), members, words, np.array(chances) / sum(chances))
    unseen = encode(vae, np.stack([stores["twitter"][key] for key in held_out]))
    return train, TrainingSet(unseen, [concepts[key] for key in held_out], [""] * len(held_out), np.ones(len(held_out)))


class GradientExchange:
    """Averages the gradients of all processes in shared memory, two buffers in turn so that one barrier a step is enough."""

    def __init__(self, buffers: Tensor, progress: Tensor, barrier: Barrier, rank: int, seconds: float):
        self.buffers, self.progress, self.barrier, self.rank = buffers, progress, barrier, rank
        self.seconds = seconds
        self.started = time.monotonic()
        self.step = 0

    @torch.no_grad()
    def average(self, parameters: list[Tensor]) -> float:
        """Replaces every gradient by the mean over processes, clipped to norm 1. Returns the share of the time that is used up,
        the same in every process, so that all stop at the same step."""
        turn = self.step % 2
        mine = self.buffers[turn, self.rank]
        offset = 0
        for parameter in parameters:
            piece = mine[offset : offset + parameter.numel()]
            if parameter.grad is None:
                piece.zero_()
            else:
                piece.copy_(parameter.grad.reshape(-1))
            offset += parameter.numel()
        if self.rank == 0:
            self.progress[turn] = (time.monotonic() - self.started) / self.seconds
        self.barrier.wait()
        mean = self.buffers[turn].mean(0)
        mean.mul_(min(1.0, 1.0 / (mean.norm().item() + 1e-6)))
        offset = 0
        for parameter in parameters:
            parameter.grad = mean[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self.step += 1
        return float(self.progress[turn])


class Trainer:
    """One of the processes: its models, its share of every batch, and (in process 0) the averaged weights."""

    def __init__(self, rank: int, settings: Settings, exchange: GradientExchange):
        self.rank, self.settings, self.exchange = rank, settings, exchange
        self.vae = AutoencoderKL.from_pretrained(settings.vae, torch_dtype=torch.float32).eval()
        self.tokenizer = CLIPTokenizer.from_pretrained(settings.tokenizer)
        self.scheduler = build_noise_scheduler()
        alphas = self.scheduler.alphas_cumprod
        self.snr = alphas / (1 - alphas)
        concepts = load_concepts(settings.images)
        self.train_set, self.unseen = build_training_set(settings.images, self.vae, concepts)
        torch.manual_seed(0)
        if settings.start:
            self.unet = UNet2DConditionModel.from_pretrained(
                settings.start, subfolder="unet", torch_dtype=torch.float32
            )
            encoder = CLIPTextModel.from_pretrained(settings.start, subfolder="text_encoder", dtype=torch.float32)
        else:
            self.unet, encoder = build_unet(), build_text_encoder()
        vocabulary = [", ".join([plain_caption(c), *c.tags, "small, android, 3d"]) for c in self.train_set.concepts]
        vocabulary += [tag for concept in self.train_set.concepts for tag in concept.tags]
        vocabulary += [plain_caption(concept) for concept in self.unseen.concepts]
        self.text = CompactTextEncoder(encoder, self.tokenizer, vocabulary)
        self.parameters = [*self.unet.parameters(), *self.text.parameters()]
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=1e-3, fused=True
        )
        self.rng = random.Random(100 + rank)
        self.numpy_rng = np.random.default_rng(100 + rank)
        torch.manual_seed(100 + rank)

    def batch_loss(self, step: int) -> tuple[Tensor, float]:
        """Min-SNR weighted loss (Hang et al. 2023, equation 5) of one batch, and the plain one for the record."""
        data = self.train_set
        rows = self.numpy_rng.choice(len(data.concepts), self.settings.batch, p=data.chances)
        captions = [self.caption(row) for row in rows]
        length = FULL_CAPTION if step % FULL_CAPTION_EVERY == 0 else SHORT_CAPTION
        latents = data.latents[rows]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (len(rows),))
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        predicted = self.unet(noisy, timesteps, self.text.encode(captions, length)).sample
        losses = (predicted - noise).square().mean((1, 2, 3))
        snr = self.snr[timesteps]
        return (losses * snr.clamp(max=MIN_SNR_GAMMA) / snr).mean(), losses.mean().item()

    def caption(self, row: int) -> str:
        if self.rng.random() < EMPTY_CAPTION_RATE:
            return ""
        caption = random_caption(self.train_set.concepts[row], self.rng)
        word = self.train_set.words[row]
        return f"{caption}, {word}" if word else caption

    def rate(self, step: int, used: float) -> float:
        falling = 1.0 if used < STEADY_SHARE else max(0.02, (1 - used) / (1 - STEADY_SHARE))
        return self.settings.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * falling

    @torch.no_grad()
    def swap_average(self) -> None:
        for parameter, average in zip(self.parameters, self.average, strict=True):
            held = parameter.clone()
            parameter.copy_(average)
            average.copy_(held)

    @torch.no_grad()
    def measure(self, data: TrainingSet, count: int = 40) -> float:
        """Denoising loss over ten fixed timesteps with fixed noise, on the first `count` pictures."""
        generator = torch.Generator().manual_seed(0)
        latents = data.latents[:count]
        states = self.text.encode([plain_caption(concept) for concept in data.concepts[:count]], FULL_CAPTION)
        total = 0.0
        for timestep in MEASURED_TIMESTEPS:
            noise = torch.randn(latents.shape, generator=generator)
            timesteps = torch.full((len(latents),), timestep)
            noisy = self.scheduler.add_noise(latents, noise, timesteps)
            total += functional.mse_loss(self.unet(noisy, timesteps, states).sample, noise).item()
        return total / len(MEASURED_TIMESTEPS)

    def save(self) -> None:
        self.swap_average()
        save_pipeline(self.settings.output, self.vae, self.text.full_encoder(), self.tokenizer, self.unet)
        print(f"averaged weights: held out {self.measure(self.unseen):.4f}, trained {self.measure(self.train_set):.4f}")
        self.swap_average()

    def run(self) -> None:
        self.exchange.barrier.wait()
        self.exchange.started = last_saved = time.monotonic()
        recent: list[float] = []
        used, step = 0.0, 0
        while used < 1:
            for parameter in self.parameters:
                parameter.grad = None
            loss, plain = self.batch_loss(step)
            loss.backward()
            used = self.exchange.average(self.parameters)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(step, used)
            self.optimizer.step()
            step += 1
            recent = [*recent[-99:], plain]
            if self.rank:
                continue
            decay = min(WEIGHT_AVERAGE_DECAY, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.average, [p.data for p in self.parameters], 1 - decay)
            if step % 100 == 0:
                seen = step * self.settings.batch * PROCESSES
                print(f"{used:6.1%} step {step} pictures {seen} loss {np.mean(recent):.4f}", flush=True)
            if time.monotonic() - last_saved > 300:
                self.save()
                last_saved = time.monotonic()
        if self.rank == 0:
            self.save()


def work(rank: int, settings: Settings, buffers: Tensor, progress: Tensor, barrier: Barrier) -> None:
    torch.set_num_threads(1)
    Trainer(rank, settings, GradientExchange(buffers, progress, barrier, rank, settings.seconds)).run()


def count_parameters(settings: Settings) -> int:
    """Upper bound: the UNet and a text encoder with the whole vocabulary."""
    return sum(p.numel() for model in (build_unet(), build_text_encoder()) for p in model.parameters())


def parse_arguments() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("images", "vae", "tokenizer", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--start", type=Path, help="a diffusers folder to train on from")
    parser.add_argument("--batch", type=int, default=16, help="pictures a step in each process")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    given = parser.parse_args()
    return Settings(
        given.images,
        given.vae,
        given.tokenizer,
        given.output,
        given.minutes * 60,
        given.start,
        given.batch,
        given.learning_rate,
    )


def main() -> None:
    settings = parse_arguments()
    context = torch.multiprocessing.get_context("spawn")
    buffers = torch.zeros(2, PROCESSES, count_parameters(settings)).share_memory_()
    progress = torch.zeros(2).share_memory_()
    barrier = context.Barrier(PROCESSES)
    workers = [
        context.Process(target=work, args=(rank, settings, buffers, progress, barrier)) for rank in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
