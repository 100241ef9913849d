"""The order of training: which images come together when, as a pure function of seed and epoch.

Nothing here has state that a resumed run would need: (seed, epoch, number of the micro-batch) say everything, and with
them every shuffled caption and every mirrored image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from maulstick.data.buckets import Size
from maulstick.data.captions import Moment, caption_for, shuffled
from maulstick.data.pixels import View
from maulstick.data.records import DatasetIndex, ImageRecord
from maulstick.data.variations import ColourChange, Crop, drawn_colours, drawn_crop
from maulstick.families.framing import Framing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BatchItem:
    """One image of a micro-batch, with what was drawn for it.

    Attributes:
        position: its place in the order of the epoch, from 0, counted over all processes.
        flipped: it is mirrored left to right.
        loss_weight: 1, or ``prior_loss_weight`` for a regularisation image.
        drawn_crop: (left, top, right, bottom) in the resized image, where it was drawn.
        colours: how its colours are changed, None for not at all.
        mask: where the loss counts, fp32 (h, w) on the latents' grid; put in with the latents, None for everywhere.
        judged: nothing is trained on it, and nothing of it is dropped: the model is measured.
    """

    record: ImageRecord
    epoch: int
    position: int
    flipped: bool
    caption: str
    loss_weight: float
    drawn_crop: Crop | None = None
    colours: ColourChange | None = None
    mask: Tensor | None = field(default=None, compare=False, repr=False)
    judged: bool = False

    @property
    def bucket(self) -> Size:
        """(width, height) that is trained, in pixels."""
        return self.record.placement.bucket

    @property
    def view(self) -> View:
        """What is made of the image file."""
        return View(self.record, self.flipped, self.drawn_crop, self.colours)

    @property
    def crop(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the bucket in the resized image, before mirroring."""
        return self.record.placement.crop if self.drawn_crop is None else self.drawn_crop

    @property
    def framing(self) -> Framing:
        """How the picture was cut out of its image, as a mirrored picture shows it where it is mirrored."""
        placement = self.record.placement
        left, top, right, _ = self.crop
        left = placement.resized[0] - right if self.flipped else left
        return Framing(self.record.size, (left, top), placement.bucket)


@dataclass(frozen=True)
class MicroBatch:
    """Images of one bucket of one dataset. ``number``: its place in this process's epoch, from 0."""

    epoch: int
    number: int
    items: tuple[BatchItem, ...]

    @property
    def bucket(self) -> Size:
        """(width, height) of all its images, in pixels."""
        return self.items[0].bucket


class BatchSchedule:
    """The micro-batches of one process, epoch by epoch.

    Counts are those of sd-scripts: every image is there ``repeats`` times per epoch, buckets are cut into batches of
    their dataset's size each, and what is left over in a bucket makes a smaller batch. With several processes each
    takes every ``world``-th batch; where the number does not divide evenly, the last ones are filled up from the
    beginning of the epoch, so that all processes have the same number of batches.

    Attributes:
        batches_in_all: micro-batches per epoch, over all processes.
        accumulation: micro-batches per step; captions whose tags grow in number ask for the step.
        total_steps: planned length of training, once it is known.
    """

    def __init__(self, index: DatasetIndex, seed: int, *, rank: int = 0, world: int = 1, accumulation: int = 1):
        self.index = index
        self.seed = seed
        self.rank = rank
        self.world = world
        self.accumulation = accumulation
        self.total_steps: int | None = None
        self._groups = [
            (bucket, dataset.spec.batch_size)
            for dataset in index.datasets
            for bucket in _by_bucket(dataset.records).values()
        ]
        self.batches_in_all = sum(-(-sum(record.repeats for record in bucket) // size) for bucket, size in self._groups)
        self._order_of: tuple[int, list[tuple[ImageRecord, ...]], list[int]] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches per epoch for each process."""
        return -(-self.batches_in_all // self.world)

    @property
    def steps_per_epoch(self) -> int:
        """Updates per epoch; the last one may be of fewer micro-batches."""
        return -(-self.batches_per_epoch // self.accumulation)

    @cached_property
    def of_all_processes(self) -> list[BatchSchedule]:
        """The schedules of all processes, in the order of their ranks: what the others train needs no asking."""
        return [BatchSchedule(self.index, self.seed, rank=rank, world=self.world) for rank in range(self.world)]

    @property
    def images_per_epoch(self) -> int:
        """Images per epoch, repeats counted, over all processes."""
        return sum(record.repeats for bucket, _ in self._groups for record in bucket)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yield this process's micro-batches of an epoch (from 0), from number ``start`` on."""
        for number in range(start, self.batches_per_epoch):
            yield self.batch(epoch, number)

    def batch(self, epoch: int, number: int) -> MicroBatch:
        """Return one micro-batch of this process."""
        if not 0 <= number < self.batches_per_epoch:
            raise IndexError(f"an epoch has {self.batches_per_epoch} micro-batches; there is no number {number}")
        batches, first_positions = self._order(epoch)
        place = (number * self.world + self.rank) % len(batches)
        step = epoch * self.steps_per_epoch + number // self.accumulation
        items = [
            self.draw(record, epoch, position, step)
            for position, record in enumerate(batches[place], first_positions[place])
        ]
        return MicroBatch(epoch, number, tuple(items))

    def draw(self, record: ImageRecord, epoch: int, position: int, step: int = 0) -> BatchItem:
        """Return what is trained when ``record`` is at ``position`` of an epoch: its caption, and how it is varied.

        ``step``: the step of training, counted from 0, that it is part of.
        """
        rng = self._rng("item", epoch, position)
        flipped = record.subset.flip_aug and rng.random() < 0.5
        weight = self.index.datasets[record.dataset].spec.prior_loss_weight if record.is_reg else 1.0
        caption = caption_for(record, rng, Moment(epoch, step, self.total_steps))
        crop = drawn_crop(record.placement, self._rng("crop", epoch, position)) if record.subset.random_crop else None
        colours = drawn_colours(self._rng("colours", epoch, position)) if record.subset.color_aug else None
        return BatchItem(record, epoch, position, flipped, caption, weight, crop, colours)

    def _rng(self, purpose: str, epoch: int, position: int) -> Random:
        # Seeding with text goes through SHA-512, so that neighbouring positions have unrelated numbers.
        return Random(f"maulstick {purpose} {self.seed} {epoch} {position}")

    def _order(self, epoch: int) -> tuple[list[tuple[ImageRecord, ...]], list[int]]:
        """Return all batches of an epoch in order, and the position of the first image of each."""
        if self._order_of is None or self._order_of[0] != epoch:
            rng = Random(f"maulstick epoch {self.seed} {epoch}")
            batches = []
            for bucket, size in self._groups:
                entries = shuffled([record for record in bucket for _ in range(record.repeats)], rng)
                batches += [tuple(entries[start : start + size]) for start in range(0, len(entries), size)]
            batches = shuffled(batches, rng)
            self._order_of = epoch, batches, [0, *accumulate(map(len, batches))]
        return self._order_of[1], self._order_of[2]


def _by_bucket(records: tuple[ImageRecord, ...]) -> dict[Size, list[ImageRecord]]:
    buckets: dict[Size, list[ImageRecord]] = {}
    for record in records:
        buckets.setdefault(record.placement.bucket, []).append(record)
    return dict(sorted(buckets.items()))
