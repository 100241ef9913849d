"""Write docs/sd-scripts.md from the tables that the program itself goes by: ``make docs``."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

from maulstick.files_io import atomic_write
from maulstick.options.load import options_app
from maulstick.options.sd_scripts import OptionRow, option_rows
from maulstick.options.sd_scripts_table import (
    NETWORK_ARGUMENTS,
    NETWORK_MODULES,
    SD_SCRIPTS_GROUPS,
    SUPPORTED_NETWORK_ARGUMENTS,
)

DOCUMENT = Path(__file__).parent.parent / "docs" / "sd-scripts.md"

_SAME, _KEY, _NO_EFFECT, _REFUSED, _OURS = "same", "network_args", "no effect", "refused", "only here"
_ORDER = (_SAME, _KEY, _NO_EFFECT, _REFUSED, _OURS)

_INTRODUCTION = """\
# Every option of sd-scripts

<!-- Written by `make docs` from src/maulstick/options/. Do not edit by hand. -->

What becomes of each option of sd-scripts' LoRA scripts (`train_network.py`, `sdxl_train_network.py`, `sd3_train_network.py`)
and of the keys that kohya_ss adds to its files. A file of theirs is read as it is: `maulstick train --config_file my.toml`.
[coming-from.md](coming-from.md) says what else is different.

| here | how many | |
|---|---|---|
| same | {same} | the same name and meaning; {different} of them with a difference, such as another default, in bold |
| no effect | {no_effect} | accepted, and named with the reason before training; nothing here depends on it |
| refused | {refused} | an error that says what to use instead; sd-scripts' default, or a value that means "off", is accepted |
| network_args | {keys} | an option of its own here, a key of `network_args` there; works as a key too |
| only here | {ours} | sd-scripts does not have it |

A name that neither program has is an error with the nearest one that exists, on the command line, in a config file and in
`network_args`. Names in brackets say which scripts have the option, where it is not all of them.
"""


def document() -> str:
    """Return the whole text of docs/sd-scripts.md."""
    rows = list(option_rows())
    helps = _help_lines()
    parts = [_introduction(rows)]
    for group, members in _by_group(rows, helps).items():
        parts.append(f"## {group}\n\n{_table(members, helps)}")
    parts.append(_network_arguments())
    return "\n".join(parts)


def _verdict(row: OptionRow) -> str:
    if row.verdict in ("same", "renamed"):
        return _SAME
    if row.verdict == "ours":
        return _KEY if row.name in SUPPORTED_NETWORK_ARGUMENTS and row.name != "block_lr" else _OURS
    return row.verdict


def _introduction(rows: list[OptionRow]) -> str:
    counts = Counter(map(_verdict, rows))
    different = sum(row.verdict == "same" and bool(row.explanation) for row in rows)
    return _INTRODUCTION.format(
        same=counts[_SAME],
        different=different,
        no_effect=counts[_NO_EFFECT],
        refused=counts[_REFUSED],
        keys=counts[_KEY],
        ours=counts[_OURS],
    )


def _help_lines() -> dict[str, tuple[str, str]]:
    """Return group and line of ``maulstick train --help`` of each of Maulstick's own options."""
    arguments = options_app("train", "").assemble_argument_collection(parse_docstring=True)
    return {
        argument.name.removeprefix("--"): (argument.parameter.group[0].name, argument.parameter.help or "")
        for argument in arguments
        if argument.name.startswith("--")
    }


def _by_group(rows: list[OptionRow], helps: dict[str, tuple[str, str]]) -> dict[str, list[OptionRow]]:
    foreign = {name: group for group, members in SD_SCRIPTS_GROUPS.items() for name in members}
    grouped: dict[str, list[OptionRow]] = {group: [] for group, _ in helps.values()}
    for row in rows:
        group = helps[row.name][0] if row.name in helps else foreign[row.name]
        grouped.setdefault(group, []).append(row)
    return grouped


def _table(rows: list[OptionRow], helps: dict[str, tuple[str, str]]) -> str:
    lines = ["| option | here | |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: _ORDER.index(_verdict(row))):
        scripts = "" if row.scripts == "all" else f" ({row.scripts})"
        line = _sentence(helps[row.name][1] if row.name in helps else row.explanation)
        if row.verdict == "same" and row.explanation:
            line = f"{line} **{_sentence(row.explanation)}**"
        lines.append(f"| `{row.name}`{scripts} | {_verdict(row)} | {_cell(line)} |")
    return "\n".join(lines) + "\n"


_KEYS = 'Each of these may be a key of `network_args` (`["conv_dim=8"]`) or an option of its own (`conv_dim = 8`):'


def _network_arguments() -> str:
    supported = ", ".join(f"`{key}`" for key in SUPPORTED_NETWORK_ARGUMENTS)
    supported = textwrap.fill(f"{_KEYS} {supported}.", width=120, break_on_hyphens=False, break_long_words=False)
    refused = "\n".join(f"| `{key}` | {_cell(_sentence(text))} |" for key, text in sorted(NETWORK_ARGUMENTS.items()))
    modules = "\n".join(f"| `{key}` | {_cell(_sentence(text))} |" for key, text in NETWORK_MODULES.items())
    return f"""\
## network_args

{supported}

Keys that other networks have are refused:

| key | what to do |
|---|---|
{refused}

## network_module

`networks.lora` is the one for all models, and `networks.lora_sd3` the same for SD3. Of the others this is said:

| module | |
|---|---|
{modules}
"""


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    if text.partition(" ")[0].isalpha():
        # Names of options and programs stay as they are.
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!")) else f"{text}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    atomic_write(DOCUMENT, document())
    print(f"wrote {DOCUMENT}")
