"""How many batches may be in flight."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest

from minato.scheduling.prefetch_window import PrefetchWindow


def window_of(num_workers: int, budget_bytes: int = 10**9, **options: Any) -> PrefetchWindow:
    return PrefetchWindow(num_workers, fixed=None, budget_bytes=budget_bytes, **options)


def test_a_window_starts_as_torchs() -> None:
    window = window_of(3)
    assert window.most == 6
    assert window_of(0).most == 2


def test_a_window_grows_by_the_number_of_workers(caplog: pytest.LogCaptureFixture) -> None:
    window = window_of(3)
    with caplog.at_level(logging.INFO, "minato"):
        assert window.grow()
    assert caplog.messages == ["the prefetch window grows to 9 batches"]
    assert window.most == 9


def test_a_window_grows_for_the_cost_of_opening_only_while_its_batches_are_small() -> None:
    windows = [window_of(2) for _ in range(3)]
    for window, nbytes in zip(windows, (0, 1000, 1 << 20), strict=True):
        window.expect(nbytes)
        for _ in range(99):
            window.widen()
    assert [window.limit for window in windows] == [4, 64, 4]


def test_a_fixed_window_stays() -> None:
    window = PrefetchWindow(3, fixed=4, budget_bytes=1)
    window.observe(100)  # no warning: the number was asked for
    assert not window.grow()
    assert not window.shrink()
    assert window.most == 4
    assert PrefetchWindow(3, fixed=0, budget_bytes=1).most == 0


def test_the_budget_bounds_the_window() -> None:
    window = window_of(2, 1000)
    window.observe(300)
    assert window.most == 3
    assert not window.grow()
    small = window_of(2, 1000)
    small.observe(10)
    grown = 0
    while small.grow():
        grown += 1
    assert 2 * grown + 4 >= 100 - 2
    assert small.most == 100


def test_the_budget_bounds_the_window_before_a_batch_is_returned() -> None:
    window = window_of(2, 1000)
    window.expect(300)
    assert not window.grow()
    window.expect(10)  # another batch is smaller
    assert window.most == 3


def test_the_first_batch_is_always_opened() -> None:
    window = window_of(2, 1000)
    with pytest.warns(RuntimeWarning, match="2000 bytes.*memory_budget=1000"):
        window.observe(2000)
    assert window.most == 1
    with warnings.catch_warnings(action="error"):
        window.observe(3000)  # it was said once
    window = window_of(2, 1000)
    window.expect(2000)
    with pytest.warns(RuntimeWarning, match="2000 bytes.*memory_budget=1000"):
        window.observe(2000)
    with warnings.catch_warnings(action="error"):
        PrefetchWindow(2, fixed=3, budget_bytes=1000).observe(2000)


def test_larger_batches_count_at_once_and_are_slowly_forgotten() -> None:
    window = window_of(2, 1000)
    window.observe(100)
    window.observe(500)
    assert window.most == 2
    for _ in range(30):
        window.observe(100)
    assert window.most > 3


def test_a_window_can_have_an_upper_limit() -> None:
    window = window_of(4, max_batches=10)
    assert window.limit == 8
    assert window.grow()
    assert window.limit == 10
    assert not window.grow()
    assert window_of(4, max_batches=3).limit == 3
    assert PrefetchWindow(4, fixed=20, budget_bytes=10**9, max_batches=3).limit == 3


def test_the_window_holds_what_workers_run_at_once() -> None:
    assert window_of(2, concurrent_batches=16).limit == 18
    assert window_of(2, concurrent_batches=1).limit == 4
    assert PrefetchWindow(2, fixed=5, budget_bytes=10**9, concurrent_batches=16).limit == 5
    assert window_of(2, max_batches=8, concurrent_batches=16).limit == 8


def test_a_shrunk_window_stays_so() -> None:
    window = window_of(4)
    assert window.shrink()
    assert window.limit == 4
    assert not window.grow()
    window.resize(8)
    assert window.limit == 4
    assert window.shrink()
    assert window.shrink()
    assert window.limit == 1
    assert not window.shrink()
    assert window.most == 1
    held = window_of(8, 1000)
    held.expect(300)
    assert held.most == 3
    assert held.shrink()
    assert held.limit == 1
    assert not held.shrink()


def test_windows_in_use_share_a_budget() -> None:
    first = window_of(2, 1000, shares=True)
    assert first.budget_bytes == 1000
    second, own = window_of(2, 1000, shares=True), window_of(2, 1000)
    assert [window.budget_bytes for window in (first, second, own)] == [500, 500, 1000]
    first.observe(300)
    assert first.most == 1
    second.release_budget()
    assert first.budget_bytes == 1000
    assert first.most == 3
    first.release_budget()
    own.release_budget()
