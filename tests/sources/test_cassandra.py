"""The Cassandra source on a real node, and on a ring that loses one; the contract suite has the rest."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minato.sources.base import MissingKey, SourceError
from minato.sources.retry import Retry
from tests.sources import servers
from tests.sources.kinds import Kind
from tests.sources.servers import Settings

pytest.importorskip("cassandra")

from cassandra.cluster import Cluster

from minato.sources.cassandra import Cassandra

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


def replicated(times: int) -> str:
    return f"{{'class': 'SimpleStrategy', 'replication_factor': {times}}}"


@pytest.fixture
def settings(kind_named: Callable[[str], Kind]) -> Settings:
    """Of the node that all tests share."""
    settings: Settings = kind_named("cassandra").source()._settings.values()
    return {"hosts": ["127.0.0.1"], **settings}


def test_columns_are_chosen_and_keys_sorted(settings: Settings) -> None:
    source = filled(settings)
    assert source.keys == ["bolt", "nut", "saw"]
    assert source[0] == {"price": 0.5, "size": None}
    some = Cassandra(table="shop.goods", key="name", columns=["price"], **settings)
    assert some.__getitems__([2, 0, 2]) == [{"price": 9.0}, {"price": 0.5}, {"price": 9.0}]
    source.close()
    some.close()


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
