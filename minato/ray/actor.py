"""What a Ray actor does: it runs samples, with all their transforms, for a worker of the training process."""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import platform
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any, NamedTuple

import numpy as np

from minato._compat import ExceptionWithTraceback
from minato._core.clock import now_ns
from minato._core.steps import run_steps
from minato._pickling import SidePickler
from minato.observe.stats.size import nbytes_of
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness
from minato.workers.process_pool import seed_worker

__all__ = ["Answer", "SampleServer", "Work", "unpacked"]


@dataclass(frozen=True)
class Work:
    """What all actors of a loader need.

    Attributes:
        num_workers, base_seed: As torch's worker processes have them.
    """

    dataset: Any
    chain: Transforms
    num_workers: int
    base_seed: int
    worker_init_fn: Callable[[int], None] | None


class Answer(NamedTuple):
    """What became of a sample.

    Attributes:
        failed: Whether it raised.
        pickled: The sample, or the exception, …
        arrays: … and the bytes of its arrays.
        laps_ns: What the dataset took, and each transform; of one that raised, all in one.
        cpu_ns: Processor time of it all.
        size_bytes: Of what the dataset gave.
        step: The transform that ran last; -1: none, but the dataset.
    """

    failed: bool
    pickled: bytes
    arrays: list[Any]
    laps_ns: list[int]
    cpu_ns: int
    size_bytes: int
    step: int


class SampleServer:
    """Runs samples, one after the other. Its process is to torch and to the dataset what a worker process is.

    Args:
        number: Of the worker that asks.
    """

    def __init__(self, number: int, work: Work) -> None:
        self._dataset = work.dataset
        self._steps = work.chain.steps
        self._roots = {"dataset": work.dataset, **work.chain.by_name}
        self._randomness: SampleRandomness | None = None
        self._looked_again = False
        self._laps = array("q", bytes(8 * len(self._steps)))
        self._cursor = array("q", [-1])
        self._failure: Exception | None = None
        seed_worker(number, work.num_workers, work.base_seed, work.dataset)
        try:
            if work.worker_init_fn is not None:
                work.worker_init_fn(number)
        except Exception as error:
            self._failure = error

    def whereabouts(self) -> tuple[int, str]:
        """Process id, and name of the machine."""
        return os.getpid(), platform.node()

    def sample(self, key: Any, epoch: int, seed: int | None, occurrence: int) -> Answer:
        """Run a sample.

        Args:
            seed: What its randomness starts from; None: it is not bound to the sample.
            occurrence: How often the key came before in the epoch.
        """
        self._cursor[0] = -1
        size_bytes = 0
        cpu_ns, begun_ns = thread_time_ns(), now_ns()
        try:
            if self._failure is not None:
                raise self._failure
            while True:
                self._bind(seed, epoch, key, occurrence)
                value = self._dataset[key]
                laps_ns = [now_ns() - begun_ns]
                size_bytes = nbytes_of(value)
                value, _ = run_steps(self._steps, value, 0, 0, self._laps, self._cursor)
                if self._looked_again or self._randomness is None:
                    break
                # The first sample may make generators, which were bound to nothing in it.
                self._looked_again = True
                if not self._randomness.look():
                    break
            failed, parts = False, _packed(value)
            laps_ns += self._laps
        except Exception as error:
            failed, parts = True, _packed_error(error)
            laps_ns = [now_ns() - begun_ns]
        cpu_ns = thread_time_ns() - cpu_ns
        return Answer(failed, *parts, laps_ns, cpu_ns, size_bytes, self._cursor[0])

    def _bind(self, seed: int | None, epoch: int, key: Any, occurrence: int) -> None:
        if seed is None:
            return
        if self._randomness is None or self._randomness.base_seed != seed:
            self._randomness = SampleRandomness(seed, owned=OwnedGenerators(self._roots))
        self._randomness.bind(epoch, key, occurrence)


@functools.cache
def _pickler() -> type[SidePickler]:
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")

    class Pickler(SidePickler, cloudpickle.Pickler):  # type: ignore[misc]
        """Arrays beside the pickle, and what the user's main module defines as Ray has sent it here."""

        def reducer_override(self, value: Any) -> Any:
            reduced = super().reducer_override(value)
            if reduced is NotImplemented:
                reduced = cloudpickle.Pickler.reducer_override(self, value)
            return reduced

    return Pickler


def _packed(value: Any) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _pickler()(file, buffers, "result").dump(value)
    return file.getvalue(), [np.asarray(buffer.raw()) for buffer in buffers]


def _packed_error(error: Exception) -> tuple[bytes, list[Any]]:
    """The same for an exception, with its traceback as text; one that cannot travel is told of by another."""
    try:
        packed = _packed(ExceptionWithTraceback(error, error.__traceback__))
        unpacked(*packed)
        return packed
    except Exception:
        told = RuntimeError(f"{type(error).__qualname__}: {error}")
        return _packed(ExceptionWithTraceback(told, error.__traceback__))


def unpacked(pickled: bytes, arrays: list[Any]) -> Any:
    """What was packed, in memory of its own: what Ray hands out may not be written to."""
    return pickle.loads(pickled, buffers=[bytearray(part) for part in arrays])
