"""The values of a loader that engine, report and shared pool need; they get no reference to the loader itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minato.options import AutoScale, Options, StartingWorkers
from minato.sampling.resume import is_stateful
from minato.sampling.samplers import SamplingSpec
from minato.transforms.compose import Transforms

if TYPE_CHECKING:
    from minato.caching import Cache


@dataclass(frozen=True, eq=False)
class WorkerSpec:
    """torch's arguments about workers."""

    count: int  # ``num_workers``, 0 for the main process
    context: Any
    init_fn: Callable[[int], None] | None
    prefetch_factor: int | None
    # It was given, and limits the open batches; otherwise the memory budget alone decides.
    bounds_prefetch: bool
    persistent: bool
    timeout_s: float  # torch's ``timeout``, 0 for none


@dataclass(frozen=True, eq=False)
class LoaderSpec:
    """A loader as it is when an iterator starts: torch's arguments, and minato's own as ``options``."""

    sampling: SamplingSpec
    transforms: Transforms
    collate_fn: Callable[[Any], Any]
    cache: Cache | None
    workers: WorkerSpec
    pin_memory: bool
    options: Options

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self.sampling.dataset

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the transforms that workers run and measure as stages; with a cache, those behind it."""
        if self.cache is None:
            return self.transforms.names
        from minato.engine.caching import behind  # with it come all caches

        return behind(self.cache, self.transforms).names

    @property
    def keeps_dataset_states(self) -> bool:
        """Whether each worker's copy of a map-style dataset has a state of its own."""
        return not self.sampling.streams and is_stateful(self.sampling.dataset)

    @property
    def max_dataset_states(self) -> int:
        """Largest number of copies of the dataset."""
        scale = self.scale
        return max((scale and scale.max) or 0, self.workers.count, 1)

    @property
    def hosts(self) -> int:
        """Number of workers that host the readers of an iterable dataset, and so stay active; 0: none do."""
        readers = self.options.readers
        reads_here = readers is not None and readers.where == "main"
        return 0 if reads_here else min(len(self.sampling.own_readers), self.workers.count)

    @property
    def scale(self) -> AutoScale | None:
        """The limits of a changing number of workers; None: it is fixed."""
        count = self.workers.count
        return count.scale if isinstance(count, StartingWorkers) else None

    def scaled(self, scale: AutoScale) -> tuple[int, int, int]:
        """Numbers of workers that a scale allows at first, at least and at most."""
        hosts = self.hosts
        if hosts and not self.transforms.steps:
            return hosts, hosts, hosts  # others would have nothing to do
        first, least, most = scale.limits()
        return first, max(least, hosts), most

    @property
    def in_threads(self) -> bool:
        """Whether the workers are threads of this process, as are the clients of Ray actors."""
        return self.workers.count > 0 and self.options.worker_kind != "process"
