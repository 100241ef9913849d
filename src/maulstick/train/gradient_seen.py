"""Which trained tensors have had a gradient at all, at no cost once they have."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn


class GradientsSeen:
    """Notes for each parameter whether a gradient was ever accumulated into it.

    A hook per parameter removes itself when it is first called, so a healthy run pays for one call each.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], waiting_for: Collection[str] | None = None):
        """``waiting_for``: names that had none yet when the run was saved; None for all."""
        self._handles: dict[str, Any] = {}
        for name, parameter in parameters:
            if waiting_for is None or name in waiting_for:
                # A frozen parameter takes no hook, and waits for ever.
                takes_hook = parameter.requires_grad
                hook = parameter.register_post_accumulate_grad_hook(self._hook(name)) if takes_hook else None
                self._handles[name] = hook

    @property
    def without(self) -> list[str]:
        """Names of the parameters that had no gradient so far, in their order."""
        return list(self._handles)

    def close(self) -> None:
        """Remove the hooks that are left."""
        for handle in self._handles.values():
            if handle is not None:
                handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Any:
        def seen(parameter: Tensor) -> None:
            self._handles.pop(name).remove()

        return seen


def behind_layer(names: Sequence[str], text_encoders: Collection[str], clip_skip: int | None) -> set[str]:
    """Return the parameters in text-encoder layers behind the one that ``clip_skip`` reads: no gradient is due there.

    Names are ``{component}.….layers.{number}.…``; all layers of a trained text encoder carry the adapter.
    """
    skipped = (clip_skip or 1) - 1
    layers: dict[str, dict[str, int]] = {}
    for name in names:
        component = name.split(".", 1)[0]
        found = re.search(r"\.layers\.(\d+)\.", name)
        if component in text_encoders and found:
            layers.setdefault(component, {})[name] = int(found[1])
    unused: set[str] = set()
    for numbers in layers.values():
        last_used = max(numbers.values()) - skipped
        unused |= {name for name, number in numbers.items() if number > last_used}
    return unused
