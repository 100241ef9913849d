"""Captions to tokens and states: windows, end marks, padding and layers as sd-scripts has them."""

from __future__ import annotations

import pytest
import torch

from maulstick.families.clip_text import text_states
from tests.families.conftest import Load
from tests.models import Version, model_folder, single_file, small_model

START, END = 49406, 49407


@pytest.mark.parametrize("version, pad", [("sd1", END), ("sd2", 0)])
@pytest.mark.parametrize("source", [model_folder, single_file])
def test_a_short_caption_is_one_padded_window(load: Load, version: Version, pad: int, source: object) -> None:
    family = load(source(version))  # type: ignore[operator]
    (row,) = family.tokenize(["a photo of a cat"])["text_encoder"].tolist()
    # The published token ids of OpenAI's CLIP for this caption.
    assert row == [START, 320, 1125, 539, 320, 2368, END] + [pad] * 70
    assert family.count_tokens("a photo of a cat") == 5


def test_long_captions_are_cut_at_the_limit_and_counted_uncut(load: Load) -> None:
    caption = " ".join(["cat"] * 100)
    family = load(model_folder())
    (row,) = family.tokenize([caption])["text_encoder"].tolist()
    assert row == [START] + [2368] * 75 + [END]
    assert family.count_tokens(caption) == 100


@pytest.mark.parametrize("length", [150, 225])
def test_sd1_windows_each_end_in_the_end_mark(load: Load, length: int) -> None:
    family = load(model_folder(), max_token_length=length)
    (row,) = family.tokenize([" ".join(["cat"] * 80)])["text_encoder"].tolist()
    first, second = row[:77], row[77:154]
    assert len(row) == length // 75 * 77
    assert first == [START] + [2368] * 75 + [END]
    assert second == [START] + [2368] * 5 + [END] * 71


def test_sd2_windows_end_and_begin_as_sd_scripts_has_them(load: Load) -> None:
    family = load(model_folder("sd2"), max_token_length=225)
    tokens = family.tokenize([" ".join(["cat"] * 80), "cat", " ".join(["cat"] * 75), " ".join(["cat"] * 300)])
    long, short, exact, too_long = (row.reshape(3, 77).tolist() for row in tokens["text_encoder"])
    assert long[0] == [START] + [2368] * 75 + [END]  # cut: the padding at its end becomes an end mark
    assert long[1] == [START] + [2368] * 5 + [END] + [0] * 70
    assert long[2] == [START, END] + [0] * 75  # empty: begins with an end mark
    assert short == [[START, 2368, END] + [0] * 74, [START, END] + [0] * 75, [START, END] + [0] * 75]
    assert exact[0] == [START] + [2368] * 75 + [END]
    assert exact[1] == [START, END] + [0] * 75
    assert too_long == [[START] + [2368] * 75 + [END]] * 3


def test_states_of_windows_are_joined_between_first_start_and_last_end(load: Load) -> None:
    family = load(model_folder(), max_token_length=150)
    tokens = family.tokenize([" ".join(["cat"] * 80), "dog"])
    states = family.encode_text(tokens)["encoder_hidden_states"]
    windows = family.text_encoders["text_encoder"](tokens["text_encoder"].reshape(4, 77)).last_hidden_state
    assert states.shape == (2, 152, 64)
    for caption in range(2):
        first, second = windows[2 * caption], windows[2 * caption + 1]
        assert torch.equal(states[caption], torch.cat([first[:1], first[1:76], second[1:76], second[76:]]))


@pytest.mark.parametrize("clip_skip", [None, 1, 2, 5])
def test_clip_skip_takes_a_layer_from_the_end_and_normalises_it(load: Load, clip_skip: int | None) -> None:
    family = load(model_folder(), clip_skip=clip_skip)
    tokens = family.tokenize(["a cat on a mat"])
    states = family.encode_text(tokens)["encoder_hidden_states"]
    encoder = small_model().text_encoder
    hidden = encoder.embeddings(tokens["text_encoder"])
    causal = torch.full((1, 1, 77, 77), float("-inf")).triu(1)
    for layer in encoder.encoder.layers[: 12 - (clip_skip or 1) + 1]:
        hidden = layer(hidden, causal)
    torch.testing.assert_close(states, encoder.final_layer_norm(hidden), rtol=1e-4, atol=1e-5)


def test_clip_skip_passes_gradients_to_the_layers_below_only(load: Load) -> None:
    family = load(model_folder(), clip_skip=3)
    encoder = family.text_encoders["text_encoder"].requires_grad_(True)
    family.encode_text(family.tokenize(["a cat"]))["encoder_hidden_states"].sum().backward()
    reached = [layer.mlp.fc1.weight.grad is not None for layer in encoder.encoder.layers]
    assert reached == [True] * 10 + [False] * 2


def test_a_caption_alone_gives_the_states_it_gives_in_company(load: Load) -> None:
    family = load(model_folder())
    captions = ["a cat", "", "two dogs, running"]
    together = family.encode_text(family.tokenize(captions))["encoder_hidden_states"]
    for place, caption in enumerate(captions):
        alone = family.encode_text(family.tokenize([caption]))["encoder_hidden_states"]
        torch.testing.assert_close(alone[0], together[place], rtol=1e-4, atol=1e-5)


def test_text_encoders_that_keep_their_layers_one_level_deeper_work_too() -> None:
    encoder = small_model().text_encoder

    class Deeper(torch.nn.Module):
        """As transformers 4.x builds it."""

        def __init__(self) -> None:
            super().__init__()
            self.text_model = encoder

        def forward(self, *args: object, **kwargs: object) -> object:
            return self.text_model(*args, **kwargs)

    tokens = torch.randint(0, 40_000, (1, 77), generator=torch.Generator().manual_seed(0))
    assert torch.equal(text_states(Deeper(), tokens, 2), text_states(encoder, tokens, 2))
