"""Image encoders, references by name, and features in files that prove what they are."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModelWithProjection, SiglipVisionModel

from maulstick.adapters.ip_adapter_files import IpAdapterSpec
from maulstick.data.image_features import ImageFeatures
from maulstick.data.references import Reference, find_references, references_digest
from maulstick.errors import DataError, ModelError
from maulstick.families.image_encoder import ImageEncoder
from maulstick.families.ip_adapter import negative_features
from tests.image_encoders import CLIP_PROJECTED, CLIP_WIDTH, SIDE, SIGLIP_WIDTH, clip_encoder, siglip_encoder


def picture(seed: int = 0, width: int = 50, height: int = 40):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


# ---------------------------------------------------------------------------------------- encoders


def test_features_are_those_of_the_libraries() -> None:
    clip, siglip = ImageEncoder(clip_encoder()), ImageEncoder(siglip_encoder())
    pixels = clip._prepared([picture()])
    assert pixels.shape == (1, 3, SIDE, SIDE)
    with torch.no_grad():
        theirs = CLIPVisionModelWithProjection.from_pretrained(clip_encoder())(pixels, output_hidden_states=True)
        sigs = SiglipVisionModel.from_pretrained(siglip_encoder())(
            siglip._prepared([picture()]), output_hidden_states=True
        )
    assert torch.equal(clip.encode([picture()], "pooled"), theirs.image_embeds)
    assert torch.equal(clip.encode([picture()], "patches"), theirs.hidden_states[-2])
    assert torch.equal(siglip.encode([picture()], "patches"), sigs.hidden_states[-2])
    widths = (clip.width("pooled"), clip.width("patches"), siglip.width("patches"))
    assert widths == (CLIP_PROJECTED, CLIP_WIDTH, SIGLIP_WIDTH)


def test_the_negative_is_zero_but_for_plus() -> None:
    """Pitfall 9, and training-facts 1.1: zero features, not those of a black image."""
    clip, siglip = ImageEncoder(clip_encoder()), ImageEncoder(siglip_encoder())
    plain = negative_features(clip, IpAdapterSpec("plain", 4, CLIP_PROJECTED))
    assert plain.shape == (CLIP_PROJECTED,)
    assert not plain.any()
    time = negative_features(siglip, IpAdapterSpec("time", 4, SIGLIP_WIDTH, 64))
    assert time.shape == ((SIDE // 8) ** 2, SIGLIP_WIDTH)
    assert not time.any()
    plus = negative_features(clip, IpAdapterSpec("plus", 4, CLIP_WIDTH, 64))
    with torch.no_grad():
        model = CLIPVisionModelWithProjection.from_pretrained(clip_encoder())
        of_zeros = model(torch.zeros(1, 3, SIDE, SIDE), output_hidden_states=True).hidden_states[-2][0]
    assert torch.equal(plus, of_zeros)


def test_pitfall_12_preprocessing_is_that_of_pillow_and_of_the_folder(tmp_path) -> None:
    encoder = ImageEncoder(siglip_encoder())
    assert type(encoder._processor()).__name__ == "SiglipImageProcessorPil"
    other = shutil.copytree(siglip_encoder(), tmp_path / "other")
    settings = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    (other / "preprocessor_config.json").write_text(
        json.dumps({**settings, "image_processor_type": "SiglipImageProcessor"})
    )
    changed = ImageEncoder(other)
    assert float(changed._prepared([picture()]).min()) >= 0
    assert float(encoder._prepared([picture()]).min()) < 0
    assert changed.identity("patches") != encoder.identity("patches")


def test_a_whole_model_serves_with_its_vision_part(tmp_path) -> None:
    folder = shutil.copytree(clip_encoder(), tmp_path / "whole")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "clip", "projection_dim": CLIP_PROJECTED, "vision_config": config})
    )
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "text_model.x": torch.zeros(1), "logit_scale": torch.zeros(1)}, folder / "model.safetensors")
    # To rounding: where a tensor lies in its file can change the order of sums.
    torch.testing.assert_close(
        ImageEncoder(folder).encode([picture()], "pooled"), ImageEncoder(clip_encoder()).encode([picture()], "pooled")
    )


def test_what_is_no_encoder_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        ImageEncoder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="is a 'bert' model"):
        ImageEncoder(tmp_path)
    folder = shutil.copytree(clip_encoder(), tmp_path / "bare")
    tensors = load_file(folder / "model.safetensors")
    bare = {name: tensor for name, tensor in tensors.items() if name != "visual_projection.weight"}
    save_file(bare, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no visual_projection.weight: it is a bare vision model"):
        ImageEncoder(folder).encode([picture()], "pooled")
    one_less = {name: tensor for name, tensor in tensors.items() if not name.endswith("layers.1.mlp.fc1.bias")}
    save_file(one_less, folder / "model.safetensors")
    with pytest.raises(ModelError, match="1 weights are missing"):
        ImageEncoder(folder).encode([picture()], "pooled")


# ---------------------------------------------------------------------------------------- references


def record(path):
    return SimpleNamespace(path=path, content_hash=f"hash of {path.name}")


def save_picture(path, seed: int = 0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(seed)).save(path)
    return path


def test_every_image_is_its_own_reference_without_a_folder(tmp_path) -> None:
    own = record(tmp_path / "1_a" / "x.png")
    assert find_references([own], None) == {own.path: Reference(own.path, own.content_hash)}


def test_references_are_found_by_name(tmp_path) -> None:
    images = [
        record(tmp_path / "1_a" / "x.png"),
        record(tmp_path / "1_a" / "y.jpg"),
        record(tmp_path / "2_b" / "x.png"),
    ]
    flat = [save_picture(tmp_path / "refs" / "x.jpg", 1), save_picture(tmp_path / "refs" / "y.png", 2)]
    (tmp_path / "refs" / "notes.txt").write_text("no image")
    found = find_references(images[:2], tmp_path / "refs")
    assert [reference.path for reference in found.values()] == flat
    with pytest.raises(DataError, match=r"x.jpg would be the reference of both .*1_a.*x.png and .*2_b.*x.png"):
        find_references(images, tmp_path / "refs")
    inside = save_picture(tmp_path / "refs" / "2_b" / "x.webp", 3)
    both = find_references(images, tmp_path / "refs")
    assert both[images[2].path].path == inside
    assert references_digest(both) != references_digest(found)


def test_missing_doubled_and_damaged_references_are_named(tmp_path) -> None:
    images = [record(tmp_path / "1_a" / f"{name}.png") for name in "xyz"]
    save_picture(tmp_path / "refs" / "x.png")
    with pytest.raises(DataError, match=r"no reference image for 2 of 3 training images \(y.png, z.png\)"):
        find_references(images, tmp_path / "refs")
    save_picture(tmp_path / "refs" / "x.jpg")
    with pytest.raises(DataError, match=r"x.png has 2 reference images \(x.jpg, x.png\)"):
        find_references(images[:1], tmp_path / "refs")
    cut = save_picture(tmp_path / "refs" / "y.png")
    cut.write_bytes(cut.read_bytes()[:900])
    with pytest.raises(DataError, match=r"conditioning_data_dir: .*y.png"):
        find_references(images[1:2], tmp_path / "refs")


# ---------------------------------------------------------------------------------------- the cache


class Counting:
    """An encoder that counts the images it is given."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, images):
        self.seen += len(images)
        return torch.stack([torch.from_numpy(image[:2, :3, 0].astype(np.float32)) for image in images])


def reference(path) -> Reference:
    import hashlib

    return Reference(path, hashlib.sha256(path.read_bytes()).hexdigest())


def source(encode, identity: str = "one", **more) -> ImageFeatures:
    return ImageFeatures(encode, lambda: identity, **more)


def test_features_are_made_once_and_read_by_the_next_run(tmp_path) -> None:
    first, second = (reference(save_picture(tmp_path / f"{n}.png", n)) for n in (1, 2))
    encode = Counting()
    made = source(encode)
    made.prepare([first, second, first])
    assert encode.seen == 2
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert [name[:11] for name in names] == ["1_features_", "2_features_"]
    assert all(name.endswith(".maulstick.safetensors") for name in names)
    again = Counting()
    read = source(again, memory_limit=0)
    read.prepare([first, second])
    assert again.seen == 0
    assert torch.equal(read.features_of([second, first]), made.features_of([second, first]))
    assert read.features_of([first]).shape == (1, 2, 3)


def test_half_written_stale_and_foreign_caches_are_rebuilt_and_named(tmp_path) -> None:
    path = save_picture(tmp_path / "1.png", 1)
    source(Counting()).prepare([reference(path)])
    (file,) = tmp_path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    encode = Counting()
    rebuilt = source(encode)
    rebuilt.prepare([reference(path)])
    assert (encode.seen, len(file.read_bytes())) == (1, len(whole))
    assert "damaged" in rebuilt.findings[0].message
    assert [finding.code for finding in rebuilt.findings] == ["cache_rebuilt"]
    save_picture(path, 2)
    changed = source(encode)
    changed.prepare([reference(path)])
    assert encode.seen == 2
    assert "the image has changed since" in changed.findings[0].message
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    flipped = source(encode)
    flipped.prepare([reference(path)])
    assert "its values are not those that were written" in flipped.findings[0].message
    other = source(encode, "another encoder")
    other.prepare([reference(path)])
    assert (encode.seen, len(list(tmp_path.glob("*.safetensors")))) == (4, 2)


def test_without_files_and_without_preparing_nothing_is_written(tmp_path) -> None:
    one = reference(save_picture(tmp_path / "1.png", 1))
    encode = Counting()
    source(encode).features_of([one])
    in_memory = source(encode, to_disk=False)
    in_memory.prepare([one])
    in_memory.features_of([one, one])
    assert encode.seen == 2
    assert list(tmp_path.glob("*.safetensors")) == []


def test_values_that_a_half_format_cannot_hold_stay_in_fp32(tmp_path) -> None:
    one, two = (reference(save_picture(tmp_path / f"{n}.png", n)) for n in (1, 2))
    large = torch.tensor([[1e6, 1.0], [3.0001, 2.0]])
    held = ImageFeatures(lambda images: large[: len(images)], lambda: "x", dtype=torch.float16)
    held.prepare([one, two])
    assert torch.equal(held.features_of([one, two]), torch.tensor([[1e6, 1.0], [3.0, 2.0]]))


def test_a_changed_image_and_a_full_disk_are_said(tmp_path, monkeypatch) -> None:
    path = save_picture(tmp_path / "1.png", 1)
    one = reference(path)
    from maulstick.data import proven_files

    def full(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(proven_files, "atomic_write", full)
        with pytest.raises(DataError, match=r"cannot write into .*No space left.*--no-cache_image_features_to_disk"):
            source(Counting()).prepare([one])
    save_picture(path, 2)
    with pytest.raises(DataError, match="has changed since it was checked"):
        source(Counting()).features_of([one])
