"""SPDL's measurements of loaders: start-up by payload, hand-off latency, transport; torch and minato beside it."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import DataLoader as TorchLoader

from bench.harness import report
from bench.harness.environments import (
    PeerMissingError,
    TrialFailedError,
    call,
    interpreter,
    versions_in,
)
from bench.harness.suite import in_turn
from bench.workloads.payloads import ByteStrings, Payloads

REQUIREMENTS = ("spdl==0.8.0", "psutil==7.2.2", "cloudpickle==3.1.2")
MIB = 1 << 20
BATCH_SIZE = 256
PASSES, SHORT_PASSES = 2, 1
METHODS = ("spawn", "forkserver", "fork")
SIZES_MIB, WORKERS = (16, 128), (1, 8)
SHORT_SIZES_MIB, SHORT_WORKERS = (1,), (1,)
STARTUP = {"torch": "torch", "spdl": "SPDL", "minato": "minato", "minato-share": "minato, share"}
STEPS_MS, SHORT_STEPS_MS = (0, 6, 15, 30), (0, 2)
ITEMS, SHORT_ITEMS, WARM_UP = 200, 30, 20
HANDOFF = {
    "spdl": "SPDL, threads",
    "spdl-queue": "SPDL, threads, thread output queue",
    "minato-threads": "minato, threads",
    "torch": "torch, process",
    "minato": "minato, process",
}
PAYLOADS, SHORT_PAYLOADS = 16, 4
TRANSPORT_MIB, SHORT_TRANSPORT_MIB = (2, 32), (1,)
TRANSPORT_PASSES = 10
TRANSPORT = {
    "torch": "torch",
    "minato": "minato",
    "spdl": "SPDL, no arena",
    "spdl-ring": "SPDL, ring",
    "spdl-pool": "SPDL, pool",
}
_TRIAL_S = 400.0
HEAD = """\
# SPDL's measurements

Written by `python -m bench.spdl`. Three measurements that SPDL publishes with its examples, written again, with torch
and minato beside SPDL {version}. All run in one environment, each figure in a process of its own.
"""
START_HEAD = """\
## Start-up

A dataset holds byte strings of 64 bytes; a sample is the length of one. Seconds from before the loader is built to its
first batch, after which the loop is left: the first loader of a process, then the median of the next {passes}. The
dataset travels to each worker unless it is forked. *minato, share*: the dataset is `minato.share(dataset)`; sharing it,
{share_s:.1f} s for {share_mib} MiB, is done once before.
"""
HANDOFF_HEAD = """\
## Hand-off

One worker yields numbers, and the loop computes for some milliseconds after each: microseconds that `next()` takes,
median and 99th percentile of {items}.
"""
TRANSPORT_HEAD = """\
## Transport

One worker process yields {count} payloads in a pass; the loop only takes them. MB/s of {passes} passes (median, least
and greatest), CPU seconds of both processes for all passes, and the peak memory (RSS) of the main process.
"""


# ---- in SPDL's environment ------------------------------------------------------------------


def startup(name: str, method: str, mib: int, workers: int, passes: int) -> dict[str, Any]:
    """Seconds to the first batch of several loaders, one after the other."""
    dataset: Any = ByteStrings(mib * MIB)
    share_s = 0.0
    if name == "minato-share":
        import minato

        begun = time.perf_counter()
        dataset = minato.share(dataset)
        share_s = time.perf_counter() - begun
    taken = []
    for _ in range(passes + 1):
        begun = time.perf_counter()
        iterator = iter(_startup_loader(name, dataset, method, workers))
        batch = next(iterator)
        taken.append(time.perf_counter() - begun)
        if batch.tolist() != [len(dataset.strings[0])] * len(batch):
            raise ValueError(f"{name} delivered {batch}")
        if hasattr(iterator, "close"):
            iterator.close()
        del iterator
        gc.collect()
    return {"cold_s": taken[0], "next_s": taken[1:], "share_s": share_s}


def _startup_loader(name: str, dataset: Any, method: str, workers: int) -> Any:
    context = multiprocessing.get_context(method)
    given: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "num_workers": workers,
        "multiprocessing_context": context,
    }
    if name == "torch":
        return TorchLoader(dataset, **given)
    if name == "spdl":
        from spdl.dataloader import get_pytorch_dataloader

        return get_pytorch_dataloader(dataset, in_order=True, **given)
    from minato import DataLoader

    return DataLoader(dataset, **given)


def handoff(name: str, step_ms: int, items: int) -> dict[str, Any]:
    """Microseconds that ``next()`` takes after a step of the loop, for each item but the first ones."""
    taken = []
    with_start = iter(_handoff_source(name, items + WARM_UP))
    for number in range(items + WARM_UP):
        begun = time.perf_counter()
        found = next(with_start)
        ended = time.perf_counter()
        if int(found) != number:
            raise ValueError(f"{name} delivered {found} as item {number}")
        if number >= WARM_UP:
            taken.append((ended - begun) * 1e6)
        while time.perf_counter() - ended < step_ms / 1000:
            pass
    return {"us": taken}


def _handoff_source(name: str, count: int) -> Iterable[Any]:
    if name.startswith("spdl"):
        from spdl.pipeline import PipelineBuilder

        pipeline = PipelineBuilder().add_source(iter(range(count))).add_sink(8)
        return _started(pipeline.build(num_threads=2, use_thread_output_queue=name == "spdl-queue"))
    dataset: Any = range(count)
    given: dict[str, Any] = {"batch_size": None, "num_workers": 1, "prefetch_factor": 8}
    if name == "torch":
        return TorchLoader(dataset, **given)
    from minato import DataLoader

    return DataLoader(dataset, workers="thread" if name == "minato-threads" else "process", **given)


def _started(pipeline: Any) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def transport(name: str, kind: str, mib: int, count: int, passes: int) -> dict[str, Any]:
    """MB/s of each pass after the first, CPU seconds of all, and the peak memory of this process in MB."""
    dataset = Payloads(kind, mib * MIB, count)
    source = _transport_source(name, dataset)
    _take(source, dataset)
    rates, cpu_s = [], _cpu_s()
    for _ in range(passes):
        begun = time.perf_counter()
        _take(source, dataset)
        rates.append(count * dataset.nbytes / 1e6 / (time.perf_counter() - begun))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return {"rates": rates, "cpu_s": _cpu_s() - cpu_s, "peak_mb": peak}


def _take(source: Iterable[Any], dataset: Payloads) -> None:
    number = 0
    for item in source:
        data = item["data"]
        if (data.nbytes if dataset.kind != "bytes" else len(data)) != dataset.nbytes:
            raise ValueError(f"a payload of {len(data)} elements")
        number += 1
        del item, data  # SPDL's pool has few segments
    if number != dataset.count:
        raise ValueError(f"{number} payloads of {dataset.count}")


def _cpu_s() -> float:
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _transport_source(name: str, dataset: Payloads) -> Iterable[Any]:
    if name.startswith("spdl"):
        from spdl import pipeline

        slots = dataset.count + 2  # SPDL's arenas raise where they are full
        room = max(MIB, 2 * dataset.nbytes)
        arenas: dict[str, Callable[[], Any]] = {
            "spdl": lambda: None,
            "spdl-ring": lambda: pipeline.SharedMemoryRingBuffer(capacity=room * slots),
            "spdl-pool": lambda: pipeline.SharedMemorySegmentPool(segment_size=room, count=slots),
        }
        config = pipeline.PipelineBuilder().add_source(dataset).add_sink(2).get_config()
        made: Iterable[Any] = pipeline.run_pipeline_in_subprocess(
            config, num_threads=1, arena=arenas[name](), buffer_size=2
        )
        return made
    given: dict[str, Any] = {"batch_size": None, "num_workers": 1, "persistent_workers": True}
    if name == "torch":
        return TorchLoader(dataset, **given)
    from minato import DataLoader

    return DataLoader(dataset, **given)


# ---- the table ------------------------------------------------------------------------------

Readings = dict[tuple[Any, ...], list[dict[str, Any]]]


class Bench:
    """Runs trials in SPDL's environment.

    Args:
        python: Of the environment.
        page: Says how it goes.
        repeats: Processes for each figure.
    """

    def __init__(self, python: Path, page: report.Page, repeats: int) -> None:
        self._python, self._page, self._repeats = python, page, repeats

    def readings(
        self, row: str, names: Iterable[str], settings: Iterable[tuple[Any, ...]]
    ) -> Readings:
        """All trials of a row: readings by name and setting; none where a loader failed."""
        found: Readings = {}
        for setting in settings:
            for _, name in in_turn(list(names), self._repeats):
                cell = found.setdefault((name, *setting), [])
                try:
                    reading = call(
                        f"bench.spdl:{row}", name, *setting, python=self._python, limit_s=_TRIAL_S
                    )
                except TrialFailedError as error:
                    self._page.say(f"{row} {name} {setting}: {error}")
                    continue
                cell.append(reading)
                self._page.say(f"{row} {name} {setting}: {_brief(reading)}")
        return found


def _brief(reading: dict[str, Any]) -> str:
    short = {
        key: statistics.median(value) if isinstance(value, list) else value
        for key, value in reading.items()
    }
    return ", ".join(f"{key} {value:.3g}" for key, value in short.items())


def _startup_table(bench: Bench, short: bool) -> str:
    passes = SHORT_PASSES if short else PASSES
    sizes, workers = (SHORT_SIZES_MIB, SHORT_WORKERS) if short else (SIZES_MIB, WORKERS)
    settings = [(*each, passes) for each in product(METHODS, sizes, workers)]
    found = bench.readings("startup", STARTUP, settings)
    lines = []
    for setting in settings:
        cells = []
        for name in STARTUP:
            readings = found[(name, *setting)]
            cold = [one["cold_s"] for one in readings]
            later = [taken for one in readings for taken in one["next_s"]]
            cells.append(
                f"{statistics.median(cold):.2f}, {statistics.median(later):.2f}"
                if cold
                else "failed"
            )
        lines.append([setting[0], f"{setting[1]} MiB", str(setting[2]), *cells])
    shares = [
        one["share_s"] for one in found[("minato-share", METHODS[0], sizes[-1], workers[0], passes)]
    ]
    head = START_HEAD.format(
        passes=passes, share_s=statistics.median(shares or [0]), share_mib=sizes[-1]
    )
    names = ["start method", "dataset", "workers", *STARTUP.values()]
    return f"{head}\n{report.table(names, lines)}"


def _handoff_table(bench: Bench, short: bool) -> str:
    items = SHORT_ITEMS if short else ITEMS
    settings = [(step, items) for step in (SHORT_STEPS_MS if short else STEPS_MS)]
    found = bench.readings("handoff", HANDOFF, settings)
    lines = []
    for setting in settings:
        cells = []
        for name in HANDOFF:
            taken = sorted(us for one in found[(name, *setting)] for us in one["us"])
            cells.append(
                f"{statistics.median(taken):.0f}, {taken[int(len(taken) * 0.99)]:.0f}"
                if taken
                else "failed"
            )
        lines.append([f"{setting[0]} ms", *cells])
    return f"{HANDOFF_HEAD.format(items=items)}\n{report.table(['step', *HANDOFF.values()], lines)}"


def _transport_table(bench: Bench, short: bool) -> str:
    count, passes = (SHORT_PAYLOADS, 1) if short else (PAYLOADS, TRANSPORT_PASSES)
    sizes = SHORT_TRANSPORT_MIB if short else TRANSPORT_MIB
    settings = [(*each, count, passes) for each in product(("bytes", "numpy", "torch"), sizes)]
    found = bench.readings("transport", TRANSPORT, settings)
    lines = []
    for setting in settings:
        cells = []
        for name in TRANSPORT:
            readings = found[(name, *setting)]
            if readings:
                rates = [rate for one in readings for rate in one["rates"]]
                cpu_s, peak = (
                    statistics.median(one[key] for one in readings) for key in ("cpu_s", "peak_mb")
                )
                cells.append(f"{report.spread_text(rates, 0)}, {cpu_s:.2f} s, {peak:.0f} MB")
            else:
                cells.append("failed")
        lines.append([setting[0], f"{setting[1]} MiB", *cells])
    head = TRANSPORT_HEAD.format(count=count, passes=passes)
    return f"{head}\n{report.table(['payload', 'size', *TRANSPORT.values()], lines)}"


TABLES = {"startup": _startup_table, "handoff": _handoff_table, "transport": _transport_table}


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    options = report.parser("bench.spdl", __doc__ or "", 1, TABLES).parse_args(arguments)
    page = report.Page("spdl", options.out)
    try:
        python = interpreter("spdl-loaders", REQUIREMENTS)
    except PeerMissingError as error:
        page.say(f"SPDL could not be installed: {error}")
        return 1
    bench = Bench(python, page, report.repeats_of(options))
    tables = [TABLES[row](bench, options.short) for row in options.rows]
    page.add(HEAD.format(version=REQUIREMENTS[0].partition("==")[2]), *tables)
    page.finish(conditions=versions_in(python, ("spdl", "torch", "numpy")))
    return 0


if __name__ == "__main__":
    report.program(main)
