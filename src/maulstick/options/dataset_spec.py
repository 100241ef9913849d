"""What is known of the folders to train on before anything is opened, and the keys that say it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maulstick.errors import OptionError
from maulstick.options.dataset_values import (
    Check,
    boolean,
    extension,
    fraction_or_steps,
    interpolation,
    separator,
    share,
    size,
    text,
    whole_number,
)


@dataclass(frozen=True, kw_only=True)
class SubsetSpec:
    """One image folder.

    Attributes:
        num_repeats: how often each of its images is used per epoch; below 1 the folder is not used.
        class_tokens: caption of images that have no caption file, None where nothing was given.
        caption_extension: extension looked for first, with its dot; ``.txt`` and ``.caption`` follow.
        alpha_mask: the alpha channels of its images are masks.
        conditioning_data_dir: folder of masks, None where there are none.
        resize_interpolation: filter for resizing, None for the usual ones.
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
    random_crop: bool = False
    color_aug: bool = False
    alpha_mask: bool = False
    conditioning_data_dir: Path | None = None
    resize_interpolation: str | None = None
    validation_split: float = 0.0
    validation_seed: int | None = None
    image_dir_note: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Image folders that share a size, a batch size and buckets. Sizes are (width, height) in pixels.

    Attributes:
        train_data_dir, reg_data_dir: the folders that ``subsets`` were found in, None for a dataset description.
        skip_image_resolution: images of no more pixels than this size has are left out; None leaves out none.
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
    skip_image_resolution: tuple[int, int] | None = None
    prior_loss_weight: float = 1.0
    train_data_dir: Path | None = None
    reg_data_dir: Path | None = None
    source: str = "train_data_dir"


def with_masks_below(subset: SubsetSpec, masks: Path) -> SubsetSpec:
    """Return a subset with the masks that one folder for all has for it, unless it has masks of its own.

    They lie in a folder of the subset's name below it, or else directly in it. The latter goes for training images
    only: regularisation images often have the same names.
    """
    if subset.conditioning_data_dir is not None or subset.alpha_mask:
        return subset
    below = masks / subset.image_dir.name
    if below.is_dir():
        return replace(subset, conditioning_data_dir=below)
    return subset if subset.is_reg else replace(subset, conditioning_data_dir=masks)


DATASET_KEYS: dict[str, Check] = {
    "resolution": size,
    "batch_size": whole_number(1),
    "enable_bucket": boolean,
    "min_bucket_reso": whole_number(1),
    "max_bucket_reso": whole_number(1),
    "bucket_reso_steps": whole_number(1),
    "bucket_no_upscale": boolean,
    "skip_image_resolution": size,
}
SUBSET_KEYS: dict[str, Check] = {
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
    "random_crop": boolean,
    "color_aug": boolean,
    "alpha_mask": boolean,
    "resize_interpolation": interpolation,
    "validation_split": share,
    "validation_seed": whole_number(0),
}
OWN_SUBSET_KEYS: dict[str, Check] = {"image_dir": text, "is_reg": boolean, "conditioning_data_dir": text}

NOT_SUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cache_info": ("a file with image sizes and captions, kept between runs", (False,)),
    "custom_attributes": ("free attributes of a subset", ({},)),
    "face_crop_aug_range": ("crops around faces whose places are in file names; cut the faces out into images", ()),
    "metadata_file": ("captions and tags from one JSON file", ()),
    "network_multiplier": ("another strength of the network for one dataset", (1,)),
}
"""sd-scripts' other keys: what each does, and the values that mean "off", which are accepted."""


def checked(value: Any, check: Check, shown_name: str) -> Any:
    try:
        return check(value)
    except ValueError as expected:
        shown_value = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
        raise OptionError(f"{shown_name} is {shown_value}; expected {expected}.") from None


def check_limits(values: Mapping[str, Any], where: str) -> None:
    if values["min_bucket_reso"] > values["max_bucket_reso"]:
        raise OptionError(
            f"{where}min_bucket_reso ({values['min_bucket_reso']}) is above max_bucket_reso "
            f"({values['max_bucket_reso']}); the shortest side of a bucket cannot be longer than its longest."
        )
