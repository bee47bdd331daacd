"""A thread that serves the clients of a listening socket. No client can delay it, the other clients or the program."""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Client", "Server"]

_PAUSE_S = 0.1
"""Pause after a connection could not be accepted: for lack of descriptors, the next attempt would fail as well."""
_JOIN_S = 5.0
"""Upper bound for the wait for the thread, which never waits for a client: only a starved thread takes longer."""
# Unlike epoll's, its state belongs to one process: a forked child cannot change it.
_Selector: type[selectors.BaseSelector] = getattr(
    selectors, "PollSelector", selectors.SelectSelector
)


class Client(ABC):
    """A connection that is served in steps, none of which waits.

    Args:
        connection: Closed with the client.

    Attributes:
        writes: Whether the next step needs the connection to be writable, rather than readable.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.writes = False

    @abstractmethod
    def step(self) -> bool:
        """Continue as far as possible without waiting; returns whether there is more to do.

        Raises:
            BlockingIOError: Nothing is possible at present.
            Exception: The client is to be dropped.
        """

    def close(self) -> None:
        """End the connection, for forked children that hold a copy of it too."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Server:
    """Serves several clients at once, in a thread.

    The connection of a client that has not been served within ``time_limit_s`` is closed. While ``most_clients`` are
    served, others wait in the listener's queue.

    Args:
        listener: Closed with the server.
        client: Makes a client of a connection; None if it has refused and closed it.
        name: Of the thread.
        time_limit_s: For each client, from its acceptance on.
        most_clients: How many are served at once.
        interval_s: Shortest time between two acceptances: it bounds the processor time that clients can cost.
    """

    def __init__(
        self,
        listener: socket.socket,
        client: Callable[[socket.socket], Client | None],
        name: str,
        time_limit_s: float,
        most_clients: int,
        interval_s: float = 0.0,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._client = client
        self._time_limit_s = time_limit_s
        self._most_clients = most_clients
        self._interval_s = interval_s
        self._clients: dict[Client, float] = {}  # their deadlines
        self._listens = False
        self._accepts_at = 0.0
        self._ended = False
        self._woken, self._wake = socket.socketpair()
        self._selector = _Selector()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to accept clients.

        Raises:
            RuntimeError: No further thread can be had; everything is closed.
        """
        try:
            self._thread.start()
        except RuntimeError:
            self.let_go()
            raise

    @property
    def works(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End all connections, the listener and the thread."""
        self._ended = True
        with suppress(OSError):  # the thread has ended already
            self._wake.send(b"!")
        # The garbage collector may end a server in its own thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def let_go(self) -> None:
        """Close all sockets; in a forked child, which has no such thread, only its copies of them."""
        for client in self._clients:
            client.connection.close()
        for each in (self._listener, self._woken, self._wake):
            each.close()
        self._selector.close()

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Have ``ready`` called in the thread when a descriptor is readable; to be called in the thread."""
        self._selector.register(descriptor, selectors.EVENT_READ, ready)

    def unwatch(self, descriptor: int) -> None:
        """End that; to be called in the thread, before the descriptor is closed."""
        self._selector.unregister(descriptor)

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn()
        finally:
            for client in list(self._clients):
                self._drop(client)
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # for forked children that hold it too
            self.let_go()

    def _turn(self) -> None:
        now = time.monotonic()
        for client, deadline in list(self._clients.items()):
            if deadline <= now:
                self._drop(client)
        has_room = len(self._clients) < self._most_clients
        self._listen(has_room and now >= self._accepts_at)
        next_s = min(self._clients.values(), default=math.inf)
        if has_room and not self._listens:
            next_s = min(next_s, self._accepts_at)
        timeout_s = None if next_s == math.inf else max(next_s - now, 0.0)
        registered = self._selector.get_map()
        for key, _ in self._selector.select(timeout_s):
            present = registered.get(key.fd)
            if present is not None and present.data is key.data:  # it was not closed just before
                key.data()

    def _listen(self, listens: bool) -> None:
        if listens and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _accept(self) -> None:
        now = time.monotonic()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has gone already
            return
        except OSError:  # no descriptors or no memory
            self._accepts_at = now + _PAUSE_S
            return
        self._accepts_at = now + self._interval_s
        client = self._client(connection)
        if client is not None:
            self._clients[client] = now + self._time_limit_s
            self._watch_client(client)

    def _watch_client(self, client: Client) -> None:
        event = selectors.EVENT_WRITE if client.writes else selectors.EVENT_READ
        self._selector.register(client.connection, event, lambda: self._step(client))

    def _step(self, client: Client) -> None:
        wrote = client.writes
        try:
            goes_on = client.step()
        except BlockingIOError:
            goes_on = True
        except Exception:  # whatever it sent: the others are served on
            goes_on = False
        if not goes_on:
            self._drop(client)
        elif client.writes != wrote:
            self._selector.unregister(client.connection)
            self._watch_client(client)

    def _drop(self, client: Client) -> None:
        del self._clients[client]
        with suppress(KeyError, ValueError):  # the client has given its connection away
            self._selector.unregister(client.connection)
        client.close()
