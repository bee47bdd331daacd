"""The flat metrics of a loader."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import minato
from minato.observe import epoch_log
from minato.observe.metrics import CATALOG
from tests.datasets import Failing, Numbers, double

NAMES = [each.name for each in CATALOG]
COUNTERS = [each.name for each in CATALOG if each.kind == "counter"]


def loader_of(**options: Any) -> minato.DataLoader[int]:
    return minato.DataLoader(Numbers(12), 2, transforms=[double], **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_values_before_during_and_after_epochs(num_workers: int) -> None:
    loader = loader_of(num_workers=num_workers)
    assert loader.metrics() == dict.fromkeys(NAMES, 0.0)
    start = time.perf_counter()
    for epoch in range(2):
        for number, _ in enumerate(loader, 1):
            values = loader.metrics()
            assert list(values) == NAMES
            assert {type(value) for value in values.values()} == {float}
            assert values["batches_total"] == 6 * epoch + number
            assert values["samples_total"] == 12 * epoch + 2 * number
            assert values["epoch"] == epoch
            assert 0 < values["wait_seconds_total"] <= values["epoch_seconds_total"]
            assert 0 < values["wait_ratio"] <= 1
            assert values["samples_per_second"] > 0
            assert values["workers"] == max(num_workers, 1)
            assert values["memory_budget_bytes"] > 0
    values, run = loader.metrics(), loader.report().run
    assert values["batches_total"] == run.throughput.batches == 12
    assert values["batch_bytes_total"] == run.throughput.nbytes > 0
    assert values["epoch"] == 1
    # The end of an epoch takes time too, which no figure of the report has.
    assert run.throughput.wall_s <= values["epoch_seconds_total"] <= time.perf_counter() - start
    # The call of next() that finds the end is waiting too, and no batch of the report.
    assert run.waiting.total_s <= values["wait_seconds_total"] <= values["epoch_seconds_total"]
    assert values["worker_busy_seconds_total"] == pytest.approx(run.workers.busy_s, rel=0.05)


def test_counters_never_fall() -> None:
    loader = loader_of(num_workers=2, persistent_workers=True)
    fallen: list[tuple[str, float, float]] = []
    ended = threading.Event()

    def watch() -> None:
        before = loader.metrics()
        while not ended.is_set():
            after = loader.metrics()
            fallen.extend((n, before[n], after[n]) for n in COUNTERS if after[n] < before[n])
            before = after
            time.sleep(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for epoch in range(12):
            for number, _ in enumerate(loader):
                if epoch % 3 == 0 and number == 2:
                    break  # an epoch that is abandoned
    finally:
        ended.set()
        watcher.join(60)
    assert not watcher.is_alive()
    assert fallen == []
    assert loader.metrics()["batches_total"] == 4 * 3 + 8 * 6


def test_counters_never_fall_between_two_lines_of_the_loop() -> None:
    loader, values = loader_of(), []
    traced = sys.gettrace()

    def trace(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_filename == epoch_log.__file__:
            values.append(loader.metrics())  # as another thread may
            return trace
        return None

    for _ in range(2):
        batches = iter(loader)
        sys.settrace(trace)
        try:
            list(batches)
        finally:
            sys.settrace(traced)
    assert len(values) > 100
    for name in COUNTERS:
        assert [each[name] for each in values] == sorted(each[name] for each in values), name


def test_failures_are_counted() -> None:
    loader = minato.DataLoader(Failing(8, {5: ValueError}), 2, num_workers=1, errors="skip")
    for epochs in (1, 2):
        with pytest.warns(minato.MinatoWarning, match="1 sample of this epoch was skipped"):
            list(loader)
        assert loader.metrics()["skipped_samples_total"] == epochs


def test_a_call_scans_no_samples() -> None:
    """Its cost depends neither on the length of the dataset nor on the samples so far."""
    least_s: list[float] = []
    for length in (10, 1_000_000):
        loader = minato.DataLoader(range(length), 10)  # type: ignore[arg-type]
        batches = iter(loader)
        next(batches)
        times = [time.thread_time()]
        for _ in range(200):
            loader.metrics()
            times.append(time.thread_time())
        least_s.append(min(after - before for before, after in itertools.pairwise(times)))
    assert least_s[1] < 10 * least_s[0]


def test_the_reference_lists_every_metric() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|$", page.read_text("utf-8"), re.MULTILINE
    )
    assert rows == [(each.name, each.kind, each.unit, each.meaning) for each in CATALOG]
