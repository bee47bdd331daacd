"""A cache on a disk that processes, forks and threads use at once, and that some leave in the middle of a write."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import minato
from minato import _fork_safety
from minato.caching import DiskCache, MemoryCache

pytest.importorskip("lmdb", reason="lmdb is not installed: install the extra 'test'")

from minato import caching
from tests.datasets import flat, forked, indices
from tests.selection import mostly_slow
from tests.threads import run_together

QUOTA = 1 << 30
LIMIT_S = 60.0
FORK = multiprocessing.get_context("fork")


def exit_code(target: Any, *arguments: Any) -> int | None:
    """Of a child that calls a function; None: it hangs."""
    child = FORK.Process(target=target, args=arguments)
    child.start()
    child.join(LIMIT_S)
    code = child.exitcode
    child.kill()
    return code


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def value_of(number: int) -> bytes:
    """A value of one byte to half a megabyte, which follows from its number."""
    size = random.Random(number).choice([1, 1500, 5000, 40_000, 500_000])
    return hashlib.shake_128(b"%d" % number).digest(size)


def check(cache: DiskCache, numbers: range) -> int:
    """How many of these entries there are; each must be whole."""
    found = 0
    for number in numbers:
        there, value = cache.get(key_of(number))
        assert not there or value == value_of(number)
        found += there
    assert cache.report().damaged == 0
    files = cache._environment()
    with files._files.begin(db=files._samples) as view:
        assert cache.stored_bytes == sum(len(value) for _, value in view.cursor())
    return found


def write_on(cache: DiskCache, started: Any) -> None:
    for number in range(10_000):
        cache.put(key_of(number), value_of(number))
        if number % 7 == 6:
            cache.drop(key_of(number - 3))
        if number == 5:
            started.set()


def test_writers_that_are_killed_leave_whole_entries(disk: Any) -> None:
    cache = disk(version="1")
    for turn in range(5):
        begun = FORK.Event(), FORK.Event()
        writers = [FORK.Process(target=write_on, args=(cache, started)) for started in begun]
        for writer in writers:
            writer.start()
        for writer, started in zip(writers, begun, strict=True):
            assert started.wait(LIMIT_S)
            if turn % 2:
                os.kill(writer.pid or 0, signal.SIGSTOP)  # in the middle of whatever it does
            writer.kill()
            writer.join(LIMIT_S)
            assert writer.exitcode == -signal.SIGKILL
        assert check(cache, range(500)) > 0
        cache.put(key_of(10_000 + turn), "still writable")
        assert cache.get(key_of(10_000 + turn)) == (True, "still writable")


def use(cache: DiskCache, first: int) -> None:
    for number in range(first, first + 30):
        cache.put(key_of(number), value_of(number))
        assert cache.get(key_of(number)) == (True, value_of(number))


def test_children_that_are_forked_while_threads_use_it(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fork_safety, "_PATIENCE_S", LIMIT_S)
    cache, ended = disk(version="1"), threading.Event()

    def busy(start: int) -> None:
        while not ended.is_set():
            use(cache, start)
            own = key_of(1000 + start)  # what others use must stay until they have got it
            cache.put(own, value_of(1000 + start))
            cache.drop(own)

    with ThreadPoolExecutor(3) as threads:
        works = [threads.submit(busy, 100 * i) for i in range(3)]
        try:
            assert [exit_code(use, cache, 20 * turn) for turn in range(4)] == [0] * 4
        finally:
            ended.set()
        for work in works:
            work.result(LIMIT_S)
    assert cache.report().errors == 0
    check(cache, range(400))


class Importing:
    """A sample whose pickling and unpickling take a while, as those of a module's first object."""

    begun = threading.Event()
    lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        self._import()
        return {"k": 1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._import()

    def _import(self) -> None:
        with self.lock:
            self.begun.set()
            time.sleep(0.1)


def leave_if_free() -> None:
    os._exit(Importing.lock.locked())


def test_no_child_is_forked_while_a_thread_pickles_a_sample() -> None:
    """It would wait forever for the lock of a module that the thread imports."""
    cache = MemoryCache(QUOTA)
    for action in (lambda: cache.put(key_of(1), Importing()), lambda: cache.get(key_of(1))):
        Importing.begun.clear()
        with ThreadPoolExecutor(1) as threads:
            work = threads.submit(action)
            assert Importing.begun.wait(LIMIT_S)
            assert exit_code(leave_if_free) == 0
            work.result(LIMIT_S)
    assert cache.report().hits == 1


def lack(cache: DiskCache) -> None:
    with pytest.warns(
        RuntimeWarning, match="was forked while a thread of its parent was in a call"
    ):
        assert cache.get(key_of(1)) == (False, None)


def test_a_child_whose_fork_interrupts_a_write_goes_without_it(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fork_safety, "_PATIENCE_S", 0.01)
    cache = disk(version="1")
    cache.put(key_of(1), 5)
    within, may_end = threading.Event(), threading.Event()

    def write() -> None:
        with caching._one_at_a_time(), cache._environment()._files.begin(write=True):
            within.set()
            may_end.wait(LIMIT_S)

    writer = threading.Thread(target=write)
    writer.start()
    assert within.wait(LIMIT_S)
    code = exit_code(lack, cache)
    may_end.set()
    writer.join()
    assert code == 0
    use(cache, 2)


@mostly_slow("turns", [6, 30])
def test_threads_open_and_close_it_while_others_use_it(tmp_path: Path, turns: int) -> None:
    def work(thread: int) -> None:
        for turn in range(turns):
            cache = DiskCache(tmp_path, QUOTA, version="1")
            use(cache, 1000 * thread + 20 * turn)
            assert cache.report().errors == 0
            if turn % 2:
                cache.close()  # the others are closed when they are collected

    run_together(*(functools.partial(work, thread) for thread in range(4)), limit_s=LIMIT_S)


def test_two_loaders_share_it_in_threads_and_forks(disk: Any) -> None:
    training = minato.DataLoader(
        range(300), 4, shuffle=True, num_workers=2, workers="thread", cache=disk()
    )  # fmt: skip
    validation = minato.DataLoader(
        range(1000, 1016), 4, cache=disk(), timeout=LIMIT_S, **forked(2)
    )  # fmt: skip
    seen: list[int] = []
    for batch in training:
        seen += batch.tolist()
        if len(seen) % 60 == 0:  # in the middle of an epoch, while threads run
            assert flat(indices(validation)) == list(range(1000, 1016))
    assert sorted(seen) == list(range(300))
    assert validation.cache.report().hits >= 16
    for loader in (training, validation):
        assert loader.cache.report().errors == 0


def test_what_ended_workers_wrote_is_on_the_disk(disk: Any) -> None:
    cache = disk(version="1")
    assert len(list(minato.DataLoader(range(20), 4, num_workers=2, cache=cache))) == 5
    files = cache._environment()
    assert files._last() >= 20
    assert files._stamp() == (caching._boot(), files._last())


def write_and_die(cache: DiskCache, count: int) -> None:
    for number in range(count):
        cache.put(key_of(number), value_of(number))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_synced", [True, False])
def test_after_a_restart_of_the_machine_only_what_was_written_out_counts(
    is_synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, QUOTA, version="1")
    assert exit_code(write_and_die, cache, 20) == -signal.SIGKILL
    if is_synced:
        cache.put(key_of(20), value_of(20))
    assert check(cache, range(20)) == 20
    cache.close()
    del cache
    monkeypatch.setattr(caching, "_boot", lambda: b"the next start..")
    cache = DiskCache(tmp_path, QUOTA, version="1")
    assert check(cache, range(20)) == (20 if is_synced else 0)
    assert cache.report().errors == 0
    use(cache, 0)
    cache.close()


def test_an_opening_that_another_process_holds_up_is_given_up(
    disk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "_PATIENCE_S", 0.1)
    held = caching._locked(tmp_path / "opening.lock")
    with held, pytest.warns(RuntimeWarning, match="held by another process"):
        assert disk(version="1").get(key_of(1)) == (False, None)
    other = disk(version="1")
    other.put(key_of(1), 5)
    assert other.get(key_of(1)) == (True, 5)
