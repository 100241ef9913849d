from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.data.captions import (
    CaptionError,
    Moment,
    caption_for,
    possible_captions,
    read_caption,
    shuffled,
    tag_counts,
    whole_caption,
)
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


def drawn_captions(image: Captioned, count: int = 400) -> Counter[str]:
    return Counter(caption_for(image, Random(seed)) for seed in range(count))


def test_prefix_and_suffix_belong_to_the_caption_and_are_dropped_with_it():
    framed = captioned("a cat", caption_prefix="photo of", caption_suffix="outside")
    assert caption_for(framed, Random(0)) == "photo of a cat outside"
    assert caption_for(captioned("", caption_prefix="photo"), Random(0)) == "photo"
    dropped = captioned("a cat", caption_prefix="photo of", caption_dropout_rate=1.0)
    assert caption_for(dropped, Random(0)) == ""
    moved = captioned("b,c", caption_prefix="a,", caption_suffix=",d", shuffle_caption=True, keep_tokens=1)
    assert set(drawn_captions(moved)) == {
        f"a, {x}, {y}, {z}" for x in "bcd" for y in "bcd" for z in "bcd" if len({x, y, z}) == 3
    }


def test_every_nth_epoch_counted_from_one_has_empty_captions():
    image = captioned("a", caption_dropout_every_n_epochs=3)
    said = [caption_for(image, Random(0), Moment(epoch=epoch)) for epoch in range(7)]
    assert said == ["a", "a", "", "a", "a", "", "a"]


def test_tags_are_dropped_one_by_one_but_not_the_kept_ones():
    image = captioned("a, b, c", keep_tokens=1, caption_tag_dropout_rate=0.25)
    drawn = drawn_captions(image, 4000)
    assert set(drawn) == {"a, b, c", "a, b", "a, c", "a"}
    for caption, chance in {"a, b, c": 9 / 16, "a, b": 3 / 16, "a, c": 3 / 16, "a": 1 / 16}.items():
        assert abs(drawn[caption] / 4000 - chance) < 4 * (chance * (1 - chance) / 4000) ** 0.5


def test_a_mark_separates_what_stays_at_both_ends():
    image = captioned("a, b ||| c, d ||| e", keep_tokens_separator="|||", keep_tokens=3, shuffle_caption=True)
    assert set(drawn_captions(image)) == {"a, b, c, d, e", "a, b, d, c, e"}
    # Not shuffled, the mark must not be learned as a word.
    plain = captioned("a, b ||| c, d ||| e", keep_tokens_separator="|||")
    assert caption_for(plain, Random(0)) == whole_caption(plain) == "a, b, c, d, e"


def test_tags_joined_by_the_secondary_separator_stay_together():
    image = captioned("sky;cloud, cat;black", shuffle_caption=True, secondary_separator=";")
    assert set(drawn_captions(image)) == {"sky,cloud, cat,black", "cat,black, sky,cloud"}


def test_another_separator_of_tags():
    image = captioned("a, b; c", caption_separator=";", shuffle_caption=True)
    assert set(drawn_captions(image)) == {"a, b, c", "c, a, b"}


def test_wildcards_choose_an_alternative_and_a_line_each_time():
    image = captioned("a {red|green} {{x}}", "b", enable_wildcard=True)
    drawn = drawn_captions(image, 1000)
    assert set(drawn) == {"a red {x}", "a green {x}", "b"}
    assert 430 < drawn["b"] < 570
    assert 200 < drawn["a red {x}"] < 300
    assert caption_for(captioned("a {red|green}", "b"), Random(0)) == "a {red|green}"


@pytest.mark.parametrize("step, count", [(0, 2), (2, 2), (3, 3), (5, 4), (9, 5), (10, 6), (50, 6)])
def test_the_number_of_tags_grows_with_the_steps(step, count):
    # floor(step * (6 free tags - 2) / 10) + 2 of the tags after the kept one, until step 10.
    image = captioned("k,1,2,3,4,5,6", keep_tokens=1, token_warmup_min=2, token_warmup_step=10)
    expected = ", ".join(["k", "1", "2", "3", "4", "5", "6"][: 1 + count])
    assert caption_for(image, Random(0), Moment(step=step)) == expected
    share = captioned("k,1,2,3,4,5,6", keep_tokens=1, token_warmup_min=2, token_warmup_step=0.1)
    assert caption_for(share, Random(0), Moment(step=step, total_steps=100)) == expected


def test_captions_that_vary_are_not_listed():
    certain = captioned("a ||| b", keep_tokens_separator="|||", shuffle_caption=True, caption_dropout_every_n_epochs=2)
    assert possible_captions([certain]) == {"a, b", ""}
    assert possible_captions([captioned("a", caption_prefix="x")]) == {"x a"}
    for varied in (
        captioned("a {b|c}", enable_wildcard=True),
        captioned("a", "b", enable_wildcard=True),
        captioned("a, b", caption_tag_dropout_rate=0.1),
        captioned("a, b", token_warmup_step=5),
        captioned("a;b", caption_separator=";", shuffle_caption=True),
    ):
        assert possible_captions([varied]) is None


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
