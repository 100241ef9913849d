"""Features of reference images, made once by a frozen image encoder and kept in files beside the images."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maulstick.data.findings import Finding, Severity
from maulstick.data.images import read_rgb
from maulstick.data.index import Progress
from maulstick.data.latents import Report
from maulstick.data.proven_files import CacheMismatch, ProvenFormat, key_difference
from maulstick.data.references import Reference
from maulstick.data.scan import CACHE_SUFFIX
from maulstick.errors import DataError

Encode = Callable[[Sequence[NDArray[np.uint8]]], Tensor]
"""Returns fp32 features (B, ...) of RGB images (H, W, 3)."""

FEATURES = ProvenFormat("maulstick-image-features-1", "features", "feature")
_MEANINGS = {
    "content": "the image has changed since",
    "encoder": "it was made with another image encoder, or other preprocessing",
}
_LONGEST_STEM = 100
_AT_ONCE = 8


class ImageFeatures:
    """Features by reference image.

    ``prepare`` makes or reads all of them; what it has not prepared is made when it is asked for, and not written.

    Attributes:
        findings: cache files that could not be used, and were made anew.
    """

    def __init__(
        self,
        encode: Encode,
        identity: Callable[[], str],
        *,
        dtype: torch.dtype = torch.float32,
        to_disk: bool = True,
        report: Report | None = None,
        memory_limit: int = 4 << 30,
    ):
        """``identity`` identifies encoder, layer and preprocessing; it is asked for only where files are used.

        Args:
            dtype: number format that features are kept in: that of the forward pass, which rounds them to it anyway.
                Those that it cannot hold are kept in fp32.
            report: is given every finding as it comes up.
            memory_limit: bytes kept in memory where files are written; without files all are.
        """
        self._encode = encode
        self._identity_of = identity
        self.dtype = dtype
        self.to_disk = to_disk
        self.findings: list[Finding] = []
        self._report = report
        self._memory_limit = memory_limit
        self._kept: dict[str, Tensor] = {}
        self._files: dict[str, tuple[Path, str]] = {}
        self._bytes = 0
        self._identity: str | None = None

    def prepare(self, references: Iterable[Reference], progress: Progress | None = None) -> None:
        """Read or make the features of these images. Raises DataError where files cannot be written."""
        wanted = list({reference.content_hash: reference for reference in references}.values())
        total = len(wanted)
        if self.to_disk:
            _check_writable({reference.path.parent for reference in wanted})
            wanted = [reference for reference in wanted if not self._take_from_file(reference)]
        done = total - len(wanted)
        if progress is not None:
            progress(done, total)
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            for reference, features in zip(some, self._made(some), strict=True):
                if self.to_disk:
                    self._write(reference, features)
                self._keep(reference, features)
            done += len(some)
            if progress is not None:
                progress(done, total)

    def features_of(self, references: Sequence[Reference]) -> Tensor:
        """Return the fp32 features (B, ...) of reference images, on the CPU."""
        return torch.stack([self._one(reference).float() for reference in references])

    def _one(self, reference: Reference) -> Tensor:
        kept = self._kept.get(reference.content_hash)
        if kept is not None:
            return kept
        if reference.content_hash not in self._files:
            (features,) = self._made([reference])
            self._kept[reference.content_hash] = features
            return features
        path, key = self._files[reference.content_hash]
        try:
            read = FEATURES.read(path, key, lambda found: key_difference(found, key, _MEANINGS))
        except CacheMismatch as error:
            raise DataError(
                f"{path} was changed while training ({error}). Start again: it is made anew then."
            ) from error
        if read is None:
            raise DataError(f"{path} was removed while training. Start again: it is made anew then.")
        return read

    def _made(self, references: Sequence[Reference]) -> list[Tensor]:
        features = self._encode([_pixels(reference) for reference in references])
        return [self._stored(each) for each in features]

    def _stored(self, features: Tensor) -> Tensor:
        rounded = features.to(self.dtype)
        # A copy of its own: a view would keep the whole batch.
        return (rounded if torch.isfinite(rounded).all() else features).clone(memory_format=torch.contiguous_format)

    # --- files -------------------------------------------------------------------------------------------------------

    def _key(self, reference: Reference) -> str:
        if self._identity is None:
            self._identity = self._identity_of()
        facts = {"content": reference.content_hash, "encoder": self._identity, "format": str(self.dtype)}
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))

    def path(self, reference: Reference) -> Path:
        """Return where features are kept: beside the image, ``<stem>_features_<12 hex digits>.maulstick.safetensors``.

        The digits stand for file name, encoder and number format, not for the image's content: a changed image finds
        its old file, sees that it is stale and replaces it.
        """
        without_content = json.loads(self._key(reference)) | {"content": None, "name": reference.path.name}
        digits = sha256(json.dumps(without_content, sort_keys=True).encode()).hexdigest()[:12]
        stem = reference.path.stem.encode(errors="ignore")[:_LONGEST_STEM].decode(errors="ignore")
        return reference.path.with_name(f"{stem}_features_{digits}{CACHE_SUFFIX}")

    def _take_from_file(self, reference: Reference) -> bool:
        path, key = self.path(reference), self._key(reference)
        try:
            features = FEATURES.read(path, key, lambda found: key_difference(found, key, _MEANINGS))
        except CacheMismatch as error:
            message = f"The feature cache {path} is not used and is made anew: {error}."
            finding = Finding(Severity.WARNING, "cache_rebuilt", (path,), message)
            self.findings.append(finding)
            if self._report is not None:
                self._report(finding)
            return False
        if features is None:
            return False
        self._files[reference.content_hash] = path, key
        self._keep(reference, features)
        return True

    def _write(self, reference: Reference, features: Tensor) -> None:
        path, key = self.path(reference), self._key(reference)
        try:
            FEATURES.write(path, key, features)
        except OSError as error:
            raise _cannot_write(path.parent, error.strerror or str(error)) from error
        self._files[reference.content_hash] = path, key

    def _keep(self, reference: Reference, features: Tensor) -> None:
        size = features.element_size() * features.nelement()
        if not self.to_disk or self._bytes + size <= self._memory_limit:
            self._kept[reference.content_hash] = features
            self._bytes += size


def _pixels(reference: Reference) -> NDArray[np.uint8]:
    try:
        content = reference.path.read_bytes()
    except OSError as error:
        raise DataError(f"{reference.path} cannot be read any more ({error.strerror or error}).") from error
    if sha256(content).hexdigest() != reference.content_hash:
        raise DataError(f"{reference.path} has changed since it was checked at the start. Start again.")
    return read_rgb(reference.path, content)


def _check_writable(folders: Iterable[Path]) -> None:
    for folder in sorted(folders):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _cannot_write(folder, "it is read-only")


def _cannot_write(folder: Path, reason: str) -> DataError:
    return DataError(
        f"cache_image_features_to_disk: cannot write into {folder} ({reason}). Make the folder writable (or make "
        "room), or turn it off with --no-cache_image_features_to_disk, which keeps features in memory."
    )
