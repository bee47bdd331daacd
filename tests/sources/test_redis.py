"""What only Redis has: how a connection begins, and a password that is wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from minato.sources.base import SourceError
from tests.sources.kinds import Kind

pytest.importorskip("redis", reason="redis is not installed: install the extra 'test'")

from minato.sources.redis import Redis


def test_a_wrong_password_is_refused_without_further_tries(
    kind_named: Callable[[str], Kind],
) -> None:
    place = kind_named("redis").source().place
    source = Redis(place.url, password="wrong")
    with pytest.raises(SourceError, match="AuthenticationError") as raised:
        source.get("sample")
    assert source.retries == 0
    assert "wrong" not in repr(source) + repr(raised.value.args)
    source.close()


def test_a_connection_asks_for_a_value_at_once() -> None:
    asked: list[bytes] = []

    def answer(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            asked.append(client.recv(4096))
            client.sendall(b"$5\r\nvalue\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=answer, args=(server,))
        answering.start()
        source = Redis(f"redis://127.0.0.1:{server.getsockname()[1]}")
        assert source.get("key") == b"value"
        answering.join()
        source.close()
    assert asked == [b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"]
