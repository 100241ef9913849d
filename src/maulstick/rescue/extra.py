"""Further things that go back together with the weights: EMA weights, random numbers, whatever has a state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class HasState(Protocol):
    """Anything whose state can be read and put back, as nested dicts and lists of tensors and plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Tensors in it are copied by whoever keeps it."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> Any:
        """Put the state back. The tensors in it belong to the receiver."""


class RandomState:
    """The global random numbers of torch (CPU and the given CUDA devices) and of Python.

    A loop that draws its random numbers from there wants them put back with the weights only if it also trains the
    same batches again; see ``docs/rescue.md``.
    """

    def __init__(self, cuda_devices: tuple[int, ...] = ()) -> None:
        self.cuda_devices = cuda_devices

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        version, words, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device) for device in self.cuda_devices],
            "python": [version, list(words), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Put all generators back."""
        torch.set_rng_state(state["torch"])
        for device, saved in zip(self.cuda_devices, state["cuda"], strict=True):
            torch.cuda.set_rng_state(saved, device)
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
