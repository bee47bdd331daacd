"""Running the samples of a lease: both halves alike."""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import Any

import pytest

from minato._core import now_ns

TWIN = "run"


def run(twin: ModuleType, fetch: Any, keys: list[Any], **given: Any) -> tuple[Any, Any, Any]:
    lease, durations = array("q", [0] * 3), array("q", [-1] * len(keys))
    arguments = {"bind": None, "epoch": 0, "catches": Exception, **given}
    found = twin.run_samples(fetch, keys, 100, lease, durations, **arguments)
    return found, lease, durations


def test_samples_in_order_with_their_times(twin: ModuleType) -> None:
    before = now_ns()
    (samples, error), lease, durations = run(twin, str, [3, "b", None])
    assert (samples, error) == (["3", "b", "None"], None)
    assert all(0 <= lap <= now_ns() - before for lap in durations)
    assert lease[0] == 100 + 2 + 1
    assert before <= lease[1] <= now_ns()
    assert lease[2] == -1


def test_lease_names_the_sample_that_runs(twin: ModuleType) -> None:
    lease, seen = array("q", [0] * 3), []
    twin.run_samples(
        lambda key: seen.append((key, lease[0])), [7, 8], 40, lease, array("q", [0, 0]), None, 0,
        Exception,
    )  # fmt: skip
    assert seen == [(7, 41), (8, 42)]


def test_each_sample_is_bound_just_before_it(twin: ModuleType) -> None:
    journal: list[Any] = []
    run(
        twin,
        lambda key: journal.append(("fetch", key)),
        ["a", "b"],
        bind=lambda epoch, key: journal.append((epoch, key)),
        epoch=5,
    )
    assert journal == [(5, "a"), ("fetch", "a"), (5, "b"), ("fetch", "b")]


def test_an_error_ends_the_run_and_is_returned(twin: ModuleType) -> None:
    called = []

    def fetch(key: int) -> int:
        called.append(key)
        return 10 // key

    (samples, error), lease, durations = run(twin, fetch, [5, 0, 2])
    assert samples == [2]
    assert isinstance(error, ZeroDivisionError)
    assert called == [5, 0]
    assert lease[0] == 102
    assert durations[1] >= 0
    assert durations[2] == -1


def test_other_errors_propagate(twin: ModuleType) -> None:
    def interrupted(key: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(twin, interrupted, [1])
    (samples, error), _, _ = run(twin, interrupted, [1], catches=BaseException)
    assert samples == []
    assert isinstance(error, KeyboardInterrupt)


def test_no_keys(twin: ModuleType) -> None:
    assert run(twin, str, [])[0] == ([], None)


def test_memory_that_is_too_small_is_refused(twin: ModuleType) -> None:
    with pytest.raises((ValueError, IndexError)):
        twin.run_samples(str, [1, 2], 0, array("q", [0] * 3), array("q", [0]), None, 0, Exception)
