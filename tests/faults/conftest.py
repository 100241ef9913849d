"""The workshop, the first time a fault test needs it, and the function that adds a row to the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.faults.table import PROPERTY, AddRow, described
from tests.faults.trials import Outcome, Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One for all tests: loading, caching and fault-free runs are done once."""
    torch.set_num_threads(1)
    return Workshop(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def add_row(record_property: Callable[[str, object], None]) -> AddRow:
    """Return a function that adds a row; ``bare`` is left out where guard and rescue have no part in the matter."""

    def add(
        fault: str, must: str, outcome: Outcome, bare: Outcome | None = None, fault_free: Outcome | None = None
    ) -> None:
        cells = (described(outcome, fault_free, counts=True), described(bare, fault_free, counts=False))
        record_property(PROPERTY, (fault, must, *cells))

    return add
