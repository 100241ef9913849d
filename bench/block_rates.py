"""What leaving blocks out saves on a full-size SD 1.5 UNet, beside what it can save: python -m bench.block_rates

Whole steps of the real training loop (LoRA of rank 8 on the UNet, batch 1, 64x64 latents, random fp32 weights) take
turns in one process; the least time of each configuration counts. A frozen base costs one forward pass, and one
input-gradient pass of what lies behind the first trained block; checkpointing costs one more forward pass of that part.
From the shares of the blocks in the forward pass that sets the limit of the speed-up over training all blocks.
The operations of one step of each configuration are counted as well, with the most memory that its tensors need at
once: what the speed-up by operations lacks is computed without need, what the one by time lacks beyond that is
overhead. Exits with 1 when a configuration stays below 95 % of its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from bench.train_step import RANK, THREADS, make_full_size
from maulstick.options.load import load_train_options
from maulstick.train.console import QuietConsole
from maulstick.train.loop import TrainingLoop
from maulstick.train.run import TrainingRun
from maulstick.train.watchers import SeesBothEnds

WANTED = 0.95
# Share of the forward pass by block, at 64x64 latents.
SHARES = {
    **dict(zip((f"down.{level}" for level in range(4)), (0.136, 0.085, 0.079, 0.0), strict=True)),
    "mid": 0.015,
    **dict(zip((f"up.{level}" for level in range(4)), (0.032, 0.189, 0.208, 0.246), strict=True)),
}


@dataclass(frozen=True)
class Configuration:
    """What trains: the options for it, and the first block of ``SHARES`` that does."""

    name: str
    arguments: tuple[str, ...]
    first: str

    def limit(self, *, checkpointing: bool) -> float:
        """Return the speed-up over all blocks that the shares allow."""
        names = list(SHARES)
        behind = 1.0 if self.first == names[0] else sum(SHARES[name] for name in names[names.index(self.first) :])
        passes = 2 if checkpointing else 1
        return (1 + passes) / (1 + passes * behind)


CONFIGURATIONS = (
    Configuration("all blocks", (), "down.0"),
    Configuration("up only", ("--down_lr_weight", "0", "--mid_lr_weight", "0"), "up.0"),
    Configuration("up.6-11 only", ("--block_lr", "other=0", "up.6-11=1"), "up.2"),
    Configuration("up.9-11 only", ("--block_lr", "other=0", "up.9-11=1"), "up.3"),
    Configuration("mid + up", ("--down_lr_weight", "0"), "mid"),
    Configuration(
        "cosine / 0 / sine",
        ("--down_lr_weight", "cosine", "--mid_lr_weight", "0", "--up_lr_weight", "sine"),
        "down.0",
    ),
)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and still alive, and remembers the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._alive:
                    self._alive.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


@dataclass
class Measured:
    """One configuration: a step of it, and what the steps cost."""

    configuration: Configuration
    checkpointing: bool
    step: Callable[[], None]
    close: Callable[[], None]
    seconds: float = float("inf")
    operations: int = 0
    peak_bytes: int = 0


def attention_operations() -> dict[Any, Callable[..., int]]:
    """The two operations of attention that torch's counter does not know on a CPU."""
    operator = torch.ops.aten

    def forward(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_backward_flop_count(gradient, query, key, value)

    return {
        operator._scaled_dot_product_flash_attention_for_cpu: forward,
        operator._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def make_picture(folder: Path, side: int) -> Path:
    """Write the one picture that is trained on; return the training folder."""
    subset = folder / "images" / "1_noise"
    subset.mkdir(parents=True)
    noise = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save(subset / "noise.png")
    (subset / "noise.txt").write_text("coloured noise")
    return subset.parent


def begun_loop(arguments: list[str]) -> tuple[TrainingRun, TrainingLoop]:
    """Return a run and its loop, about to train its first window."""
    run = TrainingRun(load_train_options(arguments), console=QuietConsole())
    run.prepare()
    loop = run.loop
    if loop is None:
        raise RuntimeError("prepare() builds the loop")
    loop.parts.trainee.train()
    for watcher in loop.parts.watchers:
        if isinstance(watcher, SeesBothEnds):
            watcher.before_training(loop)
    return run, loop


def loop_of(configuration: Configuration, model: Path, folder: Path, side: int, *, checkpointing: bool) -> Measured:
    """Make the real training loop ready; runs read one model file, so its weights are in memory once."""
    arguments = [
        *("--pretrained_model_name_or_path", str(model)),
        *("--train_data_dir", str(folder / "images")),
        *("--output_dir", tempfile.mkdtemp(dir=folder)),
        *("--resolution", str(side)),
        *("--max_train_steps", "10000"),
        *("--network_dim", str(RANK)),
        *("--network_alpha", str(RANK)),
        *("--learning_rate", "1e-4"),
        *("--seed", "0"),
        "--network_train_unet_only",
        "--cache_latents",
        "--cache_latents_to_disk",
        "--cache_text_encoder_outputs",
        *(("--gradient_checkpointing",) if checkpointing else ()),
        *configuration.arguments,
    ]
    run, loop = begun_loop(arguments)
    windows = (window for epoch in range(10**6) for window in loop.windows(epoch))

    def step() -> None:
        loop.train_step(*next(windows))

    return Measured(configuration, checkpointing, step, lambda: run.records.close("end"))


def count(measured: Measured) -> None:
    """Count the operations and the memory of one step, which warms it up as well."""
    counter, memory = FlopCounterMode(display=False, custom_mapping=attention_operations()), PeakBytes()
    with counter, memory:
        measured.step()
    measured.operations, measured.peak_bytes = counter.get_total_flops(), memory.most


def say(measured: Measured, what: str) -> None:
    """Tell at once: the whole takes minutes, and what was measured must outlive an interruption."""
    switch = "on" if measured.checkpointing else "off"
    print(f"{measured.configuration.name}, checkpointing {switch}: {what}", file=sys.stderr, flush=True)


def report(rows: list[Measured], *, checkpointing: bool) -> bool:
    """Print one table; return whether every configuration reaches its limit."""
    print(f"\n{'With' if checkpointing else 'Without'} gradient checkpointing\n")
    print(
        "| trained | s/step | times faster | limit | reached | by operations | TFLOP/step | peak of a step's tensors |"
    )
    print("|---|---|---|---|---|---|---|---|")
    every, reached_all = rows[0], True
    for row in rows:
        limit = row.configuration.limit(checkpointing=checkpointing)
        faster = every.seconds / row.seconds
        reached_all &= faster >= WANTED * limit
        operations = every.operations / row.operations if row.operations else float("nan")
        print(
            f"| {row.configuration.name} | {row.seconds:.2f} | **{faster:.2f}** | {limit:.2f} | {faster / limit:.0%} | "
            f"{operations:.2f} | {row.operations / 1e12:.2f} | {row.peak_bytes / 1e9:.2f} GB |"
        )
    return reached_all


def measure(model: Path, folder: Path, options: argparse.Namespace) -> bool:
    """Count, time in turns, and report; return whether the limits are reached."""
    side = options.latents * 8
    make_picture(folder, side)
    rows = [
        loop_of(configuration, model, folder, side, checkpointing=switch == "on")
        for switch in options.checkpointing
        for configuration in CONFIGURATIONS
    ]
    for row in rows:
        count(row)
        say(row, f"{row.operations / 1e12:.3f} TFLOP, {row.peak_bytes / 1e9:.2f} GB")
    for _ in range(options.rounds):
        for row in rows:
            started = time.perf_counter()
            row.step()
            seconds = time.perf_counter() - started
            row.seconds = min(row.seconds, seconds)
            say(row, f"{seconds:.2f} s")
    for row in rows:
        row.close()
    print(f"SD 1.5, {options.latents}x{options.latents} latents, batch 1, rank {RANK}, UNet only, fp32, ", end="")
    print(f"{torch.get_num_threads()} threads, least of {options.rounds} steps in turns, PyTorch {torch.__version__}")
    reached = True
    for switch in options.checkpointing:
        table = [row for row in rows if row.checkpointing == (switch == "on")]
        reached &= report(table, checkpointing=switch == "on")
    return reached


def main() -> int:
    """Run the benchmark; return 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="SD 1.5 folder; without it, one with random weights is made")
    parser.add_argument("--latents", type=int, default=64, help="side of the latents")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "on"], default=["off", "on"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = Path(folder) / "model"
            make_full_size(model)
        return 0 if measure(model, Path(folder), options) else 1


if __name__ == "__main__":
    sys.exit(main())
