"""What the probe measures on: a few training images, and fixed draws of noise and timestep for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

from maulstick.data.batches import MicroBatch
from maulstick.data.cache import TextStateCache
from maulstick.data.captions import shuffled
from maulstick.data.findings import Finding
from maulstick.data.latents import CachedLatents, masks_of
from maulstick.families.base import Conditioning, Family
from maulstick.options.schema import ObjectiveOptions, Precision
from maulstick.train.console import RunConsole
from maulstick.train.objective import NoisyBatch, draw_noise, image_losses
from maulstick.train.prepare import Prepared
from maulstick.train.seeds import derive_seed
from maulstick.train.sources import how_to_make
from maulstick.train.trainee import Trainee

Item = TypeVar("Item")

FEWEST_REPLICATES = 4
"""Fewer images than this are measured several times, with other noise: a spread needs something to be taken over."""
_TIMESTEP_POOL = 4096


@dataclass(frozen=True)
class ProbeImage:
    """An image ready for the denoiser: ``latents`` (1, C, H, W) on the CPU, its conditioning with a batch of one.

    ``mask`` (1, 1, H, W) is 1 everywhere for an image without.
    """

    name: str
    latents: Tensor
    conditioning: Conditioning
    mask: Tensor


@dataclass(frozen=True)
class Draw:
    """One image with one noise and one timestep, a tensor of shape (1,)."""

    image: ProbeImage
    timestep: Tensor
    noise_seed: int


Replicate = Sequence[Draw]
"""The draws of one image, one in each part of the timesteps. Replicates are what a spread is taken over."""


def take_images(prepared: Prepared, count: int, console: RunConsole) -> list[ProbeImage]:
    """Choose ``count`` training images (all, where there are fewer) by the run's seed, and encode them.

    Regularisation images are left out. Each image comes once, whatever its repeats; caption and mirroring are drawn as
    in training, but crops are those of the middle, and colours are as they are. An image
    without finite latents is named and left out. The encoders are released afterwards.
    """
    records = [record for record in prepared.index.records if not record.is_reg]
    chosen = shuffled(records, Random(f"maulstick probe {prepared.seed}"))[:count]
    kept = {record.record_id for record in chosen}
    index = prepared.index.without({image.record_id for d in prepared.index.datasets for image in d.images} - kept)
    family = prepared.family

    def report(finding: Finding) -> None:
        console.say(f"{finding.severity}: {finding.message}")

    # Kept in memory: a measurement leaves no files beside the user's images.
    making = how_to_make(prepared.options.dataset)
    latents = CachedLatents(index, family, to_disk=False, device=family.device, report=report, making=making)
    latents.prepare()
    family.release_encoders(vae=True, text_encoders=False)
    items = [
        replace(prepared.batches.draw(record, 0, place), drawn_crop=None, colours=None)
        for place, record in enumerate(chosen)
        if record.record_id not in latents.excluded
    ]
    states = TextStateCache(family, device="cpu")
    images = []
    for item in items:
        batch, encoded = latents.filled(MicroBatch(0, 0, (item,)))
        conditioning = {**states.states_for([item.caption]), **family.image_conditioning([item.framing])}
        masks = masks_of(batch.items)
        mask = torch.ones_like(encoded[:, :1]) if masks is None else masks
        images.append(ProbeImage(str(item.record.path), encoded, conditioning, mask))
    family.release_encoders(vae=False, text_encoders=True)
    return images


def split_images(images: Sequence[ProbeImage]) -> tuple[Sequence[ProbeImage], Sequence[ProbeImage]]:
    """Return the images that trial updates learn from, and those they are judged on: the same where there is one."""
    half = -(-len(images) // 2)
    return images[:half], images[half:] or images


class DrawMaker:
    """Makes draws that depend on the seed and their purpose alone."""

    def __init__(self, family: Family, seed: int, parts: int) -> None:
        """``parts``: how many equally likely parts the family's timesteps are cut into."""
        self.seed = seed
        self.parts = parts
        generator = torch.Generator().manual_seed(derive_seed(seed, "probe", "timesteps"))
        # Parts of a sorted sample are equally likely under any family's distribution, and need no knowledge of it.
        pool = family.sample_timesteps(max(_TIMESTEP_POOL, parts), generator).cpu()
        self._strata = torch.tensor_split(pool.sort().values, parts)

    def replicates(self, images: Sequence[ProbeImage], purpose: str) -> list[Replicate]:
        """Return one replicate per image, several where there are fewer than ``FEWEST_REPLICATES`` images."""
        rounds = -(-FEWEST_REPLICATES // len(images))
        return [
            [self._draw(image, part, purpose, place, part) for part in range(self.parts)]
            for place, image in enumerate([*images] * rounds)
        ]

    def batches(self, images: Sequence[ProbeImage], steps: int, size: int, purpose: str) -> list[list[Draw]]:
        """Return the draws of each update: images and parts of the timesteps in turn, so that each comes up evenly."""
        order = Random(derive_seed(self.seed, "probe", purpose))
        count = steps * size
        pairs = list(zip(_in_turn(images, count, order), _in_turn(range(self.parts), count, order), strict=True))
        return [
            [self._draw(*pairs[step * size + place], purpose, step, place) for place in range(size)]
            for step in range(steps)
        ]

    def _draw(self, image: ProbeImage, part: int, purpose: str, *place: int) -> Draw:
        seed = derive_seed(self.seed, "probe", purpose, *place)
        stratum = self._strata[part]
        at = Random(seed).randrange(len(stratum))
        return Draw(image, stratum[at : at + 1], seed)


def _in_turn(items: Sequence[Item], count: int, order: Random) -> list[Item]:
    """Return ``count`` items: all of them in random order, then all again in another one, and so on."""
    result: list[Item] = []
    while len(result) < count:
        result += shuffled(items, order)
    return result[:count]


class LossBench:
    """The loss of a training run, on draws instead of random batches."""

    def __init__(self, family: Family, objective: ObjectiveOptions, precision: Precision, batch_size: int) -> None:
        """``batch_size``: images that are run at once."""
        self.family = family
        self.objective = objective
        self.batch_size = batch_size
        self._trainee = Trainee(family, trains_text_encoders=False, precision=precision)

    def losses(self, draws: Sequence[Draw]) -> Tensor:
        """Return the loss of each draw, shape (draws,), in one forward pass; their latents must be of one size."""
        family, device = self.family, self.family.device
        latents = torch.cat([draw.image.latents for draw in draws]).to(device)
        timesteps = torch.cat([draw.timestep for draw in draws]).to(device)
        noise = torch.cat([self._noise(draw) for draw in draws]).to(device)
        batch = NoisyBatch(
            family.add_noise(latents, noise, timesteps), timesteps, family.target(latents, noise, timesteps)
        )
        names = draws[0].image.conditioning
        conditioning = {name: torch.cat([draw.image.conditioning[name] for draw in draws]).to(device) for name in names}
        prediction = self._trainee(batch.noisy, batch.timesteps, conditioning=conditioning)
        weights, masks = torch.ones(len(draws), device=device), torch.cat([draw.image.mask for draw in draws])
        return image_losses(family, prediction, batch, self.objective, weights, masks.to(device))

    def in_parts(self, draws: Sequence[Draw]) -> Iterator[list[int]]:
        """Yield places in ``draws`` that can be run at once: images of one size, at most ``batch_size``."""
        by_size: dict[torch.Size, list[int]] = {}
        for place, draw in enumerate(draws):
            by_size.setdefault(draw.image.latents.shape, []).append(place)
        for places in by_size.values():
            for start in range(0, len(places), self.batch_size):
                yield places[start : start + self.batch_size]

    @torch.no_grad()
    def all_losses(self, draws: Sequence[Draw]) -> Tensor:
        """Return the loss of each draw, shape (draws,), fp64 on the CPU, without gradients."""
        result = torch.empty(len(draws), dtype=torch.float64)
        for places in self.in_parts(draws):
            result[places] = self.losses([draws[place] for place in places]).cpu().double()
        return result

    def _noise(self, draw: Draw) -> Tensor:
        generator = torch.Generator().manual_seed(draw.noise_seed)
        return draw_noise(draw.image.latents, self.objective, generator)
