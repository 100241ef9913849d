"""What the names of ``lr_scheduler`` take: which options and arguments have a meaning for which schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.schema import ScheduleOptions
from maulstick.options.values import parse_arguments, parse_steps

_WARMUP = ("lr_warmup_steps", "lr_warmup_skip_zero")
_RATIO, _CYCLES = "lr_scheduler_min_lr_ratio", "lr_scheduler_num_cycles"


@dataclass(frozen=True)
class Argument:
    """A key of ``lr_scheduler_args``: what it expects, and whether a value is that."""

    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class ScheduleFacts:
    """What one name takes.

    Attributes:
        uses: the options that have an effect with it, besides ``lr_scheduler`` and ``lr_scheduler_args``.
        arguments: the keys of ``lr_scheduler_args`` that it knows.
    """

    uses: tuple[str, ...] = ()
    arguments: Mapping[str, Argument] | None = None

    @property
    def warms_up(self) -> bool:
        """Whether a warm-up may stand before it."""
        return "lr_warmup_steps" in self.uses


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(*names: str) -> Argument:
    return Argument("one of " + ", ".join(names), lambda value: value in names)


_CURVES = _one_of("linear", "cosine", "1-sqrt")

SCHEDULES: Mapping[str, ScheduleFacts] = {
    "constant": ScheduleFacts(),
    "constant_with_warmup": ScheduleFacts(_WARMUP),
    "linear": ScheduleFacts(_WARMUP),
    "cosine": ScheduleFacts(_WARMUP, {"num_cycles": Argument("a number above 0", lambda v: _is_number(v) and v > 0)}),
    "cosine_with_restarts": ScheduleFacts((*_WARMUP, _CYCLES)),
    "polynomial": ScheduleFacts(
        (*_WARMUP, "lr_scheduler_power"),
        {"lr_end": Argument("a learning rate, 0 or more", lambda v: _is_number(v) and v >= 0)},
    ),
    "inverse_sqrt": ScheduleFacts((*_WARMUP, "lr_scheduler_timescale")),
    "cosine_with_min_lr": ScheduleFacts((*_WARMUP, _CYCLES, _RATIO)),
    "warmup_stable_decay": ScheduleFacts(
        (*_WARMUP, "lr_decay_steps", _CYCLES, _RATIO), {"warmup_type": _CURVES, "decay_type": _CURVES}
    ),
    "piecewise_constant": ScheduleFacts(
        (), {"step_rules": Argument("FACTOR:STEP,...,FACTOR such as 1:10,0.1:20,0.01", lambda v: _are_rules(v))}
    ),
    "rex": ScheduleFacts((*_WARMUP, _RATIO)),
}
"""Every schedule there is by name. All but ``rex`` have the meaning they have in sd-scripts."""

CUSTOM = ScheduleFacts(("lr_warmup_skip_zero",))
"""A class or function named with ``lr_scheduler_type``; only the call tells which arguments it knows."""

REFUSED: Mapping[str, str] = {
    "adafactor": "it shows the rate that transformers' Adafactor makes up by itself, which is not supported. Use "
    "optimizer_type = Adafactor with lr_scheduler = constant_with_warmup: the rate is then the one you give",
    "reduce_lr_on_plateau": "it follows a validation loss, and a training loss is too noisy for it. Use cosine or rex",
    "greedy": "it follows the loss, which is too noisy for it in training. Use cosine or rex",
    "cosine_warmup_with_min_lr": "use cosine_with_min_lr; with lr_warmup_skip_zero its warm-up starts above 0 too",
    "cosine_with_hard_restarts": "use cosine_with_restarts, whose restarts are hard",
    "custom": "name the class with lr_scheduler_type",
    "exponential": "use lr_scheduler_type = ExponentialLR with lr_scheduler_args = gamma=0.999",
    "step": "use lr_scheduler = piecewise_constant, or lr_scheduler_type = StepLR",
}
"""Names that sd-scripts or other trainers have, with what to use instead."""


def schedule_facts(options: ScheduleOptions) -> ScheduleFacts:
    """Return what the chosen schedule takes.

    Raises:
        OptionError: there is no such schedule.
    """
    if options.lr_scheduler_type is not None:
        return CUSTOM
    name = options.lr_scheduler
    if name in SCHEDULES:
        return SCHEDULES[name]
    # sd-scripts takes a first rate behind a colon: adafactor:1e-4.
    refusal = REFUSED.get(name.partition(":")[0])
    if refusal is not None:
        raise OptionError(f"lr_scheduler = {name} is not supported: {refusal}.")
    hint = nearest_name_hint(name, SCHEDULES)
    raise OptionError(
        f"lr_scheduler = {name}: there is no such schedule.{hint} There are {', '.join(SCHEDULES)}; or name a class "
        "with lr_scheduler_type."
    )


def schedule_name(options: ScheduleOptions) -> str:
    """Return the name of the schedule, or of the class that takes its place."""
    return options.lr_scheduler_type or options.lr_scheduler


def schedule_arguments(options: ScheduleOptions) -> dict[str, Any]:
    """Return ``lr_scheduler_args`` by key; values are Python literals, or texts where they are not.

    Raises:
        OptionError: an argument is not of the form key=value, or a key is given twice.
    """
    return parse_arguments(options.lr_scheduler_args, "lr_scheduler_args")


def parse_step_rules(text: Any) -> list[tuple[float, float]]:
    """Return (first step after it, factor) of each piece of ``"1:10,0.1:20,0.01"``; the last piece has no end.

    As in diffusers, a number behind a colon is a step of the run, not the length of the piece.

    Raises:
        ValueError: the text is not of this form, the steps don't grow, or a factor is negative or not finite.
    """
    *pieces, last = str(text).split(",")
    rules: list[tuple[float, float]] = []
    for piece in pieces:
        factor, _, end = piece.partition(":")
        rules.append((int(end), float(factor)))
    rules.append((math.inf, float(last)))
    ends = [0.0, *(end for end, _ in rules)]
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise ValueError("the steps must grow")
    if any(not (math.isfinite(factor) and factor >= 0) for _, factor in rules):
        raise ValueError("a factor must be 0 or more")
    return rules


def _are_rules(text: Any) -> bool:
    try:
        parse_step_rules(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------- what options say together


def check_schedule(options: ScheduleOptions) -> None:
    """Refuse a schedule that does not exist, lacks what it needs, or is told what it cannot do.

    Raises:
        OptionError: names the option, what was expected and what to use.
    """
    facts, name = schedule_facts(options), schedule_name(options)
    chosen = f"lr_scheduler{'_type' if facts is CUSTOM else ''} = {name}"
    if has_steps(options, "lr_warmup_steps") and not facts.warms_up:
        use = "Use lr_scheduler = constant_with_warmup, or set lr_warmup_steps to 0."
        if name != "constant":
            use = "Put it into the schedule's own arguments, and set lr_warmup_steps to 0."
        raise OptionError(
            f"{chosen} and lr_warmup_steps = {options.lr_warmup_steps} contradict each other: it has no warm-up. {use}"
        )
    decays = has_steps(options, "lr_decay_steps")
    arguments = schedule_arguments(options)
    if facts is CUSTOM:
        return
    _check_arguments(chosen, facts, arguments)
    if name == "cosine_with_min_lr" and options.lr_scheduler_min_lr_ratio is None:
        raise OptionError(f"{chosen} needs lr_scheduler_min_lr_ratio: the lowest rate as a share of the full one.")
    if name == "warmup_stable_decay" and not decays:
        raise OptionError(f"{chosen} needs lr_decay_steps: the length of the decay at the end, such as 20%.")
    if name == "piecewise_constant" and "step_rules" not in arguments:
        raise OptionError(f"{chosen} needs its pieces: lr_scheduler_args = step_rules=1:10,0.1:20,0.01, for example.")


def _check_arguments(chosen: str, facts: ScheduleFacts, arguments: Mapping[str, Any]) -> None:
    known = facts.arguments or {}
    for key, value in arguments.items():
        if key not in known:
            hint = nearest_name_hint(key, known)
            takes = f"It takes {', '.join(known)}." if known else "It takes none."
            own = next((option for option in facts.uses if option.endswith(f"_{key}")), None)
            use = f" Use the option {own}." if own else ""
            raise OptionError(f"lr_scheduler_args: '{key}' is no argument of {chosen}.{hint} {takes}{use}")
        if not known[key].fits(value):
            raise OptionError(f"lr_scheduler_args: {key} = {value}: expected {known[key].expected}.")


def has_steps(options: ScheduleOptions, name: str) -> bool:
    """Return whether ``lr_warmup_steps`` or ``lr_decay_steps`` is more than 0."""
    # Any large total tells; the real one is not known before the data is.
    return parse_steps(getattr(options, name), 10**9, name) > 0


def schedule_leftovers(options: ScheduleOptions, given: Collection[str]) -> Iterator[str]:
    """Yield a line for each option that says something and does nothing with this schedule."""
    facts, name = schedule_facts(options), schedule_name(options)
    decay_type = schedule_arguments(options).get("decay_type", "cosine")
    if name == "warmup_stable_decay" and decay_type != "cosine" and options.lr_scheduler_num_cycles != 1:
        yield f"{_CYCLES} has no effect with decay_type={decay_type}; it is for a cosine."
    for field in fields(options):
        value = getattr(options, field.name)
        is_choice = field.name in ("lr_scheduler", "lr_scheduler_type", "lr_scheduler_args")
        if is_choice or field.name in facts.uses or field.name not in given or value == field.default:
            continue
        if value != 0 and not (field.name.endswith("_steps") and not has_steps(options, field.name)):
            others = [other for other, row in SCHEDULES.items() if field.name in row.uses]
            yield f"{field.name} has no effect with {name}; it is for {', '.join(others)}."
    if facts is CUSTOM and "lr_scheduler" in given and options.lr_scheduler != ScheduleOptions().lr_scheduler:
        yield f"lr_scheduler has no effect: lr_scheduler_type = {name} takes its place."
    warms_up = has_steps(options, "lr_warmup_steps")
    if facts.warms_up and options.lr_warmup_skip_zero and not warms_up:
        yield "lr_warmup_skip_zero has no effect without lr_warmup_steps."
    if name == "constant_with_warmup" and not warms_up:
        yield "lr_scheduler = constant_with_warmup is the same as constant without lr_warmup_steps."
    if name == "inverse_sqrt" and not warms_up and options.lr_scheduler_timescale is None:
        yield (
            "lr_scheduler = inverse_sqrt without lr_warmup_steps and lr_scheduler_timescale has a time scale of 10000 "
            "steps: the rate hardly falls before."
        )
    counts_half_waves = name == "cosine_with_min_lr" or (name == "warmup_stable_decay" and decay_type == "cosine")
    if counts_half_waves and options.lr_scheduler_num_cycles % 2 == 0:
        yield (
            f"lr_scheduler_num_cycles = {options.lr_scheduler_num_cycles} counts half waves with {name}, as in "
            "sd-scripts: an even number ends at the full rate, an odd one at the lowest."
        )
