"""Datasets, samplers and functions that the parity tests use, importable by workers that are not forked."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from tests.datasets import InOrder, Numbers, Pair, Parts


class TwoArguments(Exception):
    """Its constructor does not take what ``str()`` of it gives."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


class Unpicklable(Exception):
    """It holds something that no process can be sent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.handle = (step for step in range(3))


class Tensors(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 3), float(index))


class Arrays(Numbers):
    def __getitem__(self, index: int) -> Any:
        return np.arange(index, index + 4, dtype=np.int16), index / 2, f"sample {index}"


class Mixed(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {
            "image": np.full((2, 2), index, np.uint8),
            "pair": Pair(torch.as_tensor(index), [index, bytes([index])]),
            "flag": index % 2 == 0,
            "numpy": np.float32(index),
        }


class Ragged(Numbers):
    """Tensors of different lengths, which ``default_collate`` refuses."""

    def __getitem__(self, index: int) -> Any:
        return torch.arange(1 + index % 2)


class Failing(Numbers):
    """Every third sample raises, each time something else."""

    def __getitem__(self, index: int) -> Any:
        if index % 3 == 1:
            errors = ValueError(f"bad {index}"), KeyError("missing"), TwoArguments(index, "no")
            raise (*errors, Unpicklable("a text"), IndexError())[index // 3 % 5]
        return index


class BadSample(Numbers):
    def __init__(self, size: int, action: Callable[[], Any]) -> None:
        super().__init__(size)
        self.action = action

    def __getitem__(self, index: int) -> Any:
        return self.action() if index == 2 else index


class Holding(Numbers):
    def __init__(self, held: Any) -> None:
        super().__init__(4)
        self.held = held


class Deadly(Numbers):
    """One sample ends its process, by ``exit`` or by a signal."""

    def __init__(self, size: int, index: int, how: str) -> None:
        super().__init__(size)
        self.index, self.how = index, how

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, self.how))
            time.sleep(60)
        time.sleep(0.005)
        return index


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Apples(Numbers):
    """A sample in three is ``None``, which ``default_collate`` refuses."""

    def __getitem__(self, index: int) -> Any:
        return None if index % 3 == 2 else index


class Listed(Numbers):
    """Samples are fetched together; each tells the type of the keys."""

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return [(key, type(keys).__name__, type(key).__name__) for key in keys]


class Drawing(Numbers):
    """Draws from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), torch.rand(2), random.gauss(0, 1)


class OnlyIter:
    def __init__(self, keys: Iterable[Any]) -> None:
        self.keys = list(keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


class Repeating:
    """A sampler that never ends (timm, ultralytics)."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def multi_epochs(base: Any) -> Any:
    """A loader of a class whose one iterator goes on from epoch to epoch."""

    class MultiEpochs(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = Repeating(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator: Any = None

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Any:
            if self.iterator is None:
                self.iterator = super().__iter__()
            for _ in range(len(self)):
                yield next(self.iterator)

    return MultiEpochs


class Grumpy(InOrder):
    def __iter__(self) -> Iterator[int]:
        yield from range(self.size // 2)
        raise LookupError("no more keys")


class Stream(Parts):
    """Numbers that the workers share out."""

    def __len__(self) -> int:
        return self.size


class DrawingStream(Stream):
    """Draws from all three global generators; its workers do not share the work."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.size):
            yield number, random.random(), float(np.random.rand()), torch.rand(2)


class UnevenStream(Stream):
    """The first worker has nothing, the others have more and more."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, size = (1, self.size) if info is None else (info.id, info.id * self.size)
        for number in range(size):
            yield {"worker": worker, "number": torch.tensor(number), "text": "x" * number}


class LyingStream(Stream):
    def __len__(self) -> int:
        return self.size // 3

    def __repr__(self) -> str:
        return "a lying stream"


class FailingStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from range(self.size // 2)
        raise TwoArguments(self.size, "broken off")


def identity(samples: Any) -> Any:
    """A ``collate_fn`` that leaves the samples alone."""
    return samples


def shapes(samples: list[Any]) -> Any:
    """A ``collate_fn`` that returns something that no layout fits."""
    return {"count": len(samples), "kinds": {type(sample).__name__ for sample in samples}}


def picky(samples: list[Any]) -> Any:
    if len(samples) % 2:
        raise ValueError(f"an odd batch of {len(samples)}")
    return samples


def no_op(worker: int) -> None:
    """A ``worker_init_fn``."""


def add_one_more(worker: int) -> None:
    """A ``worker_init_fn`` that draws, which moves the worker's streams on."""
    random.random()
    np.random.rand()
    torch.rand(1)
