"""Lists of Python objects in one stretch of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._column_py import Column
else:
    from minato._core._column_c import Column

__all__ = ["Column"]
