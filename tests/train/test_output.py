"""The saved file: its kind, what its metadata says about the author, and that programs can read it."""

from __future__ import annotations

import base64
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from maulstick.adapters.files import data_hash, file_hash
from maulstick.adapters.read_formats import read_adapter
from maulstick.errors import OptionError
from maulstick.options.load import load_train_options
from maulstick.options.output_schema import MetadataOptions
from maulstick.train.output import LARGEST_THUMBNAIL, author_facts
from tests.train.test_loop import UNET_ONLY


class WebUi(pickle.Unpickler):
    """Allows what the web UI's check of pickled files allows, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")}
        assert (module, name) in allowed or (module == "torch" and name.endswith("Storage"))
        return super().find_class(module, name)

    def persistent_load(self, saved_id: Any) -> Any:
        _, kind, _, _, count = saved_id[:5]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return kind(count)


@pytest.mark.parametrize("kind", ["ckpt", "pt"])
def test_pickled_files_hold_the_same_tensors_and_are_read_by_all(make_run: Any, tmp_path: Path, kind: str) -> None:
    make_run(*UNET_ONLY, "--save_precision", "fp16", output="safe").train()
    run = make_run(*UNET_ONLY, "--save_precision", "fp16", "--save_model_as", kind, output=kind)
    assert any("safetensors is better" in notice for notice in run.loaded.notices)
    path = run.train().path
    assert path == tmp_path / kind / f"last.{kind}"
    expected = load_file(tmp_path / "safe" / "last.safetensors")
    plain = torch.load(path, weights_only=True)
    assert type(plain) is dict
    assert plain.keys() == expected.keys()
    assert all(torch.equal(plain[name], expected[name]) for name in expected)
    ours = read_adapter(path)
    assert len(ours.modules) == len(expected) // 3
    assert data_hash(path) == file_hash(path)
    # The web UI goes through the pickles of such a file with a list of what may be in them.
    with path.open("rb") as file:
        objects = [WebUi(file).load() for _ in range(5)]
    assert objects[3].keys() == expected.keys()
    assert not list(path.parent.glob(".*.tmp"))


def test_a_run_can_begin_with_a_pickled_file(make_run: Any, tmp_path: Path) -> None:
    first = make_run(*UNET_ONLY, "--save_model_as", "pt", output="first").train().path
    again = make_run(*UNET_ONLY, "--network_weights", str(first), output="again")
    again.prepare()
    saved = [t for name, t in torch.load(first, weights_only=True).items() if name.endswith("lora_up.weight")]
    live = [parameter.detach() for name, parameter in again.loop.parts.named_parameters if "lora_up" in name]
    assert sorted(float(tensor.norm()) for tensor in live) == sorted(float(tensor.norm()) for tensor in saved)
    assert min(float(tensor.norm()) for tensor in live) > 0


def test_metadata_about_the_author_has_the_names_of_the_specification(make_run: Any, tmp_path: Path) -> None:
    picture = tmp_path / "thumb.jpg"
    Image.new("RGB", (8, 8), "red").save(picture)
    given = {
        "title": "Red shapes",
        "author": "Anna",
        "description": "Shapes, ünïcode",
        "license": "CC-BY-4.0",
        "tags": "shape,red",
        "usage_hint": "say shape",
        "trigger_phrase": "a shape",
        "merged_from": "a, b",
        "preprocessor": "none",
        "is_negative_embedding": "false",
    }
    options = [token for name, value in given.items() for token in (f"--metadata_{name}", value)]
    path = make_run(*UNET_ONLY, *options, "--metadata_thumbnail", str(picture), "--no_metadata").train().path
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert {name: metadata[f"modelspec.{name}"] for name in given} == given
    kind, _, content = metadata["modelspec.thumbnail"].partition(";base64,")
    assert kind == "data:image/jpeg"
    assert Image.open(io.BytesIO(base64.b64decode(content))).size == (8, 8)


def test_without_them_only_the_title_is_there(make_run: Any) -> None:
    with safe_open(make_run(*UNET_ONLY).train().path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.title"] == "last"
    assert not {"modelspec.author", "modelspec.thumbnail", "modelspec.tags"} & metadata.keys()


def test_thumbnails_that_cannot_be_used_are_errors(tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no picture")
    large = tmp_path / "large.png"
    Image.effect_noise((2000, 2000), 100).save(large)
    assert large.stat().st_size > LARGEST_THUMBNAIL
    for given, said in ((text, "it is no picture"), (tmp_path / "none.png", "No such file"), (large, "512 pixels are")):
        with pytest.raises(OptionError, match=said):
            author_facts(MetadataOptions(metadata_thumbnail=str(given)))
    assert author_facts(MetadataOptions(metadata_thumbnail="data:image/png;base64,AA"))["thumbnail"].endswith("AA")


def test_an_ip_adapter_is_always_safetensors(tmp_path: Path) -> None:
    arguments = ["--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o"]
    arguments += ["--network_type", "ip_adapter", "--image_encoder", str(tmp_path), "--save_model_as", "pt"]
    with pytest.raises(OptionError, match="maulstick convert --to comfyui"):
        load_train_options(arguments)
