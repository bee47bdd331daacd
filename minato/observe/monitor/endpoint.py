"""A small HTTP server, in a thread, for the metrics of this process's loaders."""

from __future__ import annotations

import re
import socket
import weakref
from collections.abc import Callable
from http import HTTPStatus

from minato._fork_safety import forget_in_children
from minato._support.socket_server import Client, Server
from minato._support.text import message_of, type_name
from minato.observe.monitor.prometheus import LoaderMetrics, text_of

__all__ = ["Endpoint", "serve"]

_TIME_LIMIT_S = 2.0
"""For a request and its response."""
_MOST_CLIENTS = 16
_INTERVAL_S = 0.005
"""Between two clients: at most 200 per second, a small share of a core."""
_MOST_BYTES = 8192
"""Of a request."""
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.\d")
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """Serves the metrics of loaders at an address; ends with the last loader.

    Raises:
        OSError: The address is not available.
    """

    def __init__(self, host: str, port: int) -> None:
        self.loaders: list[weakref.ref[LoaderMetrics]] = []
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
        held = [loader() for loader in list(self.loaders)]
        return text_of(loader for loader in held if loader is not None)

    def close(self) -> None:
        """End the thread and release the address."""
        self._server.close()

    def let_go(self) -> None:
        """Close the sockets; in a forked child, only its copies of them."""
        self._server.let_go()


class _Request(Client):
    """A client with one request.

    Args:
        text: Returns the metrics.
    """

    def __init__(self, connection: socket.socket, text: Callable[[], str]) -> None:
        super().__init__(connection)
        self._text = text
        self._request = b""
        self._response = b""

    def step(self) -> bool:
        """Read more of the request, or write more of the response."""
        if not self.writes:
            data = self.connection.recv(_MOST_BYTES)
            self._request += data
            end = _END_OF_HEAD.search(self._request)
            if end is None and len(self._request) < _MOST_BYTES:
                return bool(data)
            self._response = _response(self._request if end else b"", self._text)
            self.writes = True
        self._response = self._response[self.connection.send(self._response) :]
        return bool(self._response)


def _response(request: bytes, text: Callable[[], str]) -> bytes:
    """The response to a request, which depends on its first line; b"" stands for a request that is too long."""
    match = _REQUEST.match(request)
    status, body = HTTPStatus.OK, ""
    if match is None:
        status = HTTPStatus.BAD_REQUEST if request else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    elif match[1] not in (b"GET", b"HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif match[2].partition(b"?")[0] not in (b"/", b"/metrics"):
        status = HTTPStatus.NOT_FOUND
    else:
        try:
            body = text()
        except Exception as error:  # the response reports it, as stderr belongs to the program
            status, body = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"{type_name(error)}: {message_of(error)}\n",
            )
    if status != HTTPStatus.OK:
        body = body or f"{status.value} {status.phrase}\n"
    content = body.encode("utf-8", "backslashreplace")  # names may hold what no encoding has
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(content)}\r\n"
        f"{'Allow: GET, HEAD' if status == HTTPStatus.METHOD_NOT_ALLOWED else 'Cache-Control: no-store'}\r\n"
        "Connection: close\r\n\r\n"
    )
    without_body = match is not None and match[1] == b"HEAD"
    return head.encode() + (b"" if without_body else content)


_endpoints: dict[tuple[str, int], Endpoint] = {}


def serve(loader: LoaderMetrics, host: str, port: int) -> str:
    """Serve a loader's metrics while the loader exists; several loaders may share an address.

    Args:
        port: 0 for any free port.

    Returns:
        The URL.

    Raises:
        OSError: The address is not available.
    """
    endpoint = _endpoints.get((host, port))
    if endpoint is None:
        endpoint = _endpoints[host, port] = Endpoint(host, port)
    endpoint.loaders.append(weakref.ref(loader))
    weakref.finalize(loader, _leave, (host, port))
    return endpoint.url


def _leave(address: tuple[str, int]) -> None:
    endpoint = _endpoints.get(address)
    if endpoint is None:
        return
    endpoint.loaders = [loader for loader in endpoint.loaders if loader() is not None]
    if not endpoint.loaders:
        del _endpoints[address]
        endpoint.close()


def _forget() -> None:
    for endpoint in _endpoints.values():
        endpoint.let_go()
    _endpoints.clear()


forget_in_children(_forget)
