"""The data in numbers: for the plan that is shown before training, and for the metadata of the file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from maulstick.data.buckets import Size
from maulstick.data.captions import tag_counts
from maulstick.data.records import DatasetIndex, ImageRecord, IndexedDataset
from maulstick.options.dataset_config import SubsetSpec


@dataclass(frozen=True)
class FolderSummary:
    """One image folder. ``with_caption``: images whose caption comes from a file; ``with_mask``: that have a mask."""

    folder: str
    images: int
    with_caption: int
    repeats: int
    class_tokens: str | None
    is_reg: bool
    with_mask: int = 0
    random_crop: bool = False
    color_aug: bool = False


@dataclass(frozen=True)
class DatasetSummary:
    """One dataset.

    Attributes:
        train_images, reg_images: files that are trained.
        images_per_epoch: images of an epoch, repeats counted, regularisation images included.
        buckets: (width, height) -> images per epoch.
        batches_per_epoch: micro-batches per epoch, over all processes.
        mean_aspect_error: mean over the images (without repeats) of |bucket's width / height - image's|.
    """

    source: str
    resolution: Size
    batch_size: int
    train_images: int
    reg_images: int
    images_per_epoch: int
    buckets: dict[Size, int]
    batches_per_epoch: int
    mean_aspect_error: float
    folders: tuple[FolderSummary, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain values; buckets as a list of {"resolution": [w, h], "count": n}."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "resolution": list(self.resolution),
            "buckets": [{"resolution": list(size), "count": count} for size, count in self.buckets.items()],
            "folders": [vars(folder) for folder in self.folders],
        }


def summarize(index: DatasetIndex) -> list[DatasetSummary]:
    """Return the numbers of each dataset."""
    return [_summarize(dataset) for dataset in index.datasets]


def _summarize(dataset: IndexedDataset) -> DatasetSummary:
    records = dataset.records
    counts = bucket_counts(dataset)
    size = dataset.spec.batch_size
    return DatasetSummary(
        source=dataset.spec.source,
        resolution=dataset.spec.resolution,
        batch_size=size,
        train_images=sum(not record.is_reg for record in records),
        reg_images=sum(record.is_reg for record in records),
        images_per_epoch=sum(counts.values()),
        buckets=counts,
        batches_per_epoch=sum(-(-count // size) for count in counts.values()),
        mean_aspect_error=_mean_aspect_error(dataset),
        folders=tuple(
            FolderSummary(
                folder=str(subset.image_dir),
                images=len(images),
                with_caption=sum(image.caption_file is not None for image in images),
                repeats=subset.num_repeats,
                class_tokens=subset.class_tokens,
                is_reg=subset.is_reg,
                with_mask=sum(image.mask is not None for image in images),
                random_crop=subset.random_crop,
                color_aug=subset.color_aug,
            )
            for subset, images in _by_folder(dataset)
        ),
    )


def bucket_counts(dataset: IndexedDataset) -> dict[Size, int]:
    """Return how many images, repeats counted, each bucket has per epoch, in ascending order of size."""
    counts: Counter[Size] = Counter()
    for record in dataset.records:
        counts[record.placement.bucket] += record.repeats
    return dict(sorted(counts.items()))


def bucket_info(dataset: IndexedDataset) -> dict[str, Any] | None:
    """Return ``ss_bucket_info`` as sd-scripts writes it; None without buckets."""
    if not dataset.spec.enable_bucket:
        return None
    buckets = {
        str(number): {"resolution": list(size), "count": count}
        for number, (size, count) in enumerate(bucket_counts(dataset).items())
    }
    return {"buckets": buckets, "mean_img_ar_error": _mean_aspect_error(dataset)}


def tag_frequency(index: DatasetIndex) -> dict[str, dict[str, int]]:
    """Return ``ss_tag_frequency``: folder name -> tag -> images that have it. A folder in two datasets counts once."""
    frequency: dict[str, dict[str, int]] = {}
    for dataset in index.datasets:
        for name, counts in _tag_frequency(dataset).items():
            frequency.setdefault(name, counts)
    return frequency


def dataset_dirs(index: DatasetIndex, *, reg: bool = False) -> dict[str, dict[str, int]]:
    """Return ``ss_dataset_dirs`` (``ss_reg_dataset_dirs`` with ``reg``): folder name -> repeats and images.

    A second folder of the same name is called "name (2)", as in sd-scripts.
    """
    folders: dict[str, dict[str, int]] = {}
    for dataset in index.datasets:
        for subset, images in _by_folder(dataset):
            if subset.is_reg != reg:
                continue
            name, number = subset.image_dir.name, 2
            while name in folders:
                name, number = f"{subset.image_dir.name} ({number})", number + 1
            folders[name] = {"n_repeats": subset.num_repeats, "img_count": len(images)}
    return folders


def datasets_metadata(index: DatasetIndex) -> list[dict[str, Any]]:
    """Return ``ss_datasets``, which sd-scripts writes for runs with a dataset description."""
    return [
        {
            "is_dreambooth": True,
            "batch_size_per_device": dataset.spec.batch_size,
            "num_train_images": dataset.num_train_images,
            "num_reg_images": dataset.num_reg_images,
            "resolution": list(dataset.spec.resolution),
            "enable_bucket": dataset.spec.enable_bucket,
            "min_bucket_reso": dataset.spec.min_bucket_reso if dataset.spec.enable_bucket else None,
            "max_bucket_reso": dataset.spec.max_bucket_reso if dataset.spec.enable_bucket else None,
            "tag_frequency": _tag_frequency(dataset),
            "bucket_info": bucket_info(dataset),
            "subsets": [
                {
                    "img_count": len(images),
                    "num_repeats": subset.num_repeats,
                    "color_aug": subset.color_aug,
                    "flip_aug": subset.flip_aug,
                    "random_crop": subset.random_crop,
                    "resize_interpolation": subset.resize_interpolation,
                    "shuffle_caption": subset.shuffle_caption,
                    "keep_tokens": subset.keep_tokens,
                    "image_dir": subset.image_dir.name,
                    "class_tokens": subset.class_tokens,
                    "is_reg": subset.is_reg,
                }
                for subset, images in _by_folder(dataset)
            ],
        }
        for dataset in index.datasets
    ]


def _by_folder(dataset: IndexedDataset) -> list[tuple[SubsetSpec, list[ImageRecord]]]:
    folders = [
        (subset, [image for image in dataset.images if image.subset is subset]) for subset in dataset.spec.subsets
    ]
    return [(subset, images) for subset, images in folders if images]


def _tag_frequency(dataset: IndexedDataset) -> dict[str, dict[str, int]]:
    frequency: dict[str, dict[str, int]] = {}
    for subset, images in _by_folder(dataset):
        counts = frequency.setdefault(subset.image_dir.name, {})
        for tag, count in tag_counts(image.captions[0] for image in images).items():
            counts[tag] = counts.get(tag, 0) + count
    return frequency


def _mean_aspect_error(dataset: IndexedDataset) -> float:
    errors = [abs(record.placement.aspect_error) for record in dataset.records]
    return sum(errors) / len(errors) if errors else 0.0
