"""How images are resized, which are left out, how many are encoded at once, and by how many threads they are read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from PIL import Image

from maulstick.data.batches import BatchSchedule
from maulstick.data.buckets import centre_placement, fit_to_bucket
from maulstick.data.cache import latent_key
from maulstick.data.index import build_index
from maulstick.data.latents import CachedLatents, FreshLatents, Making
from maulstick.data.read_ahead import read_ahead
from maulstick.data.summary import datasets_metadata
from maulstick.errors import DataError, OptionError
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.dataset_values import INTERPOLATIONS
from maulstick.options.schema import DatasetOptions
from tests.data_pipeline.helpers import check_all, found, one

# ---------------------------------------------------------------------------------------- resize_interpolation


@pytest.mark.parametrize("name", INTERPOLATIONS)
@pytest.mark.parametrize("side", [24, 96])
def test_filters_are_pillow_s_in_both_directions(name, side):
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    placement = centre_placement((side, side), (48, 48))
    resampling = Image.Resampling["HAMMING" if name == "area" else name.upper()]
    expected = np.asarray(Image.fromarray(pixels).resize((48, 48), resampling))
    assert np.array_equal(fit_to_bucket(pixels, placement, name), expected)
    usual = "area" if side > 48 else "lanczos"
    assert np.array_equal(fit_to_bucket(pixels, placement), fit_to_bucket(pixels, placement, usual))


def test_nearest_makes_no_new_values_and_all_filters_differ():
    pixels = np.random.default_rng(0).integers(0, 2, (30, 30, 3), dtype=np.uint8) * 255
    fitted = {name: fit_to_bucket(pixels, centre_placement((30, 30), (16, 16)), name) for name in INTERPOLATIONS}
    assert set(np.unique(fitted["nearest"])) == {0, 255}
    assert len({each.tobytes() for each in fitted.values()}) == len(INTERPOLATIONS)


def described(tmp_path, dataset: str, subset: str = "", **options):
    (tmp_path / "a").mkdir(exist_ok=True)
    text = f"[[datasets]]\nresolution = 64\n{dataset}\n[[datasets.subsets]]\nimage_dir = 'a'\n{subset}\n"
    (tmp_path / "data.toml").write_text(text)
    return dataset_specs(DatasetOptions(dataset_config=tmp_path / "data.toml", **options))


def test_filters_by_dataset_and_subset_are_part_of_the_cache(tmp_path, image):
    image(tmp_path / "a/x.png", (100, 100))
    specs = [
        described(tmp_path, ""),
        described(tmp_path, "resize_interpolation = 'linear'"),
        described(tmp_path, "resize_interpolation = 'linear'", "resize_interpolation = 'nearest'"),
        described(tmp_path, "", resize_interpolation="cubic"),
    ]
    indices = [build_index(spec) for spec in specs]
    names = [index.records[0].subset.resize_interpolation for index in indices]
    assert names == [None, "bilinear", "nearest", "bicubic"]
    assert len({latent_key(index.records[0], False, "vae") for index in indices}) == 4
    (dataset,) = datasets_metadata(indices[2])
    assert dataset["subsets"][0]["resize_interpolation"] == "nearest"
    with pytest.raises(OptionError, match="resize_interpolation is 'lancsos'; expected one of lanczos, nearest, "):
        described(tmp_path, "resize_interpolation = 'lancsos'")


# ---------------------------------------------------------------------------------------- skip_image_resolution


def test_images_of_no_more_pixels_are_left_out_and_named(tmp_path, image):
    for name, size in (("a", (64, 64)), ("b", (128, 32)), ("c", (65, 64)), ("d", (20, 20))):
        image(tmp_path / f"a/{name}.png", size, caption="x")
    index = build_index(described(tmp_path, "skip_image_resolution = 64"))
    assert [record.path.name for record in index.records] == ["c.png"]
    finding = one(index, "image_skipped")
    assert [path.name for path in finding.paths] == ["a.png", "b.png", "d.png"]
    assert "3 images of no more pixels than 64x64 left out by skip_image_resolution (a.png, b.png" in finding.message
    assert "image_far_below_bucket" not in {each.code for each in index.findings}
    index = build_index(described(tmp_path, "", skip_image_resolution="40,10"))
    assert [path.name for path in one(index, "image_skipped").paths] == ["d.png"]
    with pytest.raises(DataError, match=r"4 images of no more pixels than 500x500 left out by skip_image_resolution"):
        build_index(described(tmp_path, "skip_image_resolution = [500, 500]"))


def test_each_dataset_skips_for_itself_and_masks_of_skipped_images_are_not_missed(tmp_path, image, options):
    image(tmp_path / "train/1_a/small.png", (40, 40))
    image(tmp_path / "train/1_a/large.png", (100, 100))
    image(tmp_path / "masks/large.png", (100, 100))
    given = {"masked_loss": True, "conditioning_data_dir": tmp_path / "masks", "skip_image_resolution": "64"}
    index = build_index(dataset_specs(options(**given)))
    assert [record.path.name for record in index.records] == ["large.png"]
    first, second = described(tmp_path, "skip_image_resolution = 32")[0], described(tmp_path, "")[0]
    assert (first.skip_image_resolution, second.skip_image_resolution) == ((32, 32), None)
    for name, size in (("s", (32, 32)), ("l", (64, 64))):
        image(tmp_path / f"a/{name}.png", size)
    index = build_index([first, second])
    assert [(record.dataset, record.path.name) for record in index.records] == [
        (0, "l.png"), (1, "l.png"), (1, "s.png"),
    ]  # fmt: skip
    assert len(found(index, "image_skipped")) == 1


def test_a_size_that_is_none(tmp_path):
    with pytest.raises(OptionError, match="skip_image_resolution is '5x5'; expected one size"):
        described(tmp_path, "", skip_image_resolution="5x5")


# ---------------------------------------------------------------------------------------- at once, and threads


@pytest.mark.parametrize(("at_once", "sizes"), [(None, [4, 4]), (3, [3, 1, 3, 1]), (1, [1] * 8)])
def test_images_encoded_at_once(cats, family, at_once, sizes):
    built = cats()
    source = CachedLatents(built, family, making=Making(at_once=at_once))
    source.prepare()
    assert [shape[0] for shape in family.encoded] == sizes
    check_all(source, built)


def test_fresh_batches_are_encoded_in_parts_too(cats, family):
    built = cats(train_batch_size=4)
    source = FreshLatents(built, family, making=Making(at_once=3))
    check_all(source, built, epochs=1)
    assert [shape[0] for shape in family.encoded] == [3, 1, 3, 1]


@pytest.mark.parametrize("threads", [0, 1, 3, None])
def test_threads_are_bounded_and_change_nothing(cats, family, threads):
    built = cats()
    source = FreshLatents(built, family, making=Making(threads=threads))
    check_all(source, built, epochs=3)
    here, seen = threading.current_thread(), set()

    def read(number: int) -> int:
        seen.add(threading.current_thread())
        return number * number

    jobs = [range(start, start + 5) for start in range(0, 50, 5)]
    results = [result for _, read_ones in read_ahead(jobs, read, lambda job: job, threads) for result in read_ones]
    assert results == [number * number for number in range(50)]
    assert (seen == {here}) == (threads == 0)
    assert len(seen) <= max(1, 4 if threads is None else threads)


def test_an_error_in_a_thread_reaches_the_reader(tmp_path, image, family, options):
    path = image(tmp_path / "train/1_a/x.png")
    built = build_index(dataset_specs(options()))
    path.write_bytes(b"changed")
    for threads in (0, 2):
        with pytest.raises(DataError, match="has changed since it was checked"):
            list(FreshLatents(built, family, making=Making(threads=threads)).stream(BatchSchedule(built, 0), 0))
