"""What becomes of the options of sd-scripts that Maulstick does not have: never silence.

Each is either without effect here (accepted, and reported with the reason) or refused (an error that says what to use).
A value that is sd-scripts' own default, or that means "off", is accepted silently, because kohya_ss writes out many
options that nobody has touched. The rows are in ``sd_scripts_table``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.guard.presets import removed_option_message
from maulstick.options.config_file import Given
from maulstick.options.sd_scripts_table import (
    DIFFERENCES,
    MAULSTICK_ONLY,
    NETWORK_ARGUMENTS,
    ONLY_IN,
    SD_SCRIPTS_OPTIONS,
    SUPPORTED_NETWORK_ARGUMENTS,
    NoEffect,
    Refused,
    Renamed,
)
from maulstick.options.values import option_types

SECRETS = frozenset({"wandb_api_key", "huggingface_token"})
"""Options whose values are never shown."""


@dataclass(frozen=True)
class OptionRow:
    """One line of the comparison with sd-scripts: ``verdict`` is same, ours, renamed, no effect or refused.

    ``scripts`` says which of sd-scripts' scripts have it; it says nothing where the verdict is "ours".
    """

    name: str
    scripts: str
    verdict: str
    explanation: str


def option_rows() -> Iterator[OptionRow]:
    """Yield a row for every option of sd-scripts' LoRA scripts for SD, SDXL and SD3, and for kohya_ss' own keys."""
    for name in ["config_file", *option_types()]:
        verdict = "ours" if name in MAULSTICK_ONLY else "same"
        yield OptionRow(name, ONLY_IN.get(name, "all"), verdict, DIFFERENCES.get(name, ""))
    for name, entry in SD_SCRIPTS_OPTIONS.items():
        if isinstance(entry, Renamed):
            yield OptionRow(name, entry.scripts, "renamed", f"the same as {entry.to}")
        elif isinstance(entry, NoEffect):
            yield OptionRow(name, entry.scripts, "no effect", entry.reason)
        else:
            yield OptionRow(name, entry.scripts, "refused", entry.instead)


def unknown_option_error(name: str, where: str, *, dashes: str = "") -> OptionError:
    """Return the error for a name that neither Maulstick nor sd-scripts has, with the nearest one that exists."""
    removed = removed_option_message(name)
    if removed is not None:
        return OptionError(f"{removed} ({where})")
    known = [*option_types(), "config_file", *SD_SCRIPTS_OPTIONS]
    # A name that works is the better suggestion, even if one that is refused is as near.
    hint = nearest_name_hint(name, [*option_types(), "config_file"]) or nearest_name_hint(name, known)
    if not hint:
        hint = " `maulstick train --help` lists the options."
    elif dashes:
        hint = hint.replace("'", f"'{dashes}", 1)
    return OptionError(f"Unknown option '{dashes}{name}' ({where}).{hint}")


def take_leftover_tokens(tokens: list[str]) -> dict[str, Given]:
    """Read what is left of a command line without Maulstick's own options: options that only sd-scripts has.

    Raises:
        OptionError: a token belongs to no option, or a value is missing.
    """
    found: dict[str, Given] = {}
    waiting = list(tokens)
    while waiting:
        token = waiting.pop(0)
        if not token.startswith("--"):
            raise OptionError(
                f"Unexpected argument '{token}': it follows no option that takes it. "
                "A file of options is given with --config_file, a switch is turned off with --name=false."
            )
        name, equals, value = token.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        entry = SD_SCRIPTS_OPTIONS.get(name)
        if entry is None:
            raise unknown_option_error(name, "command line", dashes="--")
        found[name] = Given(_token_value(name, entry, value if equals else None, waiting), "command line", True)
    return found


def _token_value(
    name: str, entry: NoEffect | Refused | Renamed, attached: str | None, waiting: list[str]
) -> bool | str:
    default = entry.default
    if isinstance(default, bool):
        return attached is None or attached.lower() not in ("false", "0", "no")
    if attached is not None:
        return attached
    if not waiting or waiting[0].startswith("--"):
        raise OptionError(f"--{name} needs a value.")
    return waiting.pop(0)


def judge_options(given: Mapping[str, Given], active: Mapping[str, Any]) -> str | None:
    """Accept or refuse the given sd-scripts options.

    Args:
        active: the run's own options by name; some verdicts depend on them.

    Returns:
        One line about the accepted options that have no effect, None if there are none.

    Raises:
        OptionError: an option is refused, or lacks what it needs.
    """
    without_effect = []
    for name, value in given.items():
        entry = SD_SCRIPTS_OPTIONS[name]
        if isinstance(entry, Renamed) or _is_off(value.value, entry):
            continue
        if isinstance(entry, Refused):
            if entry.only_with is None or entry.only_with.holds(active):
                shown = "..." if name in SECRETS else _shown(value.value)
                raise OptionError(f"{name} = {shown} ({value.where}): {entry.instead}.")
            without_effect.append(f"{name} ({entry.only_with.reason})")
        elif entry.needs is not None and active[entry.needs[0]] != entry.needs[1]:
            option, needed = entry.needs
            raise OptionError(
                f"{name} = {_shown(value.value)} ({value.where}): it needs {option} = {needed}, but {option} is "
                f"{active[option]}. Set {option} = {needed}, or remove {name}."
            )
        else:
            without_effect.append(f"{name} ({entry.reason})")
    return f"Without effect here: {'; '.join(without_effect)}." if without_effect else None


def _is_off(value: Any, entry: NoEffect | Refused) -> bool:
    """Tell whether the value is sd-scripts' default or otherwise changes nothing; texts are compared as numbers too."""
    return any(_comparable(value) == _comparable(off) for off in (entry.default, *entry.also_off, "", ()))


def _comparable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_comparable(part) for part in value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def unknown_network_argument_error(key: str, where: str) -> OptionError:
    """Return the error for a key of ``network_args`` that is not supported, saying what to do."""
    known = NETWORK_ARGUMENTS.get(key)
    if known is not None:
        return OptionError(f"network_args '{key}' ({where}): {known}.")
    hint = nearest_name_hint(key, SUPPORTED_NETWORK_ARGUMENTS)
    if not hint:
        hint = f" There are {', '.join(SUPPORTED_NETWORK_ARGUMENTS)}."
    return OptionError(f"Unknown key '{key}' in network_args ({where}).{hint}")
