"""Images that belong to other images by their names: masks, and reference images, in ``conditioning_data_dir``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from maulstick.data.findings import names
from maulstick.data.scan import look_into
from maulstick.errors import DataError


def images_by_stem(folder: Path) -> dict[str, list[Path]]:
    """Return the images in a folder by their names without extension."""
    stems: dict[str, list[Path]] = {}
    for image in look_into(folder).images:
        stems.setdefault(image.stem, []).append(image)
    return stems


def only_one(image: Path, candidates: Sequence[Path], what: str) -> Path | None:
    """Return the one companion of an image, None without any. Raises DataError for several; ``what`` they are."""
    if len(candidates) > 1:
        raise DataError(
            f"conditioning_data_dir: {image} has {len(candidates)} {what}s ({names(candidates)}). Leave one of them "
            "there."
        )
    return candidates[0] if candidates else None


def refuse_shared(found: Mapping[Path, Path], what: str) -> None:
    """Raise DataError where two images (the keys) have the same companion."""
    owner: dict[Path, Path] = {}
    for image, companion in found.items():
        other = owner.setdefault(companion, image)
        if other != image:
            raise DataError(
                f"conditioning_data_dir: {companion.name} would be the {what} of both {other} and {image}. Put "
                f"{what}s into folders named as the image folders ({companion.parent / image.parent.name} and so on)."
            )
