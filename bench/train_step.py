"""What the training loop costs above the bare forward and backward pass of the same UNet: python -m bench.train_step

The bare pass is plain PyTorch with peft's own LoRA on the same modules and inputs that lie ready: no noise is drawn, no
optimizer steps, nothing is measured or written. Both take turns in one process, so that a change of the machine's
speed meets both. With --full MODEL_FOLDER a full-size model is trained at 64 px, batch 1, and start-up and peak memory
of the whole command are measured too; --make MODEL_FOLDER writes such a folder with random weights first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from maulstick.options.load import load_train_options
from maulstick.tools.quickstart import ASSETS
from maulstick.train.console import QuietConsole
from maulstick.train.events import read_events
from maulstick.train.run import TrainingRun

THREADS = 2
RANK = 8


def arguments(model: Path, images: Path, output: Path, batch_size: int, steps: int) -> list[str]:
    """Return the command line that both parts of the benchmark train with."""
    return [
        *("--pretrained_model_name_or_path", str(model)),
        *("--train_data_dir", str(images)),
        *("--output_dir", str(output)),
        *("--resolution", "64"),
        *("--train_batch_size", str(batch_size)),
        *("--max_train_steps", str(steps)),
        *("--network_dim", str(RANK)),
        *("--network_alpha", str(RANK)),
        *("--seed", "0"),
        "--network_train_unet_only",
        # Its snapshots are taken between steps that are timed one by one; the watchers' cost has figures of its own.
        "--no-rescue",
        "--cache_latents",
        "--cache_text_encoder_outputs",
        *("--console", "quiet"),
    ]


def loop_step(model: Path, output: Path, batch_size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that does one whole step of the training loop, and one that closes the run's files."""
    loaded = load_train_options(arguments(model, ASSETS / "images", output, batch_size, 10_000))
    run = TrainingRun(loaded, console=QuietConsole())
    run.prepare()
    loop = run.loop
    if loop is None:
        raise RuntimeError("prepare() builds the loop")
    loop.parts.trainee.train()
    windows = (window for epoch in range(10**6) for window in loop.windows(epoch))

    def step() -> None:
        loop.train_step(*next(windows))

    return step, lambda: run.records.close("end")


def bare_step(model: Path, batch_size: int) -> Callable[[], None]:
    """Return a function that runs the same UNet with peft's LoRA forward and backward, on inputs made before."""
    from peft import LoraConfig, inject_adapter_in_model

    from maulstick.adapters.targets import UNET_CONTAINERS, find_targets
    from maulstick.families.load import load_family
    from maulstick.options.schema import ModelOptions

    options = ModelOptions(pretrained_model_name_or_path=str(model))
    family = load_family(options, device="cpu", dtype=torch.float32)
    unet = family.denoiser.requires_grad_(False)
    targets = [target.path for target in find_targets(unet, UNET_CONTAINERS)]
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets), unet)
    unet.train()
    with torch.no_grad():
        states = family.encode_text(family.tokenize(["a picture"] * batch_size))["encoder_hidden_states"]
    family.release_encoders(vae=True, text_encoders=True)
    side = 64 // family.vae_scale
    inputs = [
        (
            torch.randn(batch_size, 4, side, side),
            torch.randint(0, 1000, (batch_size,)),
            torch.randn(batch_size, 4, side, side),
        )
        for _ in range(4)
    ]
    endless = cycle(inputs)
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]

    def step() -> None:
        noisy, timesteps, target = next(endless)
        for parameter in trained:
            parameter.grad = None
        prediction = unet(noisy, timesteps, encoder_hidden_states=states).sample
        torch.nn.functional.mse_loss(prediction, target).backward()

    return step


def take_turns(steps: dict[str, Callable[[], None]], rounds: int, per_round: int) -> dict[str, list[float]]:
    """Return seconds per step of each contender, one figure a round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(per_round):
                step()
            if turn:  # the first round warms up
                seconds[name].append((time.perf_counter() - started) / per_round)
    return seconds


def report_step(model: Path, batch_size: int, rounds: int, per_round: int, title: str) -> float:
    """Print the table of one setting; return the ratio of the medians."""
    with tempfile.TemporaryDirectory() as output:
        loop, close = loop_step(model, Path(output), batch_size)
        seconds = take_turns({"bare": bare_step(model, batch_size), "loop": loop}, rounds, per_round)
        close()
    ratios = [loop / bare for loop, bare in zip(seconds["loop"], seconds["bare"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"\n{title}, {THREADS} threads, {rounds} rounds of {per_round} steps\n")
    print("| | median s/step | min | max |\n|---|---|---|---|")
    for name, label in (("bare", "bare forward + backward, peft's LoRA"), ("loop", "training loop, everything")):
        values = seconds[name]
        print(f"| {label} | {statistics.median(values):.4f} | {min(values):.4f} | {max(values):.4f} |")
    print(f"| **ratio, round by round** | **{ratio:.3f}** | {min(ratios):.3f} | {max(ratios):.3f} |")
    return ratio


def report_whole_run(model: Path, steps: int = 12) -> None:
    """Train with the command as a user would; print start-up, seconds per step and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        # A dozen pictures, as in a small user's folder: encoding hundreds would be timed instead of the start.
        images = Path(folder) / "images" / "1_few"
        images.mkdir(parents=True)
        for picture in sorted((ASSETS / "images" / "10_openmoji").glob("*.png"))[:steps]:
            shutil.copy(picture, images)
            shutil.copy(picture.with_suffix(".txt"), images)
        command = [sys.executable, "-m", "maulstick", "train"]
        command += arguments(model, images.parent, Path(folder), 1, steps)
        started = time.time()
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(THREADS)})
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.time()
        if status != 0:
            raise SystemExit(f"the run failed with status {status}")
        events = [event for event in read_events(Path(folder) / "last.events.jsonl") if event["event"] == "step"]
    first = events[0]
    start_up = first["time"] - first["seconds"] - started
    later = [event["seconds"] for event in events[2:]]
    print("\nThe whole command, full-size SD 1.5, 64 px, batch 1, rank 8, UNet only\n")
    print("| start-up to first step | s/step (median) | whole run | peak memory |\n|---|---|---|---|")
    print(
        f"| {start_up:.1f} s | {statistics.median(later):.3f} | {ended - started:.1f} s | "
        f"{usage.ru_maxrss * 1024 / 1e9:.2f} GB |"
    )


def make_full_size(folder: Path) -> None:
    """Write a diffusers folder of SD 1.5's true sizes with random fp32 weights."""
    import json

    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    package = Path(ASSETS).parent
    configs = package / "model_configs" / "sd1"

    def config(part: str) -> dict[str, object]:
        return json.loads((configs / part / "config.json").read_text())

    torch.manual_seed(0)
    UNet2DConditionModel.from_config(config("unet")).save_pretrained(folder / "unet")
    AutoencoderKL.from_config(config("vae")).save_pretrained(folder / "vae")
    CLIPTextModel(CLIPTextConfig.from_dict(config("text_encoder"))).save_pretrained(folder / "text_encoder")
    shutil.copytree(configs / "scheduler", folder / "scheduler", dirs_exist_ok=True)
    shutil.copytree(package / "clip_tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    shutil.copy(configs / "model_index.json", folder / "model_index.json")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--per_round", type=int, default=8)
    parser.add_argument("--full", type=Path, metavar="MODEL_FOLDER", help="also measure a full-size SD 1.5 folder")
    parser.add_argument("--make", type=Path, metavar="MODEL_FOLDER", help="write a random full-size folder, and stop")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.make is not None:
        make_full_size(options.make)
        return
    report_step(ASSETS / "model", 8, options.rounds, options.per_round, "Quickstart model, 64 px, batch 8, rank 8")
    if options.full is not None:
        report_whole_run(options.full)
        report_step(options.full, 1, options.rounds, 3, "Full-size SD 1.5, 64 px, batch 1, rank 8")


if __name__ == "__main__":
    main()
