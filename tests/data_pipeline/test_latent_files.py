from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from maulstick.data import proven_files
from maulstick.data.cache import cache_path, latent_key, read_latent, write_latent
from maulstick.data.latents import CachedLatents
from maulstick.data.proven_files import CacheMismatch
from maulstick.errors import DataError
from tests.data_pipeline.helpers import check_all, damage


def test_files_serve_the_next_run(cats, family, tmp_path):
    source = CachedLatents(cats(), family, to_disk=True)
    source.prepare()
    files = sorted((tmp_path / "train/2_cat").glob("*.maulstick.safetensors"))
    assert len(files) == 8
    assert [name.name.rsplit("_", 1)[0] for name in files] == [
        "a_64x64", "a_64x64", "b_64x64", "b_64x64", "c_80x48", "c_80x48", "d_80x48", "d_80x48",
    ]  # fmt: skip
    record = source.index.records[0]
    with safe_open(cache_path(record, latent_key(record, True, "fake-vae-1")), framework="pt") as file:
        metadata = file.metadata()
        latent = file.get_tensor("latents")
    assert json.loads(metadata["key"]) == {
        "content": record.content_hash,
        "crop": [0, 0, 64, 64],
        "encoder": "fake-vae-1",
        "flipped": True,
        "preparation": "white background, hamming down, lanczos up, centre crop",
        "resized": [64, 64],
    }
    digest = hashlib.sha256(b"[4, 8, 8]" + latent.numpy().tobytes()).hexdigest()
    assert metadata["tensor_sha256"] == digest

    family.encoded.clear()
    again = CachedLatents(cats(), family, to_disk=True)
    again.prepare()
    assert family.encoded == []
    assert again.findings == []
    assert len(check_all(again, again.index)) == 8
    # The files are no data of the user's: the index does not mention them.
    assert again.index.findings == ()


@pytest.mark.parametrize(
    "kind", ["bit flip in the tensor", "bit flip in the header", "truncated", "empty", "zeros", "text"]
)
def test_a_damaged_file_is_made_anew_and_told(cats, family, kind):
    source = CachedLatents(cats(), family, to_disk=True)
    source.prepare()
    record = source.index.records[1]
    path = cache_path(record, latent_key(record, False, "fake-vae-1"))
    whole = path.read_bytes()
    damage(path, kind)
    assert path.read_bytes() != whole

    family.encoded.clear()
    reports = []
    again = CachedLatents(cats(), family, to_disk=True, report=reports.append)
    again.prepare()
    assert family.encoded == [(1, 3, 64, 64)]
    (finding,) = again.findings
    assert reports == [finding]
    assert finding.code == "cache_rebuilt"
    assert finding.paths == (path,)
    assert f"The latent cache {path} is not used and is made anew: " in finding.message
    check_all(again, again.index)
    assert read_latent(path, latent_key(record, False, "fake-vae-1")) is not None


def test_every_single_bit_counts(cats, family):
    """No flipped bit of a small cache file gives a latent other than the right one."""
    source = CachedLatents(cats(resolution="16", min_bucket_reso=8, flip_aug=False), family, to_disk=True)
    source.prepare()
    record = source.index.records[0]
    key = latent_key(record, False, "fake-vae-1")
    path = cache_path(record, key)
    whole, right = path.read_bytes(), read_latent(path, key)
    refused = 0
    for position in range(0, len(whole), 3):
        content = bytearray(whole)
        content[position] ^= 1 << (position % 8)
        path.write_bytes(bytes(content))
        try:
            latent = read_latent(path, key)
        except CacheMismatch:
            refused += 1
            continue
        assert latent is not None
        assert torch.equal(latent, right)
    assert refused > 0.9 * len(whole) / 3


def test_foreign_and_stale_files(cats, family, image, tmp_path):
    source = CachedLatents(cats(), family, to_disk=True)
    source.prepare()
    record, other = source.index.records[:2]
    key = latent_key(record, False, "fake-vae-1")
    path = cache_path(record, key)
    right = read_latent(path, key)
    # Another picture's file under this name, another program's file, an extra tensor, half precision, a broken key.
    other_path = cache_path(other, latent_key(other, False, "fake-vae-1"))
    path.write_bytes(other_path.read_bytes())
    with pytest.raises(CacheMismatch, match="the image has changed since"):
        read_latent(path, key)
    save_file({"latents": right}, path)
    with pytest.raises(CacheMismatch, match="not a latent cache of this program's format"):
        read_latent(path, key)
    metadata = {"format": "maulstick-latents-1", "key": key.text(), "tensor_sha256": "0" * 64}
    save_file({"latents": right, "more": right.clone()}, path, metadata)
    with pytest.raises(CacheMismatch, match="other tensors"):
        read_latent(path, key)
    save_file({"latents": right.half()}, path, metadata)
    with pytest.raises(CacheMismatch, match="not those that were written"):
        read_latent(path, key)
    save_file({"latents": right}, path, metadata | {"key": "{"})
    with pytest.raises(CacheMismatch, match="its key cannot be read"):
        read_latent(path, key)
    # The picture itself is replaced: its file is found stale and made anew under the same name.
    image(record.path, (64, 64), seed=99)
    again = CachedLatents(cats(), family, to_disk=True)
    again.prepare()
    stale = {finding.paths[0] for finding in again.findings}
    assert stale == {path, cache_path(record, latent_key(record, True, "fake-vae-1"))}
    assert len(list((tmp_path / "train/2_cat").glob("*.safetensors"))) == 8
    check_all(again, again.index)


def test_another_encoder_size_or_crop_has_its_own_files(cats, family, tmp_path):
    CachedLatents(cats(), family, to_disk=True).prepare()
    family.latent_identity = "fake-vae-2"
    family.encoded.clear()
    source = CachedLatents(cats(), family, to_disk=True)
    source.prepare()
    assert source.findings == []
    assert len(family.encoded) == 2
    smaller = CachedLatents(cats(resolution="32"), family, to_disk=True)
    smaller.prepare()
    assert smaller.findings == []
    assert len(list((tmp_path / "train/2_cat").glob("*.safetensors"))) == 24
    record = source.index.records[0]
    key = latent_key(record, False, "fake-vae-2")
    for changed in (
        replace(key, encoder="x"),
        replace(key, crop=(0, 0, 64, 63)),
        replace(key, resized=(64, 65)),
        replace(key, flipped=True),
        replace(key, preparation="x"),
    ):
        assert cache_path(record, changed) != cache_path(record, key)
        with pytest.raises(CacheMismatch):
            read_latent(cache_path(record, key), changed)


def test_names_of_cache_files(cats):
    record = cats().records[0]
    key = latent_key(record, False, "v")
    twin = replace(record, path=record.path.with_suffix(".jpg"))
    assert cache_path(twin, key) != cache_path(record, key)
    assert cache_path(twin, key).name.startswith("a_64x64_")
    long = replace(record, path=record.path.with_name("猫" * 80 + ".png"))
    assert len(cache_path(long, key).name.encode()) < 180
    write_latent(cache_path(long, key), key, torch.ones(4, 8, 8))
    assert torch.equal(read_latent(cache_path(long, key), key), torch.ones(4, 8, 8))


def test_unwritable_folder(cats, family, monkeypatch):
    built = cats()
    folder = built.records[0].path.parent
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(
            DataError, match=r"cache_latents_to_disk: .*cannot be written to.*use cache_latents instead"
        ):
            CachedLatents(built, family, to_disk=True).prepare()
    assert family.encoded == []

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(proven_files, "atomic_write", full)
    with pytest.raises(DataError, match=f"cannot write into {folder} .No space left on device.*cache_latents instead"):
        CachedLatents(built, family, to_disk=True).prepare()
    assert list(folder.glob("*.safetensors")) == []
    monkeypatch.undo()
    folder.chmod(0o500)
    try:
        if not os.access(folder, os.W_OK):
            with pytest.raises(DataError, match="cannot be written to"):
                CachedLatents(built, family, to_disk=True).prepare()
    finally:
        folder.chmod(0o700)


def test_beyond_the_memory_limit_files_are_read_and_verified_each_time(cats, family):
    built = cats()
    size = 4 * 8 * 8 * 4
    source = CachedLatents(built, family, to_disk=True, memory_limit=3 * size)
    source.prepare()
    assert len(source._kept) == 3
    assert len(source._files) == 8
    assert len(check_all(source, built)) == 8
    for path in built.records[0].path.parent.glob("*.safetensors"):
        damage(path, "bit flip in the tensor")
    with pytest.raises(DataError, match=r"was changed while training .*Start again"):
        check_all(source, built)
    for path in built.records[0].path.parent.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(DataError, match="was removed while training"):
        check_all(source, built)


def test_copies_of_a_picture_share_one_latent(cats, family, tmp_path):
    folder = tmp_path / "train/1_more"
    built = cats(flip_aug=False)
    folder.mkdir()
    (folder / "copy.png").write_bytes(built.records[0].path.read_bytes())
    built = cats(flip_aug=False)
    source = CachedLatents(built, family, to_disk=True, memory_limit=0)
    source.prepare()
    assert sum(shape[0] for shape in family.encoded) == 4
    check_all(source, source.index)
