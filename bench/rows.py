"""Rows of Cassandra nodes: one behind a slow network, with its driver alone beside loaders; a ring that loses one."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from cassandra import ConsistencyLevel
from cassandra.cluster import NoHostAvailable
from cassandra.concurrent import execute_concurrent_with_args
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate

from bench.harness import cassandra_node, report
from bench.harness.datasets import Counted, Ideal, Mapped, stored_object
from bench.harness.loaders import MINATO, MINATO_ANY_ORDER, Contender, minato_as, named, torch_as
from bench.harness.network import Link, Proxy
from bench.harness.suite import Row, measure
from bench.harness.trial import Consumer, Run, WrongDeliveryError, unwarned
from minato.sources.cassandra import Cassandra

NBYTES, COUNT = 60_000, 2000
BATCH_SIZE, WORKERS, READS, MANY_READS, EPOCHS = 32, 4, 16, 64, 3
RTT_S = {"0 ms": 0.0, "20 ms": 0.02, "150 ms": 0.15}
COUNTS = (COUNT, 1000, 400)
HOSTS = ("127.0.0.1",)
_TABLE = "bench.rows"
_WARM_EPOCHS = 10
_PEERS = "SELECT peer FROM system.peers"
ONE_BY_ONE, _FAR_S = "torch-one-by-one", 0.1
AGAINST = {"torch": "× torch, `__getitems__`, later epochs"}
HEAD = f"""\
# Rows of Cassandra

Written by `python -m bench.remote --rows cassandra`. Rows of {NBYTES // 1000} kB in one node of Cassandra behind a TCP
proxy. It holds every byte back for half of the round-trip time in each direction. {WORKERS} worker processes that live
for {EPOCHS} epochs, batches of {BATCH_SIZE}, a consumer that takes every batch at once. Loaders take turns; every
sample is checked. The node has answered {_WARM_EPOCHS * COUNT:,} reads before the first measurement, since Java
compiles what is executed often. The first epoch has the start of the workers and their sessions in it. Rows per second:
medians of {{repeats}} runs (least and greatest in brackets). *Driver*: one process requests each batch with
`execute_concurrent_with_args` and collates it, without a loader. Client, proxy and node share the cores of one machine,
which limits what can be reached at the lowest latency. `torch, __getitems__` requests the rows of a batch together:
{BATCH_SIZE} in each worker. `minato` does so for several batches at once, as many as each worker measures to be useful,
128 rows at most. *Ideal*: the most requests that a loader with a fixed number has in flight ({MANY_READS} in each
worker), divided by the round trip. Row by row is left out at 150 ms, where four workers cannot read more than 27 rows
per second.
"""


class Rows(Counted):
    """``(uint8 tensor, index)`` by rows of the table, from nodes or a proxy before them."""

    def __init__(
        self, port: int, count: int, rtt_s: float = 0.0, hosts: Sequence[str] = HOSTS
    ) -> None:
        super().__init__(count)
        self.source = Cassandra(hosts, _TABLE, keys=range(count), decode=_sample, port=port)
        self.rtt_s = rtt_s

    def __getitem__(self, index: int) -> Any:
        return _checked(self.source[index], index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(map(_checked, self.source.__getitems__(indices), indices))

    def __beginitems__(self, indices: list[int], done: Any) -> bool:
        return self.source.__beginitems__(indices, done)  # finish() of a run checks what came

    def content(self, index: int) -> Any:
        return torch.frombuffer(bytearray(stored_object(index, NBYTES)), dtype=torch.uint8), index

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        return Ideal(self.rtt_s / (WORKERS * MANY_READS) * len(self))


def _sample(row: dict[str, Any]) -> Any:
    data = row["data"]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), int.from_bytes(data[:8], "little")


def _checked(sample: Any, index: int) -> Any:
    if sample[1] != index:
        raise WrongDeliveryError(f"another row came for {index}")
    return sample


class _Driver:
    def __init__(self, rows: Rows, batch_size: int) -> None:
        self._count, self._batch_size = len(rows), batch_size
        self._cluster, self._session = rows.source.connect()
        self._select = self._session.prepare(f"SELECT data FROM {_TABLE} WHERE id = ?")

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, self._count, self._batch_size):
            keys = [(key,) for key in range(first, min(first + self._batch_size, self._count))]
            found = execute_concurrent_with_args(
                self._session, self._select, keys, self._batch_size, results_generator=True
            )
            yield default_collate([_sample(rows.one()) for _, rows in found])

    def __del__(self) -> None:
        self._cluster.shutdown()


def _reads(reads: int) -> Contender:
    return minato_as(f"minato, {reads} reads", f"minato-{reads}-reads", fetch_concurrency=reads)


LOADERS = named(
    Contender("driver", "driver", lambda work, given, _: _Driver(work, given["batch_size"]), True),
    Contender(
        *(ONE_BY_ONE, "torch, row by row"),
        lambda work, given, _: TorchLoader(Mapped(work), **given),
        keeps_order=True,
    ),
    torch_as("torch, `__getitems__`", "torch"),
    MINATO,
    MINATO_ANY_ORDER,
    _reads(MANY_READS),
)


def fill(port: int, count: int = COUNT, hosts: Sequence[str] = HOSTS, replicas: int = 1) -> None:
    source = Cassandra(hosts, _TABLE, keys=[], port=port)
    cluster, session = source.connect()

    def write() -> None:
        rows = ((key, stored_object(key, NBYTES)) for key in range(count))
        execute_concurrent_with_args(session, insert, rows, READS)

    try:
        _wait_until_all_know_all(cluster, session, len(hosts))
        replication = f"{{'class': 'SimpleStrategy', 'replication_factor': {replicas}}}"
        session.execute(f"CREATE KEYSPACE bench WITH replication = {replication}")
        session.execute(f"CREATE TABLE {_TABLE} (id bigint PRIMARY KEY, data blob)")
        insert = session.prepare(f"INSERT INTO {_TABLE} (id, data) VALUES (?, ?)")
        insert.consistency_level = ConsistencyLevel.ALL
        source.attempt("the rows", write)
    finally:
        cluster.shutdown()


def _wait_until_all_know_all(cluster: Any, session: Any, nodes: int) -> None:
    """Wait until a new ring is whole: a node that has not heard of the others refuses rows of tables made by them."""
    deadline = time.monotonic() + cassandra_node.START_S
    known: list[int] = []
    while known != [nodes - 1] * nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"of {nodes} nodes, {len(known)} answer, and know this many others: {known}"
            )
        time.sleep(0.1)
        cluster.refresh_nodes()
        with suppress(NoHostAvailable):  # the driver drops a node that the others do not know
            hosts = cluster.metadata.all_hosts()
            known = [len(list(session.execute(_PEERS, host=host))) for host in hosts]


def _warm(port: int, epochs: int) -> None:
    """Read all rows, until the node has compiled what it executes: the first loaders would have a slower one."""
    loader = TorchLoader(
        Rows(port, COUNT), BATCH_SIZE, num_workers=WORKERS, persistent_workers=True
    )
    with unwarned():
        for _ in range(epochs):
            for _ in loader:
                pass


def compare(page: report.Page, repeats: int, short: bool) -> None:
    page.add(HEAD.format(repeats=repeats))
    with cassandra_node.running() as node:
        fill(node.place.port)
        _warm(node.place.port, 1 if short else _WARM_EPOCHS)
        for (label, rtt_s), count in zip(RTT_S.items(), COUNTS, strict=True):
            with Proxy(Link(rtt_s), node.place.port) as proxy:
                row = Row(
                    *(f"Round trip {label}", ""),
                    lambda samples, port=proxy.port, rtt=rtt_s: Rows(port, samples, rtt),  # type: ignore[misc]
                    *(count, BATCH_SIZE, WORKERS, EPOCHS),
                    persistent=True,
                    loaders=tuple(name for name in LOADERS if name != ONE_BY_ONE or rtt_s < _FAR_S),
                    unit="samples/s",
                )
                row = row.short() if short else row
                (result,) = measure([row], LOADERS, repeats, page.say)
            best = [["*ideal*", "", f"{WORKERS * MANY_READS / rtt_s:.0f}", ""]] if rtt_s else []
            page.add(
                f"## {row.name}, {row.samples} rows\n",
                report.rates(result, LOADERS, AGAINST, *best),
            )


# ---- a ring that loses a node ----------------------------------------------------------------

NODES = tuple(f"127.0.0.{number}" for number in (1, 2, 3))
REPLICAS, RING_COUNT = 2, 3000
REQUEST_S = 10.0
"""The driver's time limit of a request."""
_AFTER_S = 1.0
LOSSES = {"killed": cassandra_node.Node.kill, "stopped": cassandra_node.Node.hang}
_SHORT = 10
RING = f"""\
# A ring that loses a node

Written by `python -m bench.remote --rows ring`, with nodes of Cassandra on the machine of the loaders. Rows of
{NBYTES // 1000} kB in {len(NODES)} nodes, each row in {REPLICAS} of them; {WORKERS} worker processes, batches of
{BATCH_SIZE}, {{count}} rows in each epoch. Both loaders have the same dataset. After a third of the second epoch a node
is *killed* (SIGKILL), which ends its connections, or *stopped* (SIGSTOP). Then nobody learns that it does not answer
any more. It is away until the third epoch has ended. Every row came exactly once, and in order, in each epoch. The
driver's time limit of a request is {REQUEST_S:.0f} s. Medians of {{repeats}} runs (least and greatest in brackets). The
first epoch, with the start of the workers, does not count. The nodes share the cores of the machine with the loaders:
two nodes leave more of them to the workers than three. A node that has just started is slow, until Java has compiled
what it executes: the page shows pauses, and does not rank the loaders.
"""
RING_LOADERS = (LOADERS["torch"], MINATO)


def ring(page: report.Page, repeats: int, short: bool) -> None:
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(cassandra_node.running(place))
            for place in cassandra_node.ring(NODES)
        ]
        _ring(page, nodes, RING_COUNT // _SHORT if short else RING_COUNT, repeats)


def _ring(
    page: report.Page, nodes: Sequence[cassandra_node.Node], count: int, repeats: int
) -> None:
    port = nodes[0].place.port
    fill(port, count, NODES, REPLICAS)
    found: dict[tuple[str, str], list[list[float]]] = {
        (loss, loader.label): [] for loss in LOSSES for loader in RING_LOADERS
    }
    for repeat in range(repeats):
        for loss, loader in itertools.product(LOSSES, RING_LOADERS[:: -1 if repeat % 2 else 1]):
            work, node = Rows(port, count, hosts=NODES), nodes[-1]
            figures = _lose(loader, work, node, functools.partial(LOSSES[loss], node))
            page.say(f"{loss}, {loader.name} {repeat + 1}/{repeats}: {figures}")
            found[loss, loader.label].append(figures)
    page.add(RING.format(count=count, repeats=repeats))
    head = ["the node is", "loader", "rows/s before"]
    head += ["in the rest of the epoch", "in the next epoch"]
    head += ["longest pause between batches before, s", "after, s", "read again by the source"]
    page.add(report.table(head, [[*key, *_cells(each)] for key, each in found.items()]))


def _cells(runs: Sequence[Sequence[float]]) -> list[str]:
    digits = 0, 0, 0, 2, 2, 0
    return [report.spread_text(*each) for each in zip(zip(*runs, strict=True), digits, strict=True)]


def _lose(
    loader: Contender, work: Rows, node: cassandra_node.Node, lose: Callable[[], None]
) -> list[float]:
    """Three epochs, in the second of which the node is lost.

    Returns:
        Rows per second before that, in the rest of the epoch and in the next one; the longest pauses; repeated reads.
    """
    arrived: list[float] = []
    batches = -(-len(work) // BATCH_SIZE)
    last = batches + batches // 3
    """The batch after which the node is lost."""

    def step(_: Any) -> None:
        arrived.append(time.perf_counter())
        if len(arrived) == last:
            lose()

    arguments = {"batch_size": BATCH_SIZE, "num_workers": WORKERS}
    run = Run(loader, work, {**arguments, "persistent_workers": True}, Consumer(step))
    for _ in range(3):
        run.epoch()
    trial = run.finish()
    node.kill()
    node.start()
    time.sleep(_AFTER_S)  # until the others know it again
    lost, end = arrived[last - 1], arrived[2 * batches - 1]
    return [
        BATCH_SIZE * (last - batches - 1) / (lost - arrived[batches]),
        BATCH_SIZE * (2 * batches - last) / (end - lost),
        len(work) / trial.epochs_s[2],
        max(trial.waits_s[batches:last]),
        max(trial.waits_s[last:]),
        work.source.retries,
    ]
