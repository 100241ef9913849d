"""Random crops and colours: where they are drawn, what they do, and that nothing else changes with them."""

from __future__ import annotations

import colorsys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from PIL import Image

from maulstick.data.batches import BatchSchedule
from maulstick.data.buckets import centre_placement
from maulstick.data.index import build_index
from maulstick.data.latents import FreshLatents
from maulstick.data.pixels import View, read_picture
from maulstick.data.summary import datasets_metadata
from maulstick.data.variations import MOST_CHANGE, MOST_HUE, ColourChange, drawn_colours, drawn_crop
from maulstick.errors import OptionError
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.schema import DatasetOptions
from tests.data_pipeline.helpers import one


def items_of(index, seed: int = 3, epochs: int = 8):
    schedule = BatchSchedule(index, seed)
    return [item for epoch in range(epochs) for batch in schedule.epoch(epoch) for item in batch.items]


# ---------------------------------------------------------------------------------------- crops


def test_every_place_is_equally_likely_and_inside():
    placement = centre_placement((12, 8), (8, 8))
    drawn = [drawn_crop(placement, Random(f"{number}")) for number in range(1000)]
    counts = [sum(crop == (left, 0, left + 8, 8) for crop in drawn) for left in range(5)]
    assert sum(counts) == 1000
    # Five places: 200 each, with a deviation of 12.6.
    assert all(140 < count < 260 for count in counts)
    assert drawn_crop(centre_placement((8, 8), (8, 8)), Random(1)) == (0, 0, 8, 8)


def test_random_crops_are_of_the_resized_image_with_masks_and_framing(tmp_path, options):
    mask = np.random.default_rng(0).integers(0, 256, (64, 160), dtype=np.uint8)
    gray = np.dstack([mask] * 4)
    (tmp_path / "train/3_a").mkdir(parents=True)
    Image.fromarray(gray).save(tmp_path / "train/3_a/x.png")
    index = build_index(dataset_specs(options(random_crop=True, alpha_mask=True, flip_aug=True)))
    assert [finding.code for finding in index.findings] == ["image_without_caption"]
    items = items_of(index)
    lefts = {item.crop[0] for item in items}
    assert len(lefts) > 10
    for item in items:
        left, top, right, bottom = item.crop
        assert (top, bottom, right - left) == (0, 64, 64)
        picture = read_picture(item.view)
        expected = mask[:, left:right]
        assert np.array_equal(picture.mask, expected)
        assert np.array_equal(picture.pixels[..., 0], expected[:, ::-1] if item.flipped else expected)
        assert item.framing.crop == (160 - right if item.flipped else left, 0)
    # The same each time it is asked for, and in any order.
    assert items_of(index) == items
    assert [item.crop for item in items_of(index, seed=4)] != [item.crop for item in items]


def test_other_draws_stay_as_they_are(tmp_path, image, options):
    image(tmp_path / "train/4_a/x.png", (100, 64), caption="a, b, c, d")
    given = {"flip_aug": True, "shuffle_caption": True, "caption_dropout_rate": 0.3}
    plain = items_of(build_index(dataset_specs(options(**given))))
    varied = items_of(build_index(dataset_specs(options(**given, random_crop=True, color_aug=True))))
    assert [(item.flipped, item.caption) for item in plain] == [(item.flipped, item.caption) for item in varied]
    assert {item.drawn_crop for item in plain} == {None} == {item.colours for item in plain}
    assert None in {item.colours for item in varied} != {None}


def test_images_that_fit_leave_nothing_to_crop(tmp_path, image, options):
    image(tmp_path / "train/1_a/x.png", (64, 64))
    index = build_index(dataset_specs(options(random_crop=True)))
    assert "'1_a': random_crop has no effect" in one(index, "option_without_effect").message


# ---------------------------------------------------------------------------------------- colours


def test_colours_are_drawn_half_of_the_time_within_their_bounds():
    drawn = [drawn_colours(Random(f"{number}")) for number in range(2000)]
    changes = [change for change in drawn if change is not None]
    assert 900 < len(changes) < 1100
    hues = np.array([change.hue for change in changes])
    assert abs(hues).max() <= MOST_HUE
    assert hues.min() < -0.9 * MOST_HUE
    assert hues.max() > 0.9 * MOST_HUE
    for name in ("saturation", "brightness", "contrast"):
        factors = np.array([getattr(change, name) for change in changes])
        assert abs(factors - 1).max() <= MOST_CHANGE
        assert abs(factors.mean() - 1) < 0.005
        assert abs(np.corrcoef(factors, hues)[0, 1]) < 0.1


def test_each_change_does_what_its_name_says():
    rng = np.random.default_rng(0)
    pixels = rng.integers(20, 200, (16, 16, 3), dtype=np.uint8)
    none = ColourChange(0, 1, 1, 1)
    assert np.abs(none.applied(pixels).astype(int) - pixels).max() <= 5
    # A step of the 8-bit hue is 6 / 256 of the distance between the channels: at most 4.2 here, and one for rounding.
    brighter = replace(none, brightness=1.05).applied(pixels)
    np.testing.assert_allclose(brighter, pixels * 1.05, atol=5)
    flat = replace(none, contrast=0.0).applied(pixels)
    assert len(np.unique(flat)) == 1
    gray = replace(none, saturation=0.0).applied(pixels)
    assert (gray == gray[..., :1]).all()
    turned = replace(none, hue=1 / 16).applied(np.full((1, 1, 3), (200, 40, 40), np.uint8))[0, 0]
    expected = colorsys.hsv_to_rgb(1 / 16, 0.8, 200 / 255)
    np.testing.assert_allclose(turned, [255 * part for part in expected], atol=5)


def test_colours_change_pixels_and_not_masks(tmp_path, options):
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 4), dtype=np.uint8)
    (tmp_path / "train/6_a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "train/6_a/x.png")
    index = build_index(dataset_specs(options(color_aug=True, alpha_mask=True)))
    plain = read_picture(View(index.records[0]))
    kinds = set()
    for item in items_of(index):
        picture = read_picture(item.view)
        assert np.array_equal(picture.mask, plain.mask)
        kinds.add(np.array_equal(picture.pixels, plain.pixels))
        if item.colours is not None:
            assert np.array_equal(picture.pixels, item.colours.applied(plain.pixels))
    assert kinds == {True, False}


def test_latents_are_those_of_the_drawn_picture(tmp_path, image, options, family):
    image(tmp_path / "train/4_a/x.png", (120, 64))
    index = build_index(dataset_specs(options(random_crop=True, color_aug=True, train_batch_size=4)))
    source = FreshLatents(index, family)
    ((_, latents),) = source.stream(BatchSchedule(index, 1), 0)
    assert len({latent.numpy().tobytes() for latent in latents}) == 4
    _, again = source.filled(BatchSchedule(index, 1).batch(0, 0))
    assert (again == latents).all()


# ---------------------------------------------------------------------------------------- options

TEXT = "[[datasets]]\n{}\n[[datasets.subsets]]\nimage_dir = 'a'\n{}\n[[datasets.subsets]]\nimage_dir = 'b'\n"


def described(tmp_path, dataset: str, subset: str, **options):
    for name in "ab":
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "data.toml").write_text(TEXT.format(dataset, subset))
    return dataset_specs(DatasetOptions(dataset_config=tmp_path / "data.toml", **options))


def test_subsets_say_it_for_themselves(tmp_path):
    a, b = described(tmp_path, "color_aug = true", "random_crop = true\ncolor_aug = false")[0].subsets
    assert (a.random_crop, a.color_aug, b.random_crop, b.color_aug) == (True, False, False, True)
    a, b = described(tmp_path, "", "random_crop = false", random_crop=True)[0].subsets
    assert (a.random_crop, b.random_crop) == (False, True)


@pytest.mark.parametrize("name", ["random_crop", "color_aug"])
def test_cached_latents_cannot_vary(tmp_path, name):
    with pytest.raises(OptionError, match=rf"data.toml.*: {name} \(subset .*a\) and cache_latents contradict"):
        described(tmp_path, "", f"{name} = true", cache_latents=True)
    described(tmp_path, f"{name} = false", "", cache_latents=True, **{name: True})


def test_metadata_says_it_by_subset(tmp_path, image, options):
    for name in "ab":
        image(tmp_path / f"{name}/x.png", (64, 64))
    specs = described(tmp_path, "resolution = 64", "random_crop = true\ncolor_aug = true")
    (dataset,) = datasets_metadata(build_index(specs))
    assert [(each["random_crop"], each["color_aug"]) for each in dataset["subsets"]] == [(True, True), (False, False)]
