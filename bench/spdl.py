"""SPDL's measurements of loaders: start-up by payload, hand-off latency, transport; torch and minato beside it."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from torch.utils.data import DataLoader as TorchLoader

from bench.harness import report
from bench.harness.environments import call, interpreter, versions_in
from bench.harness.suite import percentile
from bench.workloads.payloads import ByteStrings, Payloads

VERSION = "0.8.0"
REQUIREMENTS = (f"spdl=={VERSION}", "psutil==7.2.2", "cloudpickle==3.1.2")
MIB = 1 << 20
BATCH_SIZE = 256
PASSES = 2
METHODS = ("spawn", "forkserver", "fork")
SIZES_MIB, WORKERS = (16, 128), (1, 8)
STARTUP = {"torch": "torch", "spdl": "SPDL", "minato": "minato", "minato-share": "minato, share"}
STEPS_MS = (0, 6, 15, 30)
ITEMS, SHORT_ITEMS, WARM_UP = 200, 30, 20
HANDOFF = {
    "spdl": "SPDL, threads",
    "spdl-queue": "SPDL, threads, thread output queue",
    "minato-threads": "minato, threads",
    "torch": "torch, process",
    "minato": "minato, process",
}
KINDS = ("bytes", "numpy", "torch")
PAYLOADS, TRANSPORT_MIB = 16, (2, 32)
TRANSPORT_PASSES = 10
TRANSPORT = {
    "torch": "torch",
    "minato": "minato",
    "spdl": "SPDL, no arena",
    "spdl-ring": "SPDL, ring",
    "spdl-pool": "SPDL, pool",
}
_TRIAL_S = 400.0
HEAD = f"""\
# SPDL's measurements

Written by `python -m bench.spdl`. Three measurements that SPDL publishes with its examples, written again, with torch
and minato beside SPDL {VERSION}. All run in one environment, each figure in a process of its own.
"""


# ---- in SPDL's environment ------------------------------------------------------------------


def startup(name: str, method: str, mib: int, workers: int, passes: int) -> dict[str, Any]:
    """A dataset holds byte strings of 64 bytes; a sample is the length of one. Seconds from before the loader is built
    to its first batch, after which the loop is left: the first loader of a process, then the median of the next ones.
    The dataset travels to each worker unless it is forked. *minato, share*: the dataset is `minato.share(dataset)`,
    which takes the time after the plus, once before.
    """
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
        del iterator
        gc.collect()
    return {"cold_s": taken[0], "next_s": taken[1:], "share_s": share_s}


def _loader(name: str, dataset: Any, **given: Any) -> Any:
    if name == "torch":
        return TorchLoader(dataset, **given)
    from minato import DataLoader

    return DataLoader(dataset, **given)


def _startup_loader(name: str, dataset: Any, method: str, workers: int) -> Any:
    given: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": workers}
    given["multiprocessing_context"] = multiprocessing.get_context(method)
    if name == "spdl":
        from spdl.dataloader import get_pytorch_dataloader

        return get_pytorch_dataloader(dataset, in_order=True, **given)
    return _loader(name, dataset, **given)


def handoff(name: str, step_ms: int, items: int) -> dict[str, Any]:
    """One worker yields numbers, and the loop computes for some milliseconds after each: microseconds that `next()`
    takes, median and 99th percentile.
    """
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


def _handoff_source(name: str, count: int) -> Any:
    if name.startswith("spdl"):
        from spdl.pipeline import PipelineBuilder

        pipeline = PipelineBuilder().add_source(iter(range(count))).add_sink(8)
        return _started(pipeline.build(num_threads=2, use_thread_output_queue=name == "spdl-queue"))
    given: dict[str, Any] = {"batch_size": None, "num_workers": 1, "prefetch_factor": 8}
    if name == "minato-threads":
        given["workers"] = "thread"
    return _loader(name, range(count), **given)


def _started(pipeline: Any) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def transport(name: str, kind: str, mib: int, count: int, passes: int) -> dict[str, Any]:
    """One worker process yields payloads in passes; the loop only takes them. MB/s of a pass (median, least and
    greatest), CPU seconds of both processes for all passes, and the peak memory (RSS) of the main process.
    """
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


def _transport_source(name: str, dataset: Payloads) -> Any:
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
        return pipeline.run_pipeline_in_subprocess(
            config, num_threads=1, arena=arenas[name](), buffer_size=2
        )
    return _loader(name, dataset, batch_size=None, num_workers=1, persistent_workers=True)


# ---- the table ------------------------------------------------------------------------------

Readings = list[dict[str, Any]]


class Measurement(NamedTuple):
    """One of the three, with the settings of a whole and of a short run; ``names`` heads the first columns."""

    title: str
    labels: Mapping[str, str]
    names: tuple[str, ...]
    settings: list[tuple[Any, ...]]
    short: list[tuple[Any, ...]]
    cell: Callable[[Readings], str]


def _startup_cell(readings: Readings) -> str:
    cold = statistics.median(one["cold_s"] for one in readings)
    later = statistics.median(taken for one in readings for taken in one["next_s"])
    share = statistics.median(one["share_s"] for one in readings)
    return f"{cold:.2f}, {later:.2f}" + (f" + {share:.2f}" if share else "")


def _handoff_cell(readings: Readings) -> str:
    taken = [us for one in readings for us in one["us"]]
    return f"{statistics.median(taken):.0f}, {percentile(taken, 0.99):.0f}"


def _transport_cell(readings: Readings) -> str:
    rates = [rate for one in readings for rate in one["rates"]]
    cpu_s, peak = (statistics.median(one[key] for one in readings) for key in ("cpu_s", "peak_mb"))
    return f"{report.spread_text(rates, 0)}, {cpu_s:.2f} s, {peak:.0f} MB"


MEASUREMENTS = {
    "startup": Measurement(
        *("Start-up", STARTUP, ("start method", "MiB", "workers")),
        [*product(METHODS, SIZES_MIB, WORKERS, [PASSES])],
        [(method, 1, 1, 1) for method in METHODS],
        _startup_cell,
    ),
    "handoff": Measurement(
        *("Hand-off", HANDOFF, ("step, ms",)),
        [(step, ITEMS) for step in STEPS_MS],
        [(step, SHORT_ITEMS) for step in (0, 2)],
        _handoff_cell,
    ),
    "transport": Measurement(
        *("Transport", TRANSPORT, ("payload", "MiB")),
        [*product(KINDS, TRANSPORT_MIB, [PAYLOADS], [TRANSPORT_PASSES])],
        [(kind, 1, 4, 1) for kind in KINDS],
        _transport_cell,
    ),
}


def table(row: str, python: Path, options: Any, page: report.Page) -> str:
    measured = MEASUREMENTS[row]
    lines = []
    for setting in measured.short if options.short else measured.settings:
        found = page.turns(
            f"{row} {setting}",
            [*measured.labels],
            options.repeats,
            lambda name, _, given=setting: call(  # type: ignore[misc]
                f"bench.spdl:{row}", name, *given, python=python, limit_s=_TRIAL_S
            ),
            lambda one: measured.cell([one]),
            failed := dict[str, str](),
        )
        cells = ["failed" if it in failed else measured.cell(found[it]) for it in measured.labels]
        lines.append([*map(str, setting[: len(measured.names)]), *cells])
    about = f"## {measured.title}\n\n{inspect.getdoc(globals()[row])}\n\n"
    return about + report.table([*measured.names, *measured.labels.values()], lines)


def main(arguments: list[str] | None = None) -> None:
    options = report.Parser("spdl", __doc__, 1, rows=MEASUREMENTS).parse_args(arguments)
    page = report.Page("spdl", options.out)
    python = interpreter("spdl-loaders", REQUIREMENTS)
    page.add(HEAD, *[table(row, python, options, page) for row in options.rows])
    page.finish(conditions=versions_in(python, ("spdl", "torch", "numpy")))


if __name__ == "__main__":
    report.program(main)
