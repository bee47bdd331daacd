"""Anonymous memory: passed on by every start method, never left behind."""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import re
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from minato._core.segment import Segment
from tests.datasets import wait_until
from tests.subprocesses import fork, output

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def allocated_bytes(segment: Segment) -> int:
    """Memory that the segment takes."""
    return os.fstat(segment.descriptor).st_blocks * 512


def num_descriptors() -> int:
    gc.collect()
    return psutil.Process().num_fds()


def double(segment: Segment, count: int) -> None:
    segment.array[:count] *= 2


def in_a_process(target: Callable[..., object], *arguments: Any, method: str = "fork") -> None:
    process = multiprocessing.get_context(method).Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_gets_the_same_memory_which_has_no_name(method: str) -> None:
    segment = Segment(MIB)
    segment.array[:100] = np.arange(100)
    in_a_process(double, segment, 100, method=method)
    assert segment.array[:101].tolist() == [*range(0, 200, 2), 0]
    assert os.fstat(segment.descriptor).st_nlink == 0


def test_only_written_pages_take_memory() -> None:
    segment = Segment(1 << 36)
    assert segment.array.nbytes == segment.nbytes == 1 << 36
    assert allocated_bytes(segment) == 0
    segment.array[1 << 35] = 1
    assert 0 < allocated_bytes(segment) <= 2 * MIB


def test_discarded_pages_are_given_back_and_read_as_zero() -> None:
    segment = Segment(8 * MIB)
    segment.array[:] = 7
    before = allocated_bytes(segment)
    segment.discard(MIB + 1, 7 * MIB - 1)
    assert allocated_bytes(segment) == before - (6 * MIB - 2 * PAGE)
    assert segment.array[: MIB + PAGE].min() == 7
    assert segment.array[MIB + PAGE : 7 * MIB - PAGE].max() == 0
    assert segment.array[7 * MIB - PAGE :].min() == 7


@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, PAGE - 1), (1, 2 * PAGE - 1), (PAGE, 0)])
def test_discarding_less_than_a_page_changes_nothing(start: int, end: int) -> None:
    segment = Segment(4 * PAGE)
    segment.array[:] = 7
    segment.discard(start, end)
    assert segment.array.min() == 7


def is_mapped(address: int) -> bool:
    spans = re.findall(r"^(\w+)-(\w+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what is mapped")
@pytest.mark.parametrize("shared", [True, False])
def test_the_last_array_is_gone_and_the_memory_still_mapped(shared: bool) -> None:
    """NumPy gives an array's memory up before or after the array's finalizers run, depending on its version."""
    segment = Segment(MIB, shared=shared)
    address, found = segment.address, []
    segment.before_unmapping(lambda *given: found.append((given, is_mapped(address))), 1, 2)
    last = torch.from_numpy(segment.array)[10:20]
    del segment
    gc.collect()
    assert found == []
    del last
    assert found == [((1, 2), True)]
    assert not is_mapped(address)


def test_its_descriptors_are_closed_with_the_last_array() -> None:
    before = num_descriptors()
    segment = Segment(MIB)
    array = segment.array[10:20]
    assert num_descriptors() > before
    del segment
    array[:] = 1
    assert array.sum() == 10
    del array
    assert num_descriptors() == before


def test_a_failed_attempt_leaves_no_descriptor() -> None:
    before = num_descriptors()
    for nbytes in (0, -1, 1 << 62):
        with pytest.raises((OSError, ValueError)):
            Segment(nbytes)
    assert num_descriptors() == before


def test_it_takes_what_the_limit_on_address_space_leaves() -> None:
    def check() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + 96 * MIB, used + 96 * MIB))
        segment = Segment(1 << 40, 1 << 20)
        segment.array[-1] = 1
        assert segment.nbytes == 16 * MIB  # a quarter of the largest size that fits
        with pytest.raises(OSError, match="Cannot allocate memory"):
            Segment(1 << 40, 1 << 30)

    in_a_process(check)


def test_it_outlives_a_killed_parent_and_then_is_gone(tmp_path: Path) -> None:
    def be_parent() -> None:
        segment = Segment(64 * MIB)
        segment.array[:] = 1
        parent = os.getpid()

        def be_child() -> None:
            wait_until(lambda: os.getppid() != parent)
            (tmp_path / "sum.new").write_text(str(int(segment.array.sum())))
            (tmp_path / "sum.new").rename(tmp_path / "sum")

        pid = fork(be_child)
        (tmp_path / "told").write_text(f"{os.fstat(segment.descriptor).st_ino} {pid}")
        os.kill(parent, signal.SIGKILL)

    _, status = os.waitpid(fork(be_parent), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    inode, pid = (tmp_path / "told").read_text().split()
    wait_until(lambda: (tmp_path / "sum").exists() and not runs(int(pid)))
    assert int((tmp_path / "sum").read_text()) == 64 * MIB
    assert not any(mapped(inode))


def runs(pid: int) -> bool:
    """Whether a process has not ended; nobody may have asked for its status yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mapped(inode: str) -> list[str]:
    """Mappings of a nameless file in all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look at
            lines += path.read_text().splitlines()
    return [line for line in lines if "/memfd:minato" in line and line.split()[4] == inode]


def test_it_works_without_memfd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    segment = Segment(MIB)
    segment.array[:100] = np.arange(100)
    in_a_process(double, segment, 100)
    assert segment.array[99] == 198
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_close_its_parents_descriptor() -> None:
    segment = Segment(MIB)
    in_a_process(segment.__dict__.clear)
    assert os.fstat(segment.descriptor).st_size == MIB
    segment.array[:] = 1


def resident_bytes(segment: Segment) -> int:
    """Memory of this process that lies in the segment's address range."""
    pattern = re.compile(r"^(\w+)-(\w+) .*?^Rss: +(\d+) kB", re.MULTILINE | re.DOTALL)
    span = segment.address, segment.address + segment.nbytes
    return sum(
        int(kb) * 1024
        for start, end, kb in pattern.findall(Path("/proc/self/smaps").read_text())
        if span[0] <= int(start, 16) and int(end, 16) <= span[1]
    )


def test_private_memory_is_copied_by_a_fork_and_given_back_in_part() -> None:
    before = num_descriptors()
    segment = Segment(8 * MIB, shared=False)
    assert (segment.descriptor, num_descriptors()) == (-1, before)
    segment.array[:] = 7
    in_a_process(double, segment, 100)
    assert segment.array[0] == 7
    assert resident_bytes(segment) == 8 * MIB
    segment.discard(MIB + 1, 7 * MIB - 1)
    assert resident_bytes(segment) == 2 * MIB + 2 * PAGE
    assert segment.array[: MIB + PAGE].min() == 7
    assert segment.array[MIB + PAGE : 7 * MIB - PAGE].max() == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_few_bytes_are_read_and_written(shared: bool) -> None:
    segment = Segment(100, shared=shared)
    segment.write(7, b"abc")
    assert segment.read(6, 5) == b"\0abc\0"
    assert segment.array[6:11].tobytes() == b"\0abc\0"


CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


@pytest.mark.skipif(
    not CORE_PATTERN.exists() or CORE_PATTERN.read_text().startswith(("|", "/", "@")),
    reason="core dumps go to a program or a folder of the system's: the flags in smaps are checked instead",
)
def test_a_core_dump_holds_and_takes_only_what_was_touched(tmp_path: Path) -> None:
    script = f"""
import os, resource, signal, time
from minato._core.segment import Segment
segments = [Segment(1 << 32), Segment(1 << 32, shared=False)]  # of which all pages are looked at
for segment in segments:
    segment.array[0] = 1
child = os.fork()
if child == 0:
    os.chdir({str(tmp_path)!r})
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.abort()
_, status = os.waitpid(child, 0)
print(os.WCOREDUMP(status), os.fstat(segments[0].descriptor).st_blocks * 512)
"""
    dumped, nbytes = output("-c", script).split()
    if dumped != "True":
        pytest.skip("this machine makes no core dumps")
    assert int(nbytes) == PAGE
    (core,) = tmp_path.iterdir()
    assert core.stat().st_size < 1 << 32  # Python without a GIL has reserved more than 1 GiB itself
