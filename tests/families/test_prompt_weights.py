"""Weights in captions: how brackets are read, which states they reach, and what becomes of the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maulstick.data.cache import TextStateCache
from maulstick.errors import OptionError
from maulstick.families.clip_text import weighted_states
from maulstick.families.load import load_family
from maulstick.families.prompt_weights import has_loose_brackets, weighted_parts
from maulstick.options.schema import ModelOptions
from tests.families.conftest import Load
from tests.models import model_folder
from tests.sd3_models import sd3_folder
from tests.sdxl_models import sdxl_folder


@pytest.mark.parametrize(
    ("caption", "parts"),
    [
        ("plain words, and more", [("plain words, and more", 1)]),
        ("", []),
        ("an (important) word", [("an ", 1), ("important", 1.1), (" word", 1)]),
        ("(a:1.5)", [("a", 1.5)]),
        ("(a:.5) (b: 2 ) (c:-1)", [("a", 0.5), (" ", 1), ("b", 2), (" ", 1), ("c", -1)]),
        ("[a] ((b)) [(c)]", [("a", 1 / 1.1), (" ", 1), ("b", 1.21), (" c", 1)]),
        ("(a:b:1.2)", [("a:b", 1.2)]),
        (r"\(letters\) \[too\] and \\", [(r"(letters) [too] and " + "\\", 1)]),
        (r"(smile \(happy\):1.3)", [("smile (happy)", 1.3)]),
        ("a time 10:30", [("a time 10:30", 1)]),
        ("(a:1.2.3)", [("a:1.2.3", 1.1)]),
        # Brackets without a partner, as the web UI reads them.
        ("(never closed", [("never closed", 1.1)]),
        ("a [b (c", [("a ", 1), ("b ", 1 / 1.1), ("c", 1)]),
        ("never opened) here", [("never opened) here", 1)]),
        ("a:1.2) and ]", [("a:1.2) and ]", 1)]),
        ("(a]b)", [("a]b", 1.1)]),
        ("(unnecessary)(brackets)", [("unnecessarybrackets", 1.1)]),
        # The example of the web UI's own documentation.
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                *[("a ", 1), ("house", 1.573), (" ", 1.1), ("on", 1), (" a ", 1.1), ("hill", 0.55)],
                *[(", sun, ", 1.1), ("sky", 1.4641), (".", 1.1)],
            ],
        ),
    ],
)
def test_brackets_are_read_as_the_web_ui_reads_them(caption: str, parts: list[tuple[str, float]]) -> None:
    read = weighted_parts(caption)
    # Neighbours of equal weight are one piece, to rounding.
    merged: list[list] = []
    for text, weight in read:
        if merged and merged[-1][1] == pytest.approx(weight):
            merged[-1][0] += text
        else:
            merged.append([text, weight])
    assert [text for text, _ in merged] == [text for text, _ in parts]
    assert [weight for _, weight in merged] == pytest.approx([weight for _, weight in parts])


Made = tuple[str, list[tuple[str, float]]]
"""A caption, and its pieces with their weights."""
KINDS = (("(", ")", 1.1), ("[", "]", 1 / 1.1), ("(", ":0.7)", 0.7))


def bracketed(inner: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    def put(kind: tuple[str, str, float], made: list[Made]) -> Made:
        start, end, factor = kind
        pieces = [(text, weight * factor) for _, parts in made for text, weight in parts]
        return start + "".join(text for text, _ in made) + end, pieces

    return st.builds(put, st.sampled_from(KINDS), st.lists(inner, min_size=1, max_size=3))


plain = st.text("ab ,", min_size=1, max_size=4).map(lambda text: (text, [(text, 1.0)]))


@settings(max_examples=200, deadline=None)
@given(st.recursive(plain, bracketed, max_leaves=6))
def test_balanced_brackets_multiply(made: Made) -> None:
    caption, leaves = made
    expected = [(letter, weight) for text, weight in leaves for letter in text]
    read = [(letter, weight) for text, weight in weighted_parts(caption) for letter in text]
    assert [letter for letter, _ in read] == [letter for letter, _ in expected]
    assert [weight for _, weight in read] == pytest.approx([weight for _, weight in expected])
    assert not has_loose_brackets(caption)


def test_loose_brackets_are_noticed() -> None:
    assert [text for text in ("a", "(a)", "(a", "a)", "[a", "b:1.2)", r"\(a", "(a]") if has_loose_brackets(text)] == [
        "(a", "a)", "[a", "b:1.2)", "(a]",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------- states


def test_states_are_multiplied_and_keep_their_mean() -> None:
    states = torch.randn((2, 5, 8), generator=torch.Generator().manual_seed(0)) + 0.5
    weights = torch.tensor([[1, 2.0, 0.5, 1, 1], [1, 1, 1, 1, 1]])
    result = weighted_states(states, weights)
    exact = states.double().numpy() * weights.double().numpy()[..., None]
    exact *= (states.double().numpy().mean((1, 2)) / exact.mean((1, 2)))[:, None, None]
    np.testing.assert_allclose(result.numpy(), exact, rtol=1e-5)
    assert torch.equal(result[1], states[1])
    torch.testing.assert_close(result.mean((1, 2)), states.mean((1, 2)))
    half = states.to(torch.bfloat16)
    assert torch.equal(weighted_states(half, weights)[1], half[1])
    # Weights that turn the sign of the mean: no scale could give it back.
    signs = torch.tensor([[[1.0], [-0.5]]])
    assert weighted_states(signs, torch.tensor([[1.0, 4.0]])).flatten().tolist() == [1, -2]


def ratios(family, weighted: str, plain: str, width: slice = slice(None)) -> torch.Tensor:
    """Return, for each position, by what its state is multiplied, relative to the first."""
    states = [family.encode_text(family.tokenize([text]))["encoder_hidden_states"] for text in (weighted, plain)]
    first, second = (each[0, :, width].double() for each in states)
    quotients = (first * second).sum(1) / (second * second).sum(1)
    torch.testing.assert_close(first, quotients[:, None] * second, rtol=1e-3, atol=1e-5)
    return quotients / quotients[0]


@pytest.mark.parametrize(("version", "length"), [("sd1", 75), ("sd2", 75), ("sd1", 225), ("sd2", 150)])
def test_each_weight_reaches_the_states_of_its_words(load: Load, version, length: int) -> None:
    family = load(model_folder(version), max_token_length=length, weighted_captions=True)
    plain = load(model_folder(version), max_token_length=length)
    many = length > 75
    before = " ".join(["cat"] * 80) + " " if many else "a "
    caption = before + "(dog:1.5) and [bird]"
    start = 81 if many else 2
    words = before + "dog and bird"
    assert torch.equal(family.tokenize([caption])["text_encoder"], plain.tokenize([words])["text_encoder"])
    assert family.count_tokens(caption) == plain.count_tokens(words) == start + 2
    with torch.no_grad():
        found = ratios(family, caption, words)
    expected = torch.ones(length + 2, dtype=torch.float64)
    expected[start], expected[start + 2] = 1.5, 1 / 1.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_caption_that_is_cut_loses_the_weights_behind_the_cut(load: Load) -> None:
    family = load(model_folder(), weighted_captions=True)
    weights = family.tokenize([" ".join(["cat"] * 74) + " (dog bird:1.5)", "[cat]"])["text_encoder.weights"]
    assert weights.shape == (2, 77)
    assert weights[0].tolist() == [1.0] * 75 + [1.5, 1.0]
    assert weights[1, 1].item() == pytest.approx(1 / 1.1)


def test_both_encoders_of_sdxl_are_weighted_and_the_pooled_text_is_not() -> None:
    family, plain = (
        load_family(
            ModelOptions(pretrained_model_name_or_path=str(sdxl_folder()), weighted_captions=weighted),
            device="cpu",
            dtype=torch.float32,
        )
        for weighted in (True, False)
    )
    width = family.text_encoders["text_encoder"].config.hidden_size
    with torch.no_grad():
        for part in (slice(0, width), slice(width, None)):
            found = ratios(family, "a (dog:0.5)", "a dog", part)
            assert found[1:3].tolist() == pytest.approx([1, 0.5], rel=1e-3)
        pooled = [f.encode_text(f.tokenize([text]))["text_embeds"] for f, text in ((family, "(dog:2)"), (plain, "dog"))]
    assert torch.equal(*pooled)
    assert family.text_identity != plain.text_identity


def test_without_the_option_brackets_are_letters(load: Load) -> None:
    family = load(model_folder())
    assert list(family.tokenize(["(dog:1.5)"])) == ["text_encoder"]
    assert family.count_tokens("(dog)") == 3


def test_cached_states_are_weighted(load: Load) -> None:
    family = load(model_folder(), weighted_captions=True)
    cache = TextStateCache(family)
    cache.encode_all(["a (dog:1.5)", "a dog"])
    cached = cache.states_for(["a dog", "a (dog:1.5)"])["encoder_hidden_states"]
    with torch.no_grad():
        direct = family.encode_text(family.tokenize(["a dog", "a (dog:1.5)"]))["encoder_hidden_states"]
    torch.testing.assert_close(cached, direct, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(cached[0], cached[1])


def test_sd3_has_no_weights(load: Load) -> None:
    with pytest.raises(OptionError, match=r"weighted_captions: SD3 .* reads captions with T5 too"):
        load(sd3_folder(with_t5=False), weighted_captions=True)
