"""The optimizer's part: its state before the step, and a step on trial that is taken back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .report import Direction, Finding
from .values import dtype_name, is_finite, tensor_facts, tensors_in

Named = list[tuple[str, Tensor]]


def state_tensors(optimizer: torch.optim.Optimizer, named: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of everything that the optimizer keeps for each parameter."""
    names = {id(tensor): name for name, tensor in named}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter), "a parameter")
        for key, tensor in tensors_in(state):
            yield f"{key} of {name}", tensor


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return name, learning rates and epsilon of the optimizer, as far as it has them."""
    groups = optimizer.param_groups
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    facts["learning_rates"] = [float(group["lr"]) for group in groups if "lr" in group]
    epsilons = [group["eps"] for group in groups if isinstance(group.get("eps"), float)]
    if epsilons:
        facts["optimizer_eps"] = min(epsilons)
        facts["eps_in_parameter_dtype"] = min(
            float(torch.tensor(group["eps"], dtype=parameter.dtype))
            for group in groups
            if isinstance(group.get("eps"), float)
            for parameter in group["params"]
        )
    return facts


def trial_step(optimizer: torch.optim.Optimizer, named: Named, loss_scale: float) -> Finding | None:
    """Step with the gradients there are, divided by the scale; report the first weight or state that it spoils.

    Weights and state are put back. The gradients are not.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with _taken_back(optimizer, parameters):
        if loss_scale != 1:
            # As a GradScaler computes it: infinite in fp32 for a scale that has collapsed.
            inverse = float(torch.tensor(loss_scale, dtype=torch.float64).reciprocal().float())
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)
        optimizer.step()
        return _spoilt(optimizer, named)


def _spoilt(optimizer: torch.optim.Optimizer, named: Named) -> Finding | None:
    for name, tensor in named:
        if not is_finite(tensor):
            gradient = () if tensor.grad is None else (tensor_facts("gradient", tensor.grad),)
            return Finding(
                Direction.OPTIMIZER_STEP,
                None,
                None,
                tensor_facts(name, tensor),
                op=f"{type(optimizer).__name__}.step on {dtype_name(tensor.dtype)} weights",
                operands=gradient,
            )
    for name, tensor in state_tensors(optimizer, named):
        if not is_finite(tensor):
            return Finding(
                Direction.OPTIMIZER_STEP, None, None, tensor_facts(name, tensor), op=f"{type(optimizer).__name__}.step"
            )
    return None


@contextmanager
def _taken_back(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> Iterator[None]:
    """Restore weights, state and the groups' numbers, in the same tensors that they are in now."""
    weights = [parameter.detach().clone() for parameter in parameters]
    state = {parameter: {key: _copied(value) for key, value in kept.items()} for parameter, kept in _states(optimizer)}
    groups = [
        {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
            for parameter in [parameter for parameter, _ in _states(optimizer) if parameter not in state]:
                del optimizer.state[parameter]
            for parameter, before in state.items():
                _put_back(optimizer.state[parameter], before)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                _put_back(group, before, keep=("params",))


def _states(optimizer: torch.optim.Optimizer) -> list[tuple[Any, dict[str, Any]]]:
    return list(optimizer.state.items())


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _put_back(now: dict[str, Any], before: dict[str, Any], keep: tuple[str, ...] = ()) -> None:
    for key in [key for key in now if key not in before and key not in keep]:
        del now[key]
    for key, value in before.items():
        present = now.get(key)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and present.shape == value.shape:
            present.copy_(value)
        else:
            now[key] = value
