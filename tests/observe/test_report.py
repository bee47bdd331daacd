"""The report of loaders that ran."""

from __future__ import annotations

import io
import json
import math
import platform
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
import torch

from minato import (
    DataLoader,
    ErrorPolicy,
    FetchOptions,
    Observe,
    Readers,
    StragglerPolicy,
    metrics_collector,
)
from minato._support.values import counted
from minato.caching import MemoryCache
from minato.observe import report as report_module
from minato.observe.epoch_log import LoaderUse
from minato.observe.figures import legend
from minato.observe.observers import LoaderSnapshot, Metrics
from minato.observe.report import Report
from minato.observe.text import headline
from minato.sources.base import KeyedSource, Retry
from minato.workers.worker import Worker
from tests.datasets import (
    Failing,
    Filled,
    Journal,
    Lists,
    Numbers,
    Parts,
    Sleepy,
    Stream,
    wait_until,
)
from tests.observe.events import read
from tests.observe.histograms import histogram
from tests.subprocesses import children


def pause(sample: Any) -> Any:
    """Long enough for each sample to be timed stage by stage."""
    time.sleep(0.004)
    return sample


def stall_at_5(sample: Any) -> Any:
    if sample == 5:
        time.sleep(0.6)
    return sample


def run(loader: Any, epochs: int = 1) -> Report:
    for _ in range(epochs):
        for _ in loader:
            pass
    return loader.report()


def undisturbed(make: Callable[[], Any], true: Callable[[Report], bool]) -> Report:
    """The report of which something is true, of a few runs: other programs may hold up a part of one."""
    for _ in range(5):
        report = run(make())
        if true(report):
            break
    return report


@pytest.fixture(scope="module")
def report() -> Report:
    dataset = Sleepy(64, 0.004, {9: 0.5})  # so long that the stages of each sample are timed
    transforms = [pause, stall_at_5]
    return run(DataLoader(dataset, 4, num_workers=2, transforms=transforms), 2)


def test_the_run_is_the_sum_of_its_epochs(report: Report) -> None:
    assert [each.name for each in report.epochs] == ["epoch 0", "epoch 1"]
    assert report.run.epochs == 2
    assert report.run.finished
    for name in ("batches", "samples", "nbytes"):
        parts = [getattr(each.throughput, name) for each in report.epochs]
        assert getattr(report.run.throughput, name) == sum(parts) > 0
    assert report.run.throughput.batches == 32
    assert report.run.throughput.samples == 128
    assert report.run.throughput.coverage == 1
    waited_s = sum(each.waiting.total_s for each in report.epochs)
    assert report.run.waiting.total_s == pytest.approx(waited_s)
    assert 0 < report.run.waiting.share <= 1
    assert report.run.waiting.total_s <= report.run.throughput.wall_s


def test_every_stage_has_its_costs(report: Report) -> None:
    stages = {stage.name: stage for stage in report.run.stages}
    assert list(stages) == ["dataset", "pause", "stall_at_5", "collate and copy"]
    kinds = [stage.kind for stage in report.run.stages]
    assert kinds == ["source", "transform", "transform", "collate"]
    assert sum(stage.share for stage in report.run.stages) == pytest.approx(1, abs=0.02)
    assert stages["pause"].count == 128
    assert stages["pause"].p50_s >= 0.0039
    assert stages["stall_at_5"].p50_s < stages["pause"].p50_s
    assert stages["dataset"].p99_s > 0.45


def test_no_figure_of_a_stage_is_negative() -> None:
    """The shares of the others may add up to more than 1 by the rounding of floats."""
    metrics = Metrics(Counter(busy_ns=33))
    for name, duration_ns in {"dataset": 12, "0 One": 10, "1 Two": 11, "total": 33}.items():
        metrics.histograms[name] = histogram(duration_ns)
    rest = report_module._stages(metrics, ["One", "Two"])[-1]
    assert (rest.share, rest.mean_s) == (0, 0)


def test_the_slowest_samples_are_named_with_their_dearest_stage(report: Report) -> None:
    slowest = {each.index: each for each in report.slowest}
    assert len(slowest) == len(report.slowest) == 20
    assert slowest[5].stage == "stall_at_5"
    assert slowest[9].stage == "dataset"
    assert slowest[9].cost_s >= slowest[9].stage_s >= 0.5
    costs = [each.cost_s for each in report.slowest]
    assert costs == sorted(costs, reverse=True)


def test_workers_and_window(report: Report) -> None:
    workers, window = report.run.workers, report.run.prefetch_window
    assert (workers.count, workers.fewest, workers.most) == (2, 2, 2)
    shares = workers.busy_share, workers.no_work_share, workers.window_full_share
    assert sum(shares) == pytest.approx(1)
    assert workers.busy_s > 0.2
    assert 0 <= window.occupancy <= 1
    assert 0 < window.in_flight <= window.limit


def test_text(report: Report) -> None:
    lines = str(report).splitlines()
    assert lines[0] == report.verdict.summary
    figures = [line.split()[0] for line in lines if line.startswith("  ")]
    assert figures == ["waiting", "training", "throughput", "workers", "slowest", "prefetch"]
    assert len(lines) <= 12
    assert max(len(line) for line in lines if line.startswith("  ")) < 80
    screen = io.StringIO()
    rich.console.Console(file=screen, width=200).print(report)
    assert screen.getvalue().splitlines() == lines


class Grouped(Numbers):
    """The first sample of each group of 20 reads it."""

    read_s = 0.0

    def __getitem__(self, index: int) -> Any:
        if index % 20 == 0:
            begun = time.perf_counter()
            time.sleep(0.01)
            self.read_s += time.perf_counter() - begun
        return super().__getitem__(index)


def test_the_cost_per_sample_is_that_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.observe.live._RECENT_NS", 1 << 62)
    loader = DataLoader(dataset := Grouped(400), batch_size=20)
    begun = time.perf_counter()
    with loader.live() as view:
        for _ in loader:
            live = dict(view.rows())["slowest"]
    whole_s = time.perf_counter() - begun
    report = dict(headline(loader.report()))["slowest"]
    for told in (live, report):
        cost = re.fullmatch(r"dataset, .*, ([\d.]+) (µs|ms) per sample", told)
        assert cost is not None, told
        all_s = 400 * float(cost[1]) * {"µs": 1e-6, "ms": 1e-3}[cost[2]]
        assert 0.9 * dataset.read_s < all_s < 1.1 * whole_s


class SlowStream(Parts):
    """Each item is waited for; it divides itself."""

    def __iter__(self) -> Iterator[Any]:
        return map(pause, super().__iter__())


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 2},
        {"num_workers": 2, "transforms": [abs]},
        {"num_workers": 2, "readers": 1, "transforms": [abs]},
        {"num_workers": 0, "transforms": [abs]},
    ],
)
def test_what_a_reader_takes_is_the_time_of_the_dataset(arguments: Any) -> None:
    report = undisturbed(
        lambda: DataLoader(SlowStream(60), batch_size=5, **arguments),
        lambda report: report.run.stages[0].share > 0.6,
    )
    stages = {stage.name: stage for stage in report.run.stages}
    assert stages["dataset"].share > 0.6
    assert stages["dataset"].mean_s >= 0.004
    assert sum(stage.share for stage in stages.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_are_named_with_their_reader(num_workers: int, tmp_path: Path) -> None:
    observe = Observe(trace=tmp_path / "run.json")
    made: Any = {"num_workers": num_workers, "readers": 2, "transforms": [pause]}
    report = run(DataLoader(Parts(12), 4, observe=observe, **made))
    named = {f"item {number} of reader {reader}" for number in range(6) for reader in (0, 1)}
    assert {each.index for each in report.slowest} == named
    traced = [each for each in read(tmp_path / "run.json") if each["name"] == "sample"]
    assert {each["args"]["index"] for each in traced} == named


@pytest.mark.parametrize("readers", [3, Readers(6, ranks=2, rank=1), Readers(7, ranks=2, rank=1)])
def test_the_readers_of_a_report_are_those_of_this_process(readers: Any) -> None:
    loader: Any = DataLoader(SlowStream(12), batch_size=4, num_workers=1, readers=readers)
    setup = loader.report().setup
    assert (setup.readers, setup.reader_ranks) == (3, 1 if readers == 3 else 2)


class AnyName(Numbers):
    """Has an attribute of any name, or raises another exception than an AttributeError for it."""

    def __init__(self, found: Any) -> None:
        super().__init__(8)
        self.found = found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.found[name]


def test_a_dataset_that_answers_to_any_name_has_a_report() -> None:
    for found in ({}, defaultdict(lambda: lambda: "figures")):
        assert run(DataLoader(AnyName(found), 4)).run.throughput.samples == 8


def test_the_figures_of_a_dataset_may_be_those_of_numpy_and_torch() -> None:
    class Told(Numbers):
        def minato_figures(self) -> dict[str, Any]:
            numbers = {"loss": np.float32(0.5), "rows": np.int64(3), "mean": torch.tensor(2.0)}
            return {**numbers, "hits": math.nan, 7: 0.25, "kind": {"a": "set"}}

    told = DataLoader(Told(4)).report()
    plain = json.loads(told.to_json(), parse_constant=pytest.fail)
    assert plain["dataset"] == {"loss": 0.5, "rows": 3, "mean": 2.0, "hits": None, "7": 0.25}
    assert all(name in told.details() for name in told.dataset)


def test_details_leave_out_what_is_zero(report: Report) -> None:
    told = report.details()
    for words in ("collate and copy", "Slowest samples", "samples per s", "how to read it"):
        assert words in told
    for words in ("Errors", "Reads and cache", "GPUs", "deferrals"):
        assert words not in told
    titles = [part.splitlines() for part in told.split("\n\n")]
    assert all(len(lines) > 2 for lines in titles)
    unused = DataLoader(Numbers(40), 4).report()
    assert str(unused).count("\n") == 1
    assert "0 s" not in unused.details()


def test_one_of_a_thing_is_none_of_several() -> None:
    told = run(DataLoader(Numbers(1), 1, num_workers=1, prefetch_factor=1))
    texts = f"{told}\n{told!r}\n{told.details()}"
    assert not re.search(
        r"(?<![\d.])1 (batches|samples|workers|epochs)\b", texts
    )  # unlike "38.1 samples/s"
    for words in (
        "1 batch ",
        "1 sample ",
        "1 worker ",
        "<Report: 1 epoch, 1 batch, ",
        "1 batch in",
    ):
        assert words in texts
    assert counted(1, "processes") == "1 process"
    assert counted(2, "processes") == "2 processes"


def test_a_report_says_where_it_is_from(report: Report) -> None:
    origin = report.origin
    assert origin.script == sys.argv[0]
    assert platform.node() in origin.machine
    assert f"torch {torch.__version__}" in origin.versions
    age = datetime.now(UTC) - datetime.strptime(origin.time, "%Y-%m-%dT%H:%M:%S%z")
    assert timedelta() <= age < timedelta(hours=1)


def test_plain_data(report: Report) -> None:
    plain = json.loads(report.to_json())
    assert plain == json.loads(json.dumps(report.to_dict()))
    assert plain["run"]["waiting"]["share"] == report.run.waiting.share
    assert plain["legend"]["Waiting"]["share"]["unit"] == "share"


def test_each_figure_has_a_unit_and_a_reading() -> None:
    figures = [each for part in legend().values() for each in part.values()]
    assert len(figures) > 50
    assert all(each["unit"] and each["reading"] for each in figures)


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (Numbers(40), {"num_workers": 0}),
        (Numbers(40), {"num_workers": 2, "workers": "thread"}),
        (Filled(40, 8), {"num_workers": 2, "order": "fast_first"}),
        (Filled(40, 8), {"num_workers": 2, "persistent_workers": True, "seed": 1}),
        (Lists(40), {"num_workers": 1}),
        (Stream(40), {"num_workers": 1}),
        (Numbers(40), {"num_workers": 1, "compat": "torch"}),
        (Numbers(40), {"num_workers": np.int64(1), "prefetch_factor": np.int64(2)}),
        (Sleepy(40, 0.001), {"num_workers": 1, "fetch_concurrency": 8, "transforms": [pause]}),
    ],
)
def test_every_kind_of_loader_has_a_report(dataset: Any, arguments: dict[str, Any]) -> None:
    report = run(DataLoader(dataset, 4, **arguments), 2)
    assert report.run.throughput.batches == 20
    assert report.run.throughput.samples == 80
    assert report.run.finished
    assert all(stage.share >= 0 for stage in report.run.stages)
    assert json.loads(report.to_json())["run"]["epochs"] == 2
    assert str(report)


def test_reads_at_once_are_costs_of_the_dataset() -> None:
    report = undisturbed(
        lambda: DataLoader(Sleepy(40, 0.004), 4, num_workers=1, fetch_concurrency=8),
        lambda report: report.run.stages[0].share > 0.8,
    )
    dataset = report.run.stages[0]
    assert (dataset.name, dataset.count) == ("dataset", 40)
    assert dataset.mean_s >= 0.0039
    assert dataset.share > 0.8


def test_before_between_and_in_the_middle() -> None:
    loader = DataLoader(Numbers(40), 4)
    assert loader.report().epochs == ()
    assert loader.report().verdict.bottleneck == "unknown"
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    (epoch,) = loader.report().epochs
    assert (epoch.throughput.batches, epoch.finished) == (3, False)
    del iterator
    assert [each.throughput.batches for each in loader.report().epochs] == [3]
    assert [each.throughput.batches for each in run(loader).epochs] == [3, 10]
    iter(loader)
    begun = loader.report()
    assert begun.epochs[-1].throughput.batches == begun.epochs[-1].workers.count == 0
    assert (begun.run.workers.count, begun.run.prefetch_window.limit) == (1, 1)


@pytest.mark.parametrize("persists", [False, True])
def test_the_end_of_workers_is_part_of_the_epoch(persists: bool) -> None:
    loader = DataLoader(Numbers(8), 4, num_workers=1, persistent_workers=persists)
    for _ in range(2):
        list(loader)
    report = loader.report()
    ends = [each.waiting.end_s for each in report.epochs]
    assert [end > 0 for end in ends] == [not persists] * 2
    assert report.run.waiting.end_s == pytest.approx(sum(ends) / 2)
    assert sum(ends) < report.run.waiting.total_s < report.run.throughput.wall_s


def test_time_between_epochs_is_no_idle_time() -> None:
    """Workers that stay are idle while the program validates its model."""
    metrics = Metrics(Counter(busy_ns=8, idle_ns=100, wall_ns=5))
    use = LoaderUse()
    for count in (2, 1):  # num_workers="auto" has ended one
        use.add(0, LoaderSnapshot(count, 0, 0, 4, 0, 0))
    workers = report_module._workers(metrics, use, *use.workers)
    assert (workers.busy_share, workers.no_work_share) == pytest.approx((0.8, 0.2))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_has_all_that_its_workers_did(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be held up between the batch that ends the epoch and its notes."""
    monkeypatch.setattr("minato.engine.engine._NOTED_NS", 1 << 62)
    note = Worker.end_lease

    def note_late(*given: Any) -> Any:
        time.sleep(0.02)
        return note(*given)

    monkeypatch.setattr(Worker, "end_lease", note_late)
    made = {"num_workers": 1, "workers": "thread", "persistent_workers": persistent}
    report = run(DataLoader(Sleepy(1, 0.01), **made), 2)
    assert all(each.workers.busy_s >= 0.01 for each in report.epochs)


def test_a_run_has_the_fewest_and_the_most_workers_of_its_epochs() -> None:
    loader = DataLoader(Sleepy(8, 0.0), 4)
    run(loader, epochs=3)
    epochs = zip(loader._minato_history.epoch_log.past, [(2, 4), (1, 3), (2, 2)], strict=True)
    for notes, workers in epochs:
        notes.use.workers = workers
    workers = loader.report().run.workers
    assert (workers.count, workers.fewest, workers.most) == (1, 1, 4)


def test_failures_are_counted() -> None:
    dataset = Failing(40, dict.fromkeys(range(0, 40, 10), ValueError))
    with pytest.warns(RuntimeWarning, match="4 samples of this epoch were skipped"):
        report = run(DataLoader(dataset, 4, errors=ErrorPolicy(on_error="skip", retries=2)))
    assert (report.run.errors.skipped, report.run.errors.retries) == (4, 8)


def test_deferrals_and_lag_are_counted() -> None:
    dataset = Journal(80)

    def sometimes_slow(sample: Any) -> Any:
        if sample % 10 == 9:
            # The place in its own batch is then another one's.
            wait_until(lambda: sample + 5 in dataset.begun() or sample > 70)
            time.sleep(0.03)
        return sample

    policy, transforms = StragglerPolicy(after_s=0.01), [sometimes_slow, pause]
    workers: Any = {"num_workers": 2, "workers": "thread", "order": "fast_first"}
    loader = DataLoader(dataset, 2, stragglers=policy, transforms=transforms, **workers)
    stragglers = run(loader).run.stragglers
    assert stragglers.phase == "fixed"
    assert stragglers.deferrals >= 1
    assert stragglers.lag_max >= 1


class Overtaken(Journal):
    """Sample 0 is done when sample 12 has begun."""

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        if index == 0:
            wait_until(lambda: 12 in self.begun(), 60)
        return index


def test_batches_that_are_overtaken_are_late() -> None:
    # No more than two batches are open, so that others have been delivered when sample 12 begins.
    dataset = Overtaken(24)
    loader = DataLoader(dataset, 2, num_workers=2, order="batch", prefetch_factor=1)
    stragglers = run(loader).run.stragglers
    assert stragglers.lag_max >= 1
    assert stragglers.lag_p50 == 0


class Unsteady(KeyedSource):
    """Every read fails once."""

    def __init__(self, size: int) -> None:
        super().__init__(retry=Retry(first_s=0.001))
        self.size = size
        self.tried: set[int] = set()

    def read_value(self, key: int) -> int:
        if key not in self.tried:
            self.tried.add(key)
            raise ConnectionError
        return key

    def list_keys(self) -> range:
        return range(self.size)


class Holding(Numbers):
    """Reads from a source that it keeps."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.parts = [torch.utils.data.Subset(Unsteady(size), range(size))]

    def __getitem__(self, index: int) -> int:
        return int(self.parts[0][index])


def test_what_sources_reads_and_the_cache_did() -> None:
    fetching = FetchOptions(2, hedge_percentile=95)
    dataset, cache = Holding(8), MemoryCache(1 << 20, version="1")
    loader = DataLoader(dataset, 4, cache=cache, fetch_concurrency=fetching)
    report = run(loader, 2)
    first, second = (each.reads for each in report.epochs)
    assert (first.retries, first.cache_hits, first.cache_misses) == (8, 0, 8)
    assert (second.retries, second.cache_hits, second.cache_misses) == (0, 8, 0)
    assert (first.cache_hit_rate, second.cache_hit_rate) == (0, 1)
    assert first.cache_stored_bytes > 0 == second.cache_stored_bytes
    assert report.run.reads.cache_hit_rate == 0.5
    assert fetching.counters is not None
    fetching.counters.add(hedged=2, hedges_won=1)
    assert "Reads and cache" in report.details()
    iterator = iter(loader)
    next(iterator)
    fetching.counters.add(hedged=3, hedges_won=1)
    assert loader.report().epochs[-1].reads.hedged == 3
    other = iter(loader)  # at the same time
    fetching.counters.add(hedged=4)
    shown = loader.report()
    assert ([each.reads.hedged for each in shown.epochs[-2:]], shown.run.reads.hedged) == (
        [7, 4],
        7,
    )
    del iterator, other
    assert loader.report().run.reads.hedged == 7
    assert run(loader).run.reads.hedged == 7


def test_nothing_is_measured_on_request() -> None:
    loader = DataLoader(Numbers(8), 4, observe=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for ask in (loader.report, loader.metrics, loader.live, lambda: metrics_collector(loader)):
        with pytest.raises(ValueError, match="observe=False: nothing was measured"):
            ask()


def test_large_batches_count_in_bytes() -> None:
    report = run(DataLoader(Filled(20, 1000), 5, num_workers=1))
    assert report.run.throughput.nbytes >= 20 * np.dtype(np.float32).itemsize * 1000
    assert report.run.prefetch_window.memory_bytes > 0


def test_the_window_is_what_the_memory_budget_leaves_of_it() -> None:
    loader = DataLoader(Filled(200, 1000), 5, num_workers=2, memory_budget=5000)
    with pytest.warns(RuntimeWarning, match="one at a time"):
        report = run(loader)
    assert report.run.prefetch_window.limit == 1
    assert report.run.prefetch_window.occupancy <= 1
    assert re.search(
        r"prefetch +\S+ (of|in flight, now) at most 1 batch( in flight)?\n", str(report)
    )


@pytest.mark.large
def test_a_table_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    loader = DataLoader(Numbers(12), 2, transforms=[stall_at_5])
    for _ in range(2):
        list(loader)
    table = pandas.json_normalize(loader.report().to_dict()["epochs"])
    assert list(table["name"]) == ["epoch 0", "epoch 1"]
    assert list(table["throughput.samples"]) == [12, 12]
    assert table["waiting.share"].between(0, 1).all()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_of_multiprocessing_writes_its_report(method: str, tmp_path: Path) -> None:
    done = children("report", method, MINATO_REPORT=str(tmp_path / "report.json"))
    assert (done.stdout, done.stderr) == ("[0, 0]\n", "")
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("report.pid*.json")]
    found = [each["run"]["epochs"] for report in reports for each in report["minato_reports"]]
    assert found == [1, 1]
