"""What each model family costs: putting a LoRA into its full-size denoiser, and a step of a small one of its shape.

    python -m bench.families

Injection: every module that can carry a LoRA, convolutions too, rank 16, into a denoiser of true size in bf16 whose
weights no one ever touches, so it needs no memory. The least of several rounds counts, in seconds of this process on a
processor, so that a busy machine disturbs it little; beside it one plain walk over the modules of the same denoiser.
Exits with 1 when it takes 3 seconds or more.

Step: the training loop against the bare forward and backward pass of the same denoiser with peft's own LoRA, in turns
(see bench.train_step), and the peak memory of the whole command above that of a process that imports the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import nn

from bench.train_step import RANK, arguments, loop_step, take_turns
from maulstick.adapters.lora import inject_lora
from maulstick.adapters.targets import plan_lora
from maulstick.families.configs import shipped_config
from maulstick.families.joint_layout import join_layers
from maulstick.families.libraries import quiet_libraries
from maulstick.families.load import load_family
from maulstick.options.schema import ModelOptions
from maulstick.tools.quickstart import ASSETS
from tests.sd3_models import sd3_folder
from tests.sdxl_models import sdxl_folder

SECONDS = 3.0
BATCH_SIZE = 2


@dataclass(frozen=True)
class FamilyCase:
    """How to make a family's denoiser at full size, and a folder with a small model of the same shape."""

    full_size: Callable[[], nn.Module]
    small_folder: Callable[[], Path]


def sdxl_unet() -> nn.Module:
    """Return SDXL's UNet on the meta device."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel.from_config(shipped_config("sdxl-base", "unet"))


def sd3_transformer() -> nn.Module:
    """Return SD3.5 medium's transformer on the meta device, with the projections joined that are trained as one."""
    from diffusers import SD3Transformer2DModel

    config = {**shipped_config("sd3", "transformer"), "qk_norm": "rms_norm", "dual_attention_layers": tuple(range(13))}
    with torch.device("meta"):
        transformer: nn.Module = SD3Transformer2DModel.from_config(config)
    join_layers(transformer)
    return transformer


FAMILIES = {
    "SDXL": FamilyCase(sdxl_unet, sdxl_folder),
    "SD3.5 medium": FamilyCase(sd3_transformer, sd3_folder),
}


# ---------------------------------------------------------------------------------------------------------------------
# Injection


@dataclass(frozen=True)
class Injection:
    """Modules that carry a LoRA, and the least processor seconds of injecting it and of a walk over all modules."""

    modules: int
    seconds: float
    walk: float


def measure_injection(case: FamilyCase, rounds: int) -> Injection:
    """Put a LoRA into a fresh denoiser, ``rounds`` times."""
    seconds, walks, modules = [], [], 0
    for _ in range(rounds):
        with quiet_libraries():
            denoiser = case.full_size().to(torch.bfloat16).to_empty(device="cpu")
        started = time.process_time()
        list(denoiser.named_modules())
        walks.append(time.process_time() - started)
        targets = plan_lora(denoiser, component="unet", network_dim=16, network_alpha=16, conv_dim=16)
        started = time.process_time()
        inject_lora(denoiser, targets, seed=0)
        seconds.append(time.process_time() - started)
        modules = len(targets)
    return Injection(modules, min(seconds), min(walks))


def report_injection(rounds: int) -> bool:
    """Print the table; return whether every family is below the limit."""
    print(f"A LoRA of rank 16 into a full-size denoiser, least of {rounds} rounds, PyTorch {torch.__version__}\n")
    print("| family | modules | seconds | one walk over all modules | times a walk |\n|---|---|---|---|---|")
    found = {name: measure_injection(case, rounds) for name, case in FAMILIES.items()}
    for name, row in found.items():
        print(f"| {name} | {row.modules} | {row.seconds:.2f} | {row.walk:.4f} | {row.seconds / row.walk:.0f} |")
    print(f"\nWanted: below {SECONDS:g} seconds.")
    return all(row.seconds < SECONDS for row in found.values())


# ---------------------------------------------------------------------------------------------------------------------
# A step


def bare_step(model: Path) -> Callable[[], None]:
    """Return a function that runs the family's denoiser with peft's LoRA forward and backward, on ready inputs."""
    from peft import LoraConfig, inject_adapter_in_model

    options = ModelOptions(pretrained_model_name_or_path=str(model))
    family = load_family(options, device="cpu", dtype=torch.float32)
    family.prepare_for_adapters()
    denoiser = family.denoiser.requires_grad_(False)
    targets = [target.path for target in plan_lora(denoiser, component="unet", network_dim=RANK)]
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets), denoiser)
    denoiser.train()
    with torch.no_grad():
        conditioning = family.encode_text(family.tokenize(["a picture"] * BATCH_SIZE))
    family.release_encoders(vae=True, text_encoders=True)
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH_SIZE, family.latent_channels, 64 // family.vae_scale, 64 // family.vae_scale)
    inputs = cycle(
        (
            torch.randn(shape, generator=generator),
            family.sample_timesteps(BATCH_SIZE, generator),
            torch.randn(shape, generator=generator),
        )
        for _ in range(4)
    )
    trained = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]

    def step() -> None:
        noisy, timesteps, target = next(inputs)
        for parameter in trained:
            parameter.grad = None
        torch.nn.functional.mse_loss(family.predict(noisy, timesteps, conditioning), target).backward()

    return step


def peak_memory(*command: str) -> float:
    """Run Python with these arguments; return the most memory it held, in MB."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen([sys.executable, *command], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    return usage.ru_maxrss * 1024 / 1e6


def report_steps(rounds: int, per_round: int) -> None:
    """Print time and memory of each family's small model."""
    imports = "import maulstick.train.run, diffusers; from diffusers import UNet2DConditionModel, AutoencoderKL"
    empty = peak_memory("-c", imports)
    print(f"\nSmall models, 64 px, batch {BATCH_SIZE}, rank {RANK}, {torch.get_num_threads()} threads\n")
    print("| family | bare s/step | loop s/step | ratio, round by round | peak memory above imports |")
    print("|---|---|---|---|---|")
    for name, case in FAMILIES.items():
        model = case.small_folder()
        with tempfile.TemporaryDirectory() as output:
            loop, close = loop_step(model, Path(output), BATCH_SIZE)
            seconds = take_turns({"bare": bare_step(model), "loop": loop}, rounds, per_round)
            close()
            options = arguments(model, ASSETS / "images", Path(output) / "whole", BATCH_SIZE, 2)
            memory = peak_memory("-m", "maulstick", "train", *options) - empty
        ratio = statistics.median(ours / bare for ours, bare in zip(seconds["loop"], seconds["bare"], strict=True))
        bare, ours = (statistics.median(seconds[who]) for who in ("bare", "loop"))
        print(f"| {name} | {bare:.3f} | {ours:.3f} | **{ratio:.3f}** | {memory:.0f} MB |")


def main() -> int:
    """Run the benchmark; return 1 when injecting takes too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per_round", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--injection_only", action="store_true", help="leave the steps out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fast_enough = report_injection(options.rounds)
    if not options.injection_only:
        report_steps(options.rounds, options.per_round)
    return int(not fast_enough)


if __name__ == "__main__":
    sys.exit(main())
