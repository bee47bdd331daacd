"""Mutual authentication of two ranks by a shared key, before either reads a message of the other.

The client sends a random challenge. The server responds with a challenge of its own and a proof: an HMAC of both
challenges. The client checks the proof and sends its own. All parts have a fixed size.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from minato._support.socket_server import Client

__all__ = ["PendingConnection", "WrongKeyError", "credentials", "peer_of", "prove"]

_PEER = struct.Struct("3i")
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_SERVER, _CLIENT = b"minato host\0", b"minato rank\0"
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_UID_MAP = Path("/proc/self/uid_map")
_ALL_UIDS = ["0", "0", "4294967295"]


class WrongKeyError(PermissionError):
    """The other process does not know the key."""


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process and user id at the other end of a connection, as the kernel reports them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(raw)
    return pid, user


def peer_of(connection: socket.socket) -> int:
    """Return the id of the process at the other end.

    Raises:
        PermissionError: It belongs to another user, or this cannot be excluded.
    """
    pid, theirs = credentials(connection)
    user = os.geteuid()
    if theirs != user:
        raise PermissionError(
            f"process {pid} of user {theirs} wants to share a pool of workers with this one of user {user}: only "
            "processes of the same user may"
        )
    if user in _unknown_users():
        raise PermissionError(
            f"this process runs as user {user}, which in its user namespace represents all users without a mapping "
            "there: with shared_pool=True run the ranks as a user that the namespace maps (/proc/self/uid_map)"
        )
    return pid


@cache
def _unknown_users() -> tuple[int, ...]:
    """Return the number that the kernel shows for users without a mapping in this process's user namespace, if any."""
    try:
        if _UID_MAP.read_text().split() == _ALL_UIDS:
            return ()
        return (int(_OVERFLOW_UID.read_text()),)
    except OSError:  # without /proc
        return ()


def _proof(key: bytes, side: bytes, called: bytes, heard: bytes) -> bytes:
    return hmac.digest(key, side + called + heard, "sha256")


def prove(connection: socket.socket, key: bytes, deadline: float) -> None:
    """Run the client's side of the handshake.

    Args:
        deadline: By ``time.monotonic()``.

    Raises:
        TimeoutError: The server does not respond.
        ConnectionError: It has closed the connection.
        WrongKeyError: It does not know the key.
    """
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.settimeout(max(deadline - time.monotonic(), 0.01))
    connection.sendall(challenge)
    answer = b""
    while len(answer) < _CHALLENGE_BYTES + _PROOF_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        data = connection.recv(_CHALLENGE_BYTES + _PROOF_BYTES - len(answer))
        if not data:
            raise ConnectionResetError
        answer += data
    theirs, proof = answer[:_CHALLENGE_BYTES], answer[_CHALLENGE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, _SERVER, challenge, theirs)):
        raise WrongKeyError
    connection.sendall(_proof(key, _CLIENT, challenge, theirs))


class PendingConnection(Client):
    """The server's side of the handshake, of a connection that is not authenticated yet.

    Args:
        connection: Closed unless the other process proves that it knows the key.
        admit: Called with the connection once the other process has proved it.
    """

    def __init__(
        self, connection: socket.socket, key: bytes, admit: Callable[[socket.socket], None]
    ) -> None:
        super().__init__(connection)
        self._key = key
        self._admit = admit
        self._heard = b""
        self._own = b""
        self._proved = False

    def step(self) -> bool:
        """Receive more of the challenge or the proof, and never bytes beyond them."""
        wanted = _CHALLENGE_BYTES + (_PROOF_BYTES if self._own else 0)
        data = self.connection.recv(wanted - len(self._heard))
        self._heard += data
        if len(self._heard) < wanted:
            return bool(data)
        challenge = self._heard[:_CHALLENGE_BYTES]
        if not self._own:
            self._own = secrets.token_bytes(_CHALLENGE_BYTES)
            answer = self._own + _proof(self._key, _SERVER, challenge, self._own)
            return self.connection.send(answer) == len(answer)
        expected = _proof(self._key, _CLIENT, challenge, self._own)
        self._proved = hmac.compare_digest(self._heard[_CHALLENGE_BYTES:], expected)
        return False

    def close(self) -> None:
        """Pass the authenticated connection on, or close it."""
        if self._proved:
            self._admit(self.connection)
        else:
            super().close()
