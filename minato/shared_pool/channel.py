"""Messages between the ranks of a node, over connections that both ends have authenticated.

Clients connect (:func:`connected`); a thread of the server accepts them (:class:`RankListener`).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from minato._support.socket_server import Server
from minato.shared_pool.handshake import PendingConnection, WrongKeyError, peer_of, prove
from minato.shared_pool.messages import encoded, from_rank
from minato.shared_pool.rendezvous import Rendezvous

__all__ = ["Channel", "RankListener", "connected"]

_HEAD = struct.Struct("<IB")
"""Header of a message: its bytes, and whether a file descriptor comes with it."""
_MOST_BYTES = 1 << 28
"""Size limit of a message; the state of a resumed epoch can be large."""
_PIECE_BYTES = 1 << 18
_MOST_DESCRIPTORS = 4
"""Limit of received descriptors whose messages are incomplete; each piece of the stream brings at most one."""
_BUFFER_BYTES = 1 << 20
"""Send buffer for messages that the other process has not read; the kernel may allow less (net.core.wmem_max)."""
_SEND_S = 30.0
"""A process whose buffer stays full for this long counts as ended."""
_AGAIN_S = 0.02
"""Pause between attempts to connect."""
_HANDSHAKE_S = 30.0
"""Time limit of the handshake."""
_MAX_PENDING = 64


def connected(rendezvous: Rendezvous, timeout_s: float, decode: Callable[[bytes], Any]) -> Channel:
    """Return a channel to the server that listens there, or starts to within ``timeout_s`` seconds.

    Args:
        decode: Decodes messages of the channel.

    Raises:
        TimeoutError: No server listens, or it does not respond; the text says which.
        ConnectionError: The server has ended, or refuses this process.
        PermissionError: A process of another user listens, or one that does not know the key.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = rendezvous.call()
        if found is not None:
            connection, key = found
            try:
                pid = peer_of(connection)
                prove(connection, key, deadline)
                return Channel(connection, decode, takes_descriptors=True)
            except TimeoutError:
                connection.close()
                raise TimeoutError(
                    f"local rank 0 (process {pid}) has not given this rank its place in the pool of this loader within "
                    f"{timeout_s:.0f} s"
                ) from None
            except WrongKeyError:  # the key of a server that has ended, while the next one starts
                connection.close()
                if time.monotonic() > deadline:
                    raise WrongKeyError(
                        f"process {pid} listens in the place of local rank 0, and does not know the key in "
                        f"{rendezvous.directory}"
                    ) from None
            except BaseException:
                connection.close()
                raise
        elif time.monotonic() > deadline:
            raise TimeoutError(
                f"local rank 0 has not begun to iterate over this loader within {timeout_s:.0f} s: with "
                "shared_pool=True it runs the workers of all ranks of its node, and must take part; and all ranks "
                f"must use the same directory for temporary files, as they meet in {rendezvous.directory}"
            )
        time.sleep(_AGAIN_S)


class Channel:
    """A connection to one other process.

    Any thread may send; one thread at a time may receive.

    Args:
        connection: Closed with the channel, or if the constructor raises.
        decode: Decodes the bytes of a message; raises ValueError for invalid ones.
        takes_descriptors: Whether the other process may send descriptors. If not, the kernel drops them.

    Raises:
        PermissionError: The other process belongs to another user.

    Attributes:
        pid: Process id of the other process.
        over: Whether it has ended or closed the connection. ``received`` may still hold messages sent before.
        fault: Why this process gave the connection up; None if it did not.
        received: Received ``(message, descriptor or None)``, oldest first.
    """

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], Any],
        takes_descriptors: bool = False,
    ) -> None:
        try:
            self.pid = peer_of(connection)
        except PermissionError:
            connection.close()
            raise
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._connection = connection
        self._decode = decode
        self._takes_descriptors = takes_descriptors
        self._watch = self._watched()
        self._sending = threading.Lock()
        self._data = bytearray()
        self._descriptors: deque[int] = deque()
        self._poll = select.poll()
        for descriptor in self.descriptors:
            self._poll.register(descriptor, select.POLLIN)
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self.over = False
        self.fault: str | None = None
        self.received: deque[tuple[Any, int | None]] = deque()

    def _watched(self) -> int | None:
        # A connection stays open while a child of the other process holds a copy; a pidfd reports the process itself.
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it has ended already, or is in another namespace
                return os.pidfd_open(self.pid)
        return None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that become readable when there is data to receive, or the other process has ended."""
        connection = self._connection.fileno()
        return (connection,) if self._watch is None else (connection, self._watch)

    @property
    def has_room(self) -> bool:
        """Whether the send buffer has space for a message of usual size."""
        return bool(self._room.poll(0))

    def send(self, message: tuple[Any, ...], descriptor: int | None = None) -> None:
        """Send a message and a descriptor, which the kernel duplicates for the other process.

        Raises:
            OSError: The other process has ended, or does not receive.
            ValueError: The message is too large.
        """
        data = encoded(message)
        if len(data) > _MOST_BYTES:
            raise ValueError(
                f"a message of {len(data)} bytes to another rank: {_MOST_BYTES} are allowed"
            )
        data = _HEAD.pack(len(data), descriptor is not None) + data
        with self._sending:
            sent = 0
            if descriptor is not None:
                sent = socket.send_fds(self._connection, [data], [descriptor])
            self._connection.sendall(data[sent:])

    def wait(self, timeout_s: float) -> None:
        """Receive available messages; wait for one up to ``timeout_s`` seconds."""
        ready = {descriptor for descriptor, _ in self._poll.poll(timeout_s * 1000)}
        if self._connection.fileno() in ready:
            self._receive()
        elif ready:  # the process has ended, and all its messages have been received
            self.over = True

    def _receive(self) -> None:
        data, truncated = b"", 0
        with suppress(ConnectionError):
            if self._takes_descriptors:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._connection, _PIECE_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                self._descriptors.extend(descriptors)
                truncated = flags & socket.MSG_CTRUNC
            else:
                data = self._connection.recv(_PIECE_BYTES)
        self._data += data
        if not data:
            self.over = True
        if truncated or len(self._descriptors) > _MOST_DESCRIPTORS:
            self.give_up("there is no file descriptor left for it: raise the limit (ulimit -n)")
            return
        try:
            self._take_messages()
        except ValueError as error:
            self.give_up(f"it sent what is no message: {error}")

    def _take_messages(self) -> None:
        while len(self._data) >= _HEAD.size:
            nbytes, num_descriptors = _HEAD.unpack_from(self._data)
            if nbytes > _MOST_BYTES or num_descriptors > self._takes_descriptors:
                raise ValueError("it begins with no head of a message")
            end = _HEAD.size + nbytes
            if len(self._data) < end:
                return
            message = self._decode(bytes(self._data[_HEAD.size : end]))
            if num_descriptors and not self._descriptors:
                raise ValueError("a descriptor is missing")
            del self._data[:end]
            descriptor = self._descriptors.popleft() if num_descriptors else None
            self.received.append((message, descriptor))

    def give_up(self, why: str) -> None:
        """Stop receiving: the other process is not trusted, or its messages cannot be read."""
        self.fault, self.over = why, True
        self._data.clear()
        self.hang_up()

    def hang_up(self) -> None:
        """Shut the connection down, also for children that hold a copy; the receiving thread notices."""
        with suppress(OSError):  # the other end is closed
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down, and close all descriptors."""
        self.over = True
        self.hang_up()
        self._connection.close()
        self._descriptors.extend(each for _, each in self.received if each is not None)
        self.received.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None


class RankListener:
    """Accepts connections in a thread, and passes on their messages.

    It closes connections of processes that do not prove that they are a rank of this job. An invalid message ends the
    channel that it came over, and no other.

    Args:
        rendezvous: Where clients find the socket.
        on_message: Called in the thread with a channel and a message.
        on_disconnect: Called in the thread with a channel whose other process is gone.

    Raises:
        OSError: Another process listens there, or the files cannot be written.
        RuntimeError: There is no directory for the files.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        on_message: Callable[[Channel, Any], None],
        on_disconnect: Callable[[Channel], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._channels: set[Channel] = set()
        listener, self._key = rendezvous.listen()
        self._server = Server(listener, self._accept, "minato-ranks", _HANDSHAKE_S, _MAX_PENDING)
        try:
            self._server.start()
        except RuntimeError:
            rendezvous.end()
            raise

    @property
    def works(self) -> bool:
        """Whether the thread runs."""
        return self._server.works

    def close(self) -> None:
        """End the thread and all channels."""
        self._rendezvous.end()
        self._server.close()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def _accept(self, connection: socket.socket) -> PendingConnection | None:
        try:
            peer_of(connection)
        except PermissionError:
            connection.close()
            return None
        return PendingConnection(connection, self._key, self._admit)

    def _admit(self, connection: socket.socket) -> None:
        channel = Channel(connection, from_rank)
        self._channels.add(channel)
        for descriptor in channel.descriptors:
            self._server.watch(descriptor, partial(self._receive, channel))

    def _receive(self, channel: Channel) -> None:
        try:
            channel.wait(0)
            while channel.received:
                message, _ = channel.received.popleft()
                self._on_message(channel, message)
        except Exception as error:  # the other ranks continue
            channel.give_up(f"{type(error).__name__}: {error}")
        if channel.over:
            self._channels.remove(channel)
            for descriptor in channel.descriptors:
                self._server.unwatch(descriptor)
            channel.close()
            self._on_disconnect(channel)
