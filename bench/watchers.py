"""What alarms, autopsy, rescue and the other watchers cost a healthy run: python -m bench.watchers

The quickstart's model and recipe, the first windows of a run of 1,000: those have more looks of the alarms than the
rest. Each watcher's own time is taken inside the run and set against the whole of it, so that a machine that changes
its speed changes both. On a device that works on its own (CUDA) that is the time until it has been asked, not until it
has answered. Looks that run the model again (alarms, comparison with the base model) come ever more rarely, so what
they cost the first windows is the most they cost. Exits with 1 when rescue or autopsy cost more than 1 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bench.block_rates import begun_loop
from maulstick.tools.quickstart import ASSETS
from maulstick.train.watchers import Watcher

MOST = 0.01


def timed(watcher: Watcher, seconds: dict[str, float]) -> None:
    """Add the time of each of the watcher's looks at a window to ``seconds``."""
    look = watcher.after_window

    def after_window(*arguments: Any) -> None:
        started = time.perf_counter()
        look(*arguments)
        seconds[type(watcher).__name__] += time.perf_counter() - started

    watcher.after_window = after_window  # type: ignore[method-assign]


def main() -> int:
    """Print one table; return 1 when a healthy run pays too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *("--pretrained_model_name_or_path", str(ASSETS / "model")),
            *("--train_data_dir", str(ASSETS / "images")),
            *("--output_dir", str(Path(folder))),
            *("--resolution", "128"),
            *("--train_batch_size", "4"),
            *("--max_train_steps", "1000"),
            *("--network_dim", "16"),
            *("--conv_dim", "16"),
            *("--learning_rate", "1e-3"),
            "--network_train_unet_only",
            "--cache_latents",
            "--cache_text_encoder_outputs",
        ]
        run, loop = begun_loop(arguments)
        seconds: dict[str, float] = defaultdict(float)
        for watcher in loop.parts.watchers:
            timed(watcher, seconds)
        started = time.perf_counter()
        for window in islice((each for epoch in range(1000) for each in loop.windows(epoch)), options.windows):
            loop.train_step(*window)
        state = loop.state
        whole = time.perf_counter() - started
        run.records.close("end")
    values = sum(parameter.numel() for _, parameter in loop.parts.named_parameters)
    print(f"{state.step} windows, {state.skipped} skipped, {whole / state.step:.3f} s each; {values:,} values train")
    print("| watcher | ms/window | share of the run |\n|---|---|---|")
    for name, spent in seconds.items():
        print(f"| {name} | {1000 * spent / state.step:.2f} | {spent / whole:.2%} |")
    share = sum(seconds.values()) / whole
    print(f"| **all** | {1000 * share * whole / state.step:.2f} | **{share:.2%}** |")
    return int(any(seconds[name] > MOST * whole for name in ("RescueWatcher", "AutopsyWatcher")))


if __name__ == "__main__":
    sys.exit(main())
