"""The actor in the Ray cluster: it runs samples with all transforms for a worker of the training process."""

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
from minato._core import Lease, now_ns, run_steps
from minato._support.objects import nbytes_of
from minato._support.pickling import SidePickler
from minato.batching.blobs import reported
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness
from minato.workers.worker_process import seed_worker

__all__ = ["ActorSpec", "SampleResult", "SampleServer", "unpack"]


@dataclass(frozen=True)
class ActorSpec:
    """Arguments that all actors of a loader share; number of workers and seed are as in torch's worker processes."""

    dataset: Any
    transforms: Transforms
    num_workers: int
    base_seed: int
    worker_init_fn: Callable[[int], None] | None


class SampleResult(NamedTuple):
    """The result of one sample."""

    failed: bool
    pickled: bytes  # the sample or its exception, without the data of arrays
    arrays: list[np.ndarray]  # the bytes of these
    laps_ns: list[int]  # of the dataset and each transform; one total if the sample raised
    cpu_ns: int  # of all of them
    size_bytes: int  # of the dataset's item
    step: int  # index of the transform that ran last; -1: the dataset itself


class SampleServer:
    """Runs samples one after the other; torch and the dataset see its process as a worker process."""

    def __init__(self, number: int, spec: ActorSpec) -> None:
        self._dataset = spec.dataset
        self._steps = spec.transforms.steps
        self._roots = {"dataset": spec.dataset, **spec.transforms.by_name}
        self._randomness: SampleRandomness | None = None
        self._rescanned = False
        self._laps = array("q", bytes(8 * len(self._steps)))
        self._lease = Lease()
        self._failure: BaseException | None = None
        seed_worker(number, spec.num_workers, spec.base_seed, spec.dataset)
        try:
            if spec.worker_init_fn is not None:
                spec.worker_init_fn(number)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._failure = error

    def process_and_node(self) -> tuple[int, str]:
        """Return the process id and the name of the machine."""
        return os.getpid(), platform.node()

    def sample(self, key: object, epoch: int, seed: int | None, occurrence: int) -> SampleResult:
        """Run a sample, which occurred so often in the epoch before; its random numbers follow from a ``seed``."""
        self._lease.step = -1
        size_bytes = 0
        cpu_ns, begun_ns = thread_time_ns(), now_ns()
        try:
            if self._failure is not None:
                raise self._failure
            while True:
                if seed is not None:
                    if self._randomness is None or self._randomness.base_seed != seed:
                        self._randomness = SampleRandomness(
                            seed, owned=OwnedGenerators(self._roots)
                        )
                    self._randomness.bind(epoch, key, occurrence)
                value = self._dataset[key]
                laps_ns = [now_ns() - begun_ns]
                size_bytes = nbytes_of(value)
                value, _ = run_steps(self._steps, value, 0, 0, self._laps, self._lease)
                if self._rescanned or self._randomness is None:
                    break
                # The first sample may create generators, which were not seeded while it ran.
                self._rescanned = True
                if not self._randomness.look():
                    break
            failed, parts = False, _pack(value)
            laps_ns += self._laps
        except KeyboardInterrupt:  # it alone ends the actor
            raise
        except BaseException as error:
            failed, parts = True, _pack_error(reported(error))
            laps_ns = [now_ns() - begun_ns]
        cpu_ns = thread_time_ns() - cpu_ns
        return SampleResult(failed, *parts, laps_ns, cpu_ns, size_bytes, self._lease.step)


@functools.cache
def _pickler() -> type[SidePickler]:
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")

    class Pickler(SidePickler, cloudpickle.Pickler):  # type: ignore[misc]  # an untyped package's class
        """Pickles arrays out of band, and definitions of the user's main module by value."""

        def reducer_override(self, value: object) -> Any:
            reduced = super().reducer_override(value)
            if reduced is NotImplemented:
                reduced = cloudpickle.Pickler.reducer_override(self, value)
            return reduced

    return Pickler


def _pack(value: object) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    pickler = _pickler()(file, "sample", {})
    pickler.dump(value)
    return file.getvalue(), [np.asarray(raw) for raw in pickler.raws()]


def _pack_error(error: Exception) -> tuple[bytes, list[Any]]:
    """Pickle an exception with its traceback as text; a RuntimeError replaces one that cannot be pickled."""
    try:
        packed = _pack(ExceptionWithTraceback(error, error.__traceback__))
        unpack(*packed)
        return packed
    except Exception:
        replacement = RuntimeError(f"{type(error).__qualname__}: {error}")
        return _pack(ExceptionWithTraceback(replacement, error.__traceback__))


def unpack(pickled: bytes, arrays: list[np.ndarray]) -> Any:
    """Return the packed object in writable memory; Ray's own buffers are read-only."""
    return pickle.loads(pickled, buffers=[bytearray(part) for part in arrays])
