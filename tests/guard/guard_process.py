"""One of two processes of ``test_guard_processes.py``: runs every scenario and writes what it saw as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from maulstick.guard import GradientGuard, GradientSource, GuardError, Verdict, guarded_step
from maulstick.guard.collective import Collective
from maulstick.guard.measure import measure

FAULTS = {10: math.nan, 14: math.inf, 18: 1e6}
STEPS = 24


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def seen(verdict: Verdict) -> dict:
    """What must be the same on both processes; repr keeps NaN comparable and floats exact."""
    kept = ("skip", "reason", "norm", "threshold", "loss", "bad_tensor", "bad_micro_batch", "cosine", "escalate")
    return {name: repr(getattr(verdict, name)) for name in kept} | {"groups": repr(dict(verdict.group_norms))}


def batch(step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, 6)


def data_parallel(rank: int) -> dict:
    """A fault in the data of process 1 only; the loss that is given is the local one."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = GradientGuard.from_preset("steady", names=model.module, active_from=5, cosine="exact")
    verdicts, local = [], []
    for step in range(STEPS):
        loss = model(batch(step, rank)).square().mean()
        if rank == 1 and step in FAULTS:
            loss = loss * FAULTS[step]
        local.append(math.isfinite(loss.item()))
        loss.backward()
        verdicts.append(seen(guarded_step(guard, optimizer, loss=loss, max_grad_norm=1.0).verdict))
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    state = guard.state_dict()
    return {"verdicts": verdicts, "local_finite": local, "weights": weights.tolist(), "state": repr(state["judge"])}


def accumulation(rank: int) -> dict:
    """A NaN in the second of three micro-batches, which are not synchronised, on process 1 only."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    guard = GradientGuard.from_preset("steady", names=model.module)
    verdicts = []
    for step in range(3):
        for part in range(2):
            with model.no_sync():
                loss = model(batch(step, rank)).square().mean() / 3
                if rank == 1 and step == 1 and part == 1:
                    loss = loss * math.nan
                loss.backward()
            guard.observe_micro_batch(optimizer, loss=loss)
        loss = model(batch(step, rank)).square().mean() / 3
        loss.backward()
        guard.observe_micro_batch(optimizer, loss=loss)
        verdicts.append(seen(guarded_step(guard, optimizer).verdict))
    try:
        guard.observe_micro_batch(optimizer, drop="micro_batch")
        refused = ""
    except GuardError as error:
        refused = str(error)
    return {"verdicts": verdicts, "refused": refused}


def own_gradients(rank: int) -> dict:
    """Gradients that differ between processes, with a fault on process 1 only, shown to three guards."""
    together, alone = GradientGuard.from_preset("steady"), GradientGuard.from_preset("steady", processes=None)
    compatible = GradientGuard.from_preset("gamble")
    parameter = torch.nn.Parameter(torch.zeros(4))
    verdicts, local = [], []
    for step in range(40):
        parameter.grad = torch.full((4,), 0.1 + 0.01 * rank)
        if rank == 1 and step in (25, 28, 31):
            parameter.grad[2] = {25: math.nan, 28: math.inf, 31: 1e5}[step]
        verdicts.append([seen(each.observe([parameter])) for each in (together, compatible)])
        local.append(alone.observe([parameter]).skip)
    parameter.grad = torch.full((4,), 0.1)
    loss_of_one = together.observe([parameter], loss=math.inf if rank == 1 else 0.5)
    norms = []
    for on_host in (True, False):
        parameter.grad = torch.full((4,), 1.0 + 2.0 * rank)
        found = measure(GradientSource.of([parameter]), collective=Collective(), on_host=on_host, loss=float(rank))
        norms.append((found.norm, found.loss))
    return {"verdicts": verdicts, "local": local, "norms": norms, "loss_of_one": seen(loss_of_one)}


def sharded(rank: int) -> dict:
    """FSDP2: every process holds a part of each gradient; a fault in the part of process 1 only."""
    mesh = init_device_mesh("cpu", (2,))
    model = network()
    whole = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = GradientGuard.from_preset("steady", names=model, active_from=5, cosine="exact")
    verdicts, want = [], []
    for step in range(STEPS):
        loss = model(batch(step, 0)).square().mean()
        loss.backward()
        if step == 0:
            whole(batch(0, 0)).square().mean().backward()
            want.append(math.sqrt(sum(each.grad.double().square().sum().item() for each in whole.parameters())))
        if rank == 1 and step in FAULTS:
            model[2].weight.grad.to_local().view(-1)[0] = FAULTS[step]
        verdicts.append(seen(guarded_step(guard, optimizer, loss=loss, max_grad_norm=1.0).verdict))
    finite = all(bool(each.full_tensor().isfinite().all()) for each in model.parameters())
    try:
        model(batch(0, 0)).sum().backward()
        GradientGuard.from_preset("steady", processes=None).observe(model)
        refused = ""
    except GuardError as error:
        refused = str(error)
    return {"verdicts": verdicts, "want": want, "finite": finite, "refused": refused}


def main() -> None:
    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    scenarios = (data_parallel, accumulation, own_gradients, sharded)
    found = {scenario.__name__: scenario(rank) for scenario in scenarios}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # gloo's threads sometimes abort an interpreter that shuts down in its own time; all scenarios are over by now.
    os._exit(0)


if __name__ == "__main__":
    main()
