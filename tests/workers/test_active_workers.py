"""Who works and who stands by."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from minato._core import EVENT_COUNT_NBYTES, EventCount
from minato._system import machine_usage, process_usage, thread_usage
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.workers.shared_state import ActiveWorkers
from tests.datasets import wait_until


@pytest.fixture
def active_workers() -> ActiveWorkers:
    memory = np.zeros(ActiveWorkers.NBYTES + EVENT_COUNT_NBYTES, np.uint8)
    return ActiveWorkers(memory, 0, EventCount(memory, ActiveWorkers.NBYTES))


def test_an_active_worker_does_not_sleep(active_workers):
    active_workers.set_count(1)
    assert active_workers.wait_until_active(0, lambda: False, lambda: True)
    # What is left is its work, too.
    assert active_workers.wait_until_active(0, lambda: True, lambda: False)


def test_a_worker_sleeps_until_it_is_active(active_workers):
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(active_workers.wait_until_active, 1, lambda: False, lambda: True)
        active_workers.set_count(1)
        assert not waits.done()
        active_workers.set_count(2)
        assert waits.result(60)


def test_an_inactive_worker_exits_when_the_loader_shuts_down(active_workers):
    over = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(active_workers.wait_until_active, 1, over.is_set, lambda: True)
        over.set()
        active_workers.wake_inactive()
        assert not waits.result(60)


def test_a_worker_without_a_parent_leaves(active_workers, monkeypatch):
    monkeypatch.setattr("minato.workers.shared_state._PATIENCE_S", 0.01)
    assert not active_workers.wait_until_active(1, lambda: False, lambda: False)


def test_a_change_wakes_those_who_wait_for_work():
    memory = np.zeros(ActiveWorkers.NBYTES + EVENT_COUNT_NBYTES, np.uint8)
    work = EventCount(memory, ActiveWorkers.NBYTES)
    seen = work.events
    ActiveWorkers(memory, 0, work).set_count(1)
    assert work.events != seen


def burn(iterations: int = 300_000) -> int:
    return sum(i * i for i in range(iterations))


def test_usage_of_a_process_and_of_a_thread_grows_with_work():
    threads = [threading.get_native_id()]
    before_process, before_thread = process_usage([os.getpid()]), thread_usage(threads)
    wait_until(
        lambda: burn() > 0 and thread_usage(threads).ran_ns - before_thread.ran_ns > 30_000_000
    )
    assert process_usage([os.getpid()]).ran_ns - before_process.ran_ns >= 20_000_000


def test_usage_of_what_is_gone_is_nothing():
    assert process_usage([2**30]) == (0, 0)
    assert thread_usage([2**30]) == (0, 0)


def test_usage_of_the_machine_is_no_more_than_there_is():
    used_s, there_s = machine_usage()
    assert 0 < used_s <= there_s


def test_a_window_grows_with_the_workers_and_keeps_what_it_had():
    window = PrefetchWindow(2, fixed=None, budget_bytes=1 << 40)
    window.resize(5)
    assert window.limit == 10
    window.resize(1)
    assert window.limit == 10
    bounded = PrefetchWindow(2, fixed=None, budget_bytes=1 << 40, max_batches=6)
    bounded.resize(5)
    assert bounded.limit == 6
    fixed = PrefetchWindow(2, fixed=3, budget_bytes=1 << 40)
    fixed.resize(5)
    assert fixed.limit == 3
