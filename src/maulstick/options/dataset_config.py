"""Which folders are trained, and how: ``REPEATS_name`` folders or sd-scripts' dataset description, as one kind of spec.

Nothing here opens an image. Folders that cannot be used are not judged here either: ``data.index`` looks at what lies
in them and says what happens to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.dataset_description import folders_in, read_description
from maulstick.options.dataset_schema import DatasetOptions
from maulstick.options.dataset_spec import (
    DATASET_KEYS,
    SUBSET_KEYS,
    DatasetSpec,
    SubsetSpec,
    check_limits,
    checked,
    with_masks_below,
)


def _refuse_no_masks(options: DatasetOptions, specs: Sequence[DatasetSpec]) -> None:
    subsets = [subset for spec in specs for subset in spec.subsets]
    if options.masked_loss and not any(subset.alpha_mask or subset.conditioning_data_dir for subset in subsets):
        raise OptionError(
            f"masked_loss is given, but no subset of {options.dataset_config} has masks. Give subsets "
            "conditioning_data_dir = 'FOLDER' (masks named as the images) or alpha_mask = true."
        )


def _refuse_caching_of_varied(options: DatasetOptions, specs: Sequence[DatasetSpec]) -> None:
    if not options.cache_latents:
        return
    for spec in specs:
        for subset in spec.subsets:
            for name in ("random_crop", "color_aug"):
                if getattr(subset, name):
                    raise OptionError(
                        f"{spec.source}: {name} (subset {subset.image_dir}) and cache_latents contradict each other: "
                        "latents are cached once, and such images are others each time. Remove one of them."
                    )


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """Split ``"10_cat girl"`` into repeats and class tokens, (10, "cat girl"); None where it starts with no number.

    The number is what comes before the first underscore, as sd-scripts reads it; ``"10"`` alone has class tokens "".
    """
    number, _, class_tokens = name.partition("_")
    try:
        return int(number), class_tokens
    except ValueError:
        return None


def parse_resolution(text: str, name: str = "resolution") -> tuple[int, int]:
    """Return (width, height) of ``"512"`` or ``"512,768"``; anything else is an OptionError about option ``name``."""
    try:
        sides = [int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise OptionError(f"{name} is '{text}'; expected one size such as 512, or width,height such as 512,768.")
    return sides[0], sides[-1]


def dataset_specs(options: DatasetOptions) -> list[DatasetSpec]:
    """Return what to train on, from ``train_data_dir`` (one dataset) or from ``dataset_config`` (any number).

    Values that ``dataset_config`` leaves open come from ``options``. Raises OptionError for anything that is unknown,
    of the wrong type, out of range, contradictory or names a folder that is not there.
    """
    defaults = _command_line_values(options)
    masks = None
    if options.masked_loss and options.conditioning_data_dir is not None:
        masks = _existing_folder(options.conditioning_data_dir, "conditioning_data_dir")
    if options.dataset_config is not None:
        for name in ("train_data_dir", "reg_data_dir"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"dataset_config and {name} are both given, but dataset_config already names all image folders. "
                    "Leave one of them out."
                )
        specs = read_description(
            options.dataset_config,
            defaults,
            prior_loss_weight=options.prior_loss_weight,
            masks=masks,
            masked_loss=options.masked_loss,
        )
        _refuse_no_masks(options, specs)
        _refuse_caching_of_varied(options, specs)
        return specs
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
    if masks is not None:
        subsets = [with_masks_below(subset, masks) for subset in subsets]
    return [
        DatasetSpec(
            subsets=tuple(subsets),
            prior_loss_weight=options.prior_loss_weight,
            train_data_dir=train_root,
            reg_data_dir=reg_root,
            **{name: defaults[name] for name in DATASET_KEYS if name in defaults},
        )
    ]


# ---------------------------------------------------------------------------------------- REPEATS_name folders


def _existing_folder(folder: Path, option: str) -> Path:
    if folder.is_dir():
        return folder
    if folder.exists():
        raise OptionError(f"{option}: {folder} is a file; a folder is expected.")
    hint = nearest_name_hint(folder.name, folders_in(folder.parent))
    if not folder.is_absolute():
        hint += f" Paths are relative to the current folder, {Path.cwd()}."
    raise OptionError(f"{option}: there is no folder {folder}.{hint}")


def _image_folders(root: Path, option: str) -> list[Path]:
    try:
        return sorted(entry for entry in root.iterdir() if entry.is_dir() and parse_folder_name(entry.name) is not None)
    except OSError as error:
        raise OptionError(f"{option}: {root} cannot be read ({error.strerror or error}).") from error


def _folder_subset(folder: Path, defaults: Mapping[str, Any], *, is_reg: bool) -> SubsetSpec:
    parsed = parse_folder_name(folder.name)
    assert parsed is not None
    inherited = {name: defaults[name] for name in SUBSET_KEYS if name in defaults}
    inherited |= {"num_repeats": parsed[0], "class_tokens": parsed[1]}
    return SubsetSpec(image_dir=folder, is_reg=is_reg, **inherited)


def _command_line_values(options: DatasetOptions) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in (*DATASET_KEYS, *SUBSET_KEYS) if hasattr(options, name)}
    values |= {"batch_size": options.train_batch_size, "resolution": parse_resolution(options.resolution)}
    if options.skip_image_resolution is not None:
        values["skip_image_resolution"] = parse_resolution(options.skip_image_resolution, "skip_image_resolution")
    shown_names = {"batch_size": "train_batch_size"}
    checks = DATASET_KEYS | SUBSET_KEYS
    values = {
        name: checked(value, checks[name], shown_names.get(name, name))
        for name, value in values.items()
        if value is not None
    }
    check_limits(values, "")
    return values
