from __future__ import annotations

import pytest
import torch

from maulstick.data.cache import TextStateCache
from maulstick.errors import ModelError

STATE_BYTES = (8 * 2 + 1) * 4


def expected(caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([float(ord(letter)) for letter in caption[:8].ljust(8)])
    return torch.stack([ids, ids * 2], dim=-1), ids.sum().reshape(1)


def check(states, captions):
    assert set(states) == {"states", "pooled"}
    assert states["states"].shape == (len(captions), 8, 2)
    for place, caption in enumerate(captions):
        text, pooled = expected(caption)
        assert torch.equal(states["states"][place], text)
        assert torch.equal(states["pooled"][place], pooled)


def test_each_caption_is_encoded_once_and_misses_together(family):
    cache = TextStateCache(family)
    check(cache.states_for(["cat", "dog", "cat", ""]), ["cat", "dog", "cat", ""])
    check(cache.states_for(["dog", "bird", "cat"]), ["dog", "bird", "cat"])
    check(cache.states_for(["bird"]), ["bird"])
    assert family.captions_encoded == [["cat", "dog", ""], ["bird"]]


def test_batches_are_bounded(family):
    captions = [f"c{number}" for number in range(10)]
    check(TextStateCache(family, batch_size=4).states_for(captions), captions)
    assert [len(batch) for batch in family.captions_encoded] == [4, 4, 2]


def test_the_least_recently_used_goes_first(family):
    cache = TextStateCache(family, capacity_bytes=3 * STATE_BYTES)
    cache.states_for(["a", "b", "c"])
    cache.states_for(["a"])
    cache.states_for(["d"])
    family.captions_encoded.clear()
    check(cache.states_for(["a", "c", "d"]), ["a", "c", "d"])
    assert family.captions_encoded == []
    check(cache.states_for(["b"]), ["b"])
    assert family.captions_encoded == [["b"]]
    # A batch larger than the capacity works, too.
    check(cache.states_for(list("pqrstu")), list("pqrstu"))
    assert len(cache._kept) == 3
    assert cache._bytes == 3 * STATE_BYTES


def test_what_was_encoded_for_good_stays(family):
    cache = TextStateCache(family, capacity_bytes=STATE_BYTES, batch_size=2)
    calls = []
    cache.encode_all(["a", "b", "a", "c"], lambda done, total: calls.append((done, total)))
    assert calls == [(2, 3), (3, 3)]
    family.captions_encoded.clear()
    cache.encode_all(["c", "a"])
    check(cache.states_for(["c", "b", "a"]), ["c", "b", "a"])
    cache.states_for(["x"])
    check(cache.states_for(["a", "b", "c"]), ["a", "b", "c"])
    assert family.captions_encoded == [["x"]]


def test_kept_states_are_copies_without_gradient(family):
    cache = TextStateCache(family, device="cpu")
    states = cache.states_for(["a", "b"])
    states["states"].zero_()
    check(cache.states_for(["a", "b"]), ["a", "b"])
    kept = cache._kept["a"]["states"]
    assert kept.untyped_storage().nbytes() == kept.numel() * 4
    assert not kept.requires_grad


def test_states_that_are_not_finite_are_refused(family):
    family.bad_captions = {"dog"}
    cache = TextStateCache(family)
    with pytest.raises(ModelError, match="not finite for the caption 'dog'"):
        cache.states_for(["cat", "dog"])
    check(cache.states_for(["cat"]), ["cat"])
