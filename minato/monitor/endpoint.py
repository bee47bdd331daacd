"""Where others fetch the figures of this process's loaders: a small HTTP server in a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import connection
from typing import Any

from minato._forkguard import forget_in_children
from minato.monitor.metrics import Exported, text_of

__all__ = ["Endpoint", "serve"]

_PATIENCE_S = 1.0
"""So long a client may take to say what it wants."""


class Endpoint:
    """Tells the figures of some loaders at an address; ends with the last of them.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self.loaders: list[weakref.ref[Exported]] = []
        self._server = HTTPServer((host, port), _handler(self._text))
        self._woken, self._wake = connection.Pipe(duplex=False)
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._run, name="minato-metrics", daemon=True)
        self._thread.start()

    def _text(self) -> str:
        held = [exported() for exported in list(self.loaders)]
        return text_of(exported for exported in held if exported is not None)

    def _run(self) -> None:
        while self._woken not in connection.wait([self._server.socket, self._woken]):
            with suppress(OSError):  # a client that went away
                self._server.handle_request()

    def close(self) -> None:
        """End the thread, and give the address back."""
        with suppress(OSError):
            self._wake.send_bytes(b"end")
        # A loader may be collected in this very thread.
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.let_go()

    def let_go(self) -> None:
        """Close the sockets; in a forked child, only its copies of them."""
        self._server.server_close()
        self._wake.close()
        self._woken.close()


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Standard error is the program's."""

    return Handler


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
