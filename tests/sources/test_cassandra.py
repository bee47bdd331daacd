"""The Cassandra source on a real node, and on a ring that loses one; the contract suite has the rest."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

import minato
from minato.sources.base import MissingKey, Retry, SourceError
from tests.sources import servers
from tests.sources.kinds import RETRY, Kind
from tests.sources.servers import Settings

pytest.importorskip("cassandra")

from cassandra import ConsistencyLevel, OperationTimedOut
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.connection import Connection
from cassandra.policies import FallthroughRetryPolicy, RoundRobinPolicy

from minato.sources.cassandra import Cassandra, _Session

ROOT = Path(minato.__file__).parents[1]
NO_RETRY = Retry(attempts=1)


def filled(settings: Settings) -> Cassandra:
    """A source over a table of its own, with three rows."""
    source = Cassandra(table="shop.goods", key="name", **settings)
    cluster, session = source.connect()
    session.execute("DROP KEYSPACE IF EXISTS shop")
    session.execute(f"CREATE KEYSPACE shop WITH replication = {replicated(1)}")
    session.execute(
        'CREATE TABLE "shop"."goods" (name text PRIMARY KEY, price double, size bigint)'
    )
    for name, price in (("bolt", 0.5), ("nut", 0.25), ("saw", 9.0)):
        insert = session.prepare(
            'INSERT INTO "shop"."goods" ("name", "price", "size") VALUES (?, ?, ?)'
        )
        session.execute(insert, (name, price, None))
    cluster.shutdown()
    return source


class Asked(Cassandra):
    """Notes the keys that are asked for together; nothing comes."""

    def open_connection(self) -> Any:
        return _Session(None, self, None)

    def close_connection(self, connection: Any) -> None:
        pass

    def execute_async(self, select: Any, arguments: tuple[object]) -> Any:
        self.asked.append(arguments[0])
        return self

    def add_callbacks(self, *callbacks: Any, **arguments: Any) -> None:
        pass


def test_the_driver_gets_keys_of_python() -> None:
    """It changes an integer in place, and an item of a tensor is a view."""
    source = Asked("nowhere", "shop.goods", keys=torch.tensor([300, 301]))
    source.asked = []
    with source.connections.lease():
        assert source.__beginitems__([0, 1], lambda samples: None)
    assert [(key, type(key)) for key in source.asked] == [(300, int), (301, int)]


def replicated(times: int) -> str:
    return f"{{'class': 'SimpleStrategy', 'replication_factor': {times}}}"


@pytest.fixture
def settings(kind_named: Callable[[str], Kind]) -> Settings:
    """Of the node that all tests share."""
    settings: Settings = kind_named("cassandra").source().settings.values()
    return {"hosts": ["127.0.0.1"], **settings}


def test_columns_are_chosen_and_keys_sorted(settings: Settings) -> None:
    source = filled(settings)
    assert source.keys == ["bolt", "nut", "saw"]
    assert source[0] == {"price": 0.5, "size": None}
    some = Cassandra(table="shop.goods", key="name", columns=["price"], **settings)
    assert some.__getitems__([2, 0, 2]) == [{"price": 9.0}, {"price": 0.5}, {"price": 9.0}]
    source.close()
    some.close()


def test_policies_are_those_of_the_default_profile(settings: Settings) -> None:
    filled(settings).close()
    given = {
        "load_balancing_policy": RoundRobinPolicy(),
        "default_retry_policy": FallthroughRetryPolicy(),
    }
    source = Cassandra(table="shop.goods", key="name", **given, **settings)
    assert source.get("nut") == {"price": 0.25, "size": None}
    source.close()
    profiles = {EXEC_PROFILE_DEFAULT: ExecutionProfile(RoundRobinPolicy())}
    both = Cassandra(
        table="shop.goods", key="name", execution_profiles=profiles, **given, **settings
    )
    with pytest.raises(SourceError, match="execution_profiles should not"):
        both.get("nut")


def test_the_missing_one_of_a_batch_is_named(settings: Settings) -> None:
    source = filled(settings).subset(["saw", "file", "nut"])
    with pytest.raises(MissingKey, match="has no key 'file'"):
        source.__getitems__([0, 1, 2])
    source.close()


def test_a_changed_schema_is_told_with_the_key(settings: Settings) -> None:
    filled(settings).close()
    source = Cassandra(table="shop.goods", key="name", columns=["price"], **settings)
    assert source.get("nut") == {"price": 0.25}
    cluster, session = source.connect()
    session.execute('ALTER TABLE "shop"."goods" DROP price')
    cluster.shutdown()
    with pytest.raises(SourceError, match="cannot read key 'saw'.*price"):
        source.get("saw")
    source.close()


def test_a_wrong_role_is_refused_without_further_tries(settings: Settings) -> None:
    source = Cassandra(table="shop.goods", **{**settings, "username": "somebody"})
    with pytest.raises(SourceError, match="AuthenticationFailed") as raised:
        source.get("nut")
    assert source.retries == 0
    assert servers.PASSWORD not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        NoHostAvailable("Unable to connect to any servers", ["10.0.0.1"]),
        NoHostAvailable("Unable to connect to any servers", {"10.0.0.1": OSError("refused")}),
        OperationTimedOut(),
    ],
)
def test_a_node_that_is_lost_while_connecting_is_tried_again(error: Exception) -> None:
    """The driver tells of it in several forms."""
    cluster = mock.Mock(connection_class=Connection)
    cluster.connect.side_effect = error
    retry = Retry(3, 0.001)
    source = Cassandra("nowhere", "shop.goods", make_cluster=lambda *_, **__: cluster, retry=retry)
    with pytest.raises(SourceError, match=f"after .* s of tries: {type(error).__name__}"):
        source.get("nut")
    assert source.retries == 2


def over_tls(hosts: list[str], certificate: Path, **settings: Any) -> Cluster:
    return Cluster(hosts, ssl_context=ssl.create_default_context(cafile=certificate), **settings)


@pytest.mark.slow
def test_tls_by_a_cluster_of_ones_own(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    openssl = [servers.program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
    openssl += ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl += ["-out", certificate, "-keyout", tmp_path / "key.pem"]
    subprocess.run(openssl, check=True, capture_output=True)
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "key.pem").read_text() + certificate.read_text())
    try:
        node, settings = servers.cassandra_server(tmp_path, certificate=both)
    except servers.Missing as error:
        pytest.skip(f"cassandra: {error}")
    node.start()
    try:
        context = ssl.create_default_context(cafile=certificate)
        servers.make_role(settings, ssl_context=context)
        plain = Cassandra(table="shop.goods", connect_timeout=0.5, retry=NO_RETRY, **settings)
        with pytest.raises(SourceError, match="cannot read key 'nut'"):
            plain.get("nut")
        secure = partial(over_tls, certificate=certificate)
        source = filled({**settings, "make_cluster": secure})
        assert source.get("nut")["price"] == 0.25
        source.close()
    finally:
        node.kill()


COUNT = 400


def numbered(settings: Settings, table: str, times: int, **more: Any) -> Cassandra:
    """A source over a table whose rows are numbers, each stored so often."""
    source = Cassandra(table=table, keys=range(COUNT), **more, **settings)
    cluster, session = source.connect()
    keyspace = table.partition(".")[0]
    session.execute(
        f"CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = {replicated(times)}"
    )
    session.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, label bigint)")
    insert = session.prepare(f"INSERT INTO {table} (id, label) VALUES (?, ?)")
    insert.consistency_level = ConsistencyLevel.ALL
    for index in range(COUNT):  # a new ring may not know yet that all of it runs
        source.attempt(f"key {index}", partial(session.execute, insert, (index, index)))
    cluster.shutdown()
    return source


def longest_pause_s(source: Cassandra, fetch_concurrency: int, lose: Callable[[], None]) -> float:
    """Go through one epoch, and lose a node in the middle of it; check that every sample comes."""
    loader = minato.DataLoader(
        source, batch_size=8, num_workers=2, fetch_concurrency=fetch_concurrency
    )
    found, pauses_s = [], []
    asked = time.monotonic()
    for number, batch in enumerate(loader):
        pauses_s.append(time.monotonic() - asked)
        found += batch["label"].tolist()
        if number == 10:
            lose()
        time.sleep(0.02)  # that some of the epoch is left to read without the node
        asked = time.monotonic()
    assert found == list(range(COUNT))
    return max(pauses_s)


@pytest.mark.slow
@pytest.mark.parametrize("fetch_concurrency", [1, 8])
def test_a_node_killed_and_started_again_in_mid_epoch_loses_nothing(
    fetch_concurrency: int, settings: Settings, kind_named: Callable[[str], Kind]
) -> None:
    node = kind_named("cassandra").server
    assert node is not None
    source = numbered(settings, f"minato.killed_{fetch_concurrency}", 1, retry=RETRY)

    # The workers may have read enough ahead to miss what happens; this read does not.
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.append(source[7]))

    def lose() -> None:
        node.kill()
        reading.start()
        node.start()
        reading.join(60)

    longest_pause_s(source, fetch_concurrency, lose)
    assert found == [{"label": 7}]
    assert source.retries > 0
    source.close()


REQUEST_S = 10.0
"""The driver's time limit of a request."""


def stop(node: servers.Server) -> None:
    """Nobody learns that it does not answer any more: its connections stay."""
    os.kill(node.pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_ring_goes_on_when_a_node_ends_or_hangs_in_mid_epoch(tmp_path: Path) -> None:
    try:
        nodes, settings = servers.cassandra_ring(tmp_path, [f"127.0.0.{n}" for n in (1, 2, 3)])
    except servers.Missing as error:
        pytest.skip(f"cassandra: {error}")
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.kill)
            node.start()
        source = numbered(settings, "ring.numbers", 2)
        stack.callback(source.close)
        for fetch_concurrency in (1, 8):
            for lose in (nodes[2].kill, partial(stop, nodes[2])):
                pause_s = longest_pause_s(source, fetch_concurrency, lose)
                assert pause_s < REQUEST_S
                nodes[2].kill()
                nodes[2].start()
            # What the hanging node does not answer, another one does.
            assert source.retries < COUNT // 10


def test_a_server_ends_with_the_tests(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time; from tests.sources.servers import Server; "
        f"server = Server('sleep', pathlib.Path({str(tmp_path)!r}), ['sleep', '600'], lambda: None); "
        "server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        server = psutil.Process(int(tests.stdout.readline()))
        tests.kill()
    server.wait(60)
