"""Messages between the ranks of a node, over sockets that only processes of one user on one machine can use."""

from __future__ import annotations

import hashlib
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

__all__ = ["Channel", "connected", "listening", "meeting_place"]

_HEAD = struct.Struct("<IB")
"""Bytes of a message, and whether a descriptor comes with it."""
_PEER = struct.Struct("3i")
_PIECE_BYTES = 1 << 18
_SEND_S = 30.0
"""A process that leaves so little room for a message for so long counts as ended."""
_JOB = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "GROUP_RANK",
)
"""Variables that tell jobs, their restarts, and their nodes apart; torchrun sets them."""
_AGAIN_S = 0.02
"""Pause before somebody who is not there yet is called again."""


def meeting_place(number: int) -> str:
    """Address, in Linux's abstract namespace, at which the ranks of this job on this node meet for one loader.

    It is no file, and is gone with the socket.

    Args:
        number: Which of the program's loaders it is.
    """
    job = "\0".join(os.environ.get(name, "") for name in _JOB)
    digest = hashlib.blake2b(job.encode(), digest_size=16).hexdigest()
    return f"\0minato-{os.geteuid()}-{digest}-{number}"


def listening(address: str) -> socket.socket:
    """A socket that others can connect to.

    Raises:
        OSError: Somebody else has the address.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def connected(address: str, patience_s: float) -> Channel:
    """A channel to whoever listens there, or will within so many seconds.

    Raises:
        TimeoutError: Nobody did.
        PermissionError: It is another user.
    """
    deadline = time.monotonic() + patience_s
    while True:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            caller.connect(address)
            return Channel(caller)
        except (ConnectionRefusedError, BlockingIOError):
            caller.close()
            if time.monotonic() > deadline:
                raise TimeoutError from None
        except BaseException:
            caller.close()
            raise
        time.sleep(_AGAIN_S)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a connection, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(raw)
    return pid, user


class Channel:
    """A connection to one other process.

    Any thread may send; one at a time may receive.

    Args:
        connection: It is closed with the channel, or if the channel is refused.

    Raises:
        PermissionError: The other process is another user's.

    Attributes:
        pid: The other process.
        over: Whether it has ended, or closed the connection. What it sent before may still be in ``received``.
        received: ``(message, descriptor or None)`` of what has come.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid, user = credentials(connection)
        if user != os.geteuid():
            connection.close()
            raise PermissionError(
                f"process {self.pid} of user {user} wants to share a pool of workers with this one of user "
                f"{os.geteuid()}: only processes of the same user may"
            )
        connection.settimeout(_SEND_S)
        self._connection = connection
        self._watch = self._watched()
        self._sending = threading.Lock()
        self._data = bytearray()
        self._descriptors: deque[int] = deque()
        self._poll = select.poll()
        for descriptor in self.descriptors:
            self._poll.register(descriptor, select.POLLIN)
        self.over = False
        self.received: deque[tuple[Any, int | None]] = deque()

    def _watched(self) -> int | None:
        # A connection stays open while a child of the other process's holds a copy of it. The process does not.
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it has ended already, or is in another namespace
                return os.pidfd_open(self.pid)
        return None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when there is something to receive, or the other process has ended."""
        connection = self._connection.fileno()
        return (connection,) if self._watch is None else (connection, self._watch)

    def send(self, message: Any, descriptor: int | None = None) -> None:
        """Send an object that can be pickled, and a descriptor, of which the other process gets one of its own.

        Raises:
            OSError: The other process has ended, or does not receive.
        """
        data = pickle.dumps(message, 5)
        data = _HEAD.pack(len(data), descriptor is not None) + data
        with self._sending:
            sent = 0
            if descriptor is not None:
                sent = socket.send_fds(self._connection, [data], [descriptor])
            self._connection.sendall(data[sent:])

    def wait(self, timeout_s: float) -> None:
        """Receive what has come, or what comes next within so many seconds."""
        ready = {descriptor for descriptor, _ in self._poll.poll(timeout_s * 1000)}
        if self._connection.fileno() in ready:
            self._receive()
        elif ready:  # it has ended, and all it sent has been received
            self.over = True

    def _receive(self) -> None:
        try:
            data, descriptors, *_ = socket.recv_fds(
                self._connection, _PIECE_BYTES, 4, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        self._data += data
        if not data:
            self.over = True
        while len(self._data) >= _HEAD.size:
            nbytes, has_descriptor = _HEAD.unpack_from(self._data)
            end = _HEAD.size + nbytes
            if len(self._data) < end:
                return
            message = pickle.loads(self._data[_HEAD.size : end])
            del self._data[:end]
            self.received.append((message, self._descriptors.popleft() if has_descriptor else None))

    def hang_up(self) -> None:
        """End the connection, for children that hold a copy of it too; whoever receives finds that it is over."""
        with suppress(OSError):  # the other end is closed
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give all descriptors back."""
        self.over = True
        self.hang_up()
        self._connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None
