"""What is odd about the images themselves, once they have been read and placed in buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from maulstick.data.buckets import FAR_BELOW, size_text
from maulstick.data.findings import Finding, Severity, counted, names
from maulstick.data.images import ImageError, ImageFacts
from maulstick.data.records import ImageRecord, IndexedDataset

CheckedFile = tuple[ImageFacts, str] | ImageError
"""An image's facts and content hash, or why it cannot be used."""


def file_findings(checked: Mapping[Path, CheckedFile]) -> list[Finding]:
    """Return which files cannot be used, and which are used in part."""
    findings = []
    animated, broken_exif = [], []
    for path, result in checked.items():
        if isinstance(result, ImageError):
            message = f"{path.parent.name}/{path.name} {result.reason}: it is not used."
            findings.append(Finding(Severity.ERROR, "image_unreadable", (path,), message))
            continue
        if result[0].frames > 1:
            animated.append(path)
        if not result[0].exif_readable:
            broken_exif.append(path)
    if animated:
        message = f"{counted(len(animated), 'animated image')} ({names(animated)}): only the first frame is used."
        findings.append(Finding(Severity.INFO, "image_animated", tuple(animated), message))
    if broken_exif:
        message = f"{counted(len(broken_exif), 'image')} with broken EXIF data ({names(broken_exif)}): used as upright."
        findings.append(Finding(Severity.INFO, "exif_unreadable", tuple(broken_exif), message))
    return findings


def size_findings(images: Sequence[ImageRecord]) -> list[Finding]:
    """Return which images are enlarged so much that it shows."""
    small: dict[tuple[int, Path], list[ImageRecord]] = defaultdict(list)
    for image in images:
        if image.placement.enlarged > FAR_BELOW:
            small[image.dataset, image.subset.image_dir].append(image)
    findings = []
    for (_, folder), records in small.items():
        described = [
            f"{record.path.name} {size_text(record.size)} by {record.placement.enlarged:.1f} for "
            f"{size_text(record.placement.bucket)}"
            for record in records
        ]
        verb = "is" if len(records) == 1 else "are"
        message = (
            f"'{folder.name}': {counted(len(records), 'image')} {verb} far smaller than the training size and will be "
            f"enlarged: {names(described)}."
        )
        findings.append(
            Finding(
                Severity.WARNING,
                "image_far_below_bucket",
                tuple(record.path for record in records),
                message,
                why="Enlarged images teach blur.",
                advice="Use larger images, a lower resolution, or bucket_no_upscale with enable_bucket.",
            )
        )
    return findings


def duplicate_findings(images: Sequence[ImageRecord]) -> list[Finding]:
    """Return which different files have the same content."""
    by_content: dict[str, dict[Path, ImageRecord]] = defaultdict(dict)
    for image in images:
        by_content[image.content_hash].setdefault(image.path.resolve(), image)
    findings = []
    for same in by_content.values():
        if len(same) < 2:
            continue
        records = list(same.values())
        shown = names([f"{record.path.parent.name}/{record.path.name}" for record in records])
        captions = "the same caption" if len({record.captions for record in records}) == 1 else "different captions"
        message = f"{shown} are the same picture, with {captions}: each of them is used."
        paths = tuple(record.path for record in records)
        findings.append(
            Finding(
                Severity.WARNING,
                "duplicate_content",
                paths,
                message,
                why="It counts as often as it is there, so the LoRA learns this one picture more than the others.",
                advice="Keep one of them; repeats are set by the number in the folder's name.",
            )
        )
    return findings


def dataset_findings(datasets: Sequence[IndexedDataset]) -> list[Finding]:
    """Return which datasets have nothing to train, and which regularisation images are too many."""
    findings = []
    for dataset in datasets:
        unused = [image.path for image in dataset.images if image.repeats == 0]
        if unused and dataset.num_train_images:
            message = (
                f"{counted(len(unused), 'regularisation image')} not used: there are {dataset.num_reg_images} with "
                f"repeats, more than the {dataset.num_train_images} training images they are matched to."
            )
            findings.append(Finding(Severity.INFO, "reg_images_not_used", tuple(unused), message))
        if not dataset.num_train_images:
            folders = tuple(subset.image_dir for subset in dataset.spec.subsets if not subset.is_reg)
            message = f"{dataset.spec.source}: no training image of this dataset can be used; nothing of it is trained."
            findings.append(Finding(Severity.ERROR, "empty_dataset", folders, message))
    return findings
