"""State folders on the disk: written in one step, verified when read, found again after a crash.

A folder holds ``state.pt`` (tensors and plain values, read with ``weights_only=True``) and ``state.json`` (the facts
about the run, with the size and SHA-256 of ``state.pt``). It gets its name only when both are on the disk, so a folder
with that name is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from maulstick.adapters.files import file_hash
from maulstick.errors import ModelError
from maulstick.files_io import current_umask, disk_error_behind, set_aside

FORMAT = 1
STATE_FILE = "state.pt"
FACTS_FILE = "state.json"
TEMPORARY_MARK = ".maulstick-tmp-"


class FoundState(NamedTuple):
    """A whole state folder and its facts."""

    folder: Path
    facts: dict[str, Any]


def write_state(folder: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path | None:
    """Write a state folder in one step; return where an earlier one of that name was set aside.

    Raises OSError when the disk refuses, RuntimeError where torch cannot write the state for another reason; nothing
    is left of the new folder then, and the earlier one is as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}{TEMPORARY_MARK}", dir=folder.parent))
    try:
        with (temporary / STATE_FILE).open("wb") as file:
            try:
                torch.save(dict(state), file)
            except RuntimeError as error:
                # torch's writer hides what the disk said behind an error of its own.
                raise disk_error_behind(error) or error from None
            _to_disk(file)
        written = temporary / STATE_FILE
        all_facts = {**facts, "format": FORMAT, "bytes": written.stat().st_size, "sha256": file_hash(written)}
        with (temporary / FACTS_FILE).open("w", encoding="utf-8") as text:
            json.dump(all_facts, text, indent=1)
            _to_disk(text)
        temporary.chmod(0o777 & ~current_umask())
        earlier = set_aside(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return earlier


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts of a state folder.

    Raises ModelError when it is no state folder, is not whole, or was written in another format.
    """
    if not folder.is_dir():
        raise ModelError(
            f"resume: there is no folder {folder}. States are the folders in output_dir whose names end in -state; "
            "resume = auto takes the newest."
        )
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        size = (folder / STATE_FILE).stat().st_size
    except FileNotFoundError as error:
        other = (
            " It looks like a state of sd-scripts (accelerate), which cannot be read here."
            if (folder / "train_state.json").exists()
            else ""
        )
        raise ModelError(
            f"resume: {folder} is not a state folder of Maulstick: {Path(error.filename).name} is missing.{other}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"resume: {folder / FACTS_FILE} cannot be read ({error}).") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else None
        raise ModelError(f"resume: {folder} has format {found}; this version reads format {FORMAT}.")
    if facts.get("bytes") != size:
        raise ModelError(f"resume: {folder / STATE_FILE} has {size} bytes, {facts.get('bytes')} were written.")
    return facts


def read_state(found: FoundState) -> dict[str, Any]:
    """Return the state itself, after its checksum was compared. Raises ModelError when it is damaged."""
    path = found.folder / STATE_FILE
    if file_hash(path) != found.facts["sha256"]:
        raise ModelError(f"resume: {path} is damaged: its checksum is not the one that was written.")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ModelError(f"resume: {path} does not hold a state.")
    return state


def state_name(output_name: str, label: str | None) -> str:
    """Return the name of a state folder, as in sd-scripts; ``label`` is that of the LoRA file saved with it."""
    return f"{output_name}{f'-{label}' if label else ''}-state"


def _name_pattern(output_name: str) -> re.Pattern[str]:
    label = r"(-interrupted)?(-step\d{8}|-\d{6})?"
    return re.compile(rf"{re.escape(output_name)}{label}-state(\.old-\d+)?")


def find_latest(output_dir: Path, output_name: str) -> tuple[FoundState | None, list[str]]:
    """Return the last saved state of ``output_name``, and a line for each folder that is not usable.

    The last saved, not the furthest: that may be the end of an earlier run under the same name.
    """
    notes: list[str] = []
    candidates: list[FoundState] = []
    pattern = _name_pattern(output_name)
    for folder in sorted(output_dir.iterdir() if output_dir.is_dir() else []):
        if folder.is_dir() and pattern.fullmatch(folder.name):
            try:
                candidates.append(FoundState(folder, read_facts(folder)))
            except ModelError as error:
                notes.append(f"{error} It is left out.")
    for found in sorted(candidates, key=_when_saved, reverse=True):
        if file_hash(found.folder / STATE_FILE) == found.facts["sha256"]:
            return found, notes
        notes.append(f"resume: {found.folder / STATE_FILE} is damaged (wrong checksum). It is left out.")
    return None, notes


def _when_saved(found: FoundState) -> tuple[float, int]:
    return float(found.facts["saved_at"]), int(found.facts["step"])


def remove_state(folder: Path) -> None:
    """Remove a state folder so that a crash on the way leaves no half of it under its name."""
    doomed = folder.with_name(f".{folder.name}{TEMPORARY_MARK}removed")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(output_dir: Path, output_name: str) -> list[Path]:
    """Remove what killed writes of this run left behind; return what was removed."""
    pattern = _name_pattern(output_name)
    leftovers = [
        path
        for path in (output_dir.iterdir() if output_dir.is_dir() else [])
        if path.name.startswith(".")
        and TEMPORARY_MARK in path.name
        and pattern.fullmatch(path.name[1:].split(TEMPORARY_MARK)[0])
    ]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return leftovers
