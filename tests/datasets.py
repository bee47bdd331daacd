"""Datasets and helpers that several tests use, importable by workers that are not forked."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from minato import Arrival, FastFirst, numpy_rng, python_rng, torch_rng
from minato._support.counters import shared_integers

ORDERS = ("strict", "batch", "arrival", "fast_first")


def _torch_takes_bools() -> bool:
    try:
        with warnings.catch_warnings(action="error"):
            torch.as_tensor([np.bool_(True)])
    except (TypeError, DeprecationWarning):
        return False
    return True


TORCH_TAKES_BOOLS = _torch_takes_bools()
"""Whether torch makes tensors of NumPy's bools: torch 2.6 warns with NumPy 1.26, and 2.8 refuses with 2.3."""


def late_by(order: str, max_lag: int) -> Any:
    """A value of ``order`` by which samples are late by at most ``max_lag`` batches, where they can be late."""
    return {"arrival": Arrival, "fast_first": FastFirst}.get(order, lambda _: order)(max_lag)


TOO_MANY_WORKERS = "ignore:This DataLoader will create:UserWarning"
"""torch's advice for machines with few cores, which the tests do not take."""


def forked(num_workers: int) -> dict[str, Any]:
    """Arguments of torch's loader, for data that torch pickles for no worker: from Python 3.14 on it forks none."""
    return {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}


class Numbers(Dataset[int]):
    """``dataset[i]`` is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Sleepy(Numbers):
    """As ``Numbers``, but each sample takes ``seconds`` and some take longer."""

    def __init__(self, size: int, seconds: float, slower: Mapping[int, float] | None = None):
        super().__init__(size)
        self.seconds = seconds
        self.slower = dict(slower or {})

    def __getitem__(self, index: int) -> int:
        time.sleep(self.slower.get(index, self.seconds))
        return index


class DiesOnce(Sleepy):
    """Sample 7 kills the first worker that runs it."""

    def __init__(self, size: int, mark: Path) -> None:
        super().__init__(size, 0.001)
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if index == 7 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Filled(Numbers):
    """Arrays of float32 that hold nothing but their index."""

    def __init__(self, size: int, *shape: int) -> None:
        super().__init__(size)
        self.shape = shape

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.full(self.shape, index, np.float32)


class Failing(Numbers):
    """Raises for some indices; ``raises`` makes the exceptions."""

    def __init__(self, size: int, raises: Mapping[int, Callable[[], BaseException]]) -> None:
        super().__init__(size)
        self.raises = raises

    def __getitem__(self, index: int) -> int:
        if index in self.raises:
            raise self.raises[index]()
        return index


class Keeping(Numbers):
    """Has a state, in which there is nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Lists(Numbers):
    """Gives whole batches, which are lists of their indices."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(IterableDataset[int]):
    """Numbers; each worker gives all of them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Parts(Stream):
    """The same, of which each worker gives its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, self.size, step)


class Cursor:
    """An iterator over numbers with a state."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.at = 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Samples(Dataset[Any]):
    """Ready-made samples; callables among them are called for the sample."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        return sample() if callable(sample) else sample


_ROWS = 64
"""Threads with consecutive numbers that a journal tells apart."""


class Journal(Numbers):
    """As ``Numbers``, and counts how often each sample was begun, for threads and processes."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        super().__init__(size)
        self.seconds = seconds
        # A row for each thread: two may begin an index at once, for two epochs, and neither count may be lost.
        self._counts = shared_integers(_ROWS, max(size, 1))

    def __getitem__(self, index: int) -> int:
        self._counts[threading.get_native_id() % _ROWS, index] += 1
        time.sleep(self.seconds)
        return index

    def begun(self) -> list[int]:
        """Indices that were begun, as often as they were."""
        counts = self._counts.sum(0).tolist()
        return [i for i in range(self.size) for _ in range(counts[i])]


class Draws(Numbers):
    """Three draws of each global generator, after the index."""

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), *three_draws()]


class Helped(Numbers):
    """Draws from minato's generators, which threads have too, after the index."""

    def __getitem__(self, index: int) -> list[float]:
        return helped_draws([float(index)])


class Pair(NamedTuple):
    image: Any
    label: Any


def three_draws() -> list[float]:
    """A draw from each of the three global generators, and one that caches (a normal)."""
    return [
        random.random(),
        float(np.random.random()),
        float(torch.rand(()).item()),
        float(np.random.standard_normal()),
    ]


def helped_draws(sample: list[float]) -> list[float]:
    """The sample, and a draw from each of minato's generators."""
    drawn = float(torch.rand((), generator=torch_rng()))
    return [*sample, python_rng().random(), float(numpy_rng().random()), drawn]


def add_draws(sample: list[float]) -> list[float]:
    return sample + three_draws()


def raising(kind: type[BaseException], *given: Any, **named: Any) -> Callable[..., Any]:
    """A function that raises, whatever it gets."""

    def act(*_: object) -> Any:
        raise kind(*given, **named)

    return act


def quietly(make: Callable[[], Any]) -> Any:
    """Make what some library warns of: that it is new, or old."""
    with warnings.catch_warnings(action="ignore"):
        return make()


def double(sample: Any) -> Any:
    return sample * 2


def plus_one(sample: Any) -> Any:
    """Does not commute with ``double``."""
    return sample + 1


def worker_number() -> int:
    """-1 in the main process."""
    info = get_worker_info()
    return -1 if info is None else info.id


class InOrder(Sampler[int]):
    """Like ``SequentialSampler``, but nobody can know that."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


class Shuffled(InOrder):
    """Draws from torch's global generator for each index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(torch.randint(self.size, ()).item())


def indices(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def rows(batch: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    """The samples of a batch that has several fields."""
    return list(zip(*(part.tolist() for part in batch), strict=True))


def flat(batches: Iterable[Iterable[Any]]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def lags(batches: list[list[int]], batch_size: int) -> dict[int, int]:
    """By how many batches each sample came later than a sequential sampler wants."""
    return {i: number - i // batch_size for number, batch in enumerate(batches) for i in batch}


def outcomes(iterator: Iterator[Any], most: int = 100) -> list[Any]:
    """What each ``next`` gave: ``("batch", value)`` or ``("raised", type, message)``, up to the end."""
    found: list[Any] = []
    for _ in range(most):
        try:
            found.append(("batch", next(iterator)))
        except StopIteration as end:
            if not end.args:
                return found
            found.append(("raised", StopIteration, str(end)))
        except Exception as error:
            found.append(("raised", type(error), str(error)))
    raise AssertionError(f"no end after {most} batches")


def drain(batches: Iterable[Any], most: int = 100) -> tuple[list[Any], list[BaseException]]:
    """The samples of what is left of an epoch, and all that was raised on the way: after each error it goes on."""
    found: list[Any] = []
    raised: list[BaseException] = []
    iterator = iter(batches)
    while len(raised) < most:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except BaseException as error:
            raised.append(error)
        else:
            found += batch.tolist() if isinstance(batch, torch.Tensor) else batch
    return found, raised


def assert_same(ours: Any, theirs: Any, where: str = "batch") -> None:
    """Compare two delivered objects: types, order of keys, dtypes, shapes and bits, at any depth."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} is not {type(theirs)}"
    if isinstance(theirs, torch.Tensor):
        assert (ours.device, ours.stride()) == (theirs.device, theirs.stride()), where
    if isinstance(theirs, (torch.Tensor, np.ndarray, np.generic)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert bits(ours) == bits(theirs), f"{where}: {ours} {theirs}"
    elif isinstance(theirs, Mapping):
        assert [(type(key), key) for key in ours] == [(type(key), key) for key in theirs], where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, Sequence) and not isinstance(theirs, (str, bytes)):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(theirs, float):
        assert bits(np.float64(ours)) == bits(np.float64(theirs)), where
    else:
        assert ours == theirs, where


def bits(value: Any) -> bytes:
    """The content of a tensor, an array or a scalar."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else b""
    return np.asarray(value).tobytes()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll until something holds; the limit is for what never does, however busy the machine."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout_s} s"
        time.sleep(0.005)


class Held(Numbers):
    """A sample, or all for None, comes when the test has taken so many batches, or sets ``missing`` to 0."""

    def __init__(self, size: int, held: int | None, batches: int) -> None:
        super().__init__(size)
        self.held = held
        self.missing = multiprocessing.RawValue("i", batches)

    def __getitem__(self, index: int) -> int:
        if self.held in (None, index):
            wait_until(lambda: self.missing.value <= 0)
        return index

    def batches_of(self, loader: Iterable[torch.Tensor]) -> list[Any]:
        """The batches of a loader of this dataset."""
        found = []
        for batch in loader:
            found.append(batch.tolist())
            self.missing.value -= 1
        return found


def events_of(trace: Path) -> list[Any]:
    """The events of a trace, which may still be written."""
    found: list[Any] = json.loads(trace.read_text().rstrip(",\n") + "]")
    return found


def metrics_of(loader: Any) -> str:
    """What the loader's endpoint says."""
    with urllib.request.urlopen(str(loader.metrics_url)) as response:
        return str(response.read().decode())


class Roll:
    """Called by every sample: a worker, process or thread, goes on when so many of them are there."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # By thread, without a lock that a killed worker could keep.
        self._there = shared_integers(1024)

    def __call__(self) -> None:
        self._there[threading.get_native_id() % len(self._there)] = 1
        wait_until(lambda: int(self._there.sum()) >= self._workers)


def tally(batches: Iterable[Iterable[Any]]) -> Counter[Any]:
    """How often each batch occurs, as a tuple."""
    return Counter(tuple(batch) for batch in batches)
