"""The image records of a run, by dataset, and how regularisation images are matched to training images."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from maulstick.data.buckets import Placement, Size
from maulstick.data.findings import Finding
from maulstick.errors import DataError
from maulstick.options.dataset_config import DatasetSpec, SubsetSpec


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The mask of an image's loss.

    Attributes:
        channel: of the file at ``path``, the image itself or a file of its own.
        content_hash: SHA-256 of that file, in hex.
        box: (left, top, right, bottom) of what is not black, None where all is black.
        whole: it is white everywhere.
    """

    path: Path
    content_hash: str
    channel: Literal["alpha", "red"]
    box: tuple[int, int, int, int] | None
    whole: bool


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """One image of one dataset.

    Attributes:
        record_id: its number, unique over all datasets and kept when other images are excluded.
        captions: its caption lines; the first is used. "" where it has none.
        caption_file: where they come from; None for class tokens and for no caption at all.
        size: (width, height) in pixels, after EXIF orientation.
        repeats: how often it is used per epoch; for a regularisation image after balancing, 0 where it is not needed.
        content_hash: SHA-256 of the file, in hex.
        dataset: number of its dataset, from 0.
        mask: where its loss counts; None for everywhere.
    """

    record_id: int
    path: Path
    captions: tuple[str, ...]
    caption_file: Path | None
    size: Size
    repeats: int
    subset: SubsetSpec
    dataset: int
    content_hash: str
    placement: Placement
    mask: Mask | None = None

    @property
    def is_reg(self) -> bool:
        """It is a regularisation image."""
        return self.subset.is_reg


@dataclass(frozen=True)
class IndexedDataset:
    """A dataset with its usable images, those that balancing leaves out (``repeats`` 0) included."""

    spec: DatasetSpec
    images: tuple[ImageRecord, ...]

    @property
    def records(self) -> tuple[ImageRecord, ...]:
        """The images that are trained."""
        return tuple(image for image in self.images if image.repeats > 0)

    @property
    def num_train_images(self) -> int:
        """Training images, each counted as often as it is used per epoch."""
        return sum(image.repeats for image in self.images if not image.is_reg)

    @property
    def num_reg_images(self) -> int:
        """Regularisation images times the repeats of their folders, before balancing, as sd-scripts counts them."""
        return sum(image.subset.num_repeats for image in self.images if image.is_reg)


@dataclass(frozen=True)
class DatasetIndex:
    """All datasets of a run and what was found while reading them.

    Attributes:
        held_back: images for validation; they are in no dataset, and nothing is trained on them.
    """

    datasets: tuple[IndexedDataset, ...]
    findings: tuple[Finding, ...]
    held_back: tuple[ImageRecord, ...] = ()

    @property
    def records(self) -> tuple[ImageRecord, ...]:
        """The images that are trained, of all datasets."""
        return tuple(record for dataset in self.datasets for record in dataset.records)

    @property
    def in_use(self) -> tuple[ImageRecord, ...]:
        """The images that are looked at: those that are trained, and those held back."""
        return self.records + self.held_back

    def without(self, record_ids: Collection[int]) -> DatasetIndex:
        """Return the index without these images, balanced anew. Raises DataError when no training image is left."""
        kept = [
            IndexedDataset(
                dataset.spec,
                balance_regularisation([image for image in dataset.images if image.record_id not in record_ids]),
            )
            for dataset in self.datasets
        ]
        if not any(dataset.num_train_images for dataset in kept):
            raise DataError("No training image is left: every one of them had to be excluded.")
        held_back = tuple(image for image in self.held_back if image.record_id not in record_ids)
        return DatasetIndex(tuple(kept), self.findings, held_back)


def balance_regularisation(images: Sequence[ImageRecord]) -> tuple[ImageRecord, ...]:
    """Return the images of one dataset with the repeats of regularisation images set as sd-scripts sets them.

    In a first round each is taken with its folder's repeats, in further rounds once more each, until there are as many
    as training images (times repeats). Those that are not reached get 0.
    """
    wanted = sum(image.repeats for image in images if not image.is_reg)
    reg = [image for image in images if image.is_reg]
    repeats = {image.record_id: 0 for image in reg}
    taken, first_round = 0, True
    while reg and taken < wanted:
        for image in reg:
            if taken >= wanted:
                break
            more = image.subset.num_repeats if first_round else 1
            repeats[image.record_id] += more
            taken += more
        first_round = False
    return tuple(replace(image, repeats=repeats[image.record_id]) if image.is_reg else image for image in images)
