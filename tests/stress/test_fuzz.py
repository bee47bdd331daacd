"""Files and states of any content, for as long as ``--stress-s`` says; the suite has a short form of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minato.caching import DiskCache
from tests.behaviour import test_failures, test_files_written
from tests.caching import test_faults
from tests.observe import test_cost_history
from tests.sampling import test_damaged_states

pytestmark = pytest.mark.stress


def written(lines: st.SearchStrategy[list[Any]], check: Callable[[Path], None]) -> Any:
    def fuzz(folder: Path) -> tuple[st.SearchStrategy[Any], Callable[[Any], None]]:
        path = folder / "file"

        def one(parts: list[Any]) -> None:
            path.write_bytes(test_files_written.lines_of(parts))
            check(path)

        return lines, one

    return fuzz


def orders(folder: Path) -> Any:
    origin = {"batched": True, "length": 10}
    head = st.just({"minato_order": 2, "epoch": 0, "seed": 3, "first_batch": 0, **origin}).map(
        lambda one: [one]
    )
    lines = st.lists(test_files_written.LINE | st.binary(max_size=20), max_size=12)
    whole = st.tuples(head | st.just([]), lines).map(lambda parts: [*parts[0], *parts[1]])
    return written(whole, test_files_written.check_order)(folder)


def logs(folder: Path) -> Any:
    return test_failures.LOG_PARTS, test_failures.check_log


def histories(folder: Path) -> Any:
    return test_cost_history.HISTORIES, lambda text: test_cost_history.check_cost_history(
        text, folder
    )


def entries(folder: Path) -> Any:
    cache = DiskCache(folder / "cache", 1 << 30, version="1")
    changed = st.tuples(test_faults.ENTRIES, st.integers(0, 200))
    return changed, lambda given: test_faults.check_entry(cache, *given)


def states(folder: Path) -> Any:
    return st.data(), test_damaged_states.damage


@pytest.mark.parametrize("fuzz", [orders, logs, histories, entries, states])
def test_any_content_is_used_or_refused(
    fuzz: Callable[[Path], Any], stress_s: float, tmp_path: Path
) -> None:
    until, tried = time.monotonic() + stress_s, 0
    content, check = fuzz(tmp_path)

    @settings(max_examples=200, suppress_health_check=list(HealthCheck), database=None)
    @given(content)
    def some(one: Any) -> None:
        nonlocal tried
        tried += 1
        check(one)

    while time.monotonic() < until:
        some()
    print(f"{fuzz.__name__}: {tried} tried")
    assert tried
