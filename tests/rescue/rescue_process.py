"""One of two processes of ``test_rescue_processes.py``: the fault is on process 1 only, the rescue on both."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from maulstick.guard import GradientGuard, guarded_step
from maulstick.rescue import RescueConfig, Rescuer


def main() -> None:
    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = GradientGuard.from_preset("steady", names=model.module)
    rescuer = Rescuer(RescueConfig(after=4, every=5, limit=3), optimizer, parameters=model.module)
    rescuer.begin()
    decisions = []
    for step in range(40):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 6)).square().mean()
        if rank == 1 and 12 <= step < 16:
            loss = loss * math.nan
        loss.backward()
        outcome = guarded_step(guard, optimizer, loss=loss)
        if rank == 1 and step == 24:
            # Found when the next snapshot is due, by process 1 alone.
            optimizer.state[model.module[0].weight]["exp_avg_sq"][0, 0] = math.inf
        reduced = math.nan if outcome.verdict.loss is None else outcome.verdict.loss
        decision = rescuer.after_window(step + 1, bad=outcome.skipped, loss=reduced, finite=outcome.verdict.finite)
        decisions.append(repr(decision))
    weights = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    found = {"decisions": decisions, "weights": weights, "judge": repr(rescuer.judge.state_dict())}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # gloo's threads sometimes abort an interpreter that shuts down in its own time; everything is over by now.
    os._exit(0)


if __name__ == "__main__":
    main()
