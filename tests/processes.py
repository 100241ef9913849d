"""Tests on two processes: a script started once for each rank, or a program started with torchrun, as users do it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]

LEAVE = """
dist.barrier()
sys.stdout.flush()
# gloo's threads sometimes abort an interpreter that shuts down in its own time; what is tested is over by now.
os._exit(0)
"""
"""How a program for torchrun ends; it has imported ``os``, ``sys`` and ``torch.distributed as dist``."""


def results_of_both(script: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run ``script FOLDER`` as rank 0 and as rank 1; return what they wrote into rank0.json and rank1.json there."""
    path = os.pathsep.join(sys.path)
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, "RANK": str(rank), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        output = [each.communicate(timeout=120)[0].decode() for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0], "\n".join(output)
    zero, one = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    return zero, one


def start_on_two(
    folder: Path, program: str, arguments: Sequence[str], *, stdout: IO[Any] | int, stderr: IO[Any] | int
) -> subprocess.Popen[str]:
    """Start a program's text with torchrun on two processes; its script lies in ``folder``."""
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *arguments], env=environment, stdout=stdout, stderr=stderr, text=True)


def output_on_two(folder: Path, program: str, arguments: Sequence[str], *, timeout: float = 300) -> str:
    """Run a program's text with torchrun on two processes to its end, which must be a good one; return its output."""
    started = start_on_two(folder, program, arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = started.communicate(timeout=timeout)
    finally:
        started.kill()
    assert started.returncode == 0, errors[-3000:]
    return output
