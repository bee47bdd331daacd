"""No fork happens while a thread of ours is at work."""

from __future__ import annotations

import threading

import pytest

from minato import _fork_safety
from minato._fork_safety import at_work, forget_in_children
from tests.edges.test_forks import code_of, forked


def test_a_fork_waits_for_a_thread_that_is_at_work() -> None:
    held, goes_on, events = threading.Event(), threading.Event(), []

    def work() -> None:
        with at_work() as undisturbed:
            assert undisturbed
            held.set()
            goes_on.wait(60)
            events.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    assert held.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    assert code_of(forked(lambda: events == ["worked"])) == 0
    thread.join()


def test_nobody_waits_for_a_fork_that_is_under_way() -> None:
    seen = []

    def work() -> None:
        with at_work() as undisturbed:
            seen.append(undisturbed)

    with at_work():  # as a fork does
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    assert seen == [False, True]


def test_children_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fork_safety, "_forgotten", [])
    told: list[int] = []
    forget_in_children(lambda: told.append(1))

    def has_forgotten() -> bool:
        with at_work() as undisturbed:
            return undisturbed and told == [1]

    assert code_of(forked(has_forgotten)) == 0
    assert told == []
