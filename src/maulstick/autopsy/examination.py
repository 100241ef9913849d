"""One re-run with probes: finds the first tensor that is not finite, and leaves everything as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .causes import explain
from .optimizer import optimizer_facts, state_tensors, trial_step
from .probes import Probe, watching
from .report import Direction, Finding, Headroom, Report
from .trace import finding_of, first_origin, makers
from .values import Known, KnownTensors, dtype_name, is_finite, tensor_facts

_ROWS = 12
Modules = nn.Module | Mapping[str, nn.Module]
Parameters = Iterable[tuple[str, Tensor]]


def examine(
    run: Callable[[], Tensor],
    modules: Modules,
    parameters: Parameters | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    loss_scale: float = 1.0,
    facts: Mapping[str, Any] | None = None,
    try_step: bool = True,
    title: str = "",
) -> Report:
    """Run forward and backward once, and report the first tensor that is not finite, in the order of execution.

    Weights, gradients, buffers, optimizer state and random numbers are afterwards what they were. Where gradients and
    weights come out finite, the optimizer (if given) makes a step on trial, and its state and the weights after it are
    looked at too; with a loss scale above 1, a pass that fails only in its backward part is repeated at scale 1.

    Args:
        run: does the forward pass and returns the loss; called one to three times, and must do the same each time. Any
            shape of loss is summed up.
        modules: the networks at work, one or several by name; the paths in the report begin with these names.
        parameters: (name, parameter) of what is trained; by default all that require gradients, by their paths.
        optimizer: whose state is looked at; a torch optimizer, not a wrapper.
        inputs: what ``run`` reads, by name, nested as you like, so that a bad input has a name.
        loss_scale: what a GradScaler multiplies the loss by.
        facts: what else is known (``mixed_precision``, ``prediction_type``, …); the table of known causes uses them.
        try_step: let the optimizer make a step on trial.
        title: how the report is headed.
    """
    roots = {"": modules} if isinstance(modules, nn.Module) else dict(modules)
    named = list(parameters) if parameters is not None else _trainable(roots)
    known = KnownTensors()
    known.add("input", "", dict(inputs or {}))
    known.add("weight", "", dict(named))
    for root_name, root in roots.items():
        for name, parameter in root.named_parameters(root_name):
            known.add("weight", name, parameter)
        for name, buffer in root.named_buffers(root_name):
            known.add("buffer", name, buffer)
    if optimizer is not None:
        for name, tensor in state_tensors(optimizer, named):
            known.add("optimizer state", name, tensor)
    with _untouched(roots, named):
        finding, loss, tightest, notes = _one_pass(run, roots, named, known, loss_scale)
        found_facts = _facts(named, optimizer, loss_scale)
        if finding is None:
            finding = _bad_without_effect(known)
        if finding is None and optimizer is not None and try_step:
            finding = trial_step(optimizer, named, loss_scale)
        if finding is not None and finding.direction is Direction.BACKWARD and loss_scale != 1:
            _clear(named)
            at_one, *_ = _one_pass(run, roots, named, known, 1.0)
            found_facts["finite_at_loss_scale_1"] = at_one is None
    all_facts = {**found_facts, **(facts or {})}
    report = Report(finding, loss, loss_scale, title=title, tightest=tightest, facts=all_facts, notes=notes)
    return replace(report, causes=tuple(explain(report, roots)))


def _one_pass(
    run: Callable[[], Tensor],
    roots: Mapping[str, nn.Module],
    named: list[tuple[str, Tensor]],
    known: KnownTensors,
    loss_scale: float,
) -> tuple[Finding | None, float, tuple[Headroom, ...], tuple[str, ...]]:
    """Return the finding, the loss, the modules of least headroom, and notes."""
    notes: tuple[str, ...] = ()
    with watching(roots, known) as probe:
        probe.parameter_names = {id(tensor): name for name, tensor in named}
        loss = run()
        probe.claim(loss)
        total = loss.sum()
        finite_loss = is_finite(total)
        value = float(total.detach())
        if finite_loss and total.requires_grad:
            (total * loss_scale).backward()
        elif finite_loss:
            notes = ("the loss depends on nothing that is trained, so there was no backward pass to look at",)
    gradients = [(name, tensor.grad) for name, tensor in named if tensor.grad is not None]
    bad = [(name, gradient) for name, gradient in gradients if not is_finite(gradient)]
    tightest = _tightest(probe)
    if finite_loss and not bad:
        return None, value, tightest, notes
    ends = makers(probe, [loss] if not finite_loss else [gradient for _, gradient in bad])
    origin = first_origin(probe.bad, ends)
    if origin is None:
        return _unexplained(loss, bad), value, tightest, notes
    finding = finding_of(origin, known.bad("input", "weight"), loss_is_finite=finite_loss)
    return finding, value, tightest, notes


def _tightest(probe: Probe) -> tuple[Headroom, ...]:
    rows = sorted(probe.peaks.values(), key=lambda row: -row.amax if row.factor is None else row.factor)
    halves = [row for row in rows if row.dtype == "float16"]
    others = sorted((row for row in rows if row.dtype != "float16"), key=lambda row: -row.amax)
    return tuple([*halves, *others][:_ROWS])


def _unexplained(loss: Tensor, bad: list[tuple[str, Tensor]]) -> Finding:
    """A non-finite value that no watched operation made: it came from outside of torch's operations."""
    if bad:
        return Finding(Direction.BACKWARD, None, None, tensor_facts(f"gradient of {bad[0][0]}", bad[0][1]))
    return Finding(Direction.FORWARD, None, None, tensor_facts("loss", loss))


def _bad_without_effect(known: KnownTensors) -> Finding | None:
    """A weight or a state that is not finite is a finding even where this batch has not met it."""
    bad: list[Known] = known.bad("weight", "optimizer state")
    if not bad:
        return None
    direction = Direction.WEIGHT if bad[0].origin == "weight" else Direction.OPTIMIZER_STATE
    return Finding(direction, None, None, tensor_facts(bad[0].name, bad[0].tensor))


def _trainable(roots: Mapping[str, nn.Module]) -> list[tuple[str, Tensor]]:
    return [
        (name, parameter)
        for root_name, root in roots.items()
        for name, parameter in root.named_parameters(root_name)
        if parameter.requires_grad
    ]


def _facts(
    named: list[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None, loss_scale: float
) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for _, tensor in named:
        dtypes[dtype_name(tensor.dtype)] = dtypes.get(dtype_name(tensor.dtype), 0) + 1
    device = next((tensor.device for _, tensor in named), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = {"torch": torch.__version__, "device": name, "trained_dtypes": dtypes, "loss_scale": loss_scale}
    return facts if optimizer is None else facts | optimizer_facts(optimizer)


def _clear(named: list[tuple[str, Tensor]]) -> None:
    for _, tensor in named:
        tensor.grad = None


@contextmanager
def _untouched(roots: Mapping[str, nn.Module], named: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Put gradients, buffers and the state of the random generators back at the end."""
    gradients = [(tensor, tensor.grad) for _, tensor in named]
    others = [(p, p.grad) for root in roots.values() for p in root.parameters() if p.requires_grad]
    buffers = [(buffer, buffer.clone()) for root in roots.values() for buffer in root.buffers() if not buffer.is_meta]
    devices = {tensor.device for _, tensor in named if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(device.index or 0 for device in devices)):
            for tensor, _ in [*gradients, *others]:
                tensor.grad = None
            yield
    finally:
        for tensor, gradient in [*gradients, *others]:
            tensor.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                # A written buffer counts as changed for autograd, so it is written only where it has changed.
                if not torch.equal(buffer, before) and not _same_with_nan(buffer, before):
                    buffer.copy_(before)


def _same_with_nan(first: Tensor, second: Tensor) -> bool:
    return first.is_floating_point() and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def healthy_loss(run: Callable[[], Tensor], parameters: Parameters, loss_scale: float = 1.0) -> bool:
    """Run forward and backward without probes; return whether loss and gradients are finite. Gradients are dropped."""
    named = list(parameters)
    before = [(tensor, tensor.grad) for _, tensor in named]
    try:
        for tensor, _ in before:
            tensor.grad = None
        loss = run().sum()
        if not math.isfinite(float(loss.detach())):
            return False
        if loss.requires_grad:
            (loss * loss_scale).backward()
        return all(is_finite(tensor.grad) for tensor, _ in before if tensor.grad is not None)
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient
