from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maulstick.data.buckets import (
    BucketChooser,
    bucket_option_findings,
    bucket_table,
    centre_placement,
    fit_to_bucket,
)
from maulstick.errors import OptionError
from maulstick.options.dataset_config import DatasetSpec


def spec(**values) -> DatasetSpec:
    return DatasetSpec(
        **{"subsets": (), "resolution": (512, 512), "enable_bucket": True, "source": "data.toml", **values}
    )


def test_table_of_512():
    wide = [(576, 448), (640, 384), (704, 320), (768, 320), (832, 256), (896, 256), (960, 256), (1024, 256)]
    expected = sorted([(512, 512), *wide, *((height, width) for width, height in wide)])
    assert bucket_table((512, 512), 256, 1024, 64) == expected


@pytest.mark.parametrize(
    ("resolution", "shortest", "longest", "steps"),
    [
        ((512, 512), 256, 1024, 64),
        ((512, 768), 320, 960, 64),
        ((1024, 1024), 512, 2048, 32),
        ((64, 64), 32, 128, 8),
        ((640, 448), 256, 1024, 8),
        ((520, 520), 256, 1024, 64),
    ],
)
def test_table_by_brute_force(resolution, shortest, longest, steps):
    """Of all pairs of multiples within the limits, those whose height cannot grow; turned over; square; resolution."""
    area = resolution[0] * resolution[1]
    sides = [side for side in range(1, longest + 1) if side % steps == 0 and side >= shortest]
    expected = {resolution, max((side, side) for side in range(steps, 4096, steps) if side * side <= area)}
    for width in sides:
        heights = [height for height in sides if width * height <= area]
        if heights:
            expected |= {(width, max(heights)), (max(heights), width)}
    table = bucket_table(resolution, shortest, longest, steps)
    assert table == sorted(expected)
    assert all(width * height <= area for width, height in table)


def test_limits_that_are_no_multiples_are_moved_inwards():
    assert bucket_table((512, 512), 250, 1030, 64) == bucket_table((512, 512), 256, 1024, 64)
    assert bucket_table((512, 512), 256, 1000, 64) == bucket_table((512, 512), 256, 960, 64)


def test_a_resolution_that_is_no_multiple_of_the_steps_is_used_for_its_shape():
    chooser = BucketChooser(spec(resolution=(520, 520)), 8)
    for image in ((520, 520), (1000, 1000), (512, 512)):
        placement = chooser.place(image)
        assert placement is not None
        assert placement.bucket == (image if image == (512, 512) else (520, 520))


@pytest.mark.parametrize(
    ("image", "bucket", "resized", "crop"),
    [
        ((512, 512), (512, 512), (512, 512), (0, 0, 512, 512)),
        ((1000, 1000), (512, 512), (512, 512), (0, 0, 512, 512)),
        # 1920/1080 = 1.7778; the nearest ratios are 640/384 = 1.6667 and 704/320 = 2.2
        ((1920, 1080), (640, 384), (683, 384), (21, 0, 661, 384)),
        ((1080, 1920), (384, 640), (384, 683), (0, 21, 384, 661)),
        # 300/200 = 1.5 is nearer to 1.6667 than to 576/448 = 1.2857
        ((300, 200), (640, 384), (640, 427), (0, 21, 640, 405)),
        ((10000, 100), (1024, 256), (25600, 256), (12288, 0, 13312, 256)),
        # a size of the table stays as it is
        ((768, 320), (768, 320), (768, 320), (0, 0, 768, 320)),
    ],
)
def test_images_get_the_bucket_of_the_nearest_ratio(image, bucket, resized, crop):
    placement = BucketChooser(spec(), 8).place(image)
    assert placement is not None
    assert (placement.bucket, placement.resized, placement.crop) == (bucket, resized, crop)
    assert placement.aspect_error == pytest.approx(bucket[0] / bucket[1] - image[0] / image[1])


def test_without_buckets_everything_is_cropped_to_the_resolution():
    chooser = BucketChooser(spec(enable_bucket=False, resolution=(64, 96)), 8)
    assert chooser.table == [(64, 96)]
    placement = chooser.place((200, 100))
    assert placement is not None
    assert (placement.bucket, placement.resized, placement.crop) == ((64, 96), (192, 96), (64, 0, 128, 96))
    assert placement.enlarged == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("image", "bucket", "resized"),
    [
        # small enough: its own size, rounded down to steps of 64
        ((500, 300), (448, 256), (500, 300)),
        ((512, 512), (512, 512), (512, 512)),
        # 1000x700 must shrink to the area 512²: 612x428. Width on a step: 576 -> 576x403 (ratio 576/384 = 1.5, off by
        # 0.0714); height on a step: 384 -> 549x384 (512/384 = 1.3333, off by 0.0952). The first is nearer.
        ((1000, 700), (576, 384), (576, 403)),
        # 2000x1000: 724x362. Width: 704x352 -> bucket 704x320 (2.2); height: 320 -> 640x320 (2.0, exact).
        ((2000, 1000), (640, 320), (640, 320)),
        ((1000, 2000), (320, 640), (320, 640)),
    ],
)
def test_no_upscale(image, bucket, resized):
    placement = BucketChooser(spec(bucket_no_upscale=True), 8).place(image)
    assert placement is not None
    assert (placement.bucket, placement.resized) == (bucket, resized)
    assert placement.enlarged <= 1


@pytest.mark.parametrize("image", [(63, 500), (500, 63), (64000, 100), (1, 1)])
def test_no_upscale_has_no_bucket_for_what_is_too_narrow(image):
    assert BucketChooser(spec(bucket_no_upscale=True), 8).place(image) is None


sides = st.integers(1, 5000)


@given(sides, sides, st.booleans(), st.sampled_from([(512, 512), (512, 768), (1024, 1024)]))
def test_placements_cover_and_centre(width, height, no_upscale, resolution):
    placement = BucketChooser(spec(bucket_no_upscale=no_upscale, resolution=resolution), 8).place((width, height))
    if placement is None:
        assert no_upscale
        return
    left, top, right, bottom = placement.crop
    assert (right - left, bottom - top) == placement.bucket
    assert left >= 0
    assert top >= 0
    assert right <= placement.resized[0]
    assert bottom <= placement.resized[1]
    assert abs(placement.resized[0] - right - left) <= 1
    assert abs(placement.resized[1] - bottom - top) <= 1
    assert placement.bucket[0] * placement.bucket[1] <= resolution[0] * resolution[1]
    assert placement.bucket[0] % 64 == placement.bucket[1] % 64 == 0
    # The ratio is kept: each side is within a pixel of what the other side's scale gives.
    exact = placement.resized[1] * width / height, placement.resized[0] * height / width
    assert abs(placement.resized[0] - exact[0]) <= 0.5 + 1e-9 or abs(placement.resized[1] - exact[1]) <= 0.5 + 1e-9
    if no_upscale:
        assert placement.resized[0] <= width
        assert placement.resized[1] <= height
    else:
        # Nothing is resized further than covering needs: one side is the bucket's.
        assert placement.resized[0] == placement.bucket[0] or placement.resized[1] == placement.bucket[1]


def test_sizes_must_suit_the_vae():
    with pytest.raises(OptionError, match=r"data.toml: bucket_reso_steps is 12; .* multiples of 8 pixels.* 8 or 16"):
        BucketChooser(spec(bucket_reso_steps=12), 8)
    with pytest.raises(OptionError, match=r"resolution is 500x500; .* Use 496 or 504 instead of 500"):
        BucketChooser(spec(enable_bucket=False, resolution=(500, 500)), 8)
    assert BucketChooser(spec(bucket_reso_steps=12, resolution=(516, 516)), 4).table
    assert BucketChooser(spec(resolution=(500, 500), bucket_no_upscale=True), 8).table == []


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"resolution": (64, 64)},
            ["min_bucket_reso 256 is above resolution 64x64", "the only bucket is 64x64", "Set min_bucket_reso to 64"],
        ),
        (
            {"resolution": (64, 64), "bucket_reso_steps": 8, "min_bucket_reso": 96},
            ["the only bucket is 64x64", "Set min_bucket_reso to 32"],
        ),
        ({"resolution": (1280, 1280)}, ["max_bucket_reso 1024 is below resolution 1280x1280", "to 2560"]),
        ({"min_bucket_reso": 250}, ["min_bucket_reso 250 is no multiple of bucket_reso_steps 64: 256 is used"]),
        ({"max_bucket_reso": 1000}, ["max_bucket_reso 1000 is no multiple of bucket_reso_steps 64: 960 is used"]),
        (
            {"enable_bucket": False, "bucket_no_upscale": True},
            ["bucket_no_upscale has no effect without enable_bucket"],
        ),
    ],
)
def test_contradictory_options_are_told(values, parts):
    options = spec(**values)
    (finding,) = bucket_option_findings(options, BucketChooser(options, 8).table)
    for part in ["data.toml: ", *parts]:
        assert part in finding.message


def test_ordinary_options_have_no_finding():
    for options in (spec(), spec(bucket_no_upscale=True, resolution=(64, 64)), spec(enable_bucket=False)):
        assert bucket_option_findings(options, BucketChooser(options, 8).table) == []


def test_pixels_are_cropped_where_the_placement_says():
    pixels = np.arange(8 * 20 * 3, dtype=np.uint8).reshape(8, 20, 3)
    fitted = fit_to_bucket(pixels, centre_placement((20, 8), (8, 8)))
    assert np.array_equal(fitted, pixels[:, 6:14])


def test_resizing_filters():
    rows = np.repeat(np.linspace(0, 255, 64, dtype=np.uint8)[:, None], 48, axis=1)
    pixels = np.stack([rows, rows, rows], axis=2)
    for bucket, resample in (((24, 32), Image.Resampling.HAMMING), ((96, 128), Image.Resampling.LANCZOS)):
        expected = np.asarray(Image.fromarray(pixels).resize(bucket, resample))
        assert np.array_equal(fit_to_bucket(pixels, centre_placement((48, 64), bucket)), expected)


def area_averaged(pixels: np.ndarray, side: int) -> np.ndarray:
    """Shrink by exact area averaging: each output pixel is the mean of the area that it covers."""

    def along_first(values: np.ndarray) -> np.ndarray:
        length = values.shape[0]
        edges = np.linspace(0, length, side + 1)
        starts, ends = np.arange(length), np.arange(1, length + 1)
        overlap = np.minimum(edges[1:, None], ends) - np.maximum(edges[:-1, None], starts)
        weights = np.clip(overlap, 0, None)
        return np.tensordot(weights / weights.sum(axis=1, keepdims=True), values, axes=1)

    return along_first(along_first(pixels.astype(float)).swapaxes(0, 1)).swapaxes(0, 1)


def test_shrinking_is_nearer_to_area_averaging_than_any_other_filter():
    """On an image with the spectrum of photographs (amplitude 1/f), over ratios from 1.1 to 7.5."""
    rng = np.random.default_rng(0)
    frequency = np.fft.fftfreq(128)
    radius = np.hypot(frequency[:, None], frequency)
    radius[0, 0] = 1
    channel = np.real(np.fft.ifft2(np.fft.fft2(rng.standard_normal((128, 128))) / radius))
    channel = np.clip((channel - channel.mean()) / channel.std() * 50 + 128, 0, 255).astype(np.uint8)
    pixels = np.stack([channel] * 3, axis=2)
    errors: dict[str, float] = {}
    for side in (112, 96, 88, 64, 50, 32, 17):
        expected = area_averaged(pixels, side)
        results = {
            filter.name: np.asarray(Image.fromarray(pixels).resize((side, side), filter))
            for filter in Image.Resampling
            if filter is not Image.Resampling.HAMMING
        }
        results["ours"] = fit_to_bucket(pixels, centre_placement((128, 128), (side, side)))
        for name, result in results.items():
            errors[name] = errors.get(name, 0) + float(np.sqrt(np.mean((result - expected) ** 2)))
    assert min(errors, key=lambda name: errors[name]) == "ours", errors
    assert errors["ours"] < 0.85 * min(error for name, error in errors.items() if name != "ours")
