from __future__ import annotations

import time
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

TWIN = "clock"


def test_now_is_the_monotonic_clock_of_the_system(twin: ModuleType) -> None:
    before_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    now_ns = twin.now_ns()
    after_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert type(now_ns) is int
    assert before_ns <= now_ns <= after_ns


def test_thread_cpu_counts_work_and_not_sleep(twin: ModuleType) -> None:
    start_ns = twin.thread_cpu_ns()
    time.sleep(0.05)
    slept_ns = twin.thread_cpu_ns() - start_ns
    deadline_ns = time.thread_time_ns() + 20_000_000
    while time.thread_time_ns() < deadline_ns:
        pass
    worked_ns = twin.thread_cpu_ns() - start_ns - slept_ns
    assert 0 <= slept_ns < 20_000_000
    assert worked_ns >= 20_000_000


@given(start_ns=st.integers(0, 2**62))
def test_a_timeout_of_zero_has_expired_and_a_negative_one_never_does(
    twin: ModuleType, start_ns: int
) -> None:
    assert twin.expired(start_ns, 0) is True
    assert twin.expired(start_ns, -1) is False


@given(ago_ns=st.integers(0, 2**40), timeout_ns=st.integers(1, 2**40))
def test_expired_compares_the_time_since_the_start(
    twins: tuple[ModuleType, ModuleType], ago_ns: int, timeout_ns: int
) -> None:
    grace_ns = 10**12
    start_ns = time.monotonic_ns() - ago_ns
    for twin in twins:
        if timeout_ns <= ago_ns:
            assert twin.expired(start_ns, timeout_ns) is True
        elif timeout_ns > ago_ns + grace_ns:
            assert twin.expired(start_ns, timeout_ns) is False


def test_a_timeout_expires_when_its_time_has_passed(twin: ModuleType) -> None:
    start_ns = twin.now_ns()
    assert not twin.expired(start_ns, 60_000_000_000)
    time.sleep(0.01)
    assert twin.expired(start_ns, 10_000_000)


@pytest.mark.parametrize("arguments", [("now", 1), (1, None)], ids=["start", "timeout"])
def test_arguments_are_numbers(twin: ModuleType, arguments: tuple[object, object]) -> None:
    with pytest.raises(TypeError):
        twin.expired(*arguments)
