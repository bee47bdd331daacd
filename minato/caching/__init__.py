"""Keeping samples after the deterministic part of their transforms, so that later epochs skip it and the read."""

from minato.caching.disk import DiskCache
from minato.caching.memory import MemoryCache

__all__ = ["DiskCache", "MemoryCache"]
