"""What the machine, or the container on it, allows."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["available_memory_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Memory that can still be taken, within the limit of the control group if there is one."""
    available = int(psutil.virtual_memory().available)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
        except (OSError, ValueError):  # no such version of control groups, or "max"
            continue
        available = min(available, max(left, 0))
    return available
