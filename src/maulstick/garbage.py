"""Importing and building without the garbage collector, which finds nothing then and looks at everything."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, for_good: bool = False) -> Iterator[None]:
    """Make many objects that stay, without looking for garbage on the way; it is looked for again afterwards.

    ``for_good``: never look at what is there now, either. For imports, and for nothing that is to be freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if was_enabled:
            gc.enable()
