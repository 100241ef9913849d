"""Train a LoRA by hand, without the package, to tune the quickstart's recipe: peft on the default targets.

    python scripts/quickstart/try_recipe.py MODEL TRAIN HELD_OUT OUTPUT --rank 16 --steps 500 --learning-rate 2e-3

Writes OUTPUT/result.json (the recipe, losses before and after on both folders, seconds) and OUTPUT/grid.png: one column a prompt;
above the base model, below with the LoRA, same seeds.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from denoising_loss import denoising_losses, draw, grid, latents_of, read_folder, text_states
from diffusers import DDPMScheduler, StableDiffusionPipeline
from peft import LoraConfig

LINEAR_TARGETS = r".*attentions.*\.(to_q|to_k|to_v|to_out\.0|ff\.net\.0\.proj|ff\.net\.2|proj_in|proj_out)"
CONVOLUTION_TARGETS = r".*(conv1|conv2|time_emb_proj|conv_shortcut|downsamplers\.0\.conv|upsamplers\.0\.conv)"


def add_lora(unet: torch.nn.Module, recipe: argparse.Namespace) -> list[torch.nn.Parameter]:
    """sd-scripts' init: down uniform by fan-in, up zero."""
    targets = LINEAR_TARGETS
    ranks: dict[str, int] = {}
    if recipe.conv_rank:
        targets = f"({LINEAR_TARGETS})|({CONVOLUTION_TARGETS})"
        ranks = {r".*(conv1|conv2|samplers\.0\.conv)": recipe.conv_rank}
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=targets,
        rank_pattern=ranks,
        alpha_pattern=ranks,
        lora_dropout=recipe.dropout,
    )
    unet.requires_grad_(False)
    unet.add_adapter(config)
    return [parameter for parameter in unet.parameters() if parameter.requires_grad]


def learning_rate(recipe: argparse.Namespace, step: int) -> float:
    warm = min(1.0, (step + 1) / max(1, recipe.warmup))
    used = step / recipe.steps
    falling = {"constant": 1.0, "linear": 1 - used, "cosine": 0.5 * (1 + math.cos(math.pi * used))}[recipe.scheduler]
    return recipe.learning_rate * warm * falling


def train(
    pipeline: StableDiffusionPipeline,
    scheduler: DDPMScheduler,
    recipe: argparse.Namespace,
    measure: Callable[[int], None],
) -> dict[str, float]:
    """Trains an adapter on the pipeline's UNet; calls `measure` every so often. Returns seconds of training, without those of
    `measure`, and the parameter count."""
    torch.manual_seed(recipe.seed)
    images, captions = read_folder(recipe.train)
    versions = [latents_of(pipeline, images)]
    if recipe.flip:
        versions.append(latents_of(pipeline, images[:, :, ::-1]))
    latents = torch.stack(versions)
    states, empty = text_states(pipeline, captions), text_states(pipeline, [""])
    alphas = scheduler.alphas_cumprod
    snr = alphas / (1 - alphas)
    parameters = add_lora(pipeline.unet, recipe)
    optimizer = torch.optim.AdamW(parameters, recipe.learning_rate, weight_decay=1e-2)
    order: list[int] = []
    pipeline.unet.train()
    started, worked = time.monotonic(), time.process_time()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        while len(order) < recipe.batch:
            order += torch.randperm(len(images)).tolist()
        rows, order = order[: recipe.batch], order[recipe.batch :]
        clean = latents[torch.randint(len(versions), (recipe.batch,)), rows]
        known = states[rows].clone()
        known[torch.rand(recipe.batch) < recipe.caption_dropout] = empty
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 1000, (recipe.batch,))
        predicted = pipeline.unet(scheduler.add_noise(clean, noise, timesteps), timesteps, known).sample
        losses = (predicted - noise).square().mean((1, 2, 3))
        weights = snr[timesteps].clamp(max=recipe.min_snr_gamma) / snr[timesteps] if recipe.min_snr_gamma else 1.0
        optimizer.zero_grad()
        (losses * weights).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if recipe.measure_every and (step + 1) % recipe.measure_every == 0 and step + 1 < recipe.steps:
            paused, idled = time.monotonic(), time.process_time()
            measure(step + 1)
            started += time.monotonic() - paused
            worked += time.process_time() - idled
    pipeline.unet.eval()
    seconds, processor = time.monotonic() - started, time.process_time() - worked
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(processor, 1),
        "parameters": sum(p.numel() for p in parameters),
    }


def parse_recipe() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "held_out", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument(
        "--prompts", default="grinning face,dog face,cat face,red heart,blue heart,red apple,taxi,sun,book"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=8)
    parser.add_argument("--conv-rank", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--scheduler", choices=("constant", "linear", "cosine"), default="cosine")
    parser.add_argument("--caption-dropout", type=float, default=0.0)
    parser.add_argument("--min-snr-gamma", type=float, default=5.0)
    parser.add_argument("--flip", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0, help="on the input of every LoRA")
    parser.add_argument(
        "--measure-every", type=int, default=0, help="steps between measurements; 0: only before and after"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sample-steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    return parser.parse_args()


def main() -> None:
    recipe = parse_recipe()
    torch.set_num_threads(recipe.threads)
    pipeline = StableDiffusionPipeline.from_pretrained(recipe.model, torch_dtype=torch.float32, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    prompts = [prompt.strip() for prompt in recipe.prompts.split(",")]
    seeds = list(range(100, 100 + len(prompts)))
    folders = {}
    for name in ("train", "held_out"):
        images, captions = read_folder(getattr(recipe, name))
        folders[name] = (latents_of(pipeline, images), text_states(pipeline, captions))

    def losses() -> dict[str, float]:
        return {
            name: round(denoising_losses(pipeline.unet, *pair, scheduler).mean().item(), 5)
            for name, pair in folders.items()
        }

    before, pictures = losses(), draw(pipeline, prompts, seeds, recipe.sample_steps, recipe.guidance)
    result = train(pipeline, scheduler, recipe, lambda step: print(step, losses(), flush=True))
    after, styled = losses(), draw(pipeline, prompts, seeds, recipe.sample_steps, recipe.guidance)
    recipe.output.mkdir(parents=True, exist_ok=True)
    grid([pictures, styled]).save(recipe.output / "grid.png")
    record = {**{key: str(value) for key, value in vars(recipe).items()}, **result, "before": before, "after": after}
    (recipe.output / "result.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(json.dumps({"before": before, "after": after, **result}))


if __name__ == "__main__":
    main()
