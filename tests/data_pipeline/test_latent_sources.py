from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from maulstick.data.batches import BatchSchedule
from maulstick.data.index import build_index
from maulstick.data.latents import CachedLatents, FreshLatents
from maulstick.data.pixels import read_pixels
from maulstick.errors import DataError
from maulstick.options.dataset_config import dataset_specs
from tests.data_pipeline.helpers import check_all, picture_of


@pytest.mark.parametrize("kind", ["memory", "disk", "fresh"])
def test_all_sources_give_the_same_latents(cats, family, kind):
    built = cats()
    source = FreshLatents(built, family) if kind == "fresh" else CachedLatents(built, family, to_disk=kind == "disk")
    assert source.needs_vae == (kind == "fresh")
    calls = []
    source.prepare(lambda done, total: calls.append((done, total)))
    encoded_before = len(family.encoded)
    kinds = check_all(source, source.index)
    assert len(kinds) == 8
    assert source.findings == []
    assert source.excluded == set()
    assert source.index is built
    if kind == "fresh":
        assert calls == []
        assert encoded_before == 0
    else:
        # Two buckets, both sides of each picture, encoded together; nothing more while training.
        assert family.encoded == [(4, 3, 64, 64), (4, 3, 48, 80)]
        assert calls == [(0, 8), (4, 8), (8, 8)]
    for batch in BatchSchedule(source.index, 5).epoch(0):
        assert source.latents_for(batch).shape[0] == len(batch.items)


def test_big_images_are_encoded_one_by_one(tmp_path, image, family, options):
    for name in "ab":
        image(tmp_path / f"train/1_cat/{name}.png", (512, 512), caption="cat")
    built = build_index(dataset_specs(options(resolution="512")))
    CachedLatents(built, family).prepare()
    assert family.encoded == [(1, 3, 512, 512)] * 2


# ------------------------------------------------------------------------------- latents that are not finite


def test_not_finite_latents_are_made_again_in_fp32(cats, family):
    built = cats(flip_aug=False)
    family.bad = picture_of(built.records[2])
    source = CachedLatents(built, family)
    source.prepare()
    assert family.encoded_in_fp32 == [(1, 3, 48, 80)]
    (finding,) = source.findings
    assert finding.code == "latents_made_in_fp32"
    assert finding.paths == (built.records[2].path,)
    assert source.index is built
    assert source.excluded == set()
    family.bad = lambda image: False
    check_all(source, built)


@pytest.mark.parametrize("to_disk", [False, True])
def test_images_that_stay_bad_are_excluded_and_counted_never_zeroed(cats, family, image, tmp_path, to_disk):
    cats()
    for name in "rs":
        image(tmp_path / f"reg/1_animal/{name}.png", (64, 64), caption="animal")
    built = cats(reg_data_dir=tmp_path / "reg", flip_aug=False)
    assert [record.repeats for record in built.records] == [2, 2, 2, 2, 4, 4]
    family.bad = family.bad_in_fp32 = lambda pixels: pixels.shape[2] == 80
    source = CachedLatents(built, family, to_disk=to_disk)
    source.prepare()
    assert source.excluded == {2, 3}
    assert [finding.code for finding in source.findings] == ["latents_not_finite"] * 2
    assert "c.png: its latents are not finite, not even in fp32: the image is not used." in source.findings[0].message
    # Two training images are left, and the regularisation images are matched to them.
    assert [(record.path.name, record.repeats) for record in source.index.records] == [
        ("a.png", 2), ("b.png", 2), ("r.png", 2), ("s.png", 2),
    ]  # fmt: skip
    for batch, latents in source.stream(BatchSchedule(source.index, 0), 0):
        assert torch.isfinite(latents).all()
        assert (latents != 0).any()
        assert len(batch.items) == len(latents)
    assert len(list(tmp_path.glob("train/*/*.safetensors"))) == (2 if to_disk else 0)
    family.bad = family.bad_in_fp32 = lambda pixels: True
    with pytest.raises(DataError, match="No training image is left"):
        CachedLatents(built, family).prepare()


def test_copies_of_a_bad_picture_are_excluded_and_named(cats, family, tmp_path):
    first = cats().records[0].path
    copy = tmp_path / "train/1_more/copy.png"
    copy.parent.mkdir()
    copy.write_bytes(first.read_bytes())
    built = cats(flip_aug=False)
    bad = [record for record in built.records if record.content_hash == built.records[0].content_hash]
    assert len(bad) == 2
    family.bad = family.bad_in_fp32 = picture_of(bad[0])
    source = CachedLatents(built, family)
    source.prepare()
    assert source.excluded == {record.record_id for record in bad}
    assert {finding.paths[0] for finding in source.findings} == {first, copy}
    assert len(source.index.records) == 3


def test_excluding_can_call_for_regularisation_images_that_were_not_needed(tmp_path, image, family, options):
    for name in "ab":
        image(tmp_path / f"train/2_cat/{name}.png", caption="cat")
    for name in "rst":
        image(tmp_path / f"reg/2_animal/{name}.png", caption="animal")
    built = build_index(dataset_specs(options(reg_data_dir=tmp_path / "reg")))
    assert [record.path.name for record in built.records] == ["a.png", "b.png", "r.png", "s.png"]
    family.bad = family.bad_in_fp32 = picture_of(built.records[2])
    source = CachedLatents(built, family)
    source.prepare()
    assert [record.path.name for record in source.index.records] == ["a.png", "b.png", "s.png", "t.png"]
    assert [len(latents) for _, latents in source.stream(BatchSchedule(source.index, 0), 0)] == [1] * 8


def test_fresh_latents_replace_a_bad_image_by_one_of_its_bucket(cats, family):
    built = cats(flip_aug=False, train_batch_size=2)
    family.bad = family.bad_in_fp32 = picture_of(built.records[0])
    source = FreshLatents(built, family)
    schedule = BatchSchedule(built, 1)
    planned = list(schedule.epoch(0))
    streamed = list(source.stream(schedule, 0))
    assert [len(batch.items) for batch, _ in streamed] == [len(batch.items) for batch in planned]
    names = {item.record.path.name for batch, _ in streamed for item in batch.items}
    assert names == {"b.png", "c.png", "d.png"}
    for (batch, latents), plan in zip(streamed, planned, strict=True):
        assert batch.bucket == plan.bucket
        assert torch.isfinite(latents).all()
        assert [item.position for item in batch.items] == [item.position for item in plan.items]
    list(source.stream(schedule, 1))
    assert [finding.code for finding in source.findings] == ["latents_not_finite"]
    assert source.excluded == {0}
    batch = next(batch for batch in planned if any(item.record.record_id == 0 for item in batch.items))
    with pytest.raises(DataError, match=r"The latents of .*a\.png are not finite"):
        source.latents_for(batch)
    family.bad = family.bad_in_fp32 = lambda image: True
    with pytest.raises(DataError, match=r"No image of the bucket .* has finite latents"):
        list(FreshLatents(built, family).stream(schedule, 0))


# ------------------------------------------------------------------------------- pixels


def test_streams_can_start_anywhere_and_be_left_anywhere(cats, family):
    built = cats()
    schedule = BatchSchedule(built, 3)
    source = FreshLatents(built, family)
    whole = [batch for batch, _ in source.stream(schedule, 2)]
    assert [batch for batch, _ in source.stream(schedule, 2, start=3)] == whole[3:]
    stream = source.stream(schedule, 2)
    next(stream)
    stream.close()


def test_a_picture_that_changed_after_the_check_is_refused(cats, family, image):
    built = cats()
    record = built.records[0]
    image(record.path, (64, 64), seed=1)
    with pytest.raises(DataError, match=r"a\.png has changed since it was checked at the start"):
        CachedLatents(built, family).prepare()
    record.path.unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be read any more"):
        list(FreshLatents(built, family).stream(BatchSchedule(built, 0), 0))


def test_pixels_are_cropped_and_mirrored(cats, tmp_path):
    cats()
    folder = tmp_path / "train/1_wide"
    folder.mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "w.png")
    built = cats(enable_bucket=False)
    record = next(record for record in built.records if record.path.name == "w.png")
    assert np.array_equal(read_pixels(record, False), pixels[:, 16:80])
    assert np.array_equal(read_pixels(record, True), pixels[:, 16:80][:, ::-1])
