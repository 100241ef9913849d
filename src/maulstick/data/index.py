"""The index: every image that will be trained, with caption, size and repeats, and every finding about the rest."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path

from maulstick.data.buckets import BucketChooser, bucket_option_findings, size_text
from maulstick.data.caption_files import AssignedCaption, assign_captions, caption_extensions
from maulstick.data.findings import Finding, Severity, by_severity, counted, names
from maulstick.data.image_findings import (
    CheckedFile,
    dataset_findings,
    duplicate_findings,
    file_findings,
    size_findings,
)
from maulstick.data.images import ImageError, image_facts, verify_image
from maulstick.data.masks import Masks, mask_findings
from maulstick.data.records import DatasetIndex, ImageRecord, IndexedDataset, balance_regularisation
from maulstick.data.scan import contents_findings, look_into, root_findings
from maulstick.data.variations import crop_findings
from maulstick.errors import DataError
from maulstick.options.dataset_config import DatasetSpec, SubsetSpec, parse_folder_name

Progress = Callable[[int, int], None]
"""Called with (number done, number in all)."""


def build_index(
    specs: Sequence[DatasetSpec],
    *,
    vae_scale: int = 8,
    verify: bool = True,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DatasetIndex:
    """Read the folders of ``specs`` and place every usable image in a bucket.

    Args:
        vae_scale: pixels per latent element along a side; bucket sizes must be multiples of it (else OptionError).
        verify: decode every image to its last byte, so that a damaged one is known before training; without it only
            headers are read.
        workers: threads that read files; by default one per processor, at most eight.
        progress: called after each file.

    Raises DataError when no training image can be used, its message says which folder was meant; and for masks that
    are missing, damaged or of another size.
    """
    findings: list[Finding] = []
    candidates: list[_Candidate] = []
    choosers = []
    for number, spec in enumerate(specs):
        chooser = BucketChooser(spec, vae_scale)
        choosers.append(chooser)
        findings += bucket_option_findings(spec, chooser.table)
        for root, option in ((spec.train_data_dir, "train_data_dir"), (spec.reg_data_dir, "reg_data_dir")):
            if root is not None:
                findings += root_findings(root, option)
        candidates += _candidates(spec, number, findings)
    checked = _check_files([candidate.path for candidate in candidates], verify, workers, progress)
    candidates = _large_enough(candidates, checked, specs, findings)
    masks = Masks([(candidate.path, candidate.subset) for candidate in candidates], checked, workers)
    images: list[ImageRecord] = []
    for candidate in candidates:
        record = _record(candidate, len(images), checked[candidate.path], choosers[candidate.dataset], findings)
        if record is not None:
            images.append(replace(record, mask=masks.of(record.path, record.subset)))
    _refuse_endless_epoch(images)
    datasets = [
        IndexedDataset(spec, balance_regularisation([image for image in images if image.dataset == number]))
        for number, spec in enumerate(specs)
    ]
    findings += file_findings(checked)
    findings += size_findings(images)
    findings += duplicate_findings(images)
    findings += mask_findings(images)
    findings += crop_findings(images)
    findings += dataset_findings(datasets)
    if not any(dataset.num_train_images for dataset in datasets):
        raise DataError(_nothing_usable(specs, findings))
    for dataset in datasets:
        if dataset.spec.reg_data_dir is not None and not dataset.num_reg_images:
            raise DataError(_no_regularisation(dataset.spec.reg_data_dir, findings))
    return DatasetIndex(tuple(datasets), tuple(by_severity(findings)))


# ---------------------------------------------------------------------------------------- from folders to candidates


@dataclass(frozen=True)
class _Candidate:
    path: Path
    caption: AssignedCaption
    subset: SubsetSpec
    dataset: int


def _candidates(spec: DatasetSpec, number: int, findings: list[Finding]) -> list[_Candidate]:
    candidates: list[_Candidate] = []
    seen: set[Path] = set()
    for subset in spec.subsets:
        folder = subset.image_dir
        contents = look_into(folder, caption_extensions(subset))
        if subset.image_dir_note:
            findings.append(Finding(Severity.INFO, "image_dir_found", (folder,), subset.image_dir_note))
        if subset.num_repeats < 1:
            message = (
                f"The folder '{folder.name}' has {subset.num_repeats} repeats: "
                f"its {counted(len(contents.images), 'image')} {'is' if len(contents.images) == 1 else 'are'} not used."
            )
            findings.append(Finding(Severity.WARNING, "no_repeats", (folder,), message))
            continue
        if folder.resolve() in seen:
            message = f"{spec.source}: the folder {folder} is named twice; the second time it is not used."
            findings.append(Finding(Severity.WARNING, "duplicate_subset", (folder,), message))
            continue
        seen.add(folder.resolve())
        findings += _repeats_in_name(spec, subset)
        findings += contents_findings(subset, contents)
        captions, caption_findings = assign_captions(subset, contents)
        findings += caption_findings
        candidates += [_Candidate(image, captions[image], subset, number) for image in contents.images]
    return candidates


def _repeats_in_name(spec: DatasetSpec, subset: SubsetSpec) -> list[Finding]:
    parsed = parse_folder_name(subset.image_dir.name)
    if spec.train_data_dir is not None or parsed is None or parsed[0] in (0, subset.num_repeats):
        return []
    message = (
        f"'{subset.image_dir.name}' is repeated {counted(subset.num_repeats, 'time')}: in a dataset description "
        f"num_repeats counts, not the {parsed[0]} in the folder's name."
    )
    return [Finding(Severity.INFO, "repeats_not_from_name", (subset.image_dir,), message)]


# ---------------------------------------------------------------------------------------- from files to records


def _check_files(
    paths: Iterable[Path], verify: bool, workers: int | None, progress: Progress | None
) -> dict[Path, CheckedFile]:
    unique = list(dict.fromkeys(paths))
    pool = ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1))
    checked: dict[Path, CheckedFile] = {}
    try:
        for path, result in zip(unique, pool.map(lambda path: _check_file(path, verify), unique), strict=True):
            checked[path] = result
            if progress is not None:
                progress(len(checked), len(unique))
    finally:
        pool.shutdown(cancel_futures=True)
    return checked


def _check_file(path: Path, verify: bool) -> CheckedFile:
    if path.exists() and not path.is_file():
        return ImageError(path, "is not a regular file")
    try:
        content = path.read_bytes()
        facts = verify_image(path, content) if verify else image_facts(path, content)
    except ImageError as error:
        return error
    except OSError as error:
        return ImageError(path, f"cannot be read ({error.strerror or error})")
    return facts, sha256(content).hexdigest()


def _large_enough(
    candidates: Sequence[_Candidate],
    checked: Mapping[Path, CheckedFile],
    specs: Sequence[DatasetSpec],
    findings: list[Finding],
) -> list[_Candidate]:
    """Leave out what ``skip_image_resolution`` leaves out: images of no more pixels than that size has."""
    kept: list[_Candidate] = []
    small: dict[int, list[Path]] = defaultdict(list)
    for candidate in candidates:
        limit, result = specs[candidate.dataset].skip_image_resolution, checked[candidate.path]
        if limit is None or isinstance(result, ImageError) or prod(result[0].size) > prod(limit):
            kept.append(candidate)
        else:
            small[candidate.dataset].append(candidate.path)
    for number, paths in small.items():
        spec = specs[number]
        message = (
            f"{spec.source}: {counted(len(paths), 'image')} of no more pixels than "
            f"{size_text(spec.skip_image_resolution or (0, 0))} left out by skip_image_resolution ({names(paths)})."
        )
        findings.append(Finding(Severity.WARNING, "image_skipped", tuple(paths), message))
    return kept


def _record(
    candidate: _Candidate, record_id: int, checked: CheckedFile, chooser: BucketChooser, findings: list[Finding]
) -> ImageRecord | None:
    if isinstance(checked, ImageError):
        return None
    facts, content_hash = checked
    placement = chooser.place(facts.size)
    if placement is None:
        steps = chooser.spec.bucket_reso_steps
        message = (
            f"{candidate.path.parent.name}/{candidate.path.name} ({size_text(facts.size)}) is too small or too narrow "
            f"for a bucket with sides of at least {steps} pixels, and bucket_no_upscale forbids to enlarge it: "
            "it is not used."
        )
        findings.append(Finding(Severity.ERROR, "image_too_small", (candidate.path,), message))
        return None
    return ImageRecord(
        record_id=record_id,
        path=candidate.path,
        captions=candidate.caption.lines,
        caption_file=candidate.caption.file,
        size=facts.size,
        repeats=candidate.subset.num_repeats,
        subset=candidate.subset,
        dataset=candidate.dataset,
        content_hash=content_hash,
        placement=placement,
    )


MOST_IMAGES_PER_EPOCH = 10**7
"""An epoch of more images, repeats counted, is a slip of the pen: at 100 images a second it would take a day."""


def _refuse_endless_epoch(images: Sequence[ImageRecord]) -> None:
    """Refuse repeats that no run gets through; the list of an epoch alone would not fit into memory."""
    total = sum(image.subset.num_repeats for image in images)
    if total <= MOST_IMAGES_PER_EPOCH:
        return
    worst = max(images, key=lambda image: image.subset.num_repeats).subset
    raise DataError(
        f"An epoch would have {_large(total)} images, more than {MOST_IMAGES_PER_EPOCH:,}: the folder "
        f"'{worst.image_dir.name}' repeats each of its images {_large(worst.num_repeats)} times. Give it a smaller "
        f"number, such as 10 ({worst.image_dir})."
    )


def _large(number: int) -> str:
    # Python's own conversion to text and to a float both have an end.
    return f"{number:,}" if number < 10**15 else "more than 10^15"


_REASONS_SHOWN = 12


def _nothing_usable(specs: Sequence[DatasetSpec], findings: Sequence[Finding]) -> str:
    places = []
    for spec in specs:
        if spec.train_data_dir is not None:
            places.append(f"train_data_dir {spec.train_data_dir}")
        else:
            training = [f"{subset.image_dir}" for subset in spec.subsets if not subset.is_reg]
            places += training or [f"{spec.source} (all its subsets are regularisation images: is_reg)"]
    reasons = [
        finding.message
        for finding in by_severity(findings)
        if finding.severity is not Severity.INFO and finding.code != "empty_dataset"
    ]
    if not reasons:
        reasons = ["There is no image folder in it. Put images into a folder such as 10_name below it."]
    if len(reasons) > _REASONS_SHOWN:
        reasons = [*reasons[:_REASONS_SHOWN], f"... and {len(reasons) - _REASONS_SHOWN} more of this kind."]
    return "\n  ".join([f"No training image can be used in {', '.join(places)}.", *reasons])


def _no_regularisation(folder: Path, findings: Sequence[Finding]) -> str:
    reasons = [
        finding.message
        for finding in by_severity(findings)
        if finding.severity is not Severity.INFO and any(path.is_relative_to(folder) for path in finding.paths)
    ]
    advice = "Put regularisation images into a folder such as 1_name below it, or leave reg_data_dir out."
    return "\n  ".join([f"reg_data_dir: no image in {folder} can be used.", *(reasons[:_REASONS_SHOWN] or [advice])])
