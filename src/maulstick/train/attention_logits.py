"""The largest attention logit of a forward pass: the value that overflows first when weights grow (no qk-norm)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_QUERY_KEY_NAMES = (("to_q", "to_k"), ("q_proj", "k_proj"))
_MOST_QUERIES = 128
_MOST_KEYS = 1024


class LogitMeter:
    """Collects, while ``watching``, the largest ``|q·k| / sqrt(head width)`` of each attention.

    Long sequences are sampled evenly (128 queries, 1024 keys), so the value is a lower bound there. So it is in SD3,
    where the tokens of text have projections of their own that are not looked at; attention with norms of query and
    key cannot grow, and is left out.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self._attentions = [
            (f"{network}.{path}", *pair, heads)
            for network, root in networks.items()
            for path, module in root.named_modules()
            if (pair := _query_and_key(module)) is not None and (heads := _heads(module)) is not None
        ]
        self._largest: dict[str, Tensor] = {}
        self._waiting: dict[str, Tensor] = {}

        self._joined = [
            (f"{network}.{path}", module.to_qkv, heads)
            for network, root in networks.items()
            for path, module in root.named_modules()
            if isinstance(getattr(module, "to_qkv", None), nn.Module)
            and getattr(module, "norm_q", None) is None
            and (heads := _heads(module)) is not None
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward passes inside."""
        self._largest.clear()
        handles = []
        for name, query, key, heads in self._attentions:
            handles += [part.register_forward_hook(self._hook(name, heads)) for part in (query, key)]
        for name, projection, heads in self._joined:
            handles.append(projection.register_forward_hook(self._joined_hook(name, heads)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._waiting.clear()

    def largest(self) -> tuple[float, str] | None:
        """Return the largest value seen and the attention it was in, NaN before all; one read from the device."""
        if not self._largest:
            return None
        names = list(self._largest)
        values = torch.stack([self._largest[name] for name in names]).tolist()
        return max(zip(values, names, strict=True), key=lambda pair: (pair[0] != pair[0], pair[0]))

    def _hook(self, name: str, heads: int) -> Any:
        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            first = self._waiting.pop(name, None)
            if first is None:
                # Whichever comes first waits for the other: their product is the same either way.
                self._waiting[name] = output.detach()
                return
            self._see(name, _largest_logit(first, output.detach(), heads))

        return after

    def _joined_hook(self, name: str, heads: int) -> Any:
        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            query, key, _ = output.detach().chunk(3, dim=-1)
            self._see(name, _largest_logit(query, key, heads))

        return after

    def _see(self, name: str, value: Tensor) -> None:
        seen = self._largest.get(name)
        self._largest[name] = value if seen is None else torch.maximum(seen, value)


@torch.no_grad()
def _largest_logit(first: Tensor, second: Tensor, heads: int) -> Tensor:
    """Return max |q·k| / sqrt(d) of projections (B, L, heads * d), 0-d fp32."""
    width = first.shape[-1] // heads
    split = []
    for tensor, most in ((first, _MOST_QUERIES), (second, _MOST_KEYS)):
        sampled = tensor[:, :: -(-tensor.shape[1] // most)].float()
        split.append(sampled.unflatten(-1, (heads, width)).transpose(1, 2))
    return (split[0] @ split[1].transpose(-1, -2)).abs().amax() / width**0.5


def _query_and_key(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    for query, key in _QUERY_KEY_NAMES:
        pair = getattr(module, query, None), getattr(module, key, None)
        if isinstance(pair[0], nn.Module) and isinstance(pair[1], nn.Module):
            return pair[0], pair[1]
    return None


def _heads(module: nn.Module) -> int | None:
    found: Iterable[Any] = (getattr(module, name, None) for name in ("heads", "num_heads"))
    return next((heads for heads in found if isinstance(heads, int) and heads > 0), None)
