"""A command line that needs nothing more, and reading one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from maulstick.options.load import LoadedOptions, load_train_options

REQUIRED = {"--pretrained_model_name_or_path": "model", "--train_data_dir": "images", "--output_dir": "out"}


@pytest.fixture
def load() -> Callable[..., LoadedOptions]:
    """Return a function that loads the required options with further arguments."""

    def load(*arguments: str) -> LoadedOptions:
        required = [token for name, value in REQUIRED.items() if name not in arguments for token in (name, value)]
        return load_train_options([*required, *arguments])

    return load
