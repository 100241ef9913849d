"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Here, because with several workers the process that shows summaries reads no conftest.py further down.
from tests.faults.table import pytest_terminal_summary  # noqa: F401

# A busy machine is no defect: no time limit per example. And CI must not fail on an example that no change drew.
settings.register_profile("maulstick", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("maulstick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import everything without looking for garbage, and never look at it again: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
