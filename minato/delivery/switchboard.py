"""The host's end of all channels to other ranks: a thread that hears what they say, and whether they still live."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from minato.delivery.channel import Channel, listening

__all__ = ["Switchboard"]


class Switchboard:
    """Accepts connections, and passes on what comes over them.

    Args:
        address: Where others connect to.
        said: Called, in the thread, with a channel and what came over it.
        lost: Called, in the thread, with a channel whose other end is gone.

    Raises:
        OSError: Somebody else has the address.
    """

    def __init__(
        self, address: str, said: Callable[[Channel, Any], None], lost: Callable[[Channel], None]
    ) -> None:
        self._said = said
        self._lost = lost
        self._listener = listening(address)
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="minato-ranks", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread and all channels."""
        with suppress(OSError):  # it has ended by itself
            os.write(self._wake, b"!")
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        channels: set[Channel] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                self._listen(selector, channels)
            finally:
                for channel in channels:
                    channel.close()
                self._listener.shutdown(socket.SHUT_RDWR)  # for forked children that hold it too
                self._listener.close()
                os.close(self._woken)

    def _listen(self, selector: selectors.BaseSelector, channels: set[Channel]) -> None:
        while True:
            for key, _ in selector.select():
                if key.fd == self._woken:
                    return
                if key.fileobj is self._listener:
                    channel = self._accept()
                    if channel is not None:
                        channels.add(channel)
                        for descriptor in channel.descriptors:
                            selector.register(descriptor, selectors.EVENT_READ, channel)
                elif key.data in channels:
                    self._hear(key.data)
                    if key.data.over:
                        channels.remove(key.data)
                        for descriptor in key.data.descriptors:
                            selector.unregister(descriptor)
                        key.data.close()
                        self._lost(key.data)

    def _accept(self) -> Channel | None:
        connection, _ = self._listener.accept()
        try:
            return Channel(connection)
        except (
            PermissionError
        ):  # the address is open to all, and who has no business here is not worth a word
            return None

    def _hear(self, channel: Channel) -> None:
        channel.wait(0)
        while channel.received:
            message, _ = channel.received.popleft()
            self._said(channel, message)
