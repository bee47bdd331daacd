"""Who works on which sample, and where its result goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._ledger_py import Ledger
else:
    from minato._core._ledger_c import Ledger

__all__ = ["Ledger"]
