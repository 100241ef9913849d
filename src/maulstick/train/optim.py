"""From options to an optimizer: registry look-up, argument checks, parameter groups."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.values import parse_arguments
from maulstick.train.optimizers import OPTIMIZERS, OptimizerInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RateGroup:
    """Parameters that share a learning rate, under the name they have in the log."""

    name: str
    learning_rate: float
    parameters: Sequence[torch.nn.Parameter]


def resolve_optimizer(optimizer_type: str) -> tuple[str, OptimizerInfo]:
    """Return the registry's name and row for a name in any case, or a row for an importable class path.

    Raises:
        OptionError: the name is unknown; the message has the nearest known one.
    """
    by_lower = {name.lower(): name for name in OPTIMIZERS}
    name = by_lower.get(optimizer_type.lower())
    if name is not None:
        return name, OPTIMIZERS[name]
    if "." in optimizer_type:
        return optimizer_type, OptimizerInfo(optimizer_type, "class given by path")
    raise OptionError(
        f"optimizer_type '{optimizer_type}' is unknown.{nearest_name_hint(optimizer_type, OPTIMIZERS)} "
        f"Known: {', '.join(OPTIMIZERS)}; or the full path of a class, such as torch.optim.RAdam."
    )


def load_optimizer_class(name: str, info: OptimizerInfo) -> Callable[..., torch.optim.Optimizer]:
    """Import the optimizer's class, or say which extra brings it."""
    module_name, _, class_name = info.class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        install = f" Install it with: pip install 'maulstick[{info.extra}]'." if info.extra else ""
        if name.endswith("AdamW8bit"):
            install += " Or set optimizer_type = AdamW, which does the same in 32 bit and needs no package."
        raise OptionError(
            f"optimizer_type '{name}' needs '{module_name}', which cannot be imported.{install}"
        ) from error
    except AttributeError as error:
        raise OptionError(f"optimizer_type '{name}': '{module_name}' has no class '{class_name}'.") from error
    import torch

    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise OptionError(f"optimizer_type '{name}' is not an optimizer (a subclass of torch.optim.Optimizer).")
    return found


def check_arguments(name: str, optimizer_class: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the class would not know or that another option sets."""
    parameters = inspect.signature(optimizer_class).parameters
    valid = [key for key, p in parameters.items() if key != "params" and p.kind is not p.VAR_KEYWORD]
    for key in arguments:
        if key == "lr":
            raise OptionError("optimizer_args: 'lr' is set by learning_rate, unet_lr and text_encoder_lr.")
        if key not in valid:
            # A class that takes **kwargs would swallow the typo silently, so the named parameters decide.
            raise OptionError(
                f"optimizer_args: '{key}' is not an argument of {name}.{nearest_name_hint(key, valid)} "
                f"It takes: {', '.join(k for k in valid if k != 'lr')}."
            )


def _by_own_names(arguments: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments under the class's own names."""
    twice = next((alias for alias, own in aliases.items() if alias in arguments and own in arguments), None)
    if twice is not None:
        raise OptionError(f"optimizer_args: '{twice}' and '{aliases[twice]}' are the same argument. Keep one of them.")
    return {aliases.get(key, key): value for key, value in arguments.items()}


def check_rates(name: str, info: OptimizerInfo, groups: Sequence[RateGroup]) -> None:
    """Refuse groups of different rates where the optimizer would silently use one."""
    rates = {group.learning_rate for group in groups}
    if len(rates) > 1 and not info.honours_group_rates:
        by_rate = sorted(groups, key=lambda group: group.learning_rate)
        named = groups if len(groups) <= 4 else (by_rate[0], by_rate[-1])
        shown = ", ".join(f"{group.name} {group.learning_rate:g}" for group in named)
        if len(named) < len(groups):
            shown = f"{len(groups)} groups, lowest and highest: {shown}"
        other = "ProdigyPlusScheduleFree" if info.estimates_rate else "AdamW"
        raise OptionError(
            f"optimizer_type '{name}' uses one step size for everything and would ignore the different learning rates "
            f"({shown}). Give all the same rate, or use {other}, which keeps them apart."
        )


def check_optimizer(optimizer_type: str, arguments: Sequence[str], rates: Mapping[str, float]) -> None:
    """Refuse what ``build_optimizer`` would refuse, before there are parameters; ``rates`` is group name -> rate."""
    import torch

    groups = [RateGroup(group, rate, [torch.nn.Parameter(torch.zeros(1))]) for group, rate in rates.items()]
    optimizer = build_optimizer(optimizer_type, arguments, groups)
    if resolve_optimizer(optimizer_type)[1].extra == "cuda":
        return
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # type: ignore[attr-defined]
    try:
        for group in groups:
            group.parameters[0].grad = torch.ones(1)
        optimizer.step()
    except Exception as error:
        # Any optimizer may be named here, and each has its own way to refuse.
        raise OptionError(f"optimizer_type '{optimizer_type}' cannot train a LoRA: {error}") from error


def build_optimizer(
    optimizer_type: str, arguments: Sequence[str], groups: Sequence[RateGroup]
) -> torch.optim.Optimizer:
    """Build the optimizer over the groups.

    Each parameter group carries ``name`` (the group's name). Where all rates are equal and the optimizer takes one
    rate only, there is a single group without an ``lr`` of its own.

    Raises:
        OptionError: unknown optimizer or argument, a missing package, or rates the optimizer would ignore.
    """
    name, info = resolve_optimizer(optimizer_type)
    given = _by_own_names(parse_arguments(arguments, "optimizer_args"), info.aliases)
    optimizer_class = load_optimizer_class(name, info)
    check_arguments(name, optimizer_class, given)
    check_rates(name, info, groups)
    if not info.honours_group_rates:
        merged = [parameter for group in groups for parameter in group.parameters]
        joint_name = "+".join(group.name for group in groups)
        parameter_groups: list[dict[str, Any]] = [{"params": merged, "name": joint_name}]
    else:
        parameter_groups = [
            {"params": list(group.parameters), "lr": group.learning_rate, "name": group.name} for group in groups
        ]
    try:
        return optimizer_class(parameter_groups, lr=groups[0].learning_rate, **{**info.defaults, **given})
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        shown = ", ".join(arguments) or "none"
        raise OptionError(f"optimizer_args ({shown}): {name} refused its arguments: {error}") from error


def list_optimizers_command(as_json: bool) -> int:
    """Print the registry."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "description": info.description,
            "needs": f"maulstick[{info.extra}]" if info.extra else "",
            "honours_group_rates": info.honours_group_rates,
            "estimates_rate": info.estimates_rate,
        }
        for name, info in OPTIMIZERS.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("optimizer_type", "what it is", "own rate per group", "needs"):
        table.add_column(column)
    for row in rows:
        own_rate = "yes" if row["honours_group_rates"] else "no"
        # The brackets of an extra's name would be taken for markup.
        table.add_row(row["name"], row["description"], own_rate, escape(row["needs"]))
    Console().print(table)
    return 0
