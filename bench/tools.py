"""Resizing and extracting a LoRA against the way through the full decomposition: python -m bench.tools

The full way forms the layer's matrix and decomposes it with torch.linalg.svd, whole as sd-scripts' resize_lora.py and
extract_lora_from_models.py do (with all right singular vectors), and reduced. Both ways take turns in one process with
one thread, as the tools give each module one thread and work on several at once; ratios are what counts. The error is
the norm of what is left out, over the least that a LoRA of that rank can leave out. Exits with 1 below the limits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.tools.low_rank import factor_svd, from_svd, randomised_svd

# Times over the whole decomposition, and the error above the best, that the tools have to keep.
RESIZE_TIMES, EXTRACT_TIMES, ERROR = 200, 40, 1.01


@dataclass(frozen=True)
class Row:
    """One comparison: seconds of the full ways and ours, and our error over the least possible."""

    what: str
    shape: tuple[int, int]
    ranks: str
    whole: float
    reduced: float
    ours: float
    error: float

    def text(self) -> str:
        rows, columns = self.shape
        return (
            f"| {self.what} | {rows}x{columns} | {self.ranks} | {self.whole:.2f} s | {self.reduced:.2f} s | "
            f"{self.ours * 1000:.1f} ms | **{self.whole / self.ours:.0f}x** | {self.reduced / self.ours:.0f}x | "
            f"{self.error:.4f} |"
        )


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def full_way(matrix: Tensor, rank: int, *, whole: bool) -> LoraWeights:
    """Cut a matrix to ``rank`` through its full decomposition."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=whole)
    return LoraWeights(right[:rank].clone(), left[:, :rank] * values[:rank], None)


def compare_resize(shape: tuple[int, int], old: int, new: int) -> Row:
    """Measure a LoRA of rank ``old`` cut to ``new``."""
    generator = torch.Generator().manual_seed(0)
    decay = 0.95 ** torch.arange(old)
    weights = LoraWeights(
        torch.randn(old, shape[1], generator=generator) * decay[:, None],
        torch.randn(shape[0], old, generator=generator),
        float(old),
    )
    whole = seconds(lambda: full_way(delta_weight(weights), new, whole=True), 1)
    reduced = seconds(lambda: full_way(delta_weight(weights), new, whole=False), 1)
    ours = seconds(lambda: from_svd(factor_svd(weights), new, float(new), shape), 5)
    exact = delta_weight(weights)
    best = (exact - delta_weight(full_way(exact, new, whole=False))).norm()
    found = (exact - delta_weight(from_svd(factor_svd(weights), new, float(new), shape))).norm()
    return Row("resize", shape, f"{old} -> {new}", whole, reduced, ours, float(found / best))


def difference(shape: tuple[int, int], kind: str) -> Tensor:
    """What fine-tuning could have done: ``dense`` differs in all directions alike, ``trained`` mostly in a few."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(*shape, generator=generator) / shape[1] ** 0.5
    if kind == "dense":
        return noise
    strong = 64
    left = torch.linalg.qr(torch.randn(shape[0], strong, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(shape[1], strong, generator=generator)).Q
    return (left * (20 * 0.9 ** torch.arange(strong))) @ right.T + 0.2 * noise


def compare_extract(shape: tuple[int, int], rank: int, kind: str) -> Row:
    """Measure a dense difference approximated at ``rank``."""
    matrix = difference(shape, kind)
    whole = seconds(lambda: full_way(matrix, rank, whole=True), 1)
    reduced = seconds(lambda: full_way(matrix, rank, whole=False), 1)
    ours = seconds(lambda: from_svd(randomised_svd(matrix, rank), rank, float(rank), shape), 5)
    best = torch.linalg.svdvals(matrix)[rank:].norm()
    found = (matrix - delta_weight(from_svd(randomised_svd(matrix, rank), rank, float(rank), shape))).norm()
    return Row(f"extract, {kind}", shape, str(rank), whole, reduced, ours, float(found / best))


def main() -> int:
    """Run the benchmark; return 1 when a limit is missed on the largest shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out the smaller shapes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    largest = (1280, 5120)
    shapes = [largest] if options.quick else [largest, (1280, 1280), (640, 2560)]
    print(f"Resize and extract on SDXL-shaped layers, {options.threads} threads, PyTorch {torch.__version__}\n")
    print("| | layer | rank | full SVD | reduced SVD | ours | times faster | than reduced | error / best |")
    print("|---|---|---|---|---|---|---|---|---|")
    missed = False
    for shape in shapes:
        rows = [compare_resize(shape, 64, 16)]
        rows += [compare_extract(shape, 16, kind) for kind in ("trained", "dense")]
        for row in rows:
            print(row.text(), flush=True)
            wanted = RESIZE_TIMES if row.what == "resize" else EXTRACT_TIMES
            missed |= shape == largest and (row.whole < wanted * row.ours or row.error > ERROR)
    limits = f"resize {RESIZE_TIMES}x, extract {EXTRACT_TIMES}x, error at most {ERROR}"
    print(f"\nWanted on {largest[0]}x{largest[1]}: {limits}.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
