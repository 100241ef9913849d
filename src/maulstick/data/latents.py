"""Latents for the loop, from memory, from files or made on the way: one interface, and finite values only."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maulstick.data.batches import BatchItem, BatchSchedule, MicroBatch
from maulstick.data.buckets import fit_to_bucket
from maulstick.data.cache import (
    LatentKey,
    cache_path,
    check_writable,
    latent_key,
    read_latent,
    write_latent,
)
from maulstick.data.findings import Finding, Severity
from maulstick.data.images import read_rgb
from maulstick.data.index import Progress
from maulstick.data.proven_files import CacheMismatch
from maulstick.data.records import DatasetIndex, ImageRecord
from maulstick.errors import DataError
from maulstick.families.base import Family

Report = Callable[[Finding], None]
Job = TypeVar("Job")
Image = tuple[ImageRecord, bool]
"""A record, and whether it is mirrored."""

_PIXELS_AT_ONCE = 512 * 512
"""Images are encoded together up to this many pixels: one at 512x512, 64 at 64x64."""
_DECODED_AHEAD = 2
"""Batches that are decoded while another one is encoded or trained."""


class LatentSource(ABC):
    """Where the loop gets latents from.

    Attributes:
        index: the images that can be trained; build the ``BatchSchedule`` from it once the source is prepared.
        findings: what went wrong with single images or cache files, and what was done.
        excluded: numbers of the records that are left out because their latents are not finite even in fp32.
        needs_vae: the VAE is still needed while training.
    """

    needs_vae: bool

    def __init__(
        self, index: DatasetIndex, family: Family, *, device: torch.device | str = "cpu", report: Report | None = None
    ):
        """``device``: where pixels are put for encoding. ``report`` is called with every finding as it comes up."""
        self.index = index
        self.family = family
        self.device = device
        self.findings: list[Finding] = []
        self.excluded: set[int] = set()
        self._report = report
        self._reported: set[tuple[str, Path]] = set()

    @abstractmethod
    def prepare(self, progress: Progress | None = None) -> None:
        """Do what is to be done before training; ``index`` is final afterwards. ``progress`` is called on the way."""

    @abstractmethod
    def latents_for(self, batch: MicroBatch) -> Tensor:
        """Return the fp32 latents (B, C, H, W) of a micro-batch. Raises DataError where there are none to give."""

    def stream(self, schedule: BatchSchedule, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield the micro-batches of an epoch from number ``start`` on, each with its latents."""
        for batch in schedule.epoch(epoch, start):
            yield batch, self.latents_for(batch)

    def _found(self, severity: Severity, code: str, path: Path, message: str) -> None:
        if (code, path) in self._reported:
            return
        self._reported.add((code, path))
        finding = Finding(severity, code, (path,), message)
        self.findings.append(finding)
        if self._report is not None:
            self._report(finding)

    def _encode(self, items: Sequence[tuple[ImageRecord, NDArray[np.uint8]]]) -> list[Tensor | None]:
        """Encode images of one bucket; None for one whose latents are not finite even in fp32, which is excluded."""
        pixels = torch.stack([_as_tensor(image) for _, image in items]).to(self.device)
        with torch.no_grad():
            latents = self.family.encode_images(pixels).to("cpu", torch.float32)
            bad = [place for place in range(len(items)) if not torch.isfinite(latents[place]).all()]
            again = self.family.encode_images_in_fp32(pixels[bad]).to("cpu", torch.float32) if bad else latents[:0]
        results: list[Tensor | None] = list(latents)
        for place, latent in zip(bad, again, strict=True):
            record = items[place][0]
            if torch.isfinite(latent).all():
                results[place] = latent
                self._found(
                    Severity.WARNING,
                    "latents_made_in_fp32",
                    record.path,
                    f"{record.path}: its latents were not finite in the chosen precision and were made again in fp32.",
                )
                continue
            results[place] = None
            self._exclude(record)
        return results

    def _exclude(self, record: ImageRecord) -> None:
        self.excluded.add(record.record_id)
        message = f"{record.path}: its latents are not finite, not even in fp32: the image is not used."
        self._found(Severity.ERROR, "latents_not_finite", record.path, message)


def _as_tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """Return pixels (H, W, 3) in 0..255 as (3, H, W) in -1..1."""
    return torch.from_numpy(pixels).permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1)


def read_pixels(record: ImageRecord, flipped: bool) -> NDArray[np.uint8]:
    """Return the pixels that are trained, uint8 (H, W, 3) of the bucket's size.

    Raises DataError where the file is not the one that was checked: its caption, size and cache key may be wrong.
    """
    try:
        content = record.path.read_bytes()
    except OSError as error:
        raise DataError(f"{record.path} cannot be read any more ({error.strerror or error}).") from error
    if sha256(content).hexdigest() != record.content_hash:
        raise DataError(f"{record.path} has changed since it was checked at the start. Start again.")
    pixels = fit_to_bucket(read_rgb(record.path, content), record.placement)
    return np.ascontiguousarray(pixels[:, ::-1]) if flipped else pixels


class CachedLatents(LatentSource):
    """Latents of all images, made once before training and kept in memory, or in files beside the images too.

    With files, what exceeds ``memory_limit`` is read from its file each time it is needed, and verified each time.
    """

    needs_vae = False

    def __init__(
        self,
        index: DatasetIndex,
        family: Family,
        *,
        to_disk: bool = False,
        device: torch.device | str = "cpu",
        report: Report | None = None,
        memory_limit: int = 4 << 30,
    ):
        """``memory_limit``: bytes of latents kept in memory when ``to_disk`` is set; without it all are."""
        super().__init__(index, family, device=device, report=report)
        self.to_disk = to_disk
        self.memory_limit = memory_limit
        # The identity takes a hash over all of the VAE's weights, which only files need: memory dies with the family.
        self._encoder = family.latent_identity if to_disk else ""
        self._kept: dict[LatentKey, Tensor] = {}
        self._files: dict[LatentKey, Path] = {}
        self._bytes = 0

    def prepare(self, progress: Progress | None = None) -> None:
        """Read or make all latents; ``index`` afterwards lacks the images that have none.

        Raises DataError where files cannot be written, or where no training image is left.
        """
        if self.to_disk:
            check_writable(sorted({record.path.parent for record in self.index.in_use}))
        # Leaving a training image out can call for other regularisation images, and a copy of a bad one comes up next.
        while self._read_or_make(progress):
            self.index = self.index.without(self.excluded)

    def _read_or_make(self, progress: Progress | None) -> bool:
        """Read or make what is not there yet; return whether images had to be excluded."""
        wanted: dict[LatentKey, Image] = {}
        for record in sorted(self.index.in_use, key=lambda record: record.placement.bucket):
            for flipped, key in self._keys(record).items():
                if key not in self._kept and key not in self._files:
                    wanted.setdefault(key, (record, flipped))
        total = len(wanted)
        if self.to_disk:
            wanted = {key: image for key, image in wanted.items() if not self._take_from_file(key, image[0])}
        done = total - len(wanted)
        if progress is not None:
            progress(done, total)
        excluded_before = len(self.excluded)
        for images, latents in self._made(list(wanted.values())):
            for (record, flipped), latent in zip(images, latents, strict=True):
                key = self._keys(record)[flipped]
                if latent is None:
                    continue
                if self.to_disk:
                    self._files[key] = cache_path(record, key)
                    write_latent(self._files[key], key, latent)
                self._remember(key, latent.clone())
            done += len(images)
            if progress is not None:
                progress(done, total)
        return len(self.excluded) > excluded_before

    def latents_for(self, batch: MicroBatch) -> Tensor:
        """Return the fp32 latents (B, C, H, W) of a micro-batch, on the CPU."""
        return torch.stack([self._latent(item) for item in batch.items])

    def _keys(self, record: ImageRecord) -> dict[bool, LatentKey]:
        sides = (False, True) if record.subset.flip_aug else (False,)
        return {flipped: latent_key(record, flipped, self._encoder) for flipped in sides}

    def _latent(self, item: BatchItem) -> Tensor:
        key = self._keys(item.record)[item.flipped]
        if key in self._kept:
            return self._kept[key]
        path = self._files.get(key)
        if path is None:
            raise DataError(f"There are no latents of {item.record.path}: prepare() has not made them.")
        try:
            latent = read_latent(path, key)
        except CacheMismatch as error:
            raise DataError(
                f"{path} was changed while training ({error}). Start again: it is made anew then."
            ) from error
        if latent is None:
            raise DataError(f"{path} was removed while training. Start again: it is made anew then.")
        return latent

    def _take_from_file(self, key: LatentKey, record: ImageRecord) -> bool:
        path = cache_path(record, key)
        try:
            latent = read_latent(path, key)
        except CacheMismatch as error:
            message = f"The latent cache {path} is not used and is made anew: {error}."
            self._found(Severity.WARNING, "cache_rebuilt", path, message)
            return False
        if latent is None:
            return False
        self._files[key] = path
        self._remember(key, latent)
        return True

    def _remember(self, key: LatentKey, latent: Tensor) -> None:
        size = latent.element_size() * latent.nelement()
        if not self.to_disk or self._bytes + size <= self.memory_limit:
            self._kept[key] = latent
            self._bytes += size

    def _made(self, images: list[Image]) -> Iterator[tuple[list[Image], list[Tensor | None]]]:
        batches: list[list[Image]] = []
        for bucket, same in groupby(images, key=lambda image: image[0].placement.bucket):
            size = max(1, _PIXELS_AT_ONCE // (bucket[0] * bucket[1]))
            while batch := list(islice(same, size)):
                batches.append(batch)
        for batch, pixels in _decoded_ahead(batches, lambda batch: batch):
            yield batch, self._encode([(record, decoded) for (record, _), decoded in zip(batch, pixels, strict=True)])


class FreshLatents(LatentSource):
    """Latents made when they are needed: images are decoded ahead in threads, and encoded when their turn comes."""

    needs_vae = True

    def prepare(self, progress: Progress | None = None) -> None:
        """Do nothing: every image is encoded when its turn comes."""

    def latents_for(self, batch: MicroBatch) -> Tensor:
        """Return the fp32 latents (B, C, H, W) of a micro-batch. Raises DataError for an image that has none."""
        pixels = [read_pixels(item.record, item.flipped) for item in batch.items]
        latents = self._encode([(item.record, image) for item, image in zip(batch.items, pixels, strict=True)])
        return torch.stack([self._required(item, latent) for item, latent in zip(batch.items, latents, strict=True)])

    def stream(self, schedule: BatchSchedule, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield the micro-batches of an epoch with their latents; an image that has none gives its place to another.

        The other one is the next of the same bucket and dataset, so that sizes and counts stay as planned.
        """
        batches = schedule.epoch(epoch, start)
        for batch, pixels in _decoded_ahead(batches, lambda batch: [(i.record, i.flipped) for i in batch.items]):
            latents = self._encode([(item.record, image) for item, image in zip(batch.items, pixels, strict=True)])
            items, kept = list(batch.items), list(latents)
            for place, latent in enumerate(latents):
                if latent is None:
                    items[place], kept[place] = self._replacement(items[place], schedule)
            yield replace(batch, items=tuple(items)), torch.stack([latent for latent in kept if latent is not None])

    def _replacement(self, item: BatchItem, schedule: BatchSchedule) -> tuple[BatchItem, Tensor]:
        others = [
            record
            for record in schedule.index.datasets[item.record.dataset].records
            if record.placement.bucket == item.bucket and record.record_id not in self.excluded
        ]
        others.sort(key=lambda record: (record.record_id < item.record.record_id, record.record_id))
        for record in others:
            other = schedule.draw(record, item.epoch, item.position)
            (latent,) = self._encode([(record, read_pixels(record, other.flipped))])
            if latent is not None:
                return other, latent
        raise DataError(
            f"No image of the bucket {item.bucket[0]}x{item.bucket[1]} has finite latents, not even in fp32; "
            f"{item.record.path} is one of them. The VAE is damaged, or those images are."
        )

    def _required(self, item: BatchItem, latent: Tensor | None) -> Tensor:
        if latent is None:
            raise DataError(f"The latents of {item.record.path} are not finite, not even in fp32.")
        return latent


def _decoded_ahead(
    jobs: Iterable[Job], images_of: Callable[[Job], Sequence[Image]]
) -> Iterator[tuple[Job, list[NDArray[np.uint8]]]]:
    """Yield each job with its decoded images, while threads decode those of the next ones."""
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    waiting: deque[tuple[Job, list[Future[NDArray[np.uint8]]]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, [pool.submit(read_pixels, *image) for image in images_of(job)]))
            if len(waiting) > _DECODED_AHEAD:
                first, images = waiting.popleft()
                yield first, [image.result() for image in images]
        while waiting:
            first, images = waiting.popleft()
            yield first, [image.result() for image in images]
    finally:
        pool.shutdown(cancel_futures=True)
