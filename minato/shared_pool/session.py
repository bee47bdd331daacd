"""shared_pool=True: the ranks of a node load with one pool of workers."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import weakref
from dataclasses import dataclass, replace
from typing import Any

from minato._compat import index_sampler, is_batched
from minato._system import available_cores
from minato._version import __version__
from minato.delivery.accelerator import accelerator_of
from minato.delivery.iterator import BatchSource
from minato.engine.engine import Engine
from minato.engine.history import Experience
from minato.options import Options, StartingWorkers
from minato.sampling.completed import Completed, Tally
from minato.sampling.distributed import InterleavedRanks, RankSampler, ranked
from minato.sampling.rank_progress import merged_ranks
from minato.sampling.state import is_stateful
from minato.shared_pool.client import PoolClient
from minato.shared_pool.descriptors import DescriptorReader
from minato.shared_pool.device_prefetch import DevicePrefetcher, DeviceSource
from minato.shared_pool.messages import Hello
from minato.shared_pool.rendezvous import Rendezvous
from minato.shared_pool.server import PoolServer
from minato.shared_pool.source import ClientSource, ServerSource, rank_completed

__all__ = ["PoolSession", "RankInfo"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_JOB_VARIABLES = ("MASTER_PORT", "TORCHELASTIC_RUN_ID")
_numbers = itertools.count()
"""Loaders that share are told apart by their number, which is the same in all ranks of a job."""


@dataclass(frozen=True)
class RankInfo:
    """A process among the ranks of its job, as torchrun tells it.

    Attributes:
        rank: Its number among all of the job.
        count: How many these are.
        local_rank: Its number among those of its node.
        local_count: How many these are.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int

    @classmethod
    def of_environment(cls) -> RankInfo | None:
        """This process's; None if there are no other ranks.

        Raises:
            ValueError: A variable is missing, or they contradict each other.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        found = {name: os.environ.get(name) for name in _VARIABLES}
        words = ", ".join(f"{name}={value}" for name, value in found.items())
        advice = f"shared_pool=True goes by what torchrun sets, and here it is {words}"
        if not all(value is not None and value.isdigit() for value in found.values()):
            raise ValueError(f"{advice}: start the ranks by torchrun, or set them")
        rank, count, local_rank, local_count = (int(value or 0) for value in found.values())
        if not (local_rank < local_count <= count and local_rank <= rank < count):
            raise ValueError(f"{advice}, which contradicts itself")
        if local_count > 1 and not any(os.environ.get(name) for name in _JOB_VARIABLES):
            raise ValueError(
                f"{advice}, and neither {' nor '.join(_JOB_VARIABLES)}, which tell this job from others: start the "
                "ranks by torchrun, or set one"
            )
        return cls(rank, count, local_rank, local_count)


class PoolSession:
    """A loader's part in the pool of its node.

    Args:
        place: Of this process among the ranks.
        on_rank_death: What the others do when one ends.
    """

    def __init__(self, place: RankInfo, on_rank_death: str) -> None:
        self._place = place
        self._on_rank_death = on_rank_death
        self._number = next(_numbers)
        self._owner = os.getpid()
        self._server: PoolServer | None = None
        self._client: PoolClient | None = None
        self._prefetcher: DevicePrefetcher | None = None

    def __reduce__(self) -> tuple[type[PoolSession], tuple[RankInfo, str]]:
        return PoolSession, (self._place, self._on_rank_death)

    @classmethod
    def of(cls, options: Options) -> PoolSession | None:
        """What a new loader needs; None if it is alone.

        Raises:
            ValueError: The ranks cannot be told from the environment, or this is no Linux.
        """
        pool = options.shared_pool
        place = None if pool is None else RankInfo.of_environment()
        if pool is None or place is None:
            return None
        if sys.platform != "linux":
            raise ValueError(
                f"shared_pool=True needs sockets of Linux, and this is {sys.platform}: leave it out"
            )
        return cls(place, pool.on_rank_death)

    @property
    def place(self) -> str:
        """Which rank this is, of how many, in words."""
        place = self._place
        return f"rank {place.rank} of {place.count}, local rank {place.local_rank} of {place.local_count}"

    @property
    def hosts(self) -> bool:
        """Whether the workers are this rank's."""
        return self._place.local_rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank on this node."""
        return self._place.local_count == 1

    def divided(
        self,
        dataset: Any,
        shuffle: bool | None,
        sampler: Any,
        batch_sampler: Any,
        drop_last: bool,
        seed: int | None,
    ) -> tuple[bool | None, Any]:
        """``shuffle`` and ``sampler`` for a rank's part of the dataset.

        Raises:
            ValueError: A sampler that was given does not know ranks, or others; or the dataset keeps a state.
        """
        place = self._place
        if is_stateful(dataset):
            raise ValueError(
                "shared_pool=True cannot keep the state of a dataset with state_dict(), for which each rank would need "
                "workers of its own: leave it out"
            )
        given = batch_sampler if batch_sampler is not None else sampler
        if given is None:
            drawn = RankSampler(
                dataset, place.count, place.rank, bool(shuffle), seed or 0, drop_last
            )
            return None, drawn
        known = ranked(given)
        if known is None:
            raise ValueError(
                f"shared_pool=True cannot divide what {type(given).__name__} gives among {place.count} ranks: use "
                "torch.utils.data.DistributedSampler, minato.CostBatchSampler or one with their attributes rank and "
                "num_replicas, or leave it out"
            )
        if (known.rank, known.num_replicas) != (place.rank, place.count):
            raise ValueError(
                f"{type(known).__name__} is for rank {known.rank} of {known.num_replicas}, and this is rank "
                f"{place.rank} of {place.count}: make it with these"
            )
        return shuffle, sampler

    def experience(self, options: Options, num_workers: int) -> Experience:
        """What a new loader knows, of the workers of all ranks or, where there are none, of nothing."""
        if not self.hosts:
            options = replace(options, stats=False, num_workers=int(options.num_workers))
            return Experience.of(options, num_workers)
        ours = self._pooled_options(options)
        known = Experience.of(ours, num_workers * self._place.local_count)
        if known.staffing is not None:
            cores = available_cores(whole_node=True)
            known.staffing.settings = replace(known.staffing.settings, cores=cores)
        return known

    def _pooled_options(self, options: Options) -> Options:
        count = self._place.local_count
        budget = options.memory_budget and options.memory_budget * count
        workers = options.num_workers
        pooled = workers.times(count) if isinstance(workers, StartingWorkers) else workers * count
        # Each rank copies its part to its own device.
        return replace(options, memory_budget=budget, num_workers=pooled, device=None)

    def pooled(self, loader: Any) -> Any:
        """What stands for a loader where all ranks of the node are meant; itself, if it provides for no other."""
        if not self.hosts or self.alone:
            return loader
        place = self._place
        ranks = range(place.rank, place.rank + place.local_count)
        sampler = "batch_sampler" if is_batched(loader) else "sampler"
        return loader._twin(
            _options=self._pooled_options(loader._options),
            num_workers=loader.num_workers * place.local_count,
            **{sampler: InterleavedRanks(index_sampler(loader), ranks)},
        )

    def source(self, loader: Any, base_seed: int) -> BatchSource:
        """Where the batches of a new iterator come from.

        Raises:
            RuntimeError: The ranks do not find each other, or this is a forked child.
        """
        if self.alone:
            engine: Engine = loader._make_engine(base_seed)
            return engine
        source, device = self._rank_source(loader, base_seed), loader._options.target
        source.keeps = (
            self  # an iterator outlives its loader, and with this object the channel ends
        )
        if device is None:
            return source
        if self._prefetcher is None:
            self._prefetcher = DevicePrefetcher(
                accelerator_of(device), loader._options.prefetch_to_device
            )
        return DeviceSource(source, self._prefetcher)

    def _rank_source(self, loader: Any, base_seed: int) -> ServerSource | ClientSource:
        self._check_owner()
        if not self.hosts:
            if self._client is None:
                self._client = PoolClient(Rendezvous(self._number), self._greeting(loader))
                weakref.finalize(self, self._client.close)
            return ClientSource(self._client)
        server = self._pool_server(loader)
        server.finish_epoch()
        engine: Engine = self.pooled(loader)._make_engine(base_seed, DescriptorReader)
        return ServerSource(server, engine, index_sampler(loader))

    def done_by_all(self, loader: Any, epoch: int, own: Completed) -> Completed:
        """What all ranks have had of the pass in the middle of which they begin, as far as this one has to know.

        Args:
            own: What this rank has had, as the state says that was loaded.

        Raises:
            RuntimeError: The ranks do not find each other, or their states do not belong together.
        """
        if not self.hosts:
            return Completed()  # the host leaves out what is done
        self._check_owner()
        server = self._pool_server(loader)
        parts = server.gather_progress(epoch, rank_completed(own))
        try:
            return merged_ranks(
                Completed(part.ranges, part.batches, Tally(*part.delivered), Tally(*part.skipped))
                for part in parts
            )
        except ValueError as error:
            server.refuse(str(error))

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                "this process was forked from a rank whose loader shares a pool of workers, and is no rank itself: "
                "make a loader without shared_pool here"
            )

    def _greeting(self, loader: Any) -> Hello:
        known = ranked(index_sampler(loader))
        alike = {
            "minato": __version__,
            "ranks": self._place.local_count,
            "dataset": type(loader.dataset).__qualname__,
            "len(dataset)": len(loader.dataset),
            "sampler": type(known).__qualname__,
            "sampler.shuffle": getattr(known, "shuffle", None),
            "sampler.seed": getattr(known, "seed", None),
            "len(loader)": len(index_sampler(loader)),
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "order": loader._options.order,
            "seed": loader._options.seed,
            "transforms": loader._transforms.names,
            "collate_fn": _name_of(loader.collate_fn),
            "on_rank_death": self._on_rank_death,
        }
        facts = {name: str(value) for name, value in alike.items()}
        return Hello(self._place.local_rank, self._place.rank, facts)

    def _pool_server(self, loader: Any) -> PoolServer:
        """The server, where the other ranks find it."""
        if self._server is None:
            in_turn = loader._options.order == "strict"
            count, rendezvous = self._place.local_count, Rendezvous(self._number)
            try:
                self._server = PoolServer(
                    rendezvous, self._greeting(loader), count, in_turn, self._on_rank_death
                )
            except OSError as error:
                remedy = "free space there, or set TMPDIR, in all ranks, to another directory"
                if error.errno == errno.EADDRINUSE:
                    remedy = (
                        "another job with the same MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID runs here: start "
                        "one of them with another port (--master-port)"
                    )
                raise RuntimeError(
                    f"the ranks of this node cannot meet in {rendezvous.directory}: {error.strerror}; {remedy}"
                ) from None
            weakref.finalize(
                self, self._server.close
            ).atexit = False  # at exit it waits for the others
        return self._server


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
