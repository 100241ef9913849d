"""Images that are held back from training, to measure on them what was learned and not memorised."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from maulstick.data.findings import Finding, Severity, by_severity, counted, names
from maulstick.data.records import DatasetIndex, ImageRecord, IndexedDataset, balance_regularisation
from maulstick.errors import DataError


def hold_back(index: DatasetIndex, seed: int) -> DatasetIndex:
    """Return the index with the share of its training images held back that their ``validation_split`` asks for.

    All folders of a dataset with the same split and seed are one group, of which split times its images, rounded to
    the nearest number, are held back. Which ones is a function of ``validation_seed`` (else ``seed``) and of what is in
    the files, so that neither their names nor other images matter. A picture that is held back is trained nowhere: its
    copies are left out, which is a finding. The first of ``held_back`` are as good a sample as any.

    Raises:
        DataError: a group is too small to hold one back, or no training image would be left.
    """
    groups: dict[tuple[int, float, int], list[ImageRecord]] = defaultdict(list)
    for dataset in index.datasets:
        for image in dataset.images:
            if not image.is_reg and image.subset.validation_split > 0:
                own = image.subset.validation_seed
                groups[image.dataset, image.subset.validation_split, seed if own is None else own].append(image)
    if not groups:
        return index
    chosen: list[tuple[bytes, ImageRecord]] = []
    for (_, split, group_seed), images in groups.items():
        chosen += [(_rank(image, group_seed), image) for image in drawn(images, group_seed, _number_of(split, images))]
    return _without(index, [image for _, image in sorted(chosen, key=lambda pair: pair[0])])


def drawn(images: Iterable[ImageRecord], seed: int, number: int) -> list[ImageRecord]:
    """Return so many of the images, drawn by the seed and by what is in their files; copies stand together."""
    return sorted(images, key=lambda image: _rank(image, seed))[:number]


def _rank(image: ImageRecord, seed: int) -> bytes:
    return sha256(f"maulstick validation {seed} {image.content_hash}".encode()).digest() + str(image.path).encode()


def _number_of(split: float, images: Sequence[ImageRecord]) -> int:
    number = math.floor(len(images) * split + 0.5)
    if number == 0:
        need = math.ceil(0.5 / split)
        raise DataError(
            f"validation_split = {split:g} of {counted(len(images), 'image')} holds none back for validation. "
            f"{need} images are needed for that, or a validation_split of at least {_rounded_up(0.5 / len(images))}; "
            "without validation_split all are trained."
        )
    return number


def _rounded_up(share: float) -> str:
    return f"{math.ceil(share * 1000) / 1000:g}"


def _without(index: DatasetIndex, held_back: Sequence[ImageRecord]) -> DatasetIndex:
    ids = {image.record_id for image in held_back}
    pictures = {image.content_hash for image in held_back}
    copies: list[ImageRecord] = []
    datasets = []
    for dataset in index.datasets:
        rest = [image for image in dataset.images if image.record_id not in ids]
        copies += [image for image in rest if image.content_hash in pictures]
        kept = [image for image in rest if image.content_hash not in pictures]
        datasets.append(IndexedDataset(dataset.spec, balance_regularisation(kept)))
    if not any(dataset.num_train_images for dataset in datasets):
        raise DataError(
            f"All {counted(len(held_back), 'training image')} would be held back for validation, and none is left to "
            "train. Lower validation_split, or add a folder without it."
        )
    findings = index.findings
    if copies:
        paths = tuple(image.path for image in copies)
        message = f"{names(paths)}: the same picture as one that is held back for validation; not trained either."
        why = "A picture that is trained says nothing about pictures that are not."
        finding = Finding(Severity.WARNING, "copy_of_held_back", paths, message, why)
        findings = tuple(by_severity([*findings, finding]))
    return DatasetIndex(tuple(datasets), findings, tuple(held_back))
