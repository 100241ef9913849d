"""Caches of what the frozen encoders give: latent files that prove what they are, and text states in memory."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from maulstick.data.index import Progress
from maulstick.data.proven_files import CacheMismatch, ProvenFormat, key_difference
from maulstick.data.records import ImageRecord
from maulstick.data.scan import CACHE_SUFFIX
from maulstick.errors import DataError, ModelError
from maulstick.families.base import Conditioning, Family

LATENTS = ProvenFormat("maulstick-latents-1", "latents", "latent")
_MEANINGS = {"content": "the image has changed since", "encoder": "it was made with another VAE"}
_WHITE, _COLOURS_KEPT = "white background", "colours as they are below the alpha channel"
_USUAL_FILTERS = "hamming down, lanczos up"
_PREPARATION = f"{_WHITE}, {_USUAL_FILTERS}, centre crop"
_LONGEST_STEM = 100


@dataclass(frozen=True)
class LatentKey:
    """Everything that a latent depends on.

    Attributes:
        content: SHA-256 of the image file.
        encoder: the family's ``latent_identity``.
        resized, crop: how the image was fitted to its bucket, see ``Placement``.
        flipped: the image was mirrored before encoding.
        preparation: how pixels were made, as a text that changes with the program's version too.
    """

    content: str
    encoder: str
    resized: tuple[int, int]
    crop: tuple[int, int, int, int]
    flipped: bool
    preparation: str = _PREPARATION

    def text(self) -> str:
        """Return the key as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def latent_key(record: ImageRecord, flipped: bool, encoder: str) -> LatentKey:
    """Return the key of a record's latent."""
    placement = record.placement
    by_alpha = record.mask is not None and record.mask.channel == "alpha"
    filters = record.subset.resize_interpolation or _USUAL_FILTERS
    preparation = f"{_COLOURS_KEPT if by_alpha else _WHITE}, {filters}, centre crop"
    return LatentKey(record.content_hash, encoder, placement.resized, placement.crop, flipped, preparation)


def cache_path(record: ImageRecord, key: LatentKey) -> Path:
    """Return where a latent is kept: beside its image, as ``<stem>_<WxH>_<12 hex digits>.maulstick.safetensors``.

    The digits stand for file name, encoder, crop and flip, but not for the image's content: a changed image finds its
    old file, sees that it is stale and replaces it.
    """
    width, height = record.placement.bucket
    without_content = json.loads(key.text()) | {"content": None, "name": record.path.name}
    digits = sha256(json.dumps(without_content, sort_keys=True).encode()).hexdigest()[:12]
    stem = record.path.stem.encode(errors="ignore")[:_LONGEST_STEM].decode(errors="ignore")
    return record.path.with_name(f"{stem}_{width}x{height}_{digits}{CACHE_SUFFIX}")


def write_latent(path: Path, key: LatentKey, latent: Tensor) -> None:
    """Keep a latent (C, H, W) in a file, atomically. Raises DataError where the folder cannot be written."""
    try:
        LATENTS.write(path, key.text(), latent.detach().to("cpu", torch.float32).contiguous())
    except OSError as error:
        raise DataError(
            f"cache_latents_to_disk: cannot write into {path.parent} ({error.strerror or error}). Make the folder "
            "writable (or make room), or use cache_latents instead, which keeps latents in memory."
        ) from error


def read_latent(path: Path, key: LatentKey) -> Tensor | None:
    """Return the latent kept in ``path``, or None where there is no such file.

    Raises CacheMismatch unless the file is whole, was made for exactly ``key``, and its tensor has the hash that was
    taken when it was written.
    """
    latent = LATENTS.read(path, key.text(), lambda found: key_difference(found, key.text(), _MEANINGS))
    if latent is not None and latent.dtype != torch.float32:
        raise CacheMismatch("its values are not those that were written")
    return latent


def check_writable(folders: Iterable[Path]) -> None:
    """Raise DataError for the first folder that cache files cannot be written into, before anything is encoded."""
    for folder in folders:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise DataError(
                f"cache_latents_to_disk: {folder} cannot be written to. Make it writable, or use cache_latents "
                "instead, which keeps latents in memory."
            )


class TextStateCache:
    """Text states of captions, kept in memory; the least recently used go first when there are too many.

    Only for frozen text encoders: what is kept carries no gradient. The caption alone is the key, because a cache
    belongs to one family, whose encoders do not change; ``text_identity`` would cost a hash over all their weights.
    """

    def __init__(
        self,
        family: Family,
        *,
        capacity_bytes: int = 1 << 30,
        batch_size: int = 16,
        device: torch.device | str | None = None,
    ):
        """``capacity_bytes`` bounds what ``states_for`` keeps; ``batch_size``: captions encoded at a time;
        ``device``: where states are kept, None for where the encoders leave them."""
        self.family = family
        self.capacity_bytes = capacity_bytes
        self.batch_size = batch_size
        self.device = device
        self._kept: OrderedDict[str, Conditioning] = OrderedDict()
        self._bytes = 0
        self._pinned: dict[str, Conditioning] = {}

    def states_for(self, captions: Sequence[str]) -> Conditioning:
        """Return the conditioning of the captions, in their order; what is not kept yet is encoded in batches."""
        states = self._look_up(captions)
        missing = [caption for caption in dict.fromkeys(captions) if caption not in states]
        for start in range(0, len(missing), self.batch_size):
            states |= self._encode(missing[start : start + self.batch_size])
        for caption in missing:
            self._keep(caption, states[caption])
        return {name: torch.stack([states[caption][name] for caption in captions]) for name in states[captions[0]]}

    def encode_all(self, captions: Iterable[str], progress: Progress | None = None) -> None:
        """Encode captions once and keep them for good, so that the text encoders are not needed for them again."""
        wanted = [caption for caption in dict.fromkeys(captions) if caption not in self._pinned]
        for start in range(0, len(wanted), self.batch_size):
            self._pinned |= self._encode(wanted[start : start + self.batch_size])
            if progress is not None:
                progress(min(start + self.batch_size, len(wanted)), len(wanted))

    def _look_up(self, captions: Sequence[str]) -> dict[str, Conditioning]:
        states = {}
        for caption in captions:
            if caption in self._pinned:
                states[caption] = self._pinned[caption]
            elif caption in self._kept:
                self._kept.move_to_end(caption)
                states[caption] = self._kept[caption]
        return states

    def _encode(self, captions: list[str]) -> dict[str, Conditioning]:
        with torch.no_grad():
            encoded = self.family.encode_text(self.family.tokenize(captions))
        bad = [
            caption
            for place, caption in enumerate(captions)
            if not all(torch.isfinite(states[place]).all() for states in encoded.values())
        ]
        if bad:
            raise ModelError(
                f"The text encoder gives values that are not finite for the caption '{bad[0]}'. Use mixed_precision "
                "bf16 or no; if that does not help, the model file is damaged."
            )
        # Copies, so that one kept caption does not hold the memory of its whole batch.
        return {
            caption: {name: states[place].detach().to(self.device, copy=True) for name, states in encoded.items()}
            for place, caption in enumerate(captions)
        }

    def _keep(self, caption: str, state: Conditioning) -> None:
        self._kept[caption] = state
        self._bytes += _size_in_bytes(state)
        while self._bytes > self.capacity_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size_in_bytes(dropped)


def _size_in_bytes(state: Conditioning) -> int:
    return sum(tensor.element_size() * tensor.nelement() for tensor in state.values())
