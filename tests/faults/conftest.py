"""The workshop, the first time a fault test needs it, and the function that adds a row to the table."""

from __future__ import annotations

import pytest
import torch

from tests.faults.table import PROPERTY, AddRow, row
from tests.faults.trials import Outcome, Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One for all tests: loading, caching and fault-free runs are done once."""
    torch.set_num_threads(1)
    return Workshop(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def add_row(request: pytest.FixtureRequest) -> AddRow:
    """Return a function that adds a row; ``bare`` is left out where guard and rescue have no part in the matter."""
    place = request.session.items.index(request.node)

    def add(
        fault: str, must: str, outcome: Outcome, bare: Outcome | None = None, fault_free: Outcome | None = None
    ) -> None:
        properties = request.node.user_properties
        properties.append((PROPERTY, ((place, len(properties)), row(fault, must, outcome, bare, fault_free))))

    return add
