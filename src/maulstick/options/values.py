"""How the values of options are read: TOML values to the type of their field, and lengths given in several ways."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import fields
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.schema import TrainOptions

NUMBERS_ACCEPTED_AS_TEXT = frozenset({"resolution", "skip_image_resolution", "lr_warmup_steps", "lr_decay_steps"})
LISTS_ACCEPTED_AS_TEXT = frozenset(
    {
        *("down_lr_weight", "mid_lr_weight", "up_lr_weight"),
        *("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"),
    }
)
"""Options that are a text with commas in sd-scripts; a file may give them as a number or a list of numbers."""


@cache
def option_types() -> dict[str, Any]:
    """Return the type of every option by its name, without the ``| None`` of those that may be left out."""
    types: dict[str, Any] = {}
    for group_type in get_type_hints(TrainOptions).values():
        hints = get_type_hints(group_type)
        types |= {option.name: _without_none(hints[option.name]) for option in fields(group_type)}
    return types


def _without_none(hint: Any) -> Any:
    alternatives = [part for part in get_args(hint) if part is not NoneType]
    return alternatives[0] if len(alternatives) == 1 and NoneType in get_args(hint) else hint


def convert_toml_value(name: str, value: Any, where: str) -> Any:
    """Return the TOML value of option ``name`` in the type of its field.

    Numbers in quotes are taken as numbers (``"1e-4"``), and whole numbers may be written as ``8.0``. Sizes may be
    a number or a list of two; a list of rates may be one number; numbers by block may be a list. ``block_lr`` is a
    table, the name of a preset, or the table's entries as texts.

    Raises:
        OptionError: the value has another type; the message names option, place, value and what was expected.
    """
    try:
        if name in ("resolution", "skip_image_resolution") and isinstance(value, list) and value:
            return ",".join(str(_whole_number(side)) for side in value)
        if name in NUMBERS_ACCEPTED_AS_TEXT and _is_number(value):
            return str(value)
        if name in LISTS_ACCEPTED_AS_TEXT and not isinstance(value, str):
            return _with_commas(value)
        if name == "block_lr":
            return _table_entries(value)
        return _converted(value, option_types()[name])
    except _Unfit as unfit:
        raise OptionError(f"{name} = {_as_toml(value)} ({where}): expected {unfit.expected}.{unfit.hint}") from None


def argument_value(name: str, text: str) -> Any:
    """Return the text of a network argument as TOML would give it: a switch is true or false in any writing."""
    if option_types()[name] is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text


class _Unfit(Exception):
    """A value is not of the wanted type; ``expected`` says in words what is."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint


def _converted(value: Any, wanted: Any) -> Any:
    if wanted is bool:
        return _boolean(value)
    if wanted is int:
        return _whole_number(value)
    if wanted is float:
        return _number(value)
    if wanted is str:
        return _text(value, "text in quotes")
    if wanted is Path:
        return Path(_text(value, "a path in quotes"))
    if get_origin(wanted) is Literal:
        return _choice(value, get_args(wanted))
    (element,) = get_args(wanted)
    if element is float:
        return [_number(part) for part in (value if isinstance(value, list) else [value])]
    if element is Path:
        return [Path(_text(part, "paths in quotes")) for part in (value if isinstance(value, list) else [value])]
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise _Unfit('a list of texts such as ["key=value", "key=value"]')
    return value


def _with_commas(value: Any) -> str:
    items = value if isinstance(value, list) else [value]
    if not items or not all(_is_number(item) or isinstance(item, str) for item in items):
        raise _Unfit('a list of numbers, one number, or a text such as "0,0.5,1"')
    return ",".join(map(str, items))


def _table_entries(value: Any) -> list[str]:
    """Return a table as ``KEY=VALUE`` texts; keys without quotes (``down.4 = 1``) make TOML nest it."""
    if isinstance(value, str):
        return re.split(r"\s+(?=[^\s=]+=)", value.strip())
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if not isinstance(value, dict):
        raise _Unfit('a table such as { "down.4-5" = 0.5, mid = 0, up = "sine" }, or the name of a preset')
    entries = []
    for key, item in value.items():
        below = item if isinstance(item, dict) else {"": item}
        for rest, weight in below.items():
            entries.append(f"{key}.{rest}={_with_commas(weight)}" if rest else f"{key}={_with_commas(weight)}")
    return entries


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Unfit("true or false, without quotes")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _Unfit("a number") from None
    if not _is_number(value) or not math.isfinite(value):
        raise _Unfit("a number")
    return float(value)


def _whole_number(value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise _Unfit("a whole number") from None
    if not _is_number(value) or not math.isfinite(value) or value != int(value):
        raise _Unfit("a whole number")
    return int(value)


def _text(value: Any, expected: str) -> str:
    if not isinstance(value, str):
        raise _Unfit(expected)
    return value


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    listed = "one of " + ", ".join(map(str, choices))
    if all(isinstance(choice, int) for choice in choices):
        try:
            value = _whole_number(value)
        except _Unfit:
            raise _Unfit(listed) from None
    if value not in choices:
        raise _Unfit(listed, nearest_name_hint(value, choices) if isinstance(value, str) else "")
    return value


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_as_toml(part) for part in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def parse_steps(value: str, total: int, name: str = "lr_warmup_steps") -> int:
    """Return the number of steps that ``value`` means in a training of ``total`` steps.

    ``"500"`` is 500 steps, ``"0.1"`` (below 1) a fraction and ``"10%"`` a share of all steps; both are rounded down.
    As in sd-scripts, 1 and above must be whole numbers: ``"1.0"`` is an error, because it could mean one step or all.

    Raises:
        OptionError: anything else.
    """
    text = value.strip()
    expected = "expected a whole number of steps, a fraction below 1, or a share such as 10%"
    try:
        number = Decimal(text.removesuffix("%"))
    except InvalidOperation:
        raise OptionError(f"{name} = {value}: {expected}.") from None
    if not number.is_finite() or number < 0:
        raise OptionError(f"{name} = {value}: {expected}.")
    if text.endswith("%"):
        if number > 100:
            raise OptionError(f"{name} = {value} is more than all steps; {expected}.")
        return int(number * total / 100)
    if number < 1:
        return int(number * total)
    if not text.isdecimal():
        raise OptionError(f"{name} = {value}: {expected}. Write 1 for one step, or 100% for all.")
    return int(text)


def parse_arguments(arguments: Sequence[str], option: str) -> dict[str, Any]:
    """Read the ``key=value`` texts that an option lists; values are Python literals, or texts where they are not.

    Raises:
        OptionError: a text is not of this form, or a key is given twice.
    """
    parsed: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = (part.strip() for part in argument.partition("="))
        if not equals or not key:
            raise OptionError(f"{option}: '{argument}' is not of the form key=value.")
        if key in parsed:
            raise OptionError(f"{option}: '{key}' is given twice.")
        try:
            parsed[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            parsed[key] = text
    return parsed
