"""Keys of samples, and the words of a generator's state grown from a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._seeding_py import Snapshot, StateWriter, fill, mix
else:
    from minato._core._seeding_c import Snapshot, StateWriter, fill, mix

__all__ = ["Snapshot", "StateWriter", "fill", "mix"]
