"""A Cassandra ring that loses a node in the middle of an epoch."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from bench import rows
from bench.harness import cassandra_node, report
from bench.harness.loaders import MINATO, Contender
from bench.harness.trial import Consumer, Run

NODES = tuple(f"127.0.0.{number}" for number in (1, 2, 3))
REPLICAS, COUNT = 2, 3000
REQUEST_S = 10.0
"""The driver's time limit of a request."""
_AFTER_S = 1.0
LOSSES = {"killed": cassandra_node.Node.kill, "stopped": cassandra_node.Node.hang}
_SHORT = 10
RING = """\
# A ring that loses a node

Written by `python -m bench.remote --rows ring`, with nodes of Cassandra on the machine of the loaders. Rows of
{kilobytes} kB in {nodes} nodes, each row in {replicas} of them; {workers} worker processes, batches of {batch}, {count}
rows in each epoch. Both loaders have the same dataset. After a third of the second epoch a node is *killed* (SIGKILL),
which ends its connections, or *stopped* (SIGSTOP). Then nobody learns that it does not answer any more. It is away
until the third epoch has ended. Every row came exactly once, and in order, in each epoch. The driver's time limit of a
request is {request:.0f} s. Medians of {repeats} runs (least and greatest in brackets). The first epoch, with the start
of the workers, does not count. The nodes share the cores of the machine with the loaders: two nodes leave more of them
to the workers than three. A node that has just started is slow, until Java has compiled what it executes: the page
shows pauses, and does not rank the loaders.
"""
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
