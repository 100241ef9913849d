"""One thread, no network, and loading with few words."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maulstick.families.load import load_family
from maulstick.families.sd import StableDiffusion
from maulstick.options.schema import ModelOptions

Load = Callable[..., StableDiffusion]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something reached for the network")

    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def load() -> Load:
    """Load a family on the CPU: ``load(path, dtype=…, vae_dtype=…, gradient_checkpointing=…, **model_options)``."""

    def load_on_cpu(
        path: Path,
        dtype: torch.dtype = torch.float32,
        vae_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        **options: Any,
    ) -> StableDiffusion:
        family = load_family(
            ModelOptions(pretrained_model_name_or_path=str(path), **options),
            device="cpu",
            dtype=dtype,
            vae_dtype=vae_dtype,
            gradient_checkpointing=gradient_checkpointing,
        )
        assert isinstance(family, StableDiffusion)
        return family

    return load_on_cpu
