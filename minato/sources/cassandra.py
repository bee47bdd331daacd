"""Rows of a Cassandra or ScyllaDB cluster, through cassandra-driver (extra ``cassandra``)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minato.errors import missing

try:
    from cassandra import (
        AuthenticationFailed,
        OperationTimedOut,
        ProtocolVersion,
        Timeout,
        Unavailable,
    )
except ModuleNotFoundError:
    raise missing("minato.sources.cassandra", "cassandra-driver", "cassandra") from None
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.concurrent import execute_concurrent_with_args
from cassandra.connection import Connection, ConnectionException
from cassandra.policies import (
    ConstantSpeculativeExecutionPolicy,
    ExponentialReconnectionPolicy,
    NoSpeculativeExecutionPolicy,
)
from cassandra.query import dict_factory

from minato.sources.base import BatchedSource, Retry, Row
from minato.sources.connections import Settings
from minato.sources.sql import TableSource, quoted, quoted_column

__all__ = ["Cassandra"]

_IN_FLIGHT = 256
"""Most requests of a batch that are in flight; they share one or two connections per node."""

_OF_PROFILE = {
    "load_balancing_policy": "load_balancing_policy",
    "default_retry_policy": "retry_policy",
}
"""Arguments of ``Cluster`` with which it knows no profiles, and their names in a profile, which does the same."""
_RECEIVED_BYTES = 1 << 18
"""Most bytes of one receive call; the driver's 4096 make 15 calls of a row of 60 kB, each of which releases the GIL."""


class _Session(NamedTuple):
    """A session that reads; all threads share it."""

    cluster: Any
    session: Any
    select: Any


class Cassandra(TableSource, BatchedSource):
    """Rows of a table by their primary key, one column; a sample is a dict of the columns, in one read.

    One prepared statement serves all reads. The keys of a batch are requested concurrently, and each worker of a loader
    requests several batches at once, as many as it measures to be useful. The driver's own thread receives the rows of
    a worker's reads, and the worker decodes them. A read without an answer after half of the driver's time limit of a
    request goes to another replica, too, so that a node that hangs delays reads, but does not stop them.

    Args:
        hosts: Hosts of the cluster.
        table: Name of the table, as ``keyspace.table``.
        key: The column that is the primary key.
        columns: The columns of a sample; None for all but the key.
        keys, retry: See :class:`KeyedSource`. Without ``keys`` all are read from the table, page by page, and sorted.
        decode: Called with the dict of a row.
        make_cluster: Returns the driver's ``Cluster`` for ``hosts`` and the settings, in each process. A function of
            yours can add arguments that cannot be pickled: an ``ssl_context``, ``execution_profiles``.
        settings: ``username`` and ``password`` of a role, and further arguments of ``Cluster`` (``port``,
            ``load_balancing_policy``, ``compression`` …), each of them a value or an
            :class:`~minato.sources.connections.Env`. The driver tries to reach a lost node again at
            least every five seconds (``reconnection_policy``), and gives up one that says nothing for 15 seconds
            (``idle_heartbeat_interval`` and ``idle_heartbeat_timeout``).

    >>> source = Cassandra(["node1", "node2"], "scans.images", password=Env("DB_PASSWORD"), username="reader")
    ... # doctest: +SKIP
    """

    transient = (
        *(ConnectionException, NoHostAvailable, OperationTimedOut, Timeout, Unavailable),
        OSError,
    )
    shared = True

    def __init__(
        self,
        hosts: Sequence[str],
        table: str,
        key: str = "id",
        columns: Sequence[str] | None = None,
        *,
        keys: Sequence[object] | None = None,
        decode: Callable[[Row], object] | None = None,
        retry: Retry | None = None,
        make_cluster: Callable[..., Cluster] = Cluster,
        **settings: object,
    ) -> None:
        super().__init__(table, key, columns, None, keys, decode, retry)
        self._hosts = [hosts] if isinstance(hosts, str) else list(hosts)
        self._make_cluster = make_cluster
        self.settings = Settings(settings)

    def __repr__(self) -> str:
        return f"Cassandra({self._hosts!r}, {self.table!r}, {self.settings!r})"

    def connect(self) -> tuple[Any, Any]:
        """A new cluster object of the driver, and a session of it."""
        settings = {
            "reconnection_policy": ExponentialReconnectionPolicy(0.2, 5.0, max_attempts=None),
            "idle_heartbeat_interval": 5,
            "idle_heartbeat_timeout": 10,
            **self.settings.values(),
        }
        username, password = settings.pop("username", None), settings.pop("password", None)
        if username is not None:
            settings["auth_provider"] = PlainTextAuthProvider(username, password)
        # With profiles of the caller's own, the driver says that these arguments belong there.
        moved = {} if "execution_profiles" in settings else _OF_PROFILE
        given = {name: settings.pop(old) for old, name in moved.items() if old in settings}
        if given:
            settings["execution_profiles"] = {EXEC_PROFILE_DEFAULT: ExecutionProfile(**given)}
        cluster = self._make_cluster(self._hosts, **settings)
        if self._make_cluster is Cluster and "protocol_version" not in settings:
            # The driver would first try two of DataStax Enterprise; it still goes to lower ones by itself.
            cluster.protocol_version = ProtocolVersion.V5
        cluster.connection_class = _receives_more(cluster.connection_class)
        try:
            session = cluster.connect()
        except BaseException as error:
            cluster.shutdown()
            errors = getattr(error, "errors", None)  # by host, a list of hosts, or None
            for refusal in errors.values() if isinstance(errors, dict) else ():
                if isinstance(refusal, AuthenticationFailed):  # another attempt changes nothing
                    raise refusal from None
            raise
        profile = session.get_execution_profile(EXEC_PROFILE_DEFAULT)
        profile.row_factory = dict_factory
        policy, limit_s = profile.speculative_execution_policy, profile.request_timeout
        if limit_s and isinstance(policy, NoSpeculativeExecutionPolicy):
            again = ConstantSpeculativeExecutionPolicy(limit_s / 2, max_attempts=1)
            profile.speculative_execution_policy = again
        return cluster, session

    def open_connection(self) -> _Session:
        cluster, session = self.connect()
        try:
            select = session.prepare(self.statement(f"{self.selection()} = \0"))
        except BaseException:
            cluster.shutdown()
            raise
        select.is_idempotent = True  # so it may be sent to a second node
        return _Session(cluster, session, select)

    def close_connection(self, connection: _Session) -> None:  # the driver keeps one idle thread
        connection.cluster.shutdown()

    def session(self) -> _Session:
        """The session of this process."""
        # The lease does not cover the read: a session whose reads fail is the one that reconnects.
        with self.connections.lease() as session:
            return session  # type: ignore[no-any-return]

    def column_name(self, name: str) -> str:
        return quoted_column(name)

    def query(self, text: str, *arguments: object) -> list[Row]:
        """The rows of a query; of the prepared one, with a key."""
        _, session, select = self.session()
        return list(session.execute(select, arguments) if arguments else session.execute(text))

    def listing(self) -> str:
        return f"SELECT {quoted_column(self.key)} FROM {quoted(self.table)}"

    def list_keys(self) -> Sequence[Any]:
        return sorted(super().list_keys())

    def read_values(self, keys: list[object]) -> list[Row | None]:
        _, session, select = self.session()
        results = execute_concurrent_with_args(
            session, select, [(key,) for key in keys], _IN_FLIGHT, raise_on_first_error=False
        )
        return [
            self.sample_of(key, list(found)) if arrived else None
            for key, (arrived, found) in zip(keys, results, strict=True)
        ]

    def __beginitems__(
        self, indices: Sequence[int], done: Callable[[Callable[[], object] | None], None]
    ) -> bool:
        """Begin to read the samples of a batch; False without a session, which ``__getitems__`` opens.

        The driver's thread calls ``done`` once, with a function that returns the list of samples. It reads those whose
        read failed.
        """
        opened = self.connections.opened()
        if opened is None:
            return False
        keys = list(map(self.key_at, indices))
        results: list[list[Row]] = [[] for _ in keys]
        missing, lock = len(keys), threading.Lock()

        def samples() -> list[Any]:
            return self.all_decoded(keys, list(map(self.sample_of, keys, results)))

        def arrived(rows: list[dict[str, object]], i: int) -> None:
            nonlocal missing
            results[i] = rows
            with lock:
                missing -= 1
                complete = not missing
            if complete:
                done(samples)

        def failed(error: BaseException, i: int) -> None:
            if isinstance(error, self.transient):
                self.counters.add(retries=1)
            arrived([], i)

        for i, key in enumerate(keys):
            try:
                request = opened.session.execute_async(opened.select, (key,))
            except Exception as error:  # of which the second read of this key tells
                failed(error, i)
            else:
                request.add_callbacks(arrived, failed, (i,), errback_args=(i,))
        return True


@functools.cache
def _receives_more(connection: type[Connection]) -> type[Connection]:
    size = max(connection.in_buffer_size, _RECEIVED_BYTES)
    return type(connection.__name__, (connection,), {"in_buffer_size": size})
