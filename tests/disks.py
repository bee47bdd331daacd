"""Disks that are full or read-only: small file systems in memory, which root may mount. And other limits of files."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNT = shutil.which("mount") or "mount"


class Disk:
    """A file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left_bytes: int = 0) -> None:
        """Leave no more room than this, which counts in pages."""
        with open(self.path / "fill", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        if left_bytes:
            os.truncate(self.path / "fill", (self.path / "fill").stat().st_size - left_bytes)

    def clear(self) -> None:
        """Have room again."""
        (self.path / "fill").unlink()

    def make_read_only(self) -> None:
        subprocess.run([MOUNT, "-o", "remount,ro", str(self.path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int = 1 << 20) -> Iterator[Disk]:
    """Mount a file system of this size at a new directory; skip the test where that is not allowed."""
    path.mkdir()
    command = [MOUNT, "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk, where containers allow it")
    try:
        yield Disk(path)
    finally:
        # Lazily: a failed test's traceback may keep files open.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk would; needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """This process can open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
