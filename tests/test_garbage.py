"""The garbage collector rests where nothing is freed, and only there."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from maulstick.garbage import uncollected


def test_it_rests_inside_and_works_again_afterwards():
    seen = []

    @uncollected()
    def fail():
        seen.append(gc.isenabled())
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [False]
    assert gc.isenabled()


def test_within_another_one_it_goes_on_resting():
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_imported_is_never_looked_at_again():
    code = """
import gc
from maulstick.garbage import uncollected
with uncollected():
    kept = [[] for _ in range(1000)]
assert gc.get_freeze_count() == 0
with uncollected(for_good=True):
    import csv
assert gc.get_freeze_count() > 1000
later = [[] for _ in range(1000)]
assert gc.get_count()[0] < gc.get_threshold()[0]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
