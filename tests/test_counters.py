"""Counts that several processes add to."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from types import SimpleNamespace

import pytest
from torch.utils.data._utils import worker as torch_worker

from minato._support.counters import Counters, shared_integers


def count(counters: Counters, worker: int, times: int) -> None:
    torch_worker._worker_info = SimpleNamespace(id=worker)
    for _ in range(times):
        counters.add(red=2, blue=1)


def count_in_processes(counters: Counters, method: str, workers: list[int], times: int) -> None:
    make = multiprocessing.get_context(method).Process
    processes = [make(target=count, args=(counters, worker, times)) for worker in workers]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_other_processes_count_too(method: str) -> None:
    counters = Counters("red", "blue")
    counters.add(red=1)
    count_in_processes(counters, method, [0, 1], 1)
    assert counters.totals() == [5, 2]


def test_each_worker_of_many_has_a_row_of_its_own() -> None:
    counters = Counters("red", "blue")
    workers = [0, 63, 255, 256, 511, 4095, 4158, 4159, 1 << 21]  # the last of readers of many ranks
    count_in_processes(counters, "fork", workers, 2000)
    assert counters.totals() == [4000 * len(workers), 2000 * len(workers)]
    assert int((counters._rows[..., 2] == 2000).sum()) == len(workers)


def test_processes_that_count_as_one_number_have_lanes_of_their_own() -> None:
    """Workers of several loaders have the same numbers."""
    counters, context = Counters("red"), multiprocessing.get_context("fork")
    all_count = context.Barrier(4, timeout=60)

    def count_beside_others() -> None:
        counters.add(red=1)
        all_count.wait()

    processes = [context.Process(target=count_beside_others) for _ in range(3)]
    for process in processes:
        process.start()
    count_beside_others()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    lanes = counters._rows[..., 1].flatten()
    assert lanes[lanes > 0].tolist() == [1] * 4
    for _ in range(20):  # the lane of one that has ended is free again
        process = context.Process(target=counters.add, kwargs={"red": 1})
        process.start()
        process.join()
    lanes = counters._rows[..., 1].flatten()
    assert int((lanes > 0).sum()) == 4
    assert counters.totals() == [24]


def test_a_pickle_holds_what_was_counted() -> None:
    counters = Counters("red")
    counters.add(red=3)
    data = pickle.dumps(counters)
    copied = pickle.loads(data)
    assert len(data) < 2000
    counters.add(red=1)
    assert (copied.totals(), counters.totals()) == ([3], [4])
    copied.add(red=1)
    assert copied.totals() == [4]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory has a name here")
def test_the_memory_never_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # of what earlier tests have left
    opened = os.listdir("/proc/self/fd")
    monkeypatch.setattr("torch.UntypedStorage._share_fd_cpu_", None)
    integers = shared_integers(4, 8)
    assert integers.is_shared()
    assert integers.shape == (4, 8)
    assert not integers.any()
    del integers
    assert os.listdir("/proc/self/fd") == opened
