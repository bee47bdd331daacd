"""Gates: nobody sleeps through an event. Every test runs on both twins."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

from tests.subprocesses import fork

TWIN = "wait"

PATIENCE_S = 60.0
"""How long a player waits: so long that one lost wake-up fails the test."""
ROUNDS = 20_000
PLAY_S = 3.0
STOP = -1


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Processes that the test forks; none of them outlives it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def counters(memory: mmap.mmap, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers in shared memory, each on its own cache line."""
    return np.frombuffer(memory, np.int64, 8 * count, 1024)[::8]


def hold_until(event_count: Any, is_true: Callable[[], bool]) -> None:
    """Wait for an event as every user does, and fail where an event was slept through."""
    while True:
        seen = event_count.events
        if is_true():
            return
        begun = time.monotonic()
        if not event_count.wait(seen, PATIENCE_S) and time.monotonic() - begun > PATIENCE_S / 2:
            pytest.fail("slept through an event" if is_true() else "the others stand still")


def busy(random_s: random.Random) -> None:
    """Do nothing for up to 20 µs: notifiers then hit every moment between looking and sleeping."""
    end = time.perf_counter() + random_s.random() * 20e-6
    while time.perf_counter() < end:
        pass


def rounds(least: int) -> Iterator[int]:
    """Numbers of rounds, as many as there is time for; then ``STOP``."""
    deadline = time.monotonic() + PLAY_S
    yield from (n for n in range(1, ROUNDS) if n <= least or time.monotonic() < deadline)
    yield STOP


def reap(children: list[int]) -> None:
    """Wait until all have ended as they should."""
    while children:
        assert os.waitstatus_to_exitcode(os.waitpid(children.pop(), 0)[1]) == 0


def test_no_wake_up_is_lost_between_two_processes(
    twin: ModuleType, memory: mmap.mmap, children: list[int]
) -> None:
    event_counts = [twin.EventCount(memory, 0), twin.EventCount(memory, 64)]
    balls = counters(memory, 2)

    def answer() -> None:
        delay = random.Random(1)
        for number in itertools.count(1):
            hold_until(event_counts[1], lambda number=number: balls[1] in (number, STOP))
            if balls[1] == STOP:
                return
            if number % 2:
                busy(delay)
            balls[0] = number
            event_counts[0].notify()

    children.append(fork(answer))
    delay = random.Random(2)
    for number in rounds(least=1001):
        if number % 3:
            busy(delay)
        balls[1] = number
        event_counts[1].notify()
        if number != STOP:
            hold_until(event_counts[0], lambda number=number: balls[0] == number)
    assert balls[0] > 1000
    reap(children)


@pytest.mark.slow
def test_no_wake_up_is_lost_between_many_notifiers_and_sleepers(
    twin: ModuleType, memory: mmap.mmap, children: list[int]
) -> None:
    """Three processes count up; each round begins for all at once and ends with the last of them."""
    start, finish = twin.EventCount(memory, 0), twin.EventCount(memory, 64)
    players = 3
    numbers = counters(memory, players + 1)

    def play(me: int) -> None:
        delay = random.Random(me)
        for number in itertools.count(1):
            hold_until(start, lambda number=number: numbers[players] in (number, STOP))
            if numbers[players] == STOP:
                return
            busy(delay)
            numbers[me] = number
            finish.notify()

    children.extend(fork(lambda me=me: play(me)) for me in range(players))
    for number in rounds(least=301):
        numbers[players] = number
        start.notify()
        if number != STOP:
            hold_until(finish, lambda number=number: bool((numbers[:players] == number).all()))
    assert numbers[0] > 300
    reap(children)


def test_no_event_is_lost_between_notifiers(
    twin: ModuleType, memory: mmap.mmap, children: list[int]
) -> None:
    """Numbers of events never repeat: whoever sees the same number again has missed nothing."""
    event_count = twin.EventCount(memory, 0)
    notifiers, each = 4, 5000

    def notify() -> None:
        for _ in range(each):
            event_count.notify()

    children.extend(fork(notify) for _ in range(notifiers))
    reap(children)
    assert event_count.events == notifiers * each


def test_threads_hand_over_without_the_interpreter_lock(
    twin: ModuleType, memory: mmap.mmap
) -> None:
    event_counts = [twin.EventCount(memory, 0), twin.EventCount(memory, 64)]
    turn = [0]

    def play(me: int) -> None:
        for number in range(me, 1000, 2):
            hold_until(event_counts[me], lambda number=number: turn[0] == number)
            turn[0] = number + 1
            event_counts[1 - me].notify()

    thread = threading.Thread(target=play, args=(1,))
    thread.start()
    play(0)
    thread.join()
    assert turn[0] == 1000


def test_an_event_before_the_sleep_is_not_missed(twin: ModuleType, memory: mmap.mmap) -> None:
    event_count = twin.EventCount(memory, 0)
    seen = event_count.events
    event_count.notify()
    begun = time.monotonic()
    assert event_count.wait(seen, PATIENCE_S) is True
    assert time.monotonic() - begun < PATIENCE_S / 2


def test_waiting_ends_after_the_timeout(twin: ModuleType, memory: mmap.mmap) -> None:
    event_count = twin.EventCount(memory, 0)
    begun = time.monotonic()
    assert event_count.wait(event_count.events, 0.05) is False
    assert 0.05 <= time.monotonic() - begun < PATIENCE_S / 2
    assert event_count.sleepers == 0


def test_a_signal_ends_the_waiting(twin: ModuleType, memory: mmap.mmap) -> None:
    event_count = twin.EventCount(memory, 0)
    caught = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: caught.append(time.monotonic()))

    def send() -> None:
        while not caught:  # one that comes just before the sleep does not end it
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    try:
        begun = time.monotonic()
        sender.start()
        while not caught:
            assert event_count.wait(event_count.events, PATIENCE_S) is False
        assert caught[0] - begun < PATIENCE_S / 2
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, previous)


def test_events_are_counted_round_the_end_of_32_bits(twin: ModuleType, memory: mmap.mmap) -> None:
    memory[0:4] = b"\xff" * 4
    event_count = twin.EventCount(memory, 0)
    assert event_count.events == 2**32 - 1
    event_count.notify()
    assert event_count.events == 0
    assert event_count.wait(2**32 - 1, PATIENCE_S) is True
    assert event_count.wait(0, 0.01) is False


def test_two_event_counts_do_not_disturb_each_other(twin: ModuleType, memory: mmap.mmap) -> None:
    first, second = twin.EventCount(memory, 0), twin.EventCount(memory, twin.EVENT_COUNT_NBYTES)
    first.notify()
    assert (first.events, second.events) == (1, 0)
    assert memory[: 2 * twin.EVENT_COUNT_NBYTES] == b"\x01" + bytes(15)


def sleeping(pids: list[int]) -> bool:
    """Whether all of these processes sleep, and not just for a moment."""
    looks = []
    for _ in range(10):
        looks += [psutil.Process(pid).status() for pid in pids]
        time.sleep(0.01)
    return set(looks) == {psutil.STATUS_SLEEPING}


def sleepers(event_count: Any, woken: Any, children: list[int], count: int) -> None:
    """Fork processes that sleep and then say that they woke up."""

    def sleep(me: int) -> None:
        event_count.wait(0, PATIENCE_S)
        woken[me] = 1

    children.extend(fork(lambda me=me: sleep(me)) for me in range(count))
    while not sleeping(children):
        pass


def test_as_many_are_woken_as_asked_for(
    twin: ModuleType, memory: mmap.mmap, children: list[int]
) -> None:
    event_count, woken = twin.EventCount(memory, 0), counters(memory, 3)
    sleepers(event_count, woken, children, 3)
    event_count.notify(1)
    deadline = time.monotonic() + PATIENCE_S / 2
    while not woken.any() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert woken.sum() == 1
    event_count.notify()
    reap(children)
    assert woken.tolist() == [1, 1, 1]


def test_a_killed_sleeper_disturbs_nobody(
    twin: ModuleType, memory: mmap.mmap, children: list[int]
) -> None:
    event_count, woken = twin.EventCount(memory, 0), counters(memory, 2)
    sleepers(event_count, woken, children, 2)
    killed = children.pop(0)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    event_count.notify()
    reap(children)
    assert woken.tolist() == [0, 1]
    assert event_count.wait(0, PATIENCE_S) is True


def test_a_place_that_is_none_is_refused(twin: ModuleType, memory: mmap.mmap) -> None:
    for offset in (-8, 4, 4096, 4092):
        words = f"offset {offset} is no place for an event count in 4096 bytes"
        with pytest.raises(ValueError, match=words):
            twin.EventCount(memory, offset)
    with pytest.raises(BufferError):
        twin.EventCount(bytes(64), 0)


def test_an_event_count_keeps_its_memory(twin: ModuleType, memory: mmap.mmap) -> None:
    event_count = twin.EventCount(memory, 0)
    with pytest.raises(BufferError):
        memory.close()
    del event_count
    memory.close()


def test_shared_words_are_seen_by_every_view_and_keep_their_sign(twin: ModuleType) -> None:
    memory = bytearray(8 + twin.SharedWords.nbytes(3))
    words, others = twin.SharedWords(memory, 8, 3), twin.SharedWords(memory, 8, 3)
    for index, value in enumerate((-1, 0, 2**62)):
        words.store(index, value)
    assert [others.load(index) for index in range(3)] == [-1, 0, 2**62]
    assert memory[:8] == bytes(8)


def test_words_that_do_not_exist_or_do_not_fit_are_refused(twin: ModuleType) -> None:
    words = twin.SharedWords(bytearray(64), 0, 3)
    for index in (-1, 3, 2**40):
        for use, given in ((words.load, (index,)), (words.store, (index, 1))):
            with pytest.raises(IndexError, match=f"word {index} is not one of 3"):
                use(*given)
    for offset, count in ((0, 8), (4, 1), (-8, 1), (64, 0), (0, -1)):
        with pytest.raises(ValueError, match=f"{count} words at offset {offset} do not fit 64"):
            twin.SharedWords(bytearray(64), offset, count)
