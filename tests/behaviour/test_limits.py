"""Limits of the system: what fits, fits; what does not, says which limit it met."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minato import DataLoader
from minato._core.limits import slot_overflow
from minato._core.segment import Segment
from minato._support.counters import Counters
from minato._support.files import anonymous_log
from minato._system import available_memory_bytes
from minato.batching import arena
from minato.sampling.readers import StateSlots
from tests.subprocesses import run

GIB = 1 << 30


@pytest.mark.slow
def test_more_iterators_live_at_once_than_anybody_has() -> None:
    assert run("many.py", "iterators", 520) == "held 520 iterators\n"


def test_a_slot_has_room_for_batches_of_many_gibibytes() -> None:
    gc.collect()  # living segments share the address space, and earlier tests may have left some in cycles
    slots = arena.Arena(shared=False)
    first = slots.acquire()
    assert first.end - first.start > 16 * GIB
    view = slots.lease(first, 0)
    view[-1] = 7
    assert view[-1] == 7


def test_without_workers_any_number_of_batches_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RESERVE_BYTES", "_LEAST_RESERVE_BYTES"):
        monkeypatch.setattr(arena, name, 8 << 20)
    dataset = torch.arange(12.0)[:, None].expand(-1, 1 << 18)
    assert torch.equal(torch.cat(list(DataLoader(dataset, 1))), dataset)


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_of_more_than_4_gib(num_workers: int) -> None:
    """It takes 7 GB for half a minute."""
    if available_memory_bytes() < 12 * GIB:
        pytest.skip("needs 12 GiB of memory")
    assert run("many.py", "large", num_workers) == "delivered 4404019200 bytes\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("files", r"limit on the size of files, which is 1048576 bytes.*ulimit -f.*num_workers=0"),
        ("0", r"may have \d+ open files and has no more to spare: raise the limit \(ulimit -n\)"),
        ("4", r"cannot start a worker process: .*may have \d+ open files.*\(ulimit -n\)"),
    ],
)
def test_a_start_that_meets_a_limit_names_it(limit: str, words: str) -> None:
    """And without workers the same program goes on."""
    assert re.search(words, run("faulted.py", "refused", limit))


def test_a_limit_on_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, resource.RLIM_INFINITY))
    with pytest.raises(
        OSError, match=r"reserve \d+ bytes.*limit on address space is 1099511627776"
    ):
        Segment(1 << 62, 1 << 62, shared=False)
    assert "1099511627776 bytes (ulimit -v)" in slot_overflow(1)
    monkeypatch.undo()
    assert "ulimit" not in slot_overflow(1)
    with pytest.raises(OSError, match=r"vm\.overcommit_memory"):
        Segment(1 << 62, 1 << 62, shared=False)


def test_a_temporary_directory_with_too_long_a_path_is_named(tmp_path: Path) -> None:
    """Python's fork server has a socket there."""
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    program = (
        "import torch, minato\n"
        "if __name__ == '__main__':\n"
        "    server = {'num_workers': 1, 'multiprocessing_context': 'forkserver'}\n"
        "    list(minato.DataLoader(torch.arange(3), **server))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"temporary directory {str(folder)!r}" in ended.stderr
    assert "set TMPDIR to a shorter one" in ended.stderr


@pytest.mark.parametrize(
    "make",
    [lambda: Segment(4096), lambda: Counters("a"), lambda: StateSlots(1, 2), anonymous_log],
    ids=["segment", "counters", "states", "log"],
)
def test_a_refused_memfd_is_named(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(PermissionError, match=r"security policy.*num_workers=0"):
        make()
    assert torch.cat(list(DataLoader(range(8), 4))).tolist() == list(range(8))  # type: ignore[arg-type]
