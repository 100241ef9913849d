"""How soon the command line answers, beside what importing torch alone takes: python -m bench.start_up

Whole processes take turns; the least time of each counts, so a busy machine disturbs it little. Exits with 1 when an
answer takes longer than half the import of torch: then something heavy is imported, or built, that is not needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

ANSWERS = (("--help",), ("train", "--help"), ("--version",), ("trian",))
MOST = 0.5


def seconds_of(code: str, *arguments: str) -> float:
    """Run Python code in a process of its own; return the seconds it took."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> int:
    """Print one table; return 1 when an answer is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    runs = {"import torch": ("import torch",)} | {
        " ".join(("maulstick", *words)): ("import sys, maulstick.cli; maulstick.cli.main(sys.argv[1:])", *words)
        for words in ANSWERS
    }
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            least[name] = min(least[name], seconds_of(*run))
    torch_seconds = least["import torch"]
    print("| command | seconds | times the import of torch |\n|---|---|---|")
    for name, seconds in least.items():
        print(f"| {name} | {seconds:.2f} | {seconds / torch_seconds:.2f} |")
    return int(max(seconds for name, seconds in least.items() if name != "import torch") > MOST * torch_seconds)


if __name__ == "__main__":
    sys.exit(main())
