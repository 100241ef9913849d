"""Reading a ``--config_file``: TOML in which sections are free, as in sd-scripts."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maulstick.errors import OptionError

DATASET_KEYS = frozenset({"datasets", "subsets", "image_dir", "num_repeats", "class_tokens", "is_reg", "metadata_file"})
"""Names that only a dataset description has. ``general`` is not among them: people call a section of options so."""

TABLE_OPTIONS = frozenset({"block_lr"})
"""Options whose value is a table itself; every other table is a section of options."""


@dataclass(frozen=True)
class Given:
    """One value that a user gave, with where it stood (for messages)."""

    value: Any
    where: str
    on_command_line: bool = False


def find_config_file(path: Path) -> Path:
    """Return the file meant by ``path``, whose ``.toml`` may be left out."""
    candidates = [path] if path.suffix == ".toml" else [path, path.with_name(path.name + ".toml")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = " nor ".join(map(str, candidates))
    raise OptionError(f"config_file: there is no file {tried}. Paths are relative to the current folder, {Path.cwd()}.")


def read_config_file(path: Path) -> dict[str, Given]:
    """Return the options in the file by name; those in sections and those outside count alike.

    An empty text means that the option is not given: kohya_ss writes such lines.

    Raises:
        OptionError: the file is not there or not TOML, tables lie deeper than one level, a name stands twice with
            different values, or the file is a dataset description.
    """
    document = _parsed(path)
    options: dict[str, Given] = {}
    for key, value in document.items():
        if isinstance(value, dict) and key not in TABLE_OPTIONS:
            for inner_key, inner_value in value.items():
                _add(options, inner_key, inner_value, f"{path}, section [{key}]", path)
        else:
            _add(options, key, value, str(path), path)
    return {name: given for name, given in options.items() if given.value != ""}


def _add(options: dict[str, Given], name: str, value: Any, where: str, path: Path) -> None:
    if name in DATASET_KEYS:
        raise OptionError(
            f"'{name}' ({where}) describes a dataset, not a run. Put it into a dataset description and name that file "
            f"with dataset_config; if {path.name} is one, give it as --dataset_config instead of --config_file."
        )
    if isinstance(value, dict) and name not in TABLE_OPTIONS:
        raise OptionError(f"'{name}' ({where}) is a section inside a section. Sections may be one level deep.")
    earlier = options.get(name)
    if earlier is not None and earlier.value != value:
        raise OptionError(
            f"{name} stands twice with different values: {earlier.value} ({earlier.where}) and {value} ({where}). "
            "Keep one of them."
        )
    options[name] = Given(value, where)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        # The Windows editor writes a byte-order mark, which TOML does not allow.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"config_file: {path} is not UTF-8 text ({error.reason}). Save it as UTF-8.") from error
    except OSError as error:
        raise OptionError(f"config_file: {path} cannot be read: {error.strerror}.") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = ""
        if text.lstrip().startswith("{"):
            hint = (
                " It is JSON, as *Save configuration* of kohya_ss' GUI makes it. Give the TOML that the GUI writes "
                "into its output folder when a training starts (config_lora-DATE-TIME.toml)."
            )
        elif "\\" in text:
            hint = r" Windows paths go in single quotes ('C:\images') or with forward slashes (C:/images)."
        raise OptionError(f"config_file: {path} is not TOML: {error}.{hint}") from error
