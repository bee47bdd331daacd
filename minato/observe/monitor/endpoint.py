"""Where others fetch the figures of this process's loaders: a small HTTP server in a thread."""

from __future__ import annotations

import re
import socket
import weakref
from collections.abc import Callable
from http import HTTPStatus

from minato._fork_safety import forget_in_children
from minato._support.socket_server import Client, Server
from minato.observe.monitor.metrics import Exported, text_of

__all__ = ["Endpoint", "serve"]

_TIME_LIMIT_S = 2.0
"""For a whole request and its answer."""
_MOST_CLIENTS = 16
_INTERVAL_S = 0.005
"""Between two clients: 200 a second at most, which is a small part of a core."""
_MOST_BYTES = 8192
"""Of a request."""
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.\d")
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """Tells the figures of some loaders at an address; ends with the last of them.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self.loaders: list[weakref.ref[Exported]] = []
        listener = socket.create_server((host, port))
        self.url = f"http://{host}:{listener.getsockname()[1]}/metrics"
        self._server = Server(
            listener,
            lambda connection: _Request(connection, self._text),
            "minato-metrics",
            _TIME_LIMIT_S,
            _MOST_CLIENTS,
            _INTERVAL_S,
        )
        self._server.start()

    def _text(self) -> str:
        held = [exported() for exported in list(self.loaders)]
        return text_of(exported for exported in held if exported is not None)

    def close(self) -> None:
        """End the thread, and give the address back."""
        self._server.close()

    def let_go(self) -> None:
        """Close the sockets; in a forked child, only its copies of them."""
        self._server.let_go()


class _Request(Client):
    """A client that asks once.

    Args:
        text: Gives the figures.
    """

    def __init__(self, connection: socket.socket, text: Callable[[], str]) -> None:
        super().__init__(connection)
        self._text = text
        self._asked = b""
        self._answer = b""

    def step(self) -> bool:
        """Read more of the request, or write more of the answer."""
        if not self.writes:
            data = self.connection.recv(_MOST_BYTES)
            self._asked += data
            end = _END_OF_HEAD.search(self._asked)
            if end is None and len(self._asked) < _MOST_BYTES:
                return bool(data)
            self._answer = _answer(self._asked if end else b"", self._text)
            self.writes = True
        self._answer = self._answer[self.connection.send(self._answer) :]
        return bool(self._answer)


def _answer(asked: bytes, text: Callable[[], str]) -> bytes:
    """The answer to a request, of which the first line matters; b"" is one that is too long."""
    match = _REQUEST.match(asked)
    status, body = HTTPStatus.OK, ""
    if match is None:
        status = HTTPStatus.BAD_REQUEST if asked else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    elif match[1] not in (b"GET", b"HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif match[2].partition(b"?")[0] not in (b"/", b"/metrics"):
        status = HTTPStatus.NOT_FOUND
    else:
        try:
            body = text()
        except Exception as error:  # standard error is the program's
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n"
    if status != HTTPStatus.OK:
        body = body or f"{status.value} {status.phrase}\n"
    content = body.encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(content)}\r\n"
        f"{'Allow: GET, HEAD' if status == HTTPStatus.METHOD_NOT_ALLOWED else 'Cache-Control: no-store'}\r\n"
        "Connection: close\r\n\r\n"
    )
    without_body = match is not None and match[1] == b"HEAD"
    return head.encode() + (b"" if without_body else content)


_endpoints: dict[tuple[str, int], Endpoint] = {}


def serve(exported: Exported, host: str, port: int) -> str:
    """Tell a loader's figures at an address, which several may share, as long as the loader exists.

    Args:
        port: 0 for any that is free.

    Returns:
        The URL.

    Raises:
        OSError: The address cannot be had.
    """
    endpoint = _endpoints.get((host, port))
    if endpoint is None:
        endpoint = _endpoints[host, port] = Endpoint(host, port)
    endpoint.loaders.append(weakref.ref(exported))
    weakref.finalize(exported, _leave, (host, port))
    return endpoint.url


def _leave(address: tuple[str, int]) -> None:
    endpoint = _endpoints.get(address)
    if endpoint is None:
        return
    endpoint.loaders = [exported for exported in endpoint.loaders if exported() is not None]
    if not endpoint.loaders:
        del _endpoints[address]
        endpoint.close()


def _forget() -> None:
    for endpoint in _endpoints.values():
        endpoint.let_go()
    _endpoints.clear()


forget_in_children(_forget)
