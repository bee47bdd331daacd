"""Sleeping until another process says that something has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._wait_py import EVENT_COUNT_NBYTES, EventCount, SharedWords
else:
    from minato._core._wait_c import EVENT_COUNT_NBYTES, EventCount, SharedWords

__all__ = ["EVENT_COUNT_NBYTES", "EventCount", "SharedWords"]
