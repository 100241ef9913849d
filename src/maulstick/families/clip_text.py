"""Captions to CLIP tokens, and tokens to text states, in chunks as sd-scripts makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maulstick.errors import ModelError
from maulstick.families.prompt_weights import weighted_parts

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

CHUNK = 77
WEIGHTS = ".weights"
"""What the name of a text encoder's tokens ends in where it is the weights of their states."""
_BODY = CHUNK - 2


def load_tokenizer(folder: Path, *, pad_token: str | None = None) -> CLIPTokenizer:
    """Return the tokenizer in a folder; ``pad_token`` replaces the one its config names."""
    from transformers import CLIPTokenizer

    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The tokenizer in {folder} cannot be used: {error}") from error
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    return tokenizer


def caption_ids(tokenizer: CLIPTokenizer, captions: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each caption, uncut, without start and end marks."""
    return tokenizer(list(captions), add_special_tokens=False, verbose=False).input_ids


def weighted_ids(tokenizer: CLIPTokenizer, caption: str) -> tuple[list[int], list[float]]:
    """Return the token ids of a caption with weights in brackets, uncut, without marks, and the weight of each."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in weighted_parts(caption):
        (own,) = caption_ids(tokenizer, [text])
        ids += own
        weights += [weight] * len(own)
    return ids, weights


def chunked_tokens(tokenizer: CLIPTokenizer, captions: Sequence[str], body: int) -> Tensor:
    """Return the tokens of captions in which brackets are letters, as ``chunked_ids`` makes them."""
    return chunked_ids(tokenizer, caption_ids(tokenizer, captions), body)


def weighted_tokens(tokenizer: CLIPTokenizer, captions: Sequence[str], body: int) -> tuple[Tensor, Tensor]:
    """Return tokens as ``chunked_ids`` makes them, and the weights of their states, fp32 (B, body + 2)."""
    read = [weighted_ids(tokenizer, caption) for caption in captions]
    weights = torch.ones(len(read), body + 2)
    for row, (_, own) in zip(weights, read, strict=True):
        kept = torch.tensor(own[:body])
        row[1 : 1 + len(kept)] = kept
    return chunked_ids(tokenizer, [ids for ids, _ in read], body), weights


def weighted_states(states: Tensor, weights: Tensor | None) -> Tensor:
    """Return states (B, L, D) multiplied by weights (B, L), and scaled so that each caption's mean is what it was.

    The formula is that of the web UI and of sd-scripts' first implementation. Where the weights turn the sign of the
    mean, no scale can restore it, and none is applied. Weights of 1 change nothing, not even a digit.
    """
    if weights is None:
        return states
    exact = states.float()
    weighted = exact * weights.to(states.device)[..., None]
    scale = exact.mean((1, 2), keepdim=True) / weighted.mean((1, 2), keepdim=True)
    scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))
    return (weighted * scale).to(states.dtype)


def chunked_ids(tokenizer: CLIPTokenizer, captions: Sequence[list[int]], body: int) -> Tensor:
    """Return long tokens (B, body / 75 * 77): windows of 75 tokens, each with its own start and end mark.

    ``body`` is 75, 150 or 225; longer captions are cut. Every window ends in the end mark or in padding, and an empty
    window starts with the end mark, as sd-scripts has it.
    """
    start, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    rows = []
    for ids in captions:
        kept = [start, *ids[:body], end]
        whole = kept + [pad] * (body + 2 - len(kept))
        row: list[int] = []
        for offset in range(1, body, _BODY):
            window = [start, *whole[offset : offset + _BODY], whole[-1]]
            if window[-2] not in (end, pad):
                window[-1] = end
            if window[1] == pad:
                window[1] = end
            row += window
        # A single window is the caption itself; the rules above are for cut ones.
        rows.append(row if body > _BODY else whole)
    return torch.tensor(rows, dtype=torch.long)


def text_states(text_encoder: nn.Module, tokens: Tensor, clip_skip: int | None) -> Tensor:
    """Return states (B, 75 n + 2, D) of tokens (B, 77 n): the windows' bodies between the first start and the last end.

    ``clip_skip`` counts layers from the end; None and 1 take the last one. The final layer norm is applied to whichever
    layer is taken.
    """
    windows = tokens.reshape(-1, CHUNK)
    if clip_skip is None or clip_skip == 1:
        states = text_encoder(windows).last_hidden_state
    else:
        layer = text_encoder(windows, output_hidden_states=True).hidden_states[-clip_skip]
        # transformers 4.x keeps the layers in a module of their own.
        owner: Any = getattr(text_encoder, "text_model", text_encoder)
        states = owner.final_layer_norm(layer)
    return _joined(states, len(tokens))


def layer_states(text_encoder: nn.Module, tokens: Tensor, layer: int) -> tuple[Tensor, Any]:
    """Return the states as in ``text_states``, of the layer counted from the end, but without the final layer norm.

    The encoder's whole output for the B n windows comes second.
    """
    output = text_encoder(tokens.reshape(-1, CHUNK), output_hidden_states=True)
    return _joined(output.hidden_states[-layer], len(tokens)), output


def pooled_states(output: Any, captions: int) -> Tensor:
    """Return the projected end mark (B, P) of each caption's first window, as sd-scripts takes it."""
    embeddings: Tensor = output.text_embeds
    return embeddings.reshape(captions, -1, embeddings.shape[-1])[:, 0]


def _joined(states: Tensor, captions: int) -> Tensor:
    if len(states) == captions:
        return states
    states = states.reshape(captions, -1, CHUNK, states.shape[-1])
    bodies = states[:, :, 1:-1].flatten(1, 2)
    return torch.cat([states[:, 0, :1], bodies, states[:, -1, -1:]], dim=1)
