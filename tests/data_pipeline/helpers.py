"""What several test files of the data pipeline ask of an index, a latent source or a cache file."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from maulstick.data.batches import BatchSchedule
from maulstick.data.pixels import read_pixels


def found(index, code: str):
    """Return the findings of one kind; there must be one at least."""
    findings = [finding for finding in index.findings if finding.code == code]
    assert findings, [finding.code for finding in index.findings]
    return findings


def one(index, code: str):
    (finding,) = found(index, code)
    return finding


def expected_latent(family, record, flipped):
    """Encode a record's picture by itself, from the file."""
    with Image.open(record.path) as picture:
        pixels = np.array(picture.convert("RGB"))
    if flipped:
        pixels = pixels[:, ::-1].copy()
    return family._latents(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1, family.bad)[0]


def picture_of(record):
    """Return a function that tells whether an image is that of this record."""
    wanted = torch.from_numpy(read_pixels(record, False)).permute(2, 0, 1) / 127.5 - 1
    return lambda image: image.shape == wanted.shape and torch.allclose(image, wanted)


def check_all(source, index, epochs=6):
    """Every latent of these epochs is that of its picture, mirrored or not; both kinds occur."""
    kinds = set()
    schedule = BatchSchedule(index, 5)
    for epoch in range(epochs):
        for batch, latents in source.stream(schedule, epoch):
            assert latents.dtype == torch.float32
            assert latents.device.type == "cpu"
            for item, latent in zip(batch.items, latents, strict=True):
                torch.testing.assert_close(latent, expected_latent(source.family, item.record, item.flipped))
                kinds.add((item.record.path.name, item.flipped))
    return kinds


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "bit flip in the tensor":
        content[-5] ^= 1
    elif kind == "bit flip in the header":
        content[20] ^= 4
    elif kind == "truncated":
        del content[len(content) // 2 :]
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        content[:] = bytes(len(content))
    elif kind == "text":
        content[:] = b"not a safetensors file at all"
    path.write_bytes(bytes(content))
