"""The server's thread that accepts connections of other ranks and receives their messages."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from minato._support.socket_server import Server
from minato.shared_pool.channel import Channel
from minato.shared_pool.handshake import PendingConnection, peer_of
from minato.shared_pool.messages import from_rank
from minato.shared_pool.rendezvous import Rendezvous

__all__ = ["RankListener"]

_HANDSHAKE_S = 30.0
"""Time limit of the handshake."""
_MAX_PENDING = 64


class RankListener:
    """Accepts connections, and passes on their messages.

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
