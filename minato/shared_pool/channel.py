"""Messages between the ranks of a node, over connections that both ends have authenticated.

Clients connect (:func:`connected`); threads of the server accept and read them (:class:`RankListener`).
``multiprocessing.connection`` frames the messages and authenticates both ends by a key. Its ``Listener`` and ``Client``
would wait without a time limit for a process that says nothing. Messages are JSON, every field of which the receiver
checks.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from select import POLLIN, POLLOUT, poll
from types import UnionType
from typing import Any, NamedTuple, NewType, get_args, get_origin, get_type_hints

from minato._fork_safety import forget_in_children
from minato._support.files import unmapped_user
from minato._support.threads import living, start_thread
from minato.batching.arena import Slot
from minato.batching.reader import BatchDescriptor as BatchDescriptor
from minato.sampling.progress import BatchPart, Completed
from minato.shared_pool.rendezvous import Rendezvous

_MOST_BYTES = 1 << 28  # size limit of a message; the state of a resumed epoch can be large
_BUFFER_BYTES = 1 << 20
"""Send buffer for messages that the other process has not read; the kernel may allow less (net.core.wmem_max)."""
_STALL_S = 30  # a process that takes or sends no byte of a message for this long counts as ended
_HANDSHAKE_S = 30.0  # time limit of the handshake in the server
_MAX_PENDING = 64  # number of connections in their handshake; others wait in the socket's queue
_AGAIN_S = 0.02  # pause between attempts to connect
_PAUSE_S = 0.1
"""Pause after a connection could not be accepted: for lack of descriptors, the next attempt would fail as well."""
LIVENESS_S = 1.0  # interval of liveness checks while waiting
_JOIN_S = 5.0
"""Upper bound for the wait for a thread that is to end; only a starved one takes so long."""

_PEER = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")

_WITH_DESCRIPTOR = "arena"
"""The kind of message that a file descriptor follows; only the server sends it."""

_NUMBER_LIMIT = 1 << 64  # of numbers: hashes have 64 bits
Pairs = tuple[tuple[int, int], ...]
_LISTS_OF_PAIRS = (Pairs, list[tuple[int, int]])
_Signed = NewType("_Signed", int)


# ---- messages ----


class Hello(NamedTuple):
    """The first message of a client: its ranks on the node and in the job, and the settings of its loader, as text."""

    local_rank: int
    rank: int
    loader: dict[str, str]


class RankMessage(NamedTuple):
    """A message of a client about an epoch, by its number in the pool.

    Attributes:
        dropped: Arena and start of each slot that the rank has dropped since its last message.
        more: ``hello``: :class:`Hello`. ``enter``: epoch number, and the part done before a resume. Otherwise None.
    """

    kind: str
    number: int
    dropped: Pairs
    more: Any


class BatchMessage(NamedTuple):
    """A batch for a client: ``kind`` is ``batch``, ``portion`` the part of the epoch that the batch covers."""

    kind: str
    number: int
    arena: int
    descriptor: BatchDescriptor
    portion: BatchPart


_OF_RANK: dict[str, Any] = {
    "hello": tuple[str, int, Pairs, Hello],
    "enter": tuple[str, int, Pairs, tuple[_Signed, Completed | None]],
    **dict.fromkeys(("next", "leave", "bye"), tuple[str, int, Pairs, None]),
}
"""The types of the clients' messages."""
_OF_HOST: dict[str, Any] = {
    **dict.fromkeys(("welcome", "open", "end"), tuple[str, int]),
    **dict.fromkeys(("broken", "refused"), tuple[str, str]),
    "failed": tuple[str, int, str],
    _WITH_DESCRIPTOR: tuple[str, int, int],
    "given back": tuple[str, tuple[tuple[int, Slot], ...]],
    "batch": BatchMessage,
}
"""The types of the server's messages."""


def encoded(message: tuple[object, ...]) -> bytes:
    """A message as bytes; TypeError: it holds other than tuples, strings, integers, bools and None."""
    # numpy's integers become Python's.
    return json.dumps(message, separators=(",", ":"), default=operator.index).encode()


def from_rank(data: bytes) -> RankMessage:
    """Decode a client's message; ValueError: the bytes are none."""
    return RankMessage(*_decoded(data, _OF_RANK))


def from_host(data: bytes) -> tuple[Any, ...]:
    """Decode a message of the server, its kind and its fields; ValueError: the bytes are none."""
    return _decoded(data, _OF_HOST)


def _decoded(data: bytes, types: Mapping[str, object]) -> tuple[Any, ...]:
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    kind = message[0] if type(message) is list and message else None
    if type(kind) is not str or kind not in types:
        raise ValueError("no message of this direction")
    found: tuple[Any, ...] = _checked(message, types[kind])
    return found


def _checked(value: object, kind: Any) -> Any:
    """Return a decoded value as its type has it, with tuples and named tuples in place of lists; else ValueError."""
    origin = get_origin(kind)
    if origin is UnionType:
        return None if value is None else _checked(value, get_args(kind)[0])
    if kind in _LISTS_OF_PAIRS:
        return origin(_pairs(value))
    if kind == dict[str, str] and type(value) is dict:
        return {name: _checked(item, str) for name, item in value.items()}
    kinds = _items_of(kind)
    if kinds is None:
        if type(value) is not {_Signed: int, None: type(None)}.get(kind, kind):
            raise ValueError(f"a value of type {kind} is missing")
        if type(value) is int and kind is int and not 0 <= value < _NUMBER_LIMIT:
            raise ValueError("a number is out of range")
        return value
    if type(value) is not list:
        raise ValueError("a list is missing")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    items = [_checked(item, kind) for item, kind in zip(value, kinds, strict=True)]
    return tuple(items) if origin is tuple else kind(*items)


@functools.cache
def _items_of(kind: object) -> tuple[Any, ...] | None:
    """The types of the items of a tuple; None: it is no tuple."""
    if get_origin(kind) is tuple:
        return get_args(kind)
    is_named = isinstance(kind, type) and issubclass(kind, tuple)
    return tuple(get_type_hints(kind).values()) if is_named else None


def _pairs(value: object) -> Pairs:
    """Check pairs of numbers together: there may be one for each sample."""
    if type(value) is not list or any(type(pair) is not list or len(pair) != 2 for pair in value):
        raise ValueError("a list of pairs is missing")
    numbers = [*itertools.chain(*value)]
    if set(map(type, numbers)) - {int}:
        raise ValueError("a pair holds another value than numbers")
    if min(numbers, default=0) < 0 or max(numbers, default=0) >= _NUMBER_LIMIT:
        raise ValueError("a number is out of range")
    return tuple(map(tuple, value))


# ---- connections ----


class WrongKeyError(PermissionError):
    """The other process does not know the key."""


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process and user id at the other end of a connection, as the kernel reports them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(raw)
    return pid, user


def peer_of(connection: socket.socket) -> int:
    """Return the id of the process at the other end; PermissionError: it may belong to another user."""
    pid, theirs = credentials(connection)
    user = os.geteuid()
    if theirs != user:
        raise PermissionError(
            f"process {pid} of user {theirs} wants to share a pool of workers with this one of user {user}: only "
            "processes of the same user may"
        )
    if user == unmapped_user():
        raise PermissionError(
            f"this process runs as user {user}, which in its user namespace represents all users without a mapping "
            "there: with workers=SharedPool(...) run the ranks as a user that the namespace maps (/proc/self/uid_map)"
        )
    return pid


_processes: dict[int, tuple[int, int]] = {}
"""By local rank, the process that a loader has met last, and its pidfd: other loaders may not have met it yet."""
forget_in_children(_processes.clear)


def meet(local_rank: int, pid: int) -> None:
    """Remember the process of a rank."""
    known = _processes.get(local_rank)
    if (known is None or known[0] != pid or has_ended(local_rank)) and hasattr(os, "pidfd_open"):
        with suppress(OSError):  # as of a channel
            _processes[local_rank] = pid, os.pidfd_open(pid)


def has_ended(local_rank: int) -> bool:
    """Whether the process of a rank is known, and has ended."""
    known = _processes.get(local_rank)
    if known is None:
        return False
    news = poll()
    news.register(known[1], POLLIN)
    return bool(news.poll(0))


def connected(rendezvous: Rendezvous, timeout_s: float) -> Channel:
    """Return an authenticated channel to the server that listens there, or starts to within ``timeout_s`` seconds.

    TimeoutError: None listens, or it does not respond. ConnectionError: It has ended, or refuses this process.
    PermissionError: A process of another user listens, or one that does not know the key.
    """
    deadline, folder = time.monotonic() + timeout_s, rendezvous.directory
    why: Exception = TimeoutError(
        f"local rank 0 has not begun to iterate over this loader within {timeout_s:.0f} s: with "
        "workers=SharedPool(...) it runs the workers of all ranks of its node, and must take part; and all ranks "
        f"must use the same directory for temporary files, as they meet in {folder}"
    )
    while True:
        found = rendezvous.call()
        if found is not None:
            channel = Channel(found.connection, from_host)
            process = f"process {channel.pid}"
            try:
                channel.authenticate(found.key, deadline - time.monotonic(), is_server=False)
                return channel
            except WrongKeyError:  # of a server that has ended, while the next one starts
                what = "listens in the place of local rank 0, and does not know the key in"
                why = WrongKeyError(f"{process} {what} {folder}")
            except TimeoutError:
                if not isinstance(why, WrongKeyError):
                    why = TimeoutError(
                        f"local rank 0 ({process}) has not given this rank its place in the pool of this loader "
                        f"within {timeout_s:.0f} s"
                    )
            except BaseException:
                channel.close()
                raise
            channel.close()
        elif has_ended(0):
            raise ConnectionResetError
        if time.monotonic() > deadline:
            raise why
        time.sleep(_AGAIN_S)


class Channel:
    """A connection to one other process, whose messages ``decode`` decodes, or raises ValueError.

    Any thread may send; one thread at a time may receive. The connection is closed with the channel, or if an OSError
    is raised here: PermissionError: the other process belongs to another user.
    """

    def __init__(
        self, connection: socket.socket, decode: Callable[[bytes], tuple[object, ...]]
    ) -> None:
        self._socket = connection
        try:
            self.pid = peer_of(connection)
            connection.setblocking(True)  # whatever socket.setdefaulttimeout() says
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._limit_waits(_STALL_S)
            # The connection has a descriptor of its own, as only a socket can be shut down.
            self._connection = Connection(os.dup(connection.fileno()))
        except BaseException:
            connection.close()
            raise
        self._decode = decode
        self._process: int | None = None
        # A connection stays open while a child of the other process holds a copy; a pidfd reports the process itself.
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it has ended already, or is in another namespace
                self._process = os.pidfd_open(self.pid)
        self._sending = threading.Lock()
        self._room = poll()
        self._room.register(connection, POLLOUT)
        self.over = False  # the other process has ended, or closed the connection
        self.fault: str | None = None  # why this process gave the connection up
        self.received: deque[tuple[Any, int | None]] = deque()  # messages and descriptors

    def authenticate(self, key: bytes, timeout_s: float, *, is_server: bool) -> None:
        """Have both processes prove that they know the key, before either reads a message of the other.

        TimeoutError: The other one does not respond. ConnectionError: It has closed the connection. WrongKeyError: It
        does not know the key. ValueError: Python 3.11 proves the key by MD5, which this OpenSSL does not allow.
        """
        self._limit_waits(max(timeout_s, 0.01))
        steps = [deliver_challenge, answer_challenge]
        try:
            for step in steps if is_server else reversed(steps):
                step(self._connection, key)
        except BlockingIOError:
            raise TimeoutError from None
        except (EOFError, ConnectionError):
            raise ConnectionResetError from None
        except (AuthenticationError, AssertionError, OSError):
            raise WrongKeyError from None
        finally:
            self._limit_waits(_STALL_S)

    def _limit_waits(self, timeout_s: float) -> None:
        seconds, rest = divmod(timeout_s, 1)
        limit = _TIMEVAL.pack(int(seconds), int(rest * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    @property
    def has_room(self) -> bool:
        """Whether the send buffer has space for a message of usual size."""
        return bool(self._room.poll(0))

    def send(self, message: tuple[object, ...], descriptor: int | None = None) -> None:
        """Send a message and a descriptor, which the kernel duplicates for the other process.

        OSError: The other process has ended, or does not receive. ValueError: The message is too large.
        """
        data = encoded(message)
        if len(data) > _MOST_BYTES:
            raise ValueError(
                f"a message of {len(data)} bytes to another rank: {_MOST_BYTES} are allowed"
            )
        with self._sending:
            self._connection.send_bytes(data)
            if descriptor is not None:
                socket.send_fds(self._socket, [b"\1"], [descriptor])

    def _watched(self) -> select.poll:
        # Each time another one: the handler of a signal, which comes within a wait, may wait, too.
        news = poll()
        news.register(self._connection.fileno(), POLLIN)
        if self._process is not None:
            news.register(self._process, POLLIN)
        return news

    def sleep(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for news, of which it takes none; return whether there is any."""
        return bool(self._watched().poll(timeout_s * 1000))

    def wait(self, timeout_s: float) -> bool:
        """Receive one message, for which it waits up to ``timeout_s`` seconds; return whether there was news."""
        ready = {descriptor for descriptor, _ in self._watched().poll(timeout_s * 1000)}
        if self._connection.fileno() in ready:
            self._receive()
        elif ready:  # the process has ended, and all its messages have been received
            self.over = True
        return bool(ready)

    def _receive(self) -> None:
        try:
            message = self._decode(self._connection.recv_bytes(_MOST_BYTES))
            descriptor = self._receive_descriptor() if message[0] == _WITH_DESCRIPTOR else None
            self.received.append((message, descriptor))
        except (EOFError, ConnectionError):
            self.over = True
        except BlockingIOError:
            self.give_up(f"it sent a part of a message, and nothing more for {_STALL_S} s")
        except (OSError, ValueError) as error:
            self.give_up(f"it sent what is no message: {error}")

    def _receive_descriptor(self) -> int | None:
        """Return the descriptor that follows a message; None if there is none left for it in this process."""
        data, descriptors, flags, _ = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if descriptors:
            return descriptors[0]
        if flags & socket.MSG_CTRUNC:
            self.give_up("there is no file descriptor left for it: raise the limit (ulimit -n)")
            return None
        if not data:
            raise EOFError
        raise ValueError("a descriptor is missing")

    def give_up(self, why: str) -> None:
        """Stop receiving: the other process is not trusted, or its messages cannot be read."""
        self.fault, self.over = why, True
        self.hang_up()

    def hang_up(self) -> None:
        """Shut the connection down, also for children that hold a copy; the receiving thread notices."""
        with suppress(OSError):  # the other end is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down, and close all descriptors."""
        self.over = True
        self.hang_up()
        self._connection.close()
        self._socket.close()
        while self.received:
            _, descriptor = self.received.popleft()
            if descriptor is not None:
                os.close(descriptor)
        if self._process is not None:
            os.close(self._process)
            self._process = None


class RankListener:
    """Accepts connections, and passes on their messages; each connection has a thread.

    It closes connections of processes that do not prove that they are a rank of this job. An invalid message ends the
    channel that it came over, and no other. It raises what :meth:`Rendezvous.listen` does.

    Args:
        on_message: Called with a channel and a message, in the thread of the channel.
        on_disconnect: Called with a channel whose other process is gone, in the same thread.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        on_message: Callable[[Channel, RankMessage], None],
        on_disconnect: Callable[[Channel], None],
    ) -> None:
        self._rendezvous, self._on_message = rendezvous, on_message
        self._on_disconnect = on_disconnect
        self._threads: dict[Channel, threading.Thread] = {}
        self._pending: dict[Channel, float] = {}  # end of the time for their handshake
        self._ended = threading.Event()
        self._socket, self._key = rendezvous.listen()
        self._socket.setblocking(False)
        self._woken, self._wake = socket.socketpair()
        self._accepting = threading.Thread(target=self._run, name="minato-ranks", daemon=True)
        try:
            start_thread(self._accepting)
        except BaseException:
            rendezvous.end()
            self._close_sockets()
            raise

    @property
    def works(self) -> bool:
        """Whether it accepts connections."""
        return bool(living(self._accepting))

    def close(self) -> None:
        """End all threads and channels."""
        self._rendezvous.end()
        self._ended.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # for forked children that hold it too
        self._wake.send(b"!")
        self._accepting.join(_JOIN_S)
        self._close_sockets()
        for channel, thread in list(self._threads.items()):
            channel.hang_up()
            thread.join(_JOIN_S)

    def _close_sockets(self) -> None:
        for each in (self._socket, self._woken, self._wake):
            each.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            for channel, deadline in list(self._pending.items()):
                if deadline < time.monotonic():
                    channel.hang_up()  # its thread forgets it
            if len(self._pending) >= _MAX_PENDING:
                self._ended.wait(_PAUSE_S)
                continue
            try:
                if self._socket in wait([self._socket, self._woken], LIVENESS_S):
                    self._accept()
            except BlockingIOError:  # the client has gone already
                pass
            except (OSError, RuntimeError):  # no descriptors, memory or threads; or a stranger
                self._ended.wait(_PAUSE_S)

    def _accept(self) -> None:
        channel, name = Channel(self._socket.accept()[0], from_rank), "minato-rank"
        thread = threading.Thread(target=self._serve, args=(channel,), name=name, daemon=True)
        self._pending[channel] = time.monotonic() + _HANDSHAKE_S
        self._threads[channel] = thread
        try:
            thread.start()
        except RuntimeError:
            self._forget(channel)
            raise

    def _forget(self, channel: Channel) -> None:
        self._pending.pop(channel, None)
        channel.close()
        self._threads.pop(channel, None)

    def _serve(self, channel: Channel) -> None:
        """Authenticate a process, and pass on its messages until it is gone."""
        try:
            channel.authenticate(self._key, _HANDSHAKE_S, is_server=True)
        except (OSError, ValueError):  # it is no rank of this job, or there is no MD5
            self._forget(channel)
            return
        del self._pending[channel]
        try:
            while not channel.over:
                channel.wait(LIVENESS_S)
                while channel.received:
                    message, _ = channel.received.popleft()
                    self._on_message(channel, message)
        except Exception as error:  # the other ranks continue
            channel.give_up(f"{type(error).__name__}: {error}")
        if not self._ended.is_set():
            self._on_disconnect(channel)  # first, so that no other thread sends any more
        self._forget(channel)
