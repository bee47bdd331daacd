"""Keeping samples after the deterministic part of their transforms, so that later epochs skip it and the read."""

from minato.caching.base import MemoryCache
from minato.caching.disk import DiskCache

__all__ = ["DiskCache", "MemoryCache"]
