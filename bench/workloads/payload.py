"""Objects and rows for stores: bytes that cannot be compressed, and say which they are."""

from __future__ import annotations

from functools import cache

import numpy as np


@cache
def _noise(nbytes: int) -> bytes:
    return np.random.default_rng(1).bytes(nbytes)


def stored_object(index: int, nbytes: int) -> bytes:
    """The content of an object; it begins with its index."""
    return index.to_bytes(8, "little") + _noise(nbytes)[8:]
