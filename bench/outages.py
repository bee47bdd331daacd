"""A Cassandra ring that loses a node in the middle of an epoch; ``minato ingest`` that is killed and resumed."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import rows
from bench.harness import cassandra_node, report
from bench.harness.loaders import MINATO, Contender
from bench.harness.record import ROOT
from bench.harness.trial import Consumer, Run
from minato.sources.cassandra import Cassandra

NODES = tuple(f"127.0.0.{number}" for number in (1, 2, 3))
REPLICAS, COUNT, MANY = 2, 3000, 100_000
REQUEST_S = 10.0
"""The driver's time limit of a request."""
_AFTER_S = 1.0
LOSSES = {"killed": cassandra_node.Node.kill, "stopped": cassandra_node.Node.hang}
_PATIENCE_S = 300.0
_SHORT = 10
RING = """\
# A ring that loses a node

Written by `python -m bench.remote --rows ring`, with nodes of Cassandra on the machine of the loaders. Rows of
{kilobytes} kB in {nodes} nodes, each row in {replicas} of them; {workers} worker processes, batches of {batch},
{count} rows in each epoch, the same dataset for both loaders. After a third of the second epoch a node is *killed*
(SIGKILL), which ends its connections, or *stopped* (SIGSTOP): then nobody learns that it does not answer any more. It
is away until the third epoch has ended. Every row came exactly once, and in order, in each epoch. The driver's time
limit of a request is {request:.0f} s. Medians of {repeats} runs (least and greatest in brackets). The first epoch, with
the start of the workers, does not count. The nodes share the cores of the machine with the loaders: two nodes leave
more of them to the workers than three. A node that has just started is slow, until Java has compiled what it executes:
the page shows pauses, and does not rank the loaders.
"""
INGEST = """\
# An ingest that is killed

Written by `python -m bench.remote --rows ingest`, with a node of Cassandra on the same machine. `minato ingest` of
{many} rows with 1 kB each into one node, {workers} workers. It is killed (SIGKILL) when its journal has {share:.0%}
of them, and then started again with the same command. *Written again*: rows that the table had, and the journal had
not; they got the same keys. Medians of {repeats} runs (least and greatest in brackets); times include the start of
the program.
"""
PROGRAM = """\
class Rows:
    def __len__(self):
        return {many}

    def __getitem__(self, index):
        return {{"label": index, "data": b"%01000d" % index}}
"""
_WORKERS, _CHUNK, _SHARE = 2, 1000, 0.4
LOADERS = (
    Contender("torch", "torch, `__getitems__`", rows.LOADERS["torch"].build, keeps_order=True),
    MINATO,
)


def ring(page: report.Page, repeats: int, short: bool) -> None:
    """Measure loaders while a node is killed.

    Raises:
        NotInstalled: There is no Java or no Cassandra; the message says how to name it.
    """
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(cassandra_node.running(place))
            for place in cassandra_node.ring(NODES)
        ]
        _ring(page, nodes, COUNT // _SHORT if short else COUNT, repeats)


def ingest(page: report.Page, repeats: int, short: bool) -> None:
    """Measure an ingest with and without a kill.

    Raises:
        NotInstalled: As of :func:`ring`.
    """
    with cassandra_node.running() as node:
        _ingests(page, node.place.port, MANY // _SHORT if short else MANY, repeats)


def _ring(
    page: report.Page, nodes: Sequence[cassandra_node.Node], count: int, repeats: int
) -> None:
    port = nodes[0].place.port
    rows.fill(port, count, NODES, REPLICAS)
    found: dict[tuple[str, str], list[list[float]]] = {
        (loss, loader.label): [] for loss in LOSSES for loader in LOADERS
    }
    for repeat in range(repeats):
        for loss, loader in itertools.product(LOSSES, LOADERS[:: -1 if repeat % 2 else 1]):
            work, node = rows.Rows(port, count, hosts=NODES), nodes[-1]
            figures = _lose(loader, work, node, functools.partial(LOSSES[loss], node))
            page.say(f"{loss}, {loader.name} {repeat + 1}/{repeats}: {figures}")
            found[loss, loader.label].append(figures)
    page.add(
        RING.format(
            kilobytes=rows.NBYTES // 1000,
            nodes=len(NODES),
            replicas=REPLICAS,
            workers=rows.WORKERS,
            batch=rows.BATCH_SIZE,
            count=count,
            request=REQUEST_S,
            repeats=repeats,
        )
    )
    head = [
        "the node is",
        "loader",
        "rows/s before",
        "in the rest of the epoch",
        "in the next epoch",
    ]
    head += ["longest pause between batches before, s", "after, s", "read again by the source"]
    page.add(report.table(head, [[*key, *_cells(each)] for key, each in found.items()]))


def _cells(runs: Sequence[Sequence[float]]) -> list[str]:
    digits = 0, 0, 0, 2, 2, 0
    return [report.spread_text(*each) for each in zip(zip(*runs, strict=True), digits, strict=True)]


def _lose(
    loader: Contender, work: rows.Rows, node: cassandra_node.Node, lose: Callable[[], None]
) -> list[float]:
    """Three epochs, in the second of which the node is lost.

    Returns:
        Rows per second before that, in the rest of the epoch and in the next one; the longest pauses; repeated reads.
    """
    arrived: list[float] = []
    batches = -(-len(work) // rows.BATCH_SIZE)
    last = batches + batches // 3
    """The batch after which the node is lost."""

    def step(_: Any) -> None:
        arrived.append(time.perf_counter())
        if len(arrived) == last:
            lose()

    arguments = {"batch_size": rows.BATCH_SIZE, "num_workers": rows.WORKERS}
    run = Run(loader, work, {**arguments, "persistent_workers": True}, Consumer(step))
    for _ in range(3):
        run.epoch()
    trial = run.finish()
    node.kill()
    node.start()
    time.sleep(_AFTER_S)  # until the others know it again
    lost, end = arrived[last - 1], arrived[2 * batches - 1]
    return [
        rows.BATCH_SIZE * (last - batches - 1) / (lost - arrived[batches]),
        rows.BATCH_SIZE * (2 * batches - last) / (end - lost),
        len(work) / trial.epochs_s[2],
        max(trial.waits_s[batches:last]),
        max(trial.waits_s[last:]),
        work.source.retries,
    ]


def _ingests(page: report.Page, port: int, many: int, repeats: int) -> None:
    source = Cassandra(rows.HOSTS, "bench.whole", keys=[], port=port)
    cluster, session = source.connect()
    try:
        rows.make_keyspace(session, 1)
        found = []
        for repeat in range(repeats):
            with tempfile.TemporaryDirectory() as name:
                found.append(_ingest(Path(name), port, session, many))
            page.say(f"ingest {repeat + 1}/{repeats}: {found[-1]}")
    finally:
        cluster.shutdown()
    share = {"many": f"{many:,}", "workers": _WORKERS, "share": _SHARE, "repeats": repeats}
    page.add(INGEST.format(**share))
    head = ["", "rows", "s", "rows/s"]
    digits = (*(0, 1, 0) * 3, 0, 0, 0)
    spreads = [
        report.spread_text(*each) for each in zip(zip(*found, strict=True), digits, strict=True)
    ]
    names = ["without a kill", "until the kill", "resumed", "written again", "lost", "too many"]
    lines = [[names[i], *spreads[3 * i : 3 * i + 3]] for i in range(3)]
    lines += [[name, spreads[9 + i], "", ""] for i, name in enumerate(names[3:])]
    page.add(report.table(head, lines))


def _ingest(folder: Path, port: int, session: Any, many: int) -> list[float]:
    """Ingest without a kill, and with one: rows, seconds and rows per second of the parts; rows twice and lost."""
    (folder / "dataset.py").write_text(PROGRAM.format(many=many))
    for table in ("whole", "killed"):
        session.execute(f"DROP TABLE IF EXISTS bench.{table}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(table: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "minato", "ingest", "dataset.py:Rows"]
        line += [f"cassandra://{rows.HOSTS[0]}:{port}", "--table", f"bench.{table}"]
        line += ["--columns", "label:int,data:bytes", "--journal", table]
        line += ["--workers", str(_WORKERS), "--chunk", str(_CHUNK)]
        return subprocess.Popen(
            line,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    begun = time.perf_counter()
    _end(start("whole"))
    whole_s = time.perf_counter() - begun
    begun = time.perf_counter()
    with start("killed") as first:  # waits for its end
        while _chunks(folder / "killed") < _SHARE * many / _CHUNK:
            if first.poll() is not None or time.perf_counter() - begun > _PATIENCE_S:
                first.kill()
                raise RuntimeError(f"the ingest was not killed: {first.communicate()[0]}")
            time.sleep(0.005)
        first.kill()
    killed_s = time.perf_counter() - begun
    had = _num_rows(session)
    begun = time.perf_counter()
    said = _end(start("killed"))
    resumed_s = time.perf_counter() - begun
    written = int((re.search(r"(\d+) written by this run", said) or [said, "0"])[1])
    keys = [row["id"] for row in session.execute("SELECT id FROM bench.killed")]
    lost = len(set(range(many)) - set(keys))
    figures = [many, whole_s, many / whole_s, had, killed_s, had / killed_s]
    figures += [written, resumed_s, written / resumed_s]
    return [*figures, had - (many - written), lost, len(keys) - many + lost]


def _end(job: subprocess.Popen[str]) -> str:
    said, _ = job.communicate(timeout=_PATIENCE_S)
    if job.returncode:
        raise RuntimeError(f"the ingest failed: {said}")
    return said


def _chunks(journal: Path) -> int:
    return max(len(journal.read_text().splitlines()) - 1, 0) if journal.exists() else 0


def _num_rows(session: Any) -> int:
    return len(list(session.execute("SELECT id FROM bench.killed")))
