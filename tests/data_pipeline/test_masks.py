"""Masks follow their images through resizing, cropping and mirroring, and every odd one is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from maulstick.data.batches import BatchSchedule
from maulstick.data.cache import latent_key
from maulstick.data.images import read_colours_and_alpha, read_rgb
from maulstick.data.index import build_index
from maulstick.data.latents import CachedLatents, FreshLatents, mask_on_grid, masks_of
from maulstick.data.masks import trained_part
from maulstick.data.pixels import View, read_picture
from maulstick.data.summary import summarize
from maulstick.errors import DataError, OptionError
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.schema import DatasetOptions
from maulstick.train.same_run import dataset_facts
from tests.data_pipeline.helpers import one


def save(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def with_alpha(alpha: np.ndarray, seed: int = 0) -> np.ndarray:
    colours = np.random.default_rng(seed).integers(0, 256, (*alpha.shape, 3), dtype=np.uint8)
    return np.dstack([colours, alpha])


def left_half(width: int, height: int) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    mask[:, : width // 2] = 255
    return mask


@pytest.fixture
def masked(tmp_path, options):
    """Build the index of ``tmp_path / "train"`` with masks from ``tmp_path / "masks"``."""

    def build(**changes):
        given = {"masked_loss": True, "conditioning_data_dir": tmp_path / "masks", **changes}
        return build_index(dataset_specs(options(**given)))

    return build


# ---------------------------------------------------------------------------------------- reading


def test_colours_below_transparency_are_kept(tmp_path):
    pixels = with_alpha(left_half(8, 4))
    path = save(tmp_path / "a.png", pixels)
    colours, alpha = read_colours_and_alpha(path)
    assert np.array_equal(colours, pixels[..., :3])
    assert np.array_equal(alpha, pixels[..., 3])
    assert (read_rgb(path)[:, 4:] == 255).all()
    assert read_colours_and_alpha(save(tmp_path / "b.png", pixels[..., :3]))[1] is None


def test_alpha_of_a_turned_picture_and_of_a_transparent_colour(tmp_path):
    pixels = with_alpha(left_half(8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    colours, alpha = read_colours_and_alpha(tmp_path / "turned.png")
    assert np.array_equal(alpha, np.rot90(pixels[..., 3], -1))
    assert np.array_equal(colours, np.rot90(pixels[..., :3], -1))
    Image.fromarray(np.array([[7, 9]], np.uint8)).save(tmp_path / "gray.png", transparency=9)
    colours, alpha = read_colours_and_alpha(tmp_path / "gray.png")
    assert alpha.tolist() == [[255, 0]]
    assert colours[0, :, 0].tolist() == [7, 9]


# ---------------------------------------------------------------------------------------- following the image


@pytest.mark.parametrize("size", [(64, 64), (160, 80), (100, 230), (40, 40), (61, 97)])
@pytest.mark.parametrize("kind", ["alpha", "file"])
def test_a_mask_is_resized_and_cropped_as_its_image(tmp_path, options, masked, size, kind):
    mask = np.random.default_rng(3).integers(0, 256, size[::-1], dtype=np.uint8)
    gray = np.dstack([mask] * 3)
    if kind == "alpha":
        save(tmp_path / "train/1_a/x.png", np.dstack([gray, mask]))
        index = build_index(dataset_specs(options(alpha_mask=True)))
    else:
        save(tmp_path / "train/1_a/x.png", gray)
        save(tmp_path / "masks/x.png", gray)
        index = masked()
    for flipped in (False, True):
        picture = read_picture(View(index.records[0], flipped))
        shown = picture.pixels[:, ::-1, 0] if flipped else picture.pixels[..., 0]
        # Image and mask hold the same values, so that any shift between them would show.
        assert np.array_equal(picture.mask, shown)
        assert picture.mask.shape == (64, 64)


@pytest.mark.parametrize("source_kind", ["memory", "disk", "fresh"])
def test_every_source_gives_masks_on_the_grid_mirrored_with_the_image(tmp_path, masked, family, source_kind):
    mask = np.zeros((64, 64, 3), np.uint8)
    mask[16:32, :20] = (255, 0, 0)  # only red counts
    save(tmp_path / "train/4_a/x.png", with_alpha(np.full((64, 64), 255, np.uint8))[..., :3])
    save(tmp_path / "masks/x.png", mask)
    index = masked(flip_aug=True)
    source = FreshLatents(index, family)
    if source_kind != "fresh":
        source = CachedLatents(index, family, to_disk=source_kind == "disk")
    source.prepare()
    expected = torch.zeros(8, 8)
    expected[2:4, :2] = 1
    expected[2:4, 2] = 0.5
    seen = set()
    for batch, latents in source.stream(BatchSchedule(index, 5), 0):
        for item in batch.items:
            assert torch.equal(item.mask, expected.flip(1) if item.flipped else expected)
            seen.add(item.flipped)
        masks = masks_of(batch.items)
        assert masks.shape == (len(latents), 1, 8, 8)
    assert seen == {False, True}


def test_images_without_mask_count_everywhere_in_a_batch_with_others(tmp_path, masked, family, options):
    save(tmp_path / "train/1_a/x.png", with_alpha(left_half(64, 64)))
    save(tmp_path / "train/1_a/y.png", with_alpha(left_half(64, 64), 1)[..., :3])
    index = masked(masked_loss=False, conditioning_data_dir=None, alpha_mask=True, train_batch_size=2)
    ((batch, _),) = FreshLatents(index, family).stream(BatchSchedule(index, 0), 0)
    masks = {item.record.path.name: mask for item, mask in zip(batch.items, masks_of(batch.items), strict=True)}
    assert (masks["y.png"] == 1).all()
    assert masks["x.png"].mean() == 0.5
    finding = one(index, "no_alpha_channel")
    assert finding.message == "1 image without alpha channel (y.png): trained as a whole."
    assert [folder.with_mask for summary in summarize(index) for folder in summary.folders] == [1]
    plain = masked(masked_loss=False, conditioning_data_dir=None, train_batch_size=2)
    ((batch, _),) = FreshLatents(plain, family).stream(BatchSchedule(plain, 0), 0)
    assert masks_of(batch.items) is None


def test_area_means_are_torch_s_own():
    mask = np.random.default_rng(0).integers(0, 256, (24, 40), dtype=np.uint8)
    by_hand = mask.reshape(3, 8, 5, 8).mean((1, 3)) / 255
    np.testing.assert_allclose(mask_on_grid(mask, (3, 5)).numpy(), by_hand, atol=1e-6)


def test_latents_and_states_know_the_mask(tmp_path, masked, options):
    save(tmp_path / "train/1_a/x.png", with_alpha(left_half(64, 64)))
    save(tmp_path / "masks/x.png", left_half(64, 64))
    by_alpha = build_index(dataset_specs(options(alpha_mask=True)))
    plain, by_file = build_index(dataset_specs(options())), masked()
    # Alpha masks keep the colours below transparency, which are white otherwise: other latents.
    keys = [latent_key(index.records[0], False, "vae") for index in (plain, by_file, by_alpha)]
    assert keys[0] == keys[1] != keys[2]
    facts = [dataset_facts(index)[0][1] for index in (plain, by_file, by_alpha)]
    assert len(set(facts)) == 3
    save(tmp_path / "masks/x.png", left_half(64, 64) // 2)
    assert dataset_facts(masked())[0][1] != facts[1]


# ---------------------------------------------------------------------------------------- what is odd


def test_empty_and_white_masks_are_named(tmp_path, masked):
    for name in "abcd":
        save(tmp_path / f"train/1_a/{name}.png", with_alpha(np.full((64, 128), 255, np.uint8), ord(name))[..., :3])
    save(tmp_path / "masks/a.png", np.zeros((64, 128), np.uint8))
    corner = np.zeros((64, 128), np.uint8)
    corner[:, :30] = 255  # outside of the middle 64 columns
    save(tmp_path / "masks/b.png", corner)
    save(tmp_path / "masks/c.png", np.full((64, 128), 255, np.uint8))
    corner[:, 30:34] = 255  # two columns inside
    save(tmp_path / "masks/d.png", corner)
    index = masked()
    assert trained_part(index.records[0].placement, (128, 64)) == (32, 0, 96, 64)
    empty, whole = one(index, "mask_empty"), one(index, "mask_whole")
    assert [path.name for path in empty.paths] == ["a.png", "b.png"]
    assert "2 images whose masks are black wherever they are trained (a.png, b.png): used, with a loss of 0" in (
        empty.message
    )
    assert [path.name for path in whole.paths] == ["c.png"]


def test_masks_that_do_not_fit_are_errors_with_names(tmp_path, masked):
    save(tmp_path / "train/1_a/x.png", with_alpha(left_half(64, 64))[..., :3])
    save(tmp_path / "masks/other.png", left_half(64, 64))
    with pytest.raises(DataError, match=r"1 image without a mask \(x.png\), looked for in .*masks"):
        masked()
    save(tmp_path / "masks/x.png", left_half(32, 64))
    with pytest.raises(DataError, match=r"the mask .*x.png is 32x64, but its image .*x.png is 64x64"):
        masked()
    save(tmp_path / "masks/x.bmp", left_half(64, 64))
    with pytest.raises(DataError, match=r"x.png has 2 masks \(x.bmp, x.png\)"):
        masked()
    (tmp_path / "masks/x.bmp").unlink()
    (tmp_path / "masks/x.png").write_bytes((tmp_path / "masks/x.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"conditioning_data_dir: .*x.png.* is truncated"):
        masked()
    save(tmp_path / "masks/x.png", left_half(64, 64))
    index = masked()
    save(tmp_path / "masks/x.png", left_half(64, 64) // 2)
    with pytest.raises(DataError, match=r"masks.x.png has changed since it was checked"):
        read_picture(View(index.records[0]))


def test_masks_of_several_folders_and_of_regularisation_images(tmp_path, masked):
    for folder in ("train/1_a", "train/1_b", "reg/1_r"):
        save(tmp_path / folder / "x.png", with_alpha(left_half(64, 64), len(folder) + ord(folder[-1]))[..., :3])
    save(tmp_path / "masks/x.png", left_half(64, 64))
    with pytest.raises(DataError, match=r"x.png would be the mask of both .*1_a.x.png and .*1_b.x.png"):
        masked()
    save(tmp_path / "masks/1_b/x.png", left_half(64, 64))
    index = masked(reg_data_dir=tmp_path / "reg")
    places = [record.mask and record.mask.path.relative_to(tmp_path) for record in index.records]
    # A regularisation image of the same name does not get the training image's mask.
    assert places == [Path("masks/x.png"), Path("masks/1_b/x.png"), None]
    assert one(index, "no_mask").message == "1 regularisation image without mask (x.png): trained as a whole."
    save(tmp_path / "masks/1_r/x.png", left_half(64, 64))
    assert masked(reg_data_dir=tmp_path / "reg").records[2].mask is not None


# ---------------------------------------------------------------------------------------- descriptions


def described(tmp_path, text: str, **options):
    for name in ("imgs", "imgs2", "own"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "data.toml").write_text(text)
    return dataset_specs(DatasetOptions(dataset_config=tmp_path / "data.toml", **options))


SUBSETS = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'imgs'\n{}\n[[datasets.subsets]]\nimage_dir = 'imgs2'\n{}\n"


def test_masks_in_a_description(tmp_path):
    text = SUBSETS.format("conditioning_data_dir = 'own'", "alpha_mask = true")
    first, second = described(tmp_path, text, masked_loss=True)[0].subsets
    assert (first.conditioning_data_dir, first.alpha_mask) == (tmp_path / "own", False)
    assert (second.conditioning_data_dir, second.alpha_mask) == (None, True)
    # The command line's folder is for subsets without masks of their own.
    (tmp_path / "all").mkdir()
    text = SUBSETS.format("conditioning_data_dir = 'own'", "")
    given = {"masked_loss": True, "conditioning_data_dir": tmp_path / "all"}
    assert [each.conditioning_data_dir for each in described(tmp_path, text, **given)[0].subsets] == [
        tmp_path / "own", tmp_path / "all",
    ]  # fmt: skip
    text = "[general]\nalpha_mask = true\n" + SUBSETS.format("alpha_mask = false", "")
    assert [each.alpha_mask for each in described(tmp_path, text)[0].subsets] == [False, True]


@pytest.mark.parametrize(
    ("first", "options", "message"),
    [
        ("conditioning_data_dir = 'own'", {}, "holds masks, which only masked_loss uses"),
        ("conditioning_data_dir = 'own'\nalpha_mask = true", {"masked_loss": True}, "contradict each other"),
        ("conditioning_data_dir = 'owm'", {"masked_loss": True}, "no folder conditioning_data_dir 'owm'.*Did you mean"),
        ("", {"masked_loss": True}, "masked_loss is given, but no subset of .*data.toml has masks"),
        ("alpha_mask = 1", {}, "alpha_mask is 1; expected true or false"),
    ],
)
def test_mistakes_about_masks_in_a_description(tmp_path, first, options, message):
    with pytest.raises(OptionError, match=message):
        described(tmp_path, SUBSETS.format(first, ""), **options)
