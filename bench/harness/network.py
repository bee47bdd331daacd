"""A network that is slow: a TCP proxy that keeps every byte back for as long as it would travel."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("fork")
_REQUEST = b"GET\r\n"
"""Ends the name of the command; the greeting of a connection does not count."""


@dataclass(frozen=True)
class Link:
    """What lies between a client and the server.

    Attributes:
        rtt_s: Round-trip time of a connection in the middle.
        bandwidth: Bytes per second towards the client that all connections have together.
        own_bandwidth: The same of a connection in the middle, behind the common part.
        spread: Ratio of the round-trip times, and of the own bandwidths, of the worst and the best connections.
        swing: Share by which these rise and fall in each connection, each at its own moment.
        period_s: How long such a rise and fall takes.
        hanging: Share of the requests that hang before they travel.
        hang_s: How long they do.
    """

    rtt_s: float
    bandwidth: float | None = None
    own_bandwidth: float | None = None
    spread: float = 1.0
    swing: float = 0.0
    period_s: float = 3.0
    hanging: float = 0.0
    hang_s: float = 0.0


class _Shared:
    def __init__(self, link: Link, upstream: str | int, requests: Any) -> None:
        self.link = link
        self.upstream = upstream
        self.requests = requests
        self.random = random.Random(5)
        self.free_at = 0.0


class _Way:
    """One direction of a connection: what comes in goes out later, in the same order."""

    def __init__(self, shared: _Shared, capped: bool, factor: float, phase: float) -> None:
        self._shared = shared
        self._capped = capped
        self._factor = factor
        self._phase = phase
        self._free_at = 0.0
        self._last_due = 0.0
        self.out: asyncio.WriteTransport | None = None
        self._early: list[bytes] = []

    def send(self, data: bytes, late_s: float = 0.0) -> None:
        if self.out is None:
            self._early.append(data)
            return
        loop, link = asyncio.get_running_loop(), self._shared.link
        now = loop.time()
        begun = now + late_s
        if self._capped and link.bandwidth is not None:
            begun = max(begun, self._shared.free_at)
            self._shared.free_at = begun = begun + len(data) / link.bandwidth
        swing = 1 + link.swing * math.sin(2 * math.pi * (now / link.period_s + self._phase))
        worse = self._factor * swing
        if self._capped and link.own_bandwidth is not None:
            own_s = len(data) / link.own_bandwidth * worse
            self._free_at = begun = max(begun, self._free_at) + own_s
        # TCP keeps the order: nothing overtakes what was sent before.
        self._last_due = due = max(begun + link.rtt_s / 2 * worse, self._last_due)
        if due <= now:
            self._deliver(data)
        else:
            loop.call_at(due, self._deliver, data)

    def _deliver(self, data: bytes) -> None:
        # Who went away meanwhile gets nothing; asyncio would print a warning for each piece.
        if self.out is not None and not self.out.is_closing():
            self.out.write(data)

    def connect(self, out: asyncio.WriteTransport) -> None:
        self.out = out
        early, self._early = self._early, []
        for data in early:
            self.send(data)

    def end(self) -> None:
        if self.out is not None:
            self.out.close()


class _Upstream(asyncio.Protocol):
    def __init__(self, to_server: _Way, to_client: _Way) -> None:
        self._to_server, self._to_client = to_server, to_client

    def connection_made(self, transport: Any) -> None:
        self._to_server.connect(transport)

    def data_received(self, data: bytes) -> None:
        self._to_client.send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._to_client.end()


class _Client(asyncio.Protocol):
    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        link = shared.link
        factor = link.spread ** shared.random.uniform(-0.5, 0.5)
        phase = shared.random.random()
        self._to_server = _Way(shared, False, factor, phase)
        self._to_client = _Way(shared, True, factor, phase)
        self._connecting: asyncio.Task[Any] | None = None

    def connection_made(self, transport: Any) -> None:
        self._to_client.connect(transport)
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(self._open(loop, self._shared.upstream))

    async def _open(self, loop: asyncio.AbstractEventLoop, upstream: str | int) -> None:
        def made() -> _Upstream:
            return _Upstream(self._to_server, self._to_client)

        if isinstance(upstream, str):
            await loop.create_unix_connection(made, upstream)
        else:
            await loop.create_connection(made, "127.0.0.1", upstream)

    def data_received(self, data: bytes) -> None:
        self._shared.requests.value += data.count(_REQUEST)
        hangs = self._shared.random.random() < self._shared.link.hanging
        self._to_server.send(data, self._shared.link.hang_s * hangs)

    def connection_lost(self, exc: Exception | None) -> None:
        self._to_server.end()


class Proxy:
    """The proxy of a server's socket or port, in a process of its own for the ``with`` block; has a ``port``."""

    def __init__(self, link: Link, upstream: str | int) -> None:
        self._requests = _CONTEXT.Value("q", 0, lock=False)
        self._arguments = link, upstream, self._requests
        self.port = 0

    @property
    def requests(self) -> int:
        """How many objects clients have asked for."""
        return int(self._requests.value)

    def __enter__(self) -> Proxy:
        ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_run, args=(*self._arguments, theirs), name="proxy", daemon=True
        )
        self._process.start()
        self.port = ours.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # whatever this process does at SIGTERM, its fork would do as well
        self._process.join()


def _run(link: Link, upstream: str | int, requests: Any, tell: Connection) -> None:
    async def serve() -> None:
        shared = _Shared(link, upstream, requests)
        server = await asyncio.get_running_loop().create_server(
            lambda: _Client(shared), "127.0.0.1", 0, backlog=512
        )
        tell.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())
