"""Rows of a real Cassandra node behind a slow network: the driver alone, torch and minato, first and later epochs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from cassandra import ConsistencyLevel
from cassandra.cluster import NoHostAvailable
from cassandra.concurrent import execute_concurrent_with_args
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from bench.harness import cassandra_node, report
from bench.harness.datasets import Ideal
from bench.harness.loaders import (
    MINATO,
    MINATO_ANY_ORDER,
    Contender,
    minato_loader,
    named,
)
from bench.harness.network import Link, Proxy
from bench.harness.suite import Row, RowResult, measure
from bench.harness.trial import WrongDeliveryError, unwarned
from bench.workloads.payload import stored_object
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
HEAD = """\
# Rows of Cassandra

Written by `python -m bench.remote --rows cassandra`. Rows of {kilobytes} kB in one node of Cassandra behind a TCP
proxy. It holds every byte back for half of the round-trip time in each direction. {workers} worker processes that live
for {epochs} epochs, batches of {batch}, a consumer that takes every batch at once. Loaders take turns; every sample is
checked. The node has answered {warm} reads before the first measurement, since Java compiles what is executed often.
The first epoch has the start of the workers and their sessions in it. Rows per second: medians of {repeats} runs (least
and greatest in brackets). *Driver*: one process requests each batch with `execute_concurrent_with_args` and collates
it, without a loader. Client, proxy and node share the cores of one machine, which limits what can be reached at the
lowest latency. `torch, __getitems__` requests the rows of a batch together: {batch} in each worker. `minato` does so
for several batches at once, as many as each worker measures to be useful, 128 rows at most. *Ideal*: the most requests
that a loader with a fixed number has in flight ({most} in each worker), divided by the round trip. Row by row is left
out at 150 ms, where four workers cannot read more than 27 rows per second.
"""


class Rows(Dataset[Any]):
    """``(uint8 tensor, index)`` by rows of the table.

    Args:
        port: Of the node, or of a proxy before it.
        count: Samples.
        rtt_s: Round trip to the node.
        hosts: The nodes.
    """

    def __init__(
        self, port: int, count: int, rtt_s: float = 0.0, hosts: Sequence[str] = HOSTS
    ) -> None:
        self.source = Cassandra(hosts, _TABLE, keys=range(count), decode=_sample, port=port)
        self.rtt_s = rtt_s

    def __len__(self) -> int:
        return len(self.source)

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


class _OneByOne(Dataset[Any]):
    """The same rows for a loader that asks for each by itself."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class _Driver:
    """The driver without a loader."""

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


def _driver(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    return _Driver(work, arguments["batch_size"])


def _torch(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    return TorchLoader(work, **arguments)


def _torch_one_by_one(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    return TorchLoader(_OneByOne(work), **arguments)


def _reads(reads: int) -> Contender:
    """minato with that number of rows in flight in each worker."""
    loader = minato_loader(fetch_concurrency=reads)
    return Contender(f"minato-{reads}-reads", f"minato, {reads} reads", loader, keeps_order=True)


LOADERS = named(
    Contender("driver", "driver", _driver, keeps_order=True),
    Contender(ONE_BY_ONE, "torch, row by row", _torch_one_by_one, keeps_order=True),
    Contender("torch", "torch, `__getitems__`", _torch, keeps_order=True),
    MINATO,
    MINATO_ANY_ORDER,
    _reads(MANY_READS),
)


def fill(port: int, count: int = COUNT, hosts: Sequence[str] = HOSTS, replicas: int = 1) -> None:
    """Write the rows into new nodes."""
    source = Cassandra(hosts, _TABLE, keys=[], port=port)
    cluster, session = source.connect()

    def write() -> None:
        rows = ((key, stored_object(key, NBYTES)) for key in range(count))
        execute_concurrent_with_args(session, insert, rows, READS)

    try:
        _wait_until_all_know_all(cluster, session, len(hosts))
        make_keyspace(session, replicas)
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


def make_keyspace(session: Any, replicas: int) -> None:
    """Make the benchmark's keyspace."""
    session.execute(
        "CREATE KEYSPACE bench WITH replication = "
        f"{{'class': 'SimpleStrategy', 'replication_factor': {replicas}}}"
    )


def compare(page: report.Page, repeats: int, short: bool) -> None:
    """Measure all loaders behind each link.

    Raises:
        NotInstalled: There is no Java or no Cassandra; the message says how to name it.
    """
    page.add(
        HEAD.format(
            kilobytes=NBYTES // 1000,
            workers=WORKERS,
            epochs=EPOCHS,
            warm=f"{_WARM_EPOCHS * COUNT:,}",
            batch=BATCH_SIZE,
            repeats=repeats,
            most=MANY_READS,
        )
    )
    with cassandra_node.running() as node:
        fill(node.place.port)
        _warm(node.place.port, 1 if short else _WARM_EPOCHS)
        for (label, rtt_s), count in zip(RTT_S.items(), COUNTS, strict=True):
            with Proxy(Link(rtt_s), node.place.port) as proxy:
                row = Row(
                    name=f"Round trip {label}",
                    title="",
                    make=lambda samples, port=proxy.port, rtt=rtt_s: Rows(port, samples, rtt),  # type: ignore[misc]
                    samples=2 * BATCH_SIZE if short else count,
                    short_samples=0,
                    batch_size=BATCH_SIZE,
                    workers=WORKERS,
                    epochs=EPOCHS,
                    persistent=True,
                    loaders=tuple(name for name in LOADERS if name != ONE_BY_ONE or rtt_s < _FAR_S),
                    unit="samples/s",
                )
                (result,) = measure([row], LOADERS, repeats, page.say)
            page.add(f"## {row.name}, {row.samples} rows\n", _table(result, rtt_s))


def _table(result: RowResult, rtt_s: float) -> str:
    first, later = result.first_rates(), result.later_rates()
    lines = []
    for name in result.trials:
        ratios = [a / b for a, b in zip(later[name], later["torch"], strict=True)]
        cells = report.spread_text(first[name], 0), report.spread_text(later[name], 0)
        lines.append([LOADERS[name].label, *cells, report.spread_text(ratios, 2)])
    if rtt_s:
        lines.append(["*ideal*", "", f"{WORKERS * MANY_READS / rtt_s:.0f}", ""])
    head = ["loader", "first epoch", "later epochs", "× torch, `__getitems__`, later epochs"]
    return report.table(head, lines)
