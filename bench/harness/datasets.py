"""Datasets whose content and cost depend on the index alone, so every loader does the same work."""

from __future__ import annotations

import io
import math
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

Sample = tuple[Any, int]
"""One sample: the payload, and its index as the label."""
ROUNDS = 3
"""Measured ideals are the best of this many rounds."""
_COPIED_BYTES = 1 << 26
"""A memory copy of more is extrapolated from this many."""


@dataclass(frozen=True)
class Ideal:
    """The shortest possible epoch of a dataset; ``call_s`` is the time of ``dataset[i]`` where that is the cost."""

    epoch_s: float
    call_s: float | None = None


class Work(Protocol):
    """A map-style dataset of the benchmarks.

    Three more methods are optional. ``content(index)`` is ``self[index]`` without its cost: with it, the harness checks
    the content of batches. ``ideal(batch_size, workers)`` is the dataset's ideal: without it, the harness measures one.
    ``labels(batch)`` are the indices of a batch's samples: without it, they are the second of two fields.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Counted(Dataset[Any]):
    """As many samples as ``count`` says."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


class SleepingWork(Counted):
    """Samples that sleep: work that needs a worker but no core, such as reading from a network."""

    def __init__(self, costs_s: list[float]) -> None:
        super().__init__(len(costs_s))
        self.costs_s = costs_s

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.costs_s[index])
        return self.costs_s[index], index

    def content(self, index: int) -> Sample:
        return self.costs_s[index], index

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        """All sleep split evenly over the workers."""
        return Ideal(math.fsum(self.costs_s) / workers)


class SleepingTransforms(SleepingWork):
    """The same samples, but transforms (``SleepsShare``) take their time."""

    __getitem__ = SleepingWork.content


class SleepsShare:
    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, sample: Sample) -> Sample:
        time.sleep(sample[0] * self.share)
        return sample


class StoredTensors(Counted):
    """Float32 tensors returned from a pool in memory: no cost but the loader's own copies."""

    def __init__(self, shape: tuple[int, ...], pool_size: int, count: int) -> None:
        super().__init__(count)
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.rand((pool_size, *shape), generator=generator)

    def __getitem__(self, index: int) -> Sample:
        return self.pool[index % len(self.pool)], index

    content = __getitem__

    @property
    def epoch_bytes(self) -> int:
        return self.pool[0].nbytes * self.count

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        """A copy of every sample to its place in one recycled, warm batch, by one process."""
        sources = [sample.numpy() for sample in self.pool]
        batch = np.zeros((batch_size, *sources[0].shape), dtype=sources[0].dtype)

        def copy() -> None:
            for index in range(self.count):
                np.copyto(batch[index % batch_size], sources[index % len(sources)])

        return Ideal(_best_s(copy))


class StoredRows(Counted):
    """Rows of 16 numbers in memory, the cheapest samples there are: NumPy vectors, or lists of Python floats."""

    def __init__(self, count: int, as_floats: bool = False) -> None:
        super().__init__(count)
        table = np.random.default_rng(0).random((count, 16), dtype=np.float32)
        self.rows: Any = table.tolist() if as_floats else table

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index], index

    content = __getitem__

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        """The calls of ``dataset[i]`` alone, split over the workers."""
        call_s = _call_s(self)
        return Ideal(call_s * len(self) / max(workers, 1), call_s)


class Vectors(Counted):
    """One float32 vector from memory for every index: no length and no sample size takes more memory."""

    def __init__(self, count: int, nbytes: int = 64) -> None:
        super().__init__(count)
        self.vector = np.zeros(nbytes // 4, np.float32)

    def __getitem__(self, index: int) -> Sample:
        return self.vector, index

    content = __getitem__

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        """The calls of ``dataset[i]`` split over the workers, or one copy of all bytes if that takes longer."""
        total = self.vector.nbytes * self.count
        source = np.ones(min(total, _COPIED_BYTES), np.uint8)
        batch = np.zeros_like(source)
        copy_s = _best_s(lambda: np.copyto(batch, source)) * total / source.nbytes
        few = Vectors(min(self.count, 100_000), self.vector.nbytes)
        return Ideal(max(_call_s(few) * self.count / max(workers, 1), copy_s))


class Held(Counted):
    """Samples from a list in memory."""

    def __init__(self, samples: Sequence[Any]) -> None:
        super().__init__(len(samples))
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Mapped(Counted):
    """A dataset with a chain applied to each sample, for loaders that take no ``transforms=``."""

    def __init__(self, dataset: Any, transforms: Sequence[Callable[[Any], Any]] = ()) -> None:
        super().__init__(len(dataset))
        self.dataset, self.transforms = dataset, transforms

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Stored(Counted):
    """Samples of which each is a file, as many as ``count`` says: more than there are files or fewer."""

    def __init__(self, paths: Iterable[Path], missing: str, count: int | None) -> None:
        self.paths = list(paths)
        if not self.paths:
            raise FileNotFoundError(f"{missing}: run 'make data'")
        super().__init__(count or len(self.paths))

    def path_of(self, index: int) -> Path:
        return self.paths[index % len(self.paths)]


class Pictures(Counted):
    """Noise images, most of them small and a tenth of them 3.5 times as wide and as high."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        large = np.random.default_rng(0).random(count) < 0.1
        self.sides = [700 if big else 200 for big in large]

    def __getitem__(self, index: int) -> Any:
        side = self.sides[index]
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (side, side, 3), dtype=np.uint8), index


def compute(seconds: float) -> None:
    """Use a core for this time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        sum(range(500))


def to_floats(sample: Any) -> Any:
    pixels, index = sample
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, index


def blur(sample: Any) -> Any:
    """A box filter over 5 × 5 pixels."""
    image, index = sample
    return torch.nn.functional.avg_pool2d(image, 5, stride=1, padding=2), index


def flip_at_random(sample: Any) -> Any:
    image, index = sample
    return (image.flip(-1) if torch.rand(()) < 0.5 else image), index


def shrink(sample: Any) -> Any:
    image, index = sample
    small = torch.nn.functional.interpolate(
        image[None], size=(64, 64), mode="bilinear", antialias=True
    )
    return small[0], index


@contextmanager
def written_whole(home: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all is there."""
    folder = home.with_suffix(".partial")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    folder.rename(home)


def add_to_tar(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@cache
def _noise(nbytes: int) -> bytes:
    return np.random.default_rng(1).bytes(nbytes)


def stored_object(index: int, nbytes: int) -> bytes:
    """An object or row of a store, which begins with its index; it cannot be compressed."""
    return index.to_bytes(8, "little") + _noise(nbytes)[8:]


def measured_ideal(run: Callable[[int], Any], indices: range, workers: int, cores: int) -> Ideal:
    """The ideal of samples whose cost is unknown: time of a sample over the workers, or on the cores if longer.

    ``run`` makes one sample with all its transforms. At most a hundred, evenly spread, are measured.
    """
    measured = indices[:: -(-len(indices) // 100)]
    run(measured[0])  # the first one may import what it needs
    begun_s, cpu_s = time.perf_counter(), time.thread_time()
    for index in measured:
        run(index)
    taken_s, cpu_s = time.perf_counter() - begun_s, time.thread_time() - cpu_s
    each_s = max(taken_s / max(workers, 1), cpu_s / min(cores, max(workers, 1)))
    return Ideal(each_s * len(indices) / len(measured))


def _best_s(operation: Callable[[], None]) -> float:
    rounds_s = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        operation()
        rounds_s.append(time.perf_counter() - begun)
    return min(rounds_s)


def _call_s(work: Work) -> float:
    def call_all() -> None:
        for index in range(len(work)):
            work[index]

    return _best_s(call_all) / len(work)


def straggler_costs_s(count: int, usual_s: float, straggler_s: float, share: float) -> list[float]:
    """Give a random ``share`` of ``count`` samples (rounded) the cost ``straggler_s``."""
    costs_s = np.full(count, usual_s)
    stragglers = np.random.default_rng(0).choice(count, round(share * count), replace=False)
    costs_s[stragglers] = straggler_s
    return costs_s.tolist()


def lognormal_costs_s(count: int, mean_s: float, relative_deviation: float) -> list[float]:
    """Draw log-normal costs, scaled so that the mean of this very draw is ``mean_s``."""
    sigma = math.sqrt(math.log1p(relative_deviation**2))
    costs_s = np.random.default_rng(0).lognormal(0.0, sigma, count)
    return (mean_s / costs_s.mean() * costs_s).tolist()


def bimodal_costs_s(count: int, light_s: float, heavy_s: float, every: int) -> list[float]:
    """Make the last sample of every run of ``every`` samples a heavy one."""
    return [heavy_s if index % every == every - 1 else light_s for index in range(count)]
