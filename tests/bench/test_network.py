"""The slow network of the remote benchmark: every byte arrives, in order, and no sooner than it may."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.network import Link, Proxy


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """The path of a socket whose server sends back what it gets, to one client."""
    path = str(tmp_path / "echo.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    server = threading.Thread(target=serve)
    server.start()
    yield path
    server.join(60)
    listener.close()


@pytest.mark.parametrize(
    ("link", "least_s"),
    [
        (Link(0.05), 0.05),
        (Link(0.05, spread=4, swing=0.5), 0.05 / 2 / 2),
        (Link(0.0, bandwidth=1e6), 0.2),
        (Link(0.0, own_bandwidth=1e6), 0.2),
    ],
)
def test_bytes_arrive_in_order_and_not_too_soon(echo: str, link: Link, least_s: float) -> None:
    content = b"".join(b"*2\r\n$3\r\nGET\r\n$1\r\n%d\r\n" % (i % 10) for i in range(10_000))
    with Proxy(link, echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as client:
        started = time.perf_counter()
        sender = threading.Thread(target=client.sendall, args=(content,))
        sender.start()
        got = b""
        while len(got) < len(content):
            got += client.recv(1 << 16)
        sender.join()
        assert time.perf_counter() - started >= least_s
        assert got == content
        # A command that two pieces share is not recognised; here there are more than one in each.
        assert 9_900 <= proxy.requests <= 10_000
