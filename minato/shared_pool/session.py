"""workers=SharedPool(...): the ranks of a node load with one pool of workers."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minato._distribution import __version__
from minato._fork_safety import signals_deferred
from minato._support.objects import attribute, length_of
from minato._support.values import integer_of
from minato._system import available_cores
from minato.delivery.iterator import BatchSource
from minato.engine.engine import Engine
from minato.engine.history import History
from minato.engine.spec import LoaderSpec
from minato.options import Observe, Options, StartingWorkers
from minato.sampling.dealing import order_facts
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Completed, merged_ranks
from minato.sampling.resume import is_stateful
from minato.sampling.samplers import IndexBatches, InterleavedRanks, RankSampler, ranked
from minato.shared_pool.channel import Hello
from minato.shared_pool.client import PoolClient
from minato.shared_pool.rendezvous import Rendezvous
from minato.shared_pool.server import PoolServer
from minato.shared_pool.source import DescriptorReader, RankDevice, RankSource

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_JOB_VARIABLES = ("MASTER_PORT", "TORCHELASTIC_RUN_ID")
_numbers = itertools.count()
"""Numbers of the loaders that share workers; a loader has the same one in all ranks of a job."""


@dataclass(frozen=True)
class RankInfo:
    """A process among the ranks, as torchrun tells it: its number and how many there are, in all and on its node."""

    rank: int
    count: int
    local_rank: int
    local_count: int

    @classmethod
    def of_environment(cls) -> RankInfo | None:
        """This process's; None if there are no other ranks. ValueError: a variable is missing, or they contradict."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        found = {name: os.environ.get(name) for name in _VARIABLES}
        words = ", ".join(f"{name}={value}" for name, value in found.items())
        advice = f"workers=SharedPool(...) goes by what torchrun sets, and here it is {words}"
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
    """A loader's part in the pool of its node, with what the others do when one ends.

    Attributes:
        ranks: Those that share its pool.
        hosts: Whether the workers are this rank's.
        alone: Whether there is no other rank on this node.
    """

    def __init__(self, place: RankInfo, on_rank_death: str) -> None:
        self._place, self._on_rank_death = place, on_rank_death
        first = place.rank - place.local_rank
        self.ranks = range(first, first + place.local_count)
        self.hosts, self.alone = place.local_rank == 0, place.local_count == 1
        self._number = next(_numbers)
        self._owner = os.getpid()
        self._server: PoolServer | None = None
        self._client: PoolClient | None = None
        self._device: RankDevice | None = None

    def __reduce__(self) -> tuple[type[PoolSession], tuple[RankInfo, str]]:
        return PoolSession, (self._place, self._on_rank_death)

    @classmethod
    def of(cls, options: Options) -> PoolSession | None:
        """What a new loader needs; None if it is alone. ValueError: the environment names no ranks, or no Linux."""
        pool = options.shared_pool
        place = None if pool is None else RankInfo.of_environment()
        if pool is None or place is None:
            return None
        if sys.platform != "linux":
            raise ValueError(
                f"workers=SharedPool(...) needs sockets of Linux, and this is {sys.platform}: leave it out"
            )
        return cls(place, pool.on_rank_death)

    @property
    def place(self) -> str:
        """Which rank this is, of how many, in words."""
        place = self._place
        return f"rank {place.rank} of {place.count}, local rank {place.local_rank} of {place.local_count}"

    def divided(
        self,
        dataset: Any,
        shuffle: bool | None,
        sampler: object,
        batch_sampler: object,
        drop_last: bool,
        seed: int | None,
    ) -> tuple[bool | None, Any]:
        """``shuffle`` and ``sampler`` for a rank's part of the dataset.

        ValueError: The given sampler knows no ranks, or others, or has no length; or the dataset keeps a state.
        """
        place = self._place
        if is_stateful(dataset):
            raise ValueError(
                "workers=SharedPool(...) cannot keep the state of a dataset with state_dict(), for which each rank "
                "would need workers of its own: leave it out"
            )
        given = batch_sampler if batch_sampler is not None else sampler
        if given is None:
            numbers = place.count, place.rank
            return None, RankSampler(dataset, *numbers, bool(shuffle), seed or 0, drop_last)
        known = ranked(given)
        if known is None:
            raise ValueError(
                f"workers=SharedPool(...) cannot divide what {type(given).__name__} gives among {place.count} ranks: "
                "use torch.utils.data.DistributedSampler, minato.CostBatchSampler or one with their attributes rank "
                "and num_replicas, or leave it out"
            )
        if (known.rank, known.num_replicas) != (place.rank, place.count):
            raise ValueError(
                f"{type(known).__name__} is for rank {known.rank} of {known.num_replicas}, and this is rank "
                f"{place.rank} of {place.count}: make it with these"
            )
        if length_of(given) is None:
            raise ValueError(
                f"workers=SharedPool(...) gives each rank as many batches as its sampler promises, and "
                f"{type(given).__name__} has no length: define __len__"
            )
        return shuffle, sampler

    def history(self, spec: LoaderSpec) -> History:
        """The history of a new loader: of the workers of all ranks or, where there are none, of nothing."""
        if not self.hosts:
            options = replace(spec.options, observe=Observe(stats=False))
            workers = replace(spec.workers, count=int(spec.workers.count))
            return History.of(replace(spec, workers=workers, options=options))
        history = History.of(self._scaled(spec))
        if (scale := history.autoscale) is not None:
            scale.settings = replace(scale.settings, cores=available_cores(whole_node=True))
        return history

    def _scaled(self, spec: LoaderSpec) -> LoaderSpec:
        """The spec with the workers and the memory of all ranks of this node, and no device: each rank has its own."""
        count = self._place.local_count
        budget = spec.options.memory_budget and spec.options.memory_budget * count
        first = spec.workers.count
        pooled = first.times(count) if isinstance(first, StartingWorkers) else first * count
        options = replace(spec.options, memory_budget=budget, device=None)
        workers = replace(spec.workers, count=pooled)
        return replace(spec, workers=workers, options=options)

    def pooled(self, spec: LoaderSpec) -> LoaderSpec:
        """The spec for all ranks of the node; the same spec if this rank provides for no other."""
        if not self.hosts or self.alone:
            return spec
        sampler = InterleavedRanks(spec.sampling.index_sampler, self.ranks)
        return replace(self._scaled(spec), sampling=replace(spec.sampling, index_sampler=sampler))

    def source(
        self, spec: LoaderSpec, epoch: Epoch, make_engine: Callable[..., Engine]
    ) -> BatchSource:
        """Where the batches of a new iterator come from; RuntimeError: the ranks do not meet, or this is a fork.

        ``make_engine`` gets a spec, its first epoch and, where it is not the default, ``make_reader``.
        """
        if self.alone:
            return make_engine(spec, epoch)
        self._check_owner()
        target = spec.options.target
        if target is not None and self._device is None:
            self._device = RankDevice(target, spec.options.to_device)
        if self.hosts:
            server = self._pool_server(spec)
            server.finish_epoch()
            engine = make_engine(self.pooled(spec), epoch, make_reader=DescriptorReader)

            def join(epoch: Epoch, batches: IndexBatches) -> tuple[int, bool]:
                return server.begin_epoch(engine, epoch.batches_of_rank(), epoch, batches)

            return RankSource(server, join, self._device, self)
        if self._client is None:
            self._client = PoolClient(Rendezvous(self._number), self._greeting(spec))
            weakref.finalize(self, self._client.close).atexit = False  # it closes itself then
        return RankSource(self._client, self._client.enter, self._device, self)

    def done_by_all(self, spec: LoaderSpec, epoch: int, own: Completed) -> Completed:
        """What all ranks have had of the pass in the middle of which they begin, as far as this one has to know.

        It has had its ``own`` part. RuntimeError: The ranks do not meet, or their states do not belong together.
        """
        if not self.hosts:
            return Completed()  # the host leaves out what is done
        self._check_owner()
        server = self._pool_server(spec)
        parts = server.gather_progress(epoch, own)
        try:
            return merged_ranks(parts)
        except ValueError as error:
            server.refuse(str(error))

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                "this process was forked from a rank whose loader shares a pool of workers, and is no rank itself: "
                "make a loader without workers=SharedPool(...) here"
            )

    def _greeting(self, spec: LoaderSpec) -> Hello:
        sampling = spec.sampling
        known, collate = ranked(sampling.index_sampler), spec.collate_fn
        alike = {
            "minato": __version__,
            "ranks": self._place.local_count,
            "dataset": type(spec.dataset).__qualname__,
            "len(dataset)": length_of(spec.dataset),
            "sampler": type(known).__qualname__,
            **{f"sampler.{name}": value for name, value in order_facts(known).items()},
            "len(loader)": len(sampling.index_sampler),
            "batch_size": integer_of(attribute(sampling.index_sampler, "batch_size")),
            "drop_last": bool(attribute(sampling.index_sampler, "drop_last")),
            "order": sampling.order,
            "seed": sampling.seed,
            "transforms": spec.transforms.names,
            "collate_fn": attribute(collate, "__qualname__", type(collate).__qualname__),
            "on_rank_death": self._on_rank_death,
        }
        facts = {name: str(value) for name, value in alike.items()}
        return Hello(self._place.local_rank, self._place.rank, facts)

    def _pool_server(self, spec: LoaderSpec) -> PoolServer:
        """The server, where the other ranks find it."""
        if self._server is None:
            in_turn = spec.options.returns_in_order
            count, rendezvous = self._place.local_count, Rendezvous(self._number)
            try:
                me = self._greeting(spec)
                with signals_deferred():  # no other server can listen beside one that is lost
                    self._server = PoolServer(rendezvous, me, count, in_turn, self._on_rank_death)
                    # At exit it waits for the others.
                    weakref.finalize(self, self._server.close).atexit = False
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
        return self._server
