"""Which folders are trained, and how: ``REPEATS_name`` folders or sd-scripts' dataset description, as one kind of spec.

Nothing here opens an image. Folders that cannot be used are not judged here either: ``data.index`` looks at what lies
in them and says what happens to it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.dataset_values import (
    Check,
    boolean,
    extension,
    fraction_or_steps,
    separator,
    share,
    size,
    text,
    whole_number,
)
from maulstick.options.schema import DatasetOptions


@dataclass(frozen=True, kw_only=True)
class SubsetSpec:
    """One image folder.

    Attributes:
        num_repeats: how often each of its images is used per epoch; below 1 the folder is not used.
        class_tokens: caption of images that have no caption file, None where nothing was given.
        caption_extension: extension looked for first, with its dot; ``.txt`` and ``.caption`` follow.
        image_dir_note: how ``image_dir`` was found, where that needs saying.
    """

    image_dir: Path
    num_repeats: int = 1
    class_tokens: str | None = None
    is_reg: bool = False
    caption_extension: str = ".txt"
    shuffle_caption: bool = False
    keep_tokens: int = 0
    caption_dropout_rate: float = 0.0
    caption_dropout_every_n_epochs: int = 0
    caption_tag_dropout_rate: float = 0.0
    caption_prefix: str | None = None
    caption_suffix: str | None = None
    caption_separator: str = ","
    keep_tokens_separator: str = ""
    secondary_separator: str | None = None
    enable_wildcard: bool = False
    token_warmup_min: int = 1
    token_warmup_step: float = 0.0
    flip_aug: bool = False
    validation_split: float = 0.0
    validation_seed: int | None = None
    image_dir_note: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Image folders that share a size, a batch size and buckets. Sizes are (width, height) in pixels.

    Attributes:
        train_data_dir, reg_data_dir: the folders that ``subsets`` were found in, None for a dataset description.
        source: where this comes from, for messages: an option name, or file and table.
    """

    subsets: tuple[SubsetSpec, ...]
    resolution: tuple[int, int]
    batch_size: int = 1
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    bucket_no_upscale: bool = False
    prior_loss_weight: float = 1.0
    train_data_dir: Path | None = None
    reg_data_dir: Path | None = None
    source: str = "train_data_dir"


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """Split ``"10_cat girl"`` into repeats and class tokens, (10, "cat girl"); None where it starts with no number.

    The number is what comes before the first underscore, as sd-scripts reads it; ``"10"`` alone has class tokens "".
    """
    number, _, class_tokens = name.partition("_")
    try:
        return int(number), class_tokens
    except ValueError:
        return None


def parse_resolution(text: str) -> tuple[int, int]:
    """Return (width, height) of ``"512"`` or ``"512,768"``; anything else is an OptionError."""
    try:
        sides = [int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise OptionError(f"resolution is '{text}'; expected one size such as 512, or width,height such as 512,768.")
    return sides[0], sides[-1]


def dataset_specs(options: DatasetOptions) -> list[DatasetSpec]:
    """Return what to train on, from ``train_data_dir`` (one dataset) or from ``dataset_config`` (any number).

    Values that ``dataset_config`` leaves open come from ``options``. Raises OptionError for anything that is unknown,
    of the wrong type, out of range, contradictory or names a folder that is not there.
    """
    defaults = _command_line_values(options)
    if options.dataset_config is not None:
        for name in ("train_data_dir", "reg_data_dir"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"dataset_config and {name} are both given, but dataset_config already names all image folders. "
                    "Leave one of them out."
                )
        return _read_description(options.dataset_config, defaults, options.prior_loss_weight)
    if options.train_data_dir is None:
        raise OptionError(
            "No training images were named. Give train_data_dir (a folder that holds folders such as 10_cat) "
            "or dataset_config (a dataset description in TOML)."
        )
    train_root = _existing_folder(options.train_data_dir, "train_data_dir")
    reg_root = None if options.reg_data_dir is None else _existing_folder(options.reg_data_dir, "reg_data_dir")
    subsets = [
        _folder_subset(folder, defaults, is_reg=False) for folder in _image_folders(train_root, "train_data_dir")
    ]
    if reg_root is not None:
        folders = _image_folders(reg_root, "reg_data_dir")
        subsets += [_folder_subset(folder, defaults, is_reg=True) for folder in folders]
    return [
        DatasetSpec(
            subsets=tuple(subsets),
            prior_loss_weight=options.prior_loss_weight,
            train_data_dir=train_root,
            reg_data_dir=reg_root,
            **{name: defaults[name] for name in _DATASET_KEYS},
        )
    ]


# ---------------------------------------------------------------------------------------- REPEATS_name folders


def _existing_folder(folder: Path, option: str) -> Path:
    if folder.is_dir():
        return folder
    if folder.exists():
        raise OptionError(f"{option}: {folder} is a file; a folder is expected.")
    hint = nearest_name_hint(folder.name, _folders_in(folder.parent))
    raise OptionError(f"{option}: there is no folder {folder}.{hint}")


def _folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder for a hint; none where it cannot be read."""
    try:
        return [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _image_folders(root: Path, option: str) -> list[Path]:
    try:
        return sorted(entry for entry in root.iterdir() if entry.is_dir() and parse_folder_name(entry.name) is not None)
    except OSError as error:
        raise OptionError(f"{option}: {root} cannot be read ({error.strerror or error}).") from error


def _folder_subset(folder: Path, defaults: Mapping[str, Any], *, is_reg: bool) -> SubsetSpec:
    parsed = parse_folder_name(folder.name)
    assert parsed is not None
    inherited = {name: defaults[name] for name in _SUBSET_KEYS if name in defaults}
    inherited |= {"num_repeats": parsed[0], "class_tokens": parsed[1]}
    return SubsetSpec(image_dir=folder, is_reg=is_reg, **inherited)


# ---------------------------------------------------------------------------------------- values and their checks

_DATASET_KEYS: dict[str, Check] = {
    "resolution": size,
    "batch_size": whole_number(1),
    "enable_bucket": boolean,
    "min_bucket_reso": whole_number(1),
    "max_bucket_reso": whole_number(1),
    "bucket_reso_steps": whole_number(1),
    "bucket_no_upscale": boolean,
}
_SUBSET_KEYS: dict[str, Check] = {
    "num_repeats": whole_number(0),
    "class_tokens": text,
    "caption_extension": extension,
    "shuffle_caption": boolean,
    "keep_tokens": whole_number(0),
    "caption_dropout_rate": share,
    "caption_dropout_every_n_epochs": whole_number(0),
    "caption_tag_dropout_rate": share,
    "caption_prefix": text,
    "caption_suffix": text,
    "caption_separator": separator,
    "keep_tokens_separator": text,
    "secondary_separator": text,
    "enable_wildcard": boolean,
    "token_warmup_min": whole_number(0),
    "token_warmup_step": fraction_or_steps,
    "flip_aug": boolean,
    "validation_split": share,
    "validation_seed": whole_number(0),
}
_OWN_SUBSET_KEYS: dict[str, Check] = {"image_dir": text, "is_reg": boolean}

_NOT_SUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "alpha_mask": ("loss masked by the alpha channel", (False,)),
    "cache_info": ("a file with image sizes and captions, kept between runs", (False,)),
    "color_aug": ("random changes of colour", (False,)),
    "conditioning_data_dir": ("control images for ControlNet", ()),
    "custom_attributes": ("free attributes of a subset", ({},)),
    "face_crop_aug_range": ("random crops around faces", ()),
    "metadata_file": ("captions and tags from one JSON file", ()),
    "network_multiplier": ("another strength of the network for one dataset", (1,)),
    "random_crop": ("crops at random places", (False,)),
    "resize_interpolation": ("another filter for resizing", ()),
    "skip_image_resolution": ("leaving out images below a size", ()),
}
"""sd-scripts' other keys: what each does, and the values that mean "off", which are accepted."""


def _command_line_values(options: DatasetOptions) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in (*_DATASET_KEYS, *_SUBSET_KEYS) if hasattr(options, name)}
    values |= {"batch_size": options.train_batch_size, "resolution": parse_resolution(options.resolution)}
    shown_names = {"batch_size": "train_batch_size"}
    checks = _DATASET_KEYS | _SUBSET_KEYS
    values = {
        name: _checked(value, checks[name], shown_names.get(name, name))
        for name, value in values.items()
        if value is not None
    }
    _check_limits(values, "")
    return values


def _checked(value: Any, check: Check, shown_name: str) -> Any:
    try:
        return check(value)
    except ValueError as expected:
        shown_value = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
        raise OptionError(f"{shown_name} is {shown_value}; expected {expected}.") from None


def _check_limits(values: Mapping[str, Any], where: str) -> None:
    if values["min_bucket_reso"] > values["max_bucket_reso"]:
        raise OptionError(
            f"{where}min_bucket_reso ({values['min_bucket_reso']}) is above max_bucket_reso "
            f"({values['max_bucket_reso']}); the shortest side of a bucket cannot be longer than its longest."
        )


# ---------------------------------------------------------------------------------------- sd-scripts' description


def _read_description(file: Path, defaults: Mapping[str, Any], prior_loss_weight: float) -> list[DatasetSpec]:
    document = _parsed(file)
    unknown = [key for key in document if key not in ("general", "datasets")]
    if unknown:
        hint = nearest_name_hint(unknown[0], ["general", "datasets"])
        raise OptionError(f"{file}: unknown table '{unknown[0]}'; expected [general] and [[datasets]].{hint}")
    general = document.get("general", {})
    if not isinstance(general, dict):
        raise OptionError(f"{file}: 'general' must be one table, written [general].")
    general = _checked_table(general, _DATASET_KEYS | _SUBSET_KEYS, f"{file}, [general]")
    specs = []
    for number, table in enumerate(_tables(document, "datasets", f"{file}"), start=1):
        where = f"{file}, [[datasets]] number {number}"
        subset_tables = _tables(table, "subsets", where)
        own = {key: value for key, value in table.items() if key != "subsets"}
        own = _checked_table(own, _DATASET_KEYS | _SUBSET_KEYS, where)
        values = {**defaults, **general, **own}
        _check_limits(values, f"{where}: ")
        subsets = [
            _described_subset(file, subset, values, f"{file}, [[datasets.subsets]] number {place} of dataset {number}")
            for place, subset in enumerate(subset_tables, start=1)
        ]
        specs.append(
            DatasetSpec(
                subsets=tuple(subsets),
                prior_loss_weight=prior_loss_weight,
                source=where,
                **{name: values[name] for name in _DATASET_KEYS},
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
            values[key] = _checked(value, allowed[key], f"{where}: {key}")
        elif key in _NOT_SUPPORTED:
            meaning, off_values = _NOT_SUPPORTED[key]
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in off_values):
                raise OptionError(
                    f"{where}: {key} ({meaning}) is an option of sd-scripts that Maulstick does not support. Remove it."
                )
        elif key in _OWN_SUBSET_KEYS:
            raise OptionError(f"{where}: {key} belongs in [[datasets.subsets]].")
        elif key in _DATASET_KEYS:
            raise OptionError(
                f"{where}: {key} belongs in [[datasets]] or [general]; all subsets of a dataset share it."
            )
        else:
            hint = nearest_name_hint(key, allowed) or f" Known here: {', '.join(sorted(allowed))}."
            raise OptionError(f"{where}: unknown key '{key}'.{hint}")
    return values


def _described_subset(file: Path, table: Mapping[str, Any], inherited: Mapping[str, Any], where: str) -> SubsetSpec:
    own = _checked_table(table, _SUBSET_KEYS | _OWN_SUBSET_KEYS, where)
    if "image_dir" not in own:
        raise OptionError(f"{where}: image_dir is missing; every subset names its image folder with it.")
    if own.get("is_reg") and own.get("validation_split"):
        raise OptionError(
            f"{where}: validation_split and is_reg contradict each other: regularisation images are never held back. "
            "Remove one."
        )
    folder, note = _described_folder(own.pop("image_dir"), file, where)
    values = {name: inherited[name] for name in _SUBSET_KEYS if name in inherited} | own
    return SubsetSpec(image_dir=folder, image_dir_note=note, **values)


def _described_folder(written: str, file: Path, where: str) -> tuple[Path, str | None]:
    """Find a folder where sd-scripts would (from the current directory), else beside the description."""
    folder = Path(written).expanduser()
    if folder.is_dir():
        return folder, None
    beside = file.parent / folder
    if not folder.is_absolute() and beside.is_dir():
        return beside, (
            f"image_dir '{written}' is not below the current directory; the one beside {file.name} is used: {beside}"
        )
    if folder.is_file():
        raise OptionError(f"{where}: image_dir '{written}' is a file; a folder is expected.")
    looked = f"{folder}" if folder.is_absolute() else f"{Path.cwd() / folder}, {beside}"
    hint = nearest_name_hint(folder.name, [*_folders_in(folder.parent), *_folders_in(beside.parent)])
    raise OptionError(f"{where}: there is no folder image_dir '{written}' (looked for: {looked}).{hint}")
