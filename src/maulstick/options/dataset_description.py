"""Reading sd-scripts' dataset description: a TOML or JSON file of datasets and their image folders."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.dataset_spec import (
    DATASET_KEYS,
    NOT_SUPPORTED,
    OWN_SUBSET_KEYS,
    SUBSET_KEYS,
    DatasetSpec,
    SubsetSpec,
    check_limits,
    checked,
    with_masks_below,
)
from maulstick.options.dataset_values import Check


def read_description(
    file: Path, defaults: Mapping[str, Any], *, prior_loss_weight: float, masks: Path | None, masked_loss: bool
) -> list[DatasetSpec]:
    """Return the datasets of a description.

    Args:
        defaults: values by key where the description leaves them open.
        masks: folder of masks of the subsets that name none.
        masked_loss: whether a subset may name one.

    Raises OptionError for anything that is unknown, of the wrong type, out of range or contradictory.
    """
    document = _parsed(file)
    unknown = [key for key in document if key not in ("general", "datasets")]
    if unknown:
        hint = nearest_name_hint(unknown[0], ["general", "datasets"])
        raise OptionError(f"{file}: unknown table '{unknown[0]}'; expected [general] and [[datasets]].{hint}")
    general = document.get("general", {})
    if not isinstance(general, dict):
        raise OptionError(f"{file}: 'general' must be one table, written [general].")
    general = _checked_table(general, DATASET_KEYS | SUBSET_KEYS, f"{file}, [general]")
    specs = []
    for number, table in enumerate(_tables(document, "datasets", f"{file}"), start=1):
        where = f"{file}, [[datasets]] number {number}"
        subset_tables = _tables(table, "subsets", where)
        own = {key: value for key, value in table.items() if key != "subsets"}
        own = _checked_table(own, DATASET_KEYS | SUBSET_KEYS, where)
        values = {**defaults, **general, **own}
        check_limits(values, f"{where}: ")
        subsets = [
            _described_subset(file, subset, values, f"{file}, [[datasets.subsets]] number {place} of dataset {number}")
            for place, subset in enumerate(subset_tables, start=1)
        ]
        if not masked_loss and (named := next((each for each in subsets if each.conditioning_data_dir), None)):
            raise OptionError(
                f"{where}: conditioning_data_dir = {named.conditioning_data_dir} holds masks, which only masked_loss "
                "uses. Add masked_loss, or remove it."
            )
        if masks is not None:
            subsets = [with_masks_below(subset, masks) for subset in subsets]
        specs.append(
            DatasetSpec(
                subsets=tuple(subsets),
                prior_loss_weight=prior_loss_weight,
                source=where,
                **{name: values[name] for name in DATASET_KEYS if name in values},
            )
        )
    return specs


def _parsed(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise OptionError(f"dataset_config: there is no file {file}.")
    try:
        text = file.read_text(encoding="utf-8-sig")
        document = json.loads(text) if file.suffix.lower() == ".json" else tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise OptionError(f"dataset_config: {file} is not UTF-8 text ({error.reason}). Save it as UTF-8.") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        hint = ""
        if "\\" in text:
            hint = r" Windows paths go in single quotes ('C:\images') or with forward slashes (C:/images)."
        raise OptionError(f"dataset_config: {file} cannot be read: {error}.{hint}") from error
    if not isinstance(document, dict):
        raise OptionError(f"dataset_config: {file} must hold 'general' and 'datasets'.")
    return document


def _tables(parent: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    path = "datasets" if key == "datasets" else "datasets.subsets"
    tables = parent.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise OptionError(f"{where}: '{key}' must be a list of tables, each written [[{path}]] (two brackets).")
    if not tables:
        raise OptionError(f"{where}: there is no [[{path}]]; at least one is needed.")
    return tables


def _checked_table(table: Mapping[str, Any], allowed: Mapping[str, Check], where: str) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        if value is None:
            continue
        if key in allowed:
            values[key] = checked(value, allowed[key], f"{where}: {key}")
        elif key in NOT_SUPPORTED:
            meaning, off_values = NOT_SUPPORTED[key]
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in off_values):
                raise OptionError(
                    f"{where}: {key} ({meaning}) is an option of sd-scripts that Maulstick does not support. Remove it."
                )
        elif key in OWN_SUBSET_KEYS:
            raise OptionError(f"{where}: {key} belongs in [[datasets.subsets]].")
        elif key in DATASET_KEYS:
            raise OptionError(
                f"{where}: {key} belongs in [[datasets]] or [general]; all subsets of a dataset share it."
            )
        else:
            hint = nearest_name_hint(key, allowed) or f" Known here: {', '.join(sorted(allowed))}."
            raise OptionError(f"{where}: unknown key '{key}'.{hint}")
    return values


def _described_subset(file: Path, table: Mapping[str, Any], inherited: Mapping[str, Any], where: str) -> SubsetSpec:
    own = _checked_table(table, SUBSET_KEYS | OWN_SUBSET_KEYS, where)
    if "image_dir" not in own:
        raise OptionError(f"{where}: image_dir is missing; every subset names its image folder with it.")
    if own.get("is_reg") and own.get("validation_split"):
        raise OptionError(
            f"{where}: validation_split and is_reg contradict each other: regularisation images are never held back. "
            "Remove one."
        )
    folder, note = _described_folder("image_dir", own.pop("image_dir"), file, where)
    masks = own.pop("conditioning_data_dir", None)
    values = {name: inherited[name] for name in SUBSET_KEYS if name in inherited} | own
    if masks is not None:
        values["conditioning_data_dir"], _ = _described_folder("conditioning_data_dir", masks, file, where)
        if values.get("alpha_mask"):
            raise OptionError(
                f"{where}: alpha_mask and conditioning_data_dir contradict each other: masks are either alpha channels "
                "or files. Set alpha_mask = false in this subset, or remove conditioning_data_dir."
            )
    return SubsetSpec(image_dir=folder, image_dir_note=note, **values)


def _described_folder(key: str, written: str, file: Path, where: str) -> tuple[Path, str | None]:
    """Find a folder where sd-scripts would (from the current directory), else beside the description."""
    folder = Path(written).expanduser()
    if folder.is_dir():
        return folder, None
    beside = file.parent / folder
    if not folder.is_absolute() and beside.is_dir():
        return beside, (
            f"{key} '{written}' is not below the current directory; the one beside {file.name} is used: {beside}"
        )
    if folder.is_file():
        raise OptionError(f"{where}: {key} '{written}' is a file; a folder is expected.")
    looked = f"{folder}" if folder.is_absolute() else f"{Path.cwd() / folder}, {beside}"
    hint = nearest_name_hint(folder.name, [*folders_in(folder.parent), *folders_in(beside.parent)])
    raise OptionError(f"{where}: there is no folder {key} '{written}' (looked for: {looked}).{hint}")


def folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder for a hint; none where it cannot be read."""
    try:
        return [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []
