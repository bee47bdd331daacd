"""Which of the keys that a sampler gave have arrived, and how often each was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._arrivals_py import Arrivals, Occurrences, sum_of_hashes
else:
    from minato._core._arrivals_c import Arrivals, Occurrences, sum_of_hashes

__all__ = ["Arrivals", "Occurrences", "sum_of_hashes"]
