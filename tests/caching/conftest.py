from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minato.caching import DiskCache


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., DiskCache]]:
    """Makes caches in one folder, which are closed at the end."""
    with contextlib.ExitStack() as made:

        def make(quota_bytes: int = 1 << 30, **options: Any) -> DiskCache:
            return made.enter_context(
                contextlib.closing(DiskCache(tmp_path, quota_bytes, **options))
            )

        yield make
