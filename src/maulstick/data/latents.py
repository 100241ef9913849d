"""Latents for the loop, from memory, from files or made on the way: one interface, and finite values only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from maulstick.data.batches import BatchItem, BatchSchedule, MicroBatch
from maulstick.data.cache import (
    LatentKey,
    cache_path,
    check_writable,
    latent_key,
    read_latent,
    write_latent,
)
from maulstick.data.findings import Finding, Severity
from maulstick.data.index import Progress
from maulstick.data.pixels import Picture, View, read_mask, read_picture
from maulstick.data.proven_files import CacheMismatch
from maulstick.data.read_ahead import read_ahead
from maulstick.data.records import DatasetIndex, ImageRecord
from maulstick.errors import DataError
from maulstick.families.base import Family

Report = Callable[[Finding], None]

_PIXELS_AT_ONCE = 512 * 512
"""Images are encoded together up to this many pixels: one at 512x512, 64 at 64x64."""


@dataclass(frozen=True)
class Making:
    """How latents are made.

    Attributes:
        at_once: most images that are encoded together, None for as many as their size allows.
        threads: most threads that read images, see ``read_ahead``.
    """

    at_once: int | None = None
    threads: int | None = None


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
        self,
        index: DatasetIndex,
        family: Family,
        *,
        device: torch.device | str = "cpu",
        report: Report | None = None,
        making: Making = Making(),
    ):
        """``device``: where pixels are put for encoding. ``report`` is called with every finding as it comes up."""
        self.index = index
        self.family = family
        self.device = device
        self.findings: list[Finding] = []
        self.excluded: set[int] = set()
        self.making = making
        self._report = report
        self._reported: set[tuple[str, Path]] = set()

    @abstractmethod
    def prepare(self, progress: Progress | None = None) -> None:
        """Do what is to be done before training; ``index`` is final afterwards. ``progress`` is called on the way."""

    @abstractmethod
    def filled(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """Return a micro-batch with the masks of its images, and its fp32 latents (B, C, H, W), on the CPU.

        Raises DataError where there are none to give.
        """

    def latents_for(self, batch: MicroBatch) -> Tensor:
        """Return the latents alone."""
        return self.filled(batch)[1]

    def stream(self, schedule: BatchSchedule, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield the micro-batches of an epoch from number ``start`` on, each with its latents."""
        for batch in schedule.epoch(epoch, start):
            yield self.filled(batch)

    def _found(self, severity: Severity, code: str, path: Path, message: str) -> None:
        if (code, path) in self._reported:
            return
        self._reported.add((code, path))
        finding = Finding(severity, code, (path,), message)
        self.findings.append(finding)
        if self._report is not None:
            self._report(finding)

    def _encode(self, records: Sequence[ImageRecord], pictures: Sequence[Picture]) -> list[Tensor | None]:
        """Encode images of one bucket; None for one whose latents are not finite even in fp32, which is excluded."""
        size = self.making.at_once or len(records)
        parts = (slice(start, start + size) for start in range(0, len(records), size))
        return [latent for part in parts for latent in self._encode_at_once(records[part], pictures[part])]

    def _encode_at_once(self, records: Sequence[ImageRecord], pictures: Sequence[Picture]) -> list[Tensor | None]:
        pixels = torch.stack([_as_tensor(picture.pixels) for picture in pictures]).to(self.device)
        with torch.no_grad():
            latents = self.family.encode_images(pixels).to("cpu", torch.float32)
            bad = [place for place in range(len(records)) if not torch.isfinite(latents[place]).all()]
            again = self.family.encode_images_in_fp32(pixels[bad]).to("cpu", torch.float32) if bad else latents[:0]
        results: list[Tensor | None] = list(latents)
        for place, latent in zip(bad, again, strict=True):
            record = records[place]
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


def masks_of(items: Sequence[BatchItem]) -> Tensor | None:
    """Return the masks of a micro-batch, fp32 (B, 1, h, w) with 1 for images without; None where none has one."""
    known = next((item.mask for item in items if item.mask is not None), None)
    if known is None:
        return None
    return torch.stack([torch.ones_like(known) if item.mask is None else item.mask for item in items]).unsqueeze(1)


def mask_on_grid(mask: NDArray[np.uint8], grid: Sequence[int]) -> Tensor:
    """Return a mask (H, W) in 0..255 as the means over a grid of (h, w), fp32 in 0..1."""
    whole = torch.from_numpy(mask).to(torch.float32).div_(255)
    return interpolate(whole[None, None], size=tuple(grid), mode="area")[0, 0]


def _with_mask(item: BatchItem, mask: Tensor | None) -> BatchItem:
    """Return an item with its mask, given as its image has it and mirrored where the image is."""
    if mask is None:
        return item
    return replace(item, mask=mask.flip(-1) if item.flipped else mask)


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
        making: Making = Making(),
        memory_limit: int = 4 << 30,
    ):
        """``memory_limit``: bytes of latents kept in memory when ``to_disk`` is set; without it all are."""
        super().__init__(index, family, device=device, report=report, making=making)
        self.to_disk = to_disk
        self.memory_limit = memory_limit
        # The identity takes a hash over all of the VAE's weights, which only files need: memory dies with the family.
        self._encoder = family.latent_identity if to_disk else ""
        self._kept: dict[LatentKey, Tensor] = {}
        self._files: dict[LatentKey, Path] = {}
        self._bytes = 0
        self._masks: dict[int, Tensor] = {}

    def prepare(self, progress: Progress | None = None) -> None:
        """Read or make all latents; ``index`` afterwards lacks the images that have none.

        Raises DataError where files cannot be written, or where no training image is left.
        """
        if self.to_disk:
            check_writable(sorted({record.path.parent for record in self.index.in_use}))
        # Leaving a training image out can call for other regularisation images, and a copy of a bad one comes up next.
        while self._read_or_make(progress):
            self.index = self.index.without(self.excluded)
        self._read_masks()

    def _read_or_make(self, progress: Progress | None) -> bool:
        """Read or make what is not there yet; return whether images had to be excluded."""
        wanted: dict[LatentKey, View] = {}
        for record in sorted(self.index.in_use, key=lambda record: record.placement.bucket):
            for flipped, key in self._keys(record).items():
                if key not in self._kept and key not in self._files:
                    wanted.setdefault(key, View(record, flipped))
        total = len(wanted)
        if self.to_disk:
            wanted = {key: view for key, view in wanted.items() if not self._take_from_file(key, view.record)}
        done = total - len(wanted)
        if progress is not None:
            progress(done, total)
        excluded_before = len(self.excluded)
        for images, latents in self._made(list(wanted.values())):
            for view, latent in zip(images, latents, strict=True):
                key = self._keys(view.record)[view.flipped]
                if latent is None:
                    continue
                if self.to_disk:
                    self._files[key] = cache_path(view.record, key)
                    write_latent(self._files[key], key, latent)
                self._remember(key, latent.clone())
            done += len(images)
            if progress is not None:
                progress(done, total)
        return len(self.excluded) > excluded_before

    def filled(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        latents = torch.stack([self._latent(item) for item in batch.items])
        items = [_with_mask(item, self._masks.get(item.record.record_id)) for item in batch.items]
        return replace(batch, items=tuple(items)), latents

    def _read_masks(self) -> None:
        """Read all masks. They are small, and no encoder is waited for: files of their own would save nothing."""
        records = [record for record in self.index.in_use if record.mask is not None]
        for record, (mask,) in read_ahead(records, read_mask, lambda record: [View(record)], self.making.threads):
            if mask is not None:
                width, height = record.placement.bucket
                grid = (height // self.family.vae_scale, width // self.family.vae_scale)
                self._masks[record.record_id] = mask_on_grid(mask, grid)

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

    def _made(self, views: list[View]) -> Iterator[tuple[list[View], list[Tensor | None]]]:
        batches: list[list[View]] = []
        for bucket, same in groupby(views, key=lambda view: view.placement.bucket):
            size = self.making.at_once or max(1, _PIXELS_AT_ONCE // (bucket[0] * bucket[1]))
            while batch := list(islice(same, size)):
                batches.append(batch)
        for batch, pictures in read_ahead(batches, read_picture, lambda batch: batch, self.making.threads):
            yield batch, self._encode([view.record for view in batch], pictures)


class FreshLatents(LatentSource):
    """Latents made when they are needed: images are decoded ahead in threads, and encoded when their turn comes."""

    needs_vae = True

    def prepare(self, progress: Progress | None = None) -> None:
        """Do nothing: every image is encoded when its turn comes."""

    def filled(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """As in ``LatentSource``. Raises DataError for an image that has no finite latents."""
        pictures = [read_picture(item.view) for item in batch.items]
        latents = self._encode([item.record for item in batch.items], pictures)
        pairs = zip(batch.items, latents, strict=True)
        return _put_together(batch, batch.items, pictures, [self._required(*pair) for pair in pairs])

    def stream(self, schedule: BatchSchedule, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield the micro-batches of an epoch with their latents; an image that has none gives its place to another.

        The other one is the next of the same bucket and dataset, so that sizes and counts stay as planned.
        """
        batches = schedule.epoch(epoch, start)
        for batch, pictures in read_ahead(batches, read_picture, _views, self.making.threads):
            items, kept = list(batch.items), []
            for place, latent in enumerate(self._encode([item.record for item in items], pictures)):
                if latent is None:
                    items[place], pictures[place], latent = self._replacement(items[place], schedule)
                kept.append(latent)
            yield _put_together(batch, items, pictures, kept)

    def _replacement(self, item: BatchItem, schedule: BatchSchedule) -> tuple[BatchItem, Picture, Tensor]:
        others = [
            record
            for record in schedule.index.datasets[item.record.dataset].records
            if record.placement.bucket == item.bucket and record.record_id not in self.excluded
        ]
        others.sort(key=lambda record: (record.record_id < item.record.record_id, record.record_id))
        for record in others:
            other = schedule.draw(record, item.epoch, item.position)
            picture = read_picture(other.view)
            (latent,) = self._encode([record], [picture])
            if latent is not None:
                return other, picture, latent
        raise DataError(
            f"No image of the bucket {item.bucket[0]}x{item.bucket[1]} has finite latents, not even in fp32; "
            f"{item.record.path} is one of them. The VAE is damaged, or those images are."
        )

    def _required(self, item: BatchItem, latent: Tensor | None) -> Tensor:
        if latent is None:
            raise DataError(f"The latents of {item.record.path} are not finite, not even in fp32.")
        return latent


def _views(batch: MicroBatch) -> list[View]:
    return [item.view for item in batch.items]


def _put_together(
    batch: MicroBatch, items: Sequence[BatchItem], pictures: Sequence[Picture], latents: Sequence[Tensor]
) -> tuple[MicroBatch, Tensor]:
    stacked = torch.stack(list(latents))
    masks = [None if picture.mask is None else mask_on_grid(picture.mask, stacked.shape[-2:]) for picture in pictures]
    masked = [_with_mask(item, mask) for item, mask in zip(items, masks, strict=True)]
    return replace(batch, items=tuple(masked)), stacked
