from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.data.captions import CaptionError, caption_for, possible_captions, read_caption, shuffled, tag_counts
from maulstick.options.dataset_config import SubsetSpec


@dataclass
class Captioned:
    captions: tuple[str, ...]
    subset: SubsetSpec


def captioned(*lines: str, **options) -> Captioned:
    return Captioned(lines, SubsetSpec(image_dir=Path("cat"), **options))


def test_without_options_the_first_line_is_used_as_it_is():
    rng = Random(0)
    assert caption_for(captioned("a cat,  sitting , 1girl", "second"), rng) == "a cat,  sitting , 1girl"
    assert caption_for(captioned(), rng) == caption_for(captioned(""), rng) == ""
    assert rng.random() == Random(0).random()


def test_shuffling_keeps_the_first_tags_and_joins_with_a_comma_and_space():
    image = captioned("a,b ,c,  d", shuffle_caption=True, keep_tokens=2)
    drawn = Counter(caption_for(image, Random(seed)) for seed in range(400))
    assert set(drawn) == {"a, b, c, d", "a, b, d, c"}
    assert 150 < drawn["a, b, c, d"] < 250
    every_order = {caption_for(captioned("a,b,c", shuffle_caption=True), Random(seed)) for seed in range(200)}
    assert every_order == {"a, b, c", "a, c, b", "b, a, c", "b, c, a", "c, a, b", "c, b, a"}
    assert caption_for(captioned("a,b", shuffle_caption=True, keep_tokens=9), Random(1)) == "a, b"


def test_dropout():
    assert caption_for(captioned("a", caption_dropout_rate=1.0), Random(3)) == ""
    drawn = Counter(caption_for(captioned("a", caption_dropout_rate=0.25), Random(seed)) for seed in range(2000))
    assert set(drawn) == {"a", ""}
    assert 400 < drawn[""] < 600


@given(st.lists(st.integers()), st.integers())
def test_shuffled_is_a_permutation_and_a_function_of_the_generator(items, seed):
    assert shuffled(items, Random(seed)) == shuffled(items, Random(seed))
    assert sorted(shuffled(items, Random(seed))) == sorted(items)


def test_the_order_for_a_seed_never_changes():
    # A resumed run depends on it; this is Mersenne Twister's first five numbers, sorted.
    assert shuffled("abcde", Random(1)) == ["a", "d", "e", "c", "b"]


def test_possible_captions():
    plain, same = captioned("a, b"), captioned("a, b")
    assert possible_captions([plain, same, captioned("c", caption_dropout_rate=0.1)]) == {"a, b", "c", ""}
    assert possible_captions([plain, captioned("a, b", shuffle_caption=True)]) is None
    kept = captioned("a,b", shuffle_caption=True, keep_tokens=1)
    assert possible_captions([kept]) == {"a, b"} == {caption_for(kept, Random(seed)) for seed in range(20)}


def test_tag_counts():
    assert tag_counts(["A cat, sitting", "a cat , , SITTING,x", ""]) == {"a cat": 2, "sitting": 2, "x": 1}


def test_encodings(tmp_path):
    path = tmp_path / "a.txt"
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes("é, 猫".encode(encoding))
        assert read_caption(path).lines == ("é, 猫",)
        assert read_caption(path).had_mark
    path.write_bytes("猫".encode("shift-jis"))
    with pytest.raises(CaptionError, match=r"a\.txt: is not UTF-8 text \(byte 0\)"):
        read_caption(path)
    path.write_bytes(b"\xff\xfea")
    with pytest.raises(CaptionError, match="is not UTF-16-LE text"):
        read_caption(path)
    with pytest.raises(CaptionError, match="cannot be read"):
        read_caption(tmp_path / "none.txt")
