"""Reference images: which image an IP-Adapter sees with which training image."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from maulstick.data.companions import images_by_stem, only_one, refuse_shared
from maulstick.data.findings import names
from maulstick.data.images import ImageError, verify_image
from maulstick.data.records import ImageRecord
from maulstick.errors import DataError


@dataclass(frozen=True)
class Reference:
    """A reference image. ``content_hash``: SHA-256 of the file, in hex."""

    path: Path
    content_hash: str


def find_references(records: Sequence[ImageRecord], folder: Path | None) -> dict[Path, Reference]:
    """Return training image -> reference image; without a folder every image is its own.

    With one, the reference has the name of the training image, whatever its extension: in ``folder``, or, where there
    are several image folders, in a folder of that name below it.

    Raises:
        DataError: the folder cannot be read, an image has no reference or two, a reference belongs to two images, or is
            damaged. Files are named.
    """
    if folder is None:
        return {record.path: Reference(record.path, record.content_hash) for record in records}
    if not folder.is_dir():
        raise DataError(f"conditioning_data_dir: there is no folder {folder}.")
    paths = {record.path: record for record in records}
    listed: dict[Path, Mapping[str, list[Path]]] = {}
    found: dict[Path, Path] = {}
    missing: list[Path] = []
    for image in paths:
        below = folder / image.parent.name
        place = below if below.is_dir() else folder
        if place not in listed:
            listed[place] = images_by_stem(place)
        reference = only_one(image, listed[place].get(image.stem, []), "reference image")
        if reference is None:
            missing.append(image)
        else:
            found[image] = reference
    if missing:
        raise DataError(
            f"conditioning_data_dir: {folder} has no reference image for {len(missing)} of {len(paths)} training "
            f"images ({names(missing)}). It must have the same name, with any image extension."
        )
    refuse_shared(found, "reference")
    return _verified(found)


def _verified(found: Mapping[Path, Path]) -> dict[Path, Reference]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(found, pool.map(_checked, found.values()), strict=True))


def _checked(path: Path) -> Reference:
    try:
        content = path.read_bytes()
        verify_image(path, content)
    except ImageError as error:
        raise DataError(f"conditioning_data_dir: {error}") from error
    except OSError as error:
        raise DataError(f"conditioning_data_dir: {path} cannot be read ({error.strerror or error}).") from error
    return Reference(path, sha256(content).hexdigest())


def references_digest(references: Mapping[Path, Reference]) -> str:
    """Identify which image is trained with which reference, wherever they lie."""
    rows = sorted(f"{image.parent.name}/{image.name} {each.content_hash}" for image, each in references.items())
    # Names of files may hold bytes that are no text.
    return sha256("\n".join(rows).encode("utf-8", "surrogateescape")).hexdigest()[:16]
