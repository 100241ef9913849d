"""A scheduler class of one's own as a pure function of the window: run once on a stand-in, its factors kept.

Recording it before training means that nothing of it has to be saved or resumed, that every process has the same
factors, and that a class which fails does so before the first step.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.values import parse_arguments
from maulstick.train.schedule import Factor, ScheduleSettings

_HOME = "torch.optim.lr_scheduler"


def recorded_factor(settings: ScheduleSettings) -> Factor:
    """Return the factor of each window of the class or function that ``settings.name`` names.

    A first window of factor 0 gets that of the second with ``skip_zero``.

    Raises:
        OptionError: it cannot be imported, refuses its arguments, needs the loss, or does not act as one factor on the
            learning rates.
    """
    factors = _record(settings.name, settings.arguments, settings.total_steps, settings.rates)

    def factor(window: int) -> float:
        if window == 0 and settings.skip_zero and factors[0] == 0 and len(factors) > 1:
            return factors[1]
        return factors[min(window, len(factors) - 1)]

    return factor


@lru_cache(maxsize=4)
def _record(name: str, arguments: tuple[str, ...], windows: int, rates: tuple[float, ...]) -> tuple[float, ...]:
    make = _find(name)
    # One group for each rate that is trained, because arguments may hold rates (eta_min, max_lr), and one group more,
    # because a class may treat groups differently whatever their rates are.
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (*rates, rates[0])]
    optimizer = torch.optim.AdamW(groups, lr=rates[0])
    before = _other_values(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = _build(name, make, optimizer, arguments)
        factors = []
        for window in range(max(1, windows)):
            if window:
                _step(name, optimizer, scheduler, window)
            factors.append(_common_factor(name, optimizer, rates, window))
            changed = [key for key, value in _other_values(optimizer).items() if value != before[key]]
            if changed:
                raise _unfit(
                    name,
                    f"it changes {changed[0]} of the optimizer too, and only the learning rate can be scheduled. "
                    "Torch's classes that do so leave it alone with lr_scheduler_args = cycle_momentum=False",
                )
    return tuple(factors)


def _unfit(name: str, why: str) -> OptionError:
    return OptionError(f"lr_scheduler_type = {name} cannot be used: {why}.")


def _find(name: str) -> Callable[..., Any]:
    module_name, _, class_name = name.rpartition(".")
    module_name = module_name or _HOME
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _unfit(
            name, f"'{module_name}' cannot be imported ({error}). A file of your own must be on PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest_name_hint(class_name, known)
        raise OptionError(f"lr_scheduler_type = {name}: '{module_name}' has no '{class_name}'.{hint}")
    if not callable(found):
        raise _unfit(name, "it is neither a class nor a function")
    if isinstance(found, type) and not issubclass(found, LRScheduler):
        raise _unfit(name, "it is not a subclass of torch.optim.lr_scheduler.LRScheduler")
    if isinstance(found, type) and issubclass(found, ReduceLROnPlateau):
        raise _unfit(
            name, "it follows a validation loss, and a training loss is too noisy for it; try lr_scheduler = cosine"
        )
    return found


def _build(
    name: str, make: Callable[..., Any], optimizer: torch.optim.Optimizer, arguments: tuple[str, ...]
) -> LRScheduler:
    try:
        scheduler = make(optimizer, **parse_arguments(arguments, "lr_scheduler_args"))
    except OptionError:
        raise
    except Exception as error:
        # Any class may be named here, and each has its own way to refuse.
        shown = ", ".join(arguments) or "none"
        raise _unfit(name, f"it refused its arguments (lr_scheduler_args: {shown}): {error}") from error
    if not isinstance(scheduler, LRScheduler):
        raise _unfit(name, f"it gives a {type(scheduler).__name__}, not a torch.optim.lr_scheduler.LRScheduler")
    required = [
        parameter.name
        for parameter in inspect.signature(scheduler.step).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required:
        raise _unfit(name, f"its step() wants {', '.join(required)}, and a schedule here depends on the step alone")
    return scheduler


def _step(name: str, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, window: int) -> None:
    try:
        optimizer.step()
        scheduler.step()
    except Exception as error:
        raise _unfit(name, f"it failed at step {window}: {error}") from error


def _common_factor(name: str, optimizer: torch.optim.Optimizer, rates: tuple[float, ...], window: int) -> float:
    factors = [
        float(group["lr"]) / rate for group, rate in zip(optimizer.param_groups, (*rates, rates[0]), strict=True)
    ]
    first = factors[0]
    if not all(math.isfinite(factor) and factor >= 0 for factor in factors):
        raise _unfit(name, f"the learning rate at step {window} is {first * rates[0]:g}")
    if any(not math.isclose(factor, first, rel_tol=1e-6, abs_tol=1e-12) for factor in factors):
        shown = " and ".join(f"{float(group['lr']):g}" for group in optimizer.param_groups)
        raise _unfit(
            name,
            f"it gives groups of different rates different factors (at step {window}: {shown}), as an argument that is "
            "a rate itself does. Train all at one learning rate, or leave that argument out",
        )
    return first


def _other_values(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Return what every group says besides its learning rate."""
    return {key: [group[key] for group in optimizer.param_groups] for key in optimizer.defaults if key != "lr"}
