"""How many requests the store bears at once: the ConcurrentDataloader paper's pools without a loader, and loaders."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import minato
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.far import ABOUT, Picture, Pictures, bound_per_s, far_store
from bench.papers.grid import BATCH_SIZE, RUN_S, SHORT_RUN_S, samples_of
from bench.papers.page import Section, Settings, prose
from bench.papers.trial import check, timed

SIZES, SHORT_SIZES = (1, 4, 10, 20, 40, 60), (1, 3)
WORKERS = 4
_TEXT = """\
{about}. *Pool*: so many processes that read the data set and hand nothing over, as the paper measured a store
without a loader (table 7: pools of 1 to 80, 2000 images). torch has so many workers; minato has {workers} at
most, and so many reads in all of them together (`Fetching(n, most=n)`). Samples per second of whole runs in
batches of {batch}, starts included, of as many samples as the bound brings in {run_s:g} s.
"""
_dataset: Pictures | None = None


def run(settings: Settings) -> Section:
    """Time a pool and loaders of each size, in turn."""
    sizes = SHORT_SIZES if settings.short else SIZES
    run_s, least = (SHORT_RUN_S, 1) if settings.short else (RUN_S, 2)
    contenders: dict[str, Callable[[Pictures, int], float]] = {
        "pool": pool_s,
        "torch": _loader("torch"),
        "torch, in_order=False": _loader("torch, in_order=False"),
        "minato": _minato_s,
    }
    names = [*contenders]
    found: dict[tuple[int, str], list[float]] = {}
    with far_store() as port:
        for repeat in range(settings.repeats):
            turn = repeat % len(names)
            for size in sizes:
                dataset = Pictures(port, samples_of(size, size, run_s, least))
                for name in names[turn:] + names[:turn]:
                    rate = len(dataset) / contenders[name](dataset, size)
                    found.setdefault((size, name), []).append(rate)
    rows = [
        [f"{size}", f"{bound_per_s(size):.0f}"]
        + [spread_text(Spread.of(found[size, name]), 0) for name in names]
        for size in sizes
    ]
    text = prose(_TEXT, about=ABOUT, workers=WORKERS, batch=BATCH_SIZE, run_s=run_s)
    title = "Pools of requests (ConcurrentDataloader, figure 12)"
    return Section(title, f"{text}\n{table(['requests at once', 'bound', *names], rows)}")


def pool_s(dataset: Pictures, size: int) -> float:
    """Seconds in which a pool of processes reads all samples."""
    begun_s = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(size, _enter, (dataset,)) as pool:
        came = list(pool.imap_unordered(_index_of, range(len(dataset))))
        taken_s = time.perf_counter() - begun_s
        pool.close()
        pool.join()
    check("", came, range(len(dataset)))
    return taken_s


def _enter(dataset: Pictures) -> None:
    global _dataset
    _dataset = dataset


def _index_of(index: int) -> int:
    assert _dataset is not None
    sample: Picture = _dataset[index]
    return sample.key


def _loader(name: str) -> Callable[[Pictures, int], float]:
    def taken_s(dataset: Pictures, size: int) -> float:
        return _timed_s(name, dataset, size)

    return taken_s


def _minato_s(dataset: Pictures, size: int) -> float:
    fetching = minato.Fetching(size, most=size)
    return _timed_s("minato", dataset, min(size, WORKERS), fetch_concurrency=fetching)


def _timed_s(name: str, dataset: Pictures, workers: int, **options: Any) -> float:
    order = range(len(dataset))
    options = {"batch_size": BATCH_SIZE, "num_workers": workers, **options}
    return timed(name, dataset, [], order, 0.0, **options).whole_s
