"""Picture files: their text, and that none is ever lost."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from PIL import Image

from maulstick.pictures import picture_files
from maulstick.pictures.picture_files import PictureFacts, UsedLora, parameters_text, write_new_picture
from maulstick.pictures.prompts import Prompt

PROMPT = Prompt(
    "a cat, süß", negative="blurry", width=64, height=96, seed=7, scale=7.5, steps=20, sampler="dpmsolver++"
)
FACTS = PictureFacts(
    "model",
    "fp16",
    vae="other, vae",
    clip_skip=2,
    loras=[UsedLora("style", 0.8, "0123456789abcdef" * 4), UsedLora("person", 1.0, "f" * 64)],
)
IMAGE = Image.new("RGB", (64, 96), (1, 2, 3))


def test_the_text_is_what_the_web_ui_reads() -> None:
    assert parameters_text(PROMPT, FACTS).splitlines()[:2] == [
        "a cat, süß <lora:style:0.8> <lora:person:1>",
        "Negative prompt: blurry",
    ]
    last = parameters_text(PROMPT, FACTS).splitlines()[2]
    assert last.startswith(
        "Steps: 20, Sampler: DPM++ 2M, CFG scale: 7.5, Seed: 7, Size: 64x96, Model: model, "
        'VAE: "other, vae", Clip skip: 2, Lora hashes: "style: 0123456789ab, person: ffffffffffff", Version: maulstick '
    )
    plain = parameters_text(Prompt("a", "", 64, 64, 1, 4.0, 5, "euler"), PictureFacts("m", "float"))
    assert plain.startswith("a\nSteps: 5, Sampler: Euler, CFG scale: 4, Seed: 1, Size: 64x64, Model: m, Version: ")


def test_both_texts_come_back_from_the_file(tmp_path: Path) -> None:
    path = write_new_picture(IMAGE, tmp_path, "-7", PROMPT, FACTS)
    with Image.open(path) as image:
        assert image.text["parameters"] == parameters_text(PROMPT, FACTS)
        record = json.loads(image.text["maulstick"])
        assert image.tobytes() == IMAGE.tobytes()
    assert record["prompt"] == "a cat, süß"
    assert (record["width"], record["height"], record["seed"], record["precision"]) == (64, 96, 7, "fp16")
    assert record["loras"][0] == {"name": "style", "weight": 0.8, "data_hash": "0123456789abcdef" * 4}


def test_numbers_go_on_and_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "00041-3.png").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    names = [write_new_picture(IMAGE, tmp_path, f"-{seed}", PROMPT, FACTS).name for seed in (7, 7)]
    assert names == ["00042-7.png", "00043-7.png"]
    assert (tmp_path / "00041-3.png").read_bytes() == b"mine"


def test_writers_at_the_same_time_get_names_of_their_own(tmp_path: Path) -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.append(picture_files.reserve_name(tmp_path, "-1").name))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 16


def test_a_picture_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        write_new_picture(IMAGE, tmp_path, "-1", PROMPT, FACTS)
    assert list(tmp_path.iterdir()) == []
