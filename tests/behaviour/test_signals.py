"""Signals, whenever they come: what handlers raise outside of finalizers ends the program, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from minato import DataLoader
from minato._fork_safety import signals_deferred
from tests.datasets import Numbers, wait_until
from tests.selection import mostly_slow
from tests.subprocesses import run
from tests.threads import wait_for_main

PROGRAMS = ["fork", "spawn", "forkserver", "thread", "inline"]


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Handlers of two signals: one leaves, as those of trainers do, one takes notes."""
    arrived: list[int] = []

    def leave(number: int, _: Any) -> None:
        arrived.append(number)
        sys.exit(143)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, leave),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number)),
        signal.SIGINT: signal.getsignal(signal.SIGINT),
    }
    yield arrived
    for number, handler in before.items():
        signal.signal(number, handler)


# ---- around forks ---------------------------------------------------------------------------


def test_signals_are_handled_at_the_end_of_the_block(handlers: list[int]) -> None:
    before = installed()
    ended = None
    with pytest.raises(SystemExit), signals_deferred():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        wait_until(lambda: True, 1)
        ended = [*handlers]
    assert ended == []
    assert sorted(handlers) == sorted([signal.SIGTERM, signal.SIGUSR1])
    assert installed() == before


def installed() -> list[Any]:
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


def test_an_interrupt_that_comes_while_handlers_change_leaves_them_as_they_were(
    handlers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = installed()
    change, calls = signal.signal, 0

    def interrupted(number: int, handler: Any) -> Any:
        nonlocal calls
        calls += 1
        result = change(number, handler)
        if calls == changes:
            raise KeyboardInterrupt
        return result

    for changes in itertools.count(1):
        calls = 0
        try:
            with monkeypatch.context() as patch:
                patch.setattr(signal, "signal", interrupted)
                with signals_deferred():
                    pass
        except KeyboardInterrupt:
            assert installed() == before, changes
        else:
            break
    assert changes > 6  # three handlers, each replaced and restored


def test_an_alarm_at_any_time_leaves_them_as_they_were(handlers: list[int]) -> None:
    """Not only between two lines: what a handler raises comes at any jump and after any call."""
    before, draws, inside = installed(), random.Random(0), 0
    interrupt = signal.default_int_handler
    alarm = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(4000):
            entered = left = False
            with suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_REAL, draws.random() * 2e-4 + 1e-6)
                    with signals_deferred():
                        entered = True
                        sum(map(len, map(str, range(100))))
                        left = True
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            inside += entered and not left
            assert signal.getsignal(signal.SIGALRM) is interrupt
    finally:
        signal.signal(signal.SIGALRM, alarm)
    assert (inside, installed()) == (0, before)


def test_a_signal_that_comes_twice_is_handled_once(handlers: list[int]) -> None:
    with signals_deferred():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert handlers == [signal.SIGUSR1]


def test_an_event_loop_hears_of_a_signal_once() -> None:
    heard: list[int] = []

    async def work() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.append, 1)
        with signals_deferred():
            os.kill(os.getpid(), signal.SIGUSR1)
        while not heard:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    asyncio.run(work())
    assert heard == [1]


def test_a_handler_that_the_block_installs_stays(handlers: list[int]) -> None:
    mine: list[int] = []
    with signals_deferred():
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: True, 1)
        signal.signal(signal.SIGUSR1, lambda number, _: mine.append(number))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert (handlers, mine) == ([], [signal.SIGUSR1] * 2)


def test_a_forked_child_has_its_handlers_at_once_and_none_of_the_parents_signals(
    handlers: list[int],
) -> None:
    with signals_deferred():
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: True, 1)
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            except SystemExit:
                os._exit(5 if handlers == [signal.SIGTERM] else 7)
            finally:
                os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_other_threads_need_no_deferral(handlers: list[int]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with signals_deferred():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    leave.set()
    thread.join()


# ---- in finalizers --------------------------------------------------------------------------


def test_an_iterator_leaves_signals_to_the_program(
    handlers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler raises in a finalizer is Python's to report, once."""
    ignored: list[type[BaseException]] = []

    def hook(seen: Any) -> None:
        ignored.append(seen.exc_type)

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    before = installed()
    others = threading.active_count()  # a library's may stay from another test
    assert len(list(DataLoader(Numbers(8), 4, num_workers=2))) == 2
    Finalized()
    assert sys.unraisablehook is hook
    assert installed() == before
    wait_until(lambda: threading.active_count() == others)
    assert (ignored, handlers) == ([SystemExit], [signal.SIGTERM])


class Stuck(Numbers):
    """Only the first four samples come before the test is over."""

    def __init__(self) -> None:
        super().__init__(64)
        # Not an Event, whose set() would wait for a process that ended.
        self.is_stuck = multiprocessing.RawValue("b", 0)
        self.over = multiprocessing.RawValue("b", 0)

    def __getitem__(self, index: int) -> int:
        while index >= 4 and not self.over.value:
            self.is_stuck.value = 1
            time.sleep(0.01)
        return index


def signal_at_the_end_of_workers(number: int, *place: str) -> None:
    """Send this process a signal while its main thread waits for workers to end."""
    wait_for_main(*place)
    time.sleep(0.1)
    os.kill(os.getpid(), number)


@mostly_slow("number", [signal.SIGINT, signal.SIGTERM])
@mostly_slow(
    "options",
    [{}, {"persistent_workers": True}, {"workers": "thread"}],
    ids=["processes", "persistent", "threads"],
)
def test_a_signal_while_a_dropped_iterator_ends_its_workers(
    handlers: list[int],
    number: signal.Signals,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("supervision", "pools"):  # without the signal it would wait for ever
        monkeypatch.setattr(f"minato.workers.{module}._GRACE_S", 3600.0)
    others = threading.active_count()
    dataset = Stuck()
    loader = DataLoader(dataset, 4, num_workers=2, **options)
    iterator = iter(loader)
    next(iterator)
    wait_until(lambda: dataset.is_stuck.value == 1)  # a worker that has nothing to do ends at once
    place = ("threading.py", "join") if "workers" in options else ("supervision.py", "outlast")
    sender = threading.Thread(target=signal_at_the_end_of_workers, args=(number, *place))
    ignored: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: ignored.append(seen.exc_type))
    sender.start()
    del loader, iterator  # waits for the workers
    gc.collect()
    assert ignored == [KeyboardInterrupt if number == signal.SIGINT else SystemExit]
    assert multiprocessing.active_children() == []
    dataset.over.value = 1
    sender.join()
    wait_until(lambda: threading.active_count() == others)


ENDINGS = {"end_engine", "shut_down", "_end_threads"}


@contextmanager
def interrupted_at(place: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at one of the lines by which a finalizer ends workers, counted from 0."""
    left = iter(range(place))

    def trace(frame: FrameType, event: str, _: object) -> Any:
        is_here = event == "line" and frame.f_code.co_name in ENDINGS
        if is_here and next(left, None) is None:
            raise KeyboardInterrupt  # and Python forgets the tracer
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("options", [{}, {"workers": "thread"}], ids=["processes", "threads"])
def test_a_finalizer_that_is_interrupted_at_any_line_ends_the_workers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: ignored.append(seen.exc_type))
    others = threading.active_count()
    for place in range(100):
        iterator = iter(
            DataLoader(Numbers(8), 4, num_workers=1, persistent_workers=True, **options)
        )
        next(iterator)
        with interrupted_at(place):
            del iterator
            gc.collect()
        wait_until(lambda: threading.active_count() == others)
        assert multiprocessing.active_children() == []
        if len(ignored) <= place:
            break
    assert 5 < len(ignored) == place
    assert {*ignored} == {KeyboardInterrupt}


# ---- at random moments ----------------------------------------------------------------------


def check_random_moments(method: str, moments: int, seconds: float, seed: int) -> None:
    out = run("interrupted.py", method, moments, seconds, seed, timeout_s=seconds + 150)
    found = json.loads(out)
    print(method, {**found, "lost": len(found["lost"])})
    assert found["moments"] > 0
    assert found["lost"] == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "thread", "inline"])
def test_a_few_random_moments(method: str) -> None:
    check_random_moments(method, 12, 20.0, 5)


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("method", PROGRAMS)
def test_random_moments(method: str, stress_s: float) -> None:
    check_random_moments(method, 1000, stress_s, int(stress_s))
