"""Seeds for every random draw, derived from the run's seed and the place in the run.

Nothing random carries state from one micro-batch to the next: a resumed run draws what the interrupted one would have.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *place: int | str) -> int:
    """Return a 63-bit seed that depends on ``seed`` and on every element of ``place``."""
    text = "/".join(str(part) for part in (seed, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
