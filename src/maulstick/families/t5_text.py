"""Captions to T5's tokens, and tokens to T5's states, in a number format that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maulstick.errors import ModelError
from maulstick.families.build import build_module
from maulstick.families.source import Component


def t5_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return bf16 for fp16, whose range the feed-forward output (``wo``) exceeds; T5 itself was trained in bf16.

    Keeping ``wo`` alone in fp32 would not do: autocast runs it in fp16 all the same.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


def load_t5_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder."""
    from transformers import T5TokenizerFast

    try:
        return T5TokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"T5's tokenizer in {folder} cannot be used: {error}. A tokenizer.json there is enough; without T5 "
            "(no_t5xxl) none is needed."
        ) from error


def t5_tokens(tokenizer: Any, captions: Sequence[str], length: int) -> Tensor:
    """Return long tokens (B, ``length``): cut or padded, the end mark last."""
    ids: Tensor = tokenizer(
        list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def build_t5(part: Component, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return T5's encoder, frozen, in evaluation mode.

    Files hold its one table of embeddings under one or both of its names.
    """
    from transformers import T5Config, T5EncoderModel

    own, shared = "encoder.embed_tokens.weight", "shared.weight"
    slots = dict(part.weights.slots)
    if own in slots or shared in slots:
        slots[own] = slots[shared] = slots.get(shared, slots.get(own))  # type: ignore[assignment]
    weights = type(part.weights)(part.weights.file, slots, part.weights.leftover)
    module: Any = build_module(
        lambda: T5EncoderModel(T5Config.from_dict(part.config)), weights, what="T5", dtype=dtype, device=device
    )
    module.encoder.embed_tokens = module.shared
    built: nn.Module = module
    return built


@torch.no_grad()
def t5_states(encoder: nn.Module, tokens: Tensor) -> Tensor:
    """Return T5's last states (B, L, D), in its own number format whatever autocast is on."""
    with torch.autocast(tokens.device.type, enabled=False):
        states: Tensor = encoder(tokens)[0]
    return states
