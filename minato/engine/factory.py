"""What ``iter(loader)`` opens, engine and pass: a part of ``DataLoader``."""

from __future__ import annotations

import functools
import os
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

from minato._compat import index_sampler
from minato.errors import MinatoWarning
from minato.options import Options
from minato.sampling.epoch import Course, Run, is_stream
from minato.sampling.replay import RecordedOrder
from minato.sampling.state import is_stateful
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators

if TYPE_CHECKING:
    from minato.batching.arena import ArenaCache
    from minato.batching.reader import BatchReader
    from minato.delivery.pinning import Pin
    from minato.engine.engine import Engine
    from minato.engine.history import Experience
    from minato.engine.plan import Plan
    from minato.observe.trace.track import Trace
    from minato.shared_pool.session import PoolSession

__all__ = ["Opening", "RestingEngine"]


class RestingEngine:
    """The engine of an iterator that has come to its end, for the loader's next one.

    Where the work is done in line, an engine takes as long to make as several small batches, and its ledger's pages
    would be cold.
    """

    def __init__(self) -> None:
        self._kept: deque[Engine] = deque(maxlen=1)

    def put_by(self, engine: Any) -> bool:
        """Keep an engine whose pass is over, if it can serve again."""
        if not engine.plan.can_rest:
            return False
        engine.rest()
        self._kept.append(engine)
        return True

    def take(self, loader: Any) -> Engine | None:
        """The engine, if there is one that suits the loader as it is now, in this process."""
        try:
            engine = self._kept.pop()  # at once: another thread may ask, too
        except IndexError:
            return None
        suits = engine.arena.owner == os.getpid() and engine.plan.suits(loader)
        return engine if suits else None


class Opening:
    """Makes engines and passes, of this loader's rank or for all that share its pool."""

    dataset: Any
    num_workers: int
    persistent_workers: bool
    _iterator: Any
    _index_sampler: Any
    _options: Options
    _position: Course
    _transforms: Transforms
    _history: Experience
    _replay: RecordedOrder | None
    _spare_arenas: ArenaCache
    _resting_engine: RestingEngine
    _trace: Trace | None
    _sharing: PoolSession | None
    _warned_of_generators = False

    @property
    def _whole(self) -> Any:
        """What stands for this loader where all ranks that share its pool are meant."""
        return self if self._sharing is None else self._sharing.pooled(self)

    def _refuse_ranks(self, what: str) -> None:
        if self._sharing is not None and not self._sharing.alone:
            raise ValueError(
                f"{what} is about one rank's own workers, and with shared_pool=True there are none: use a loader "
                "without it"
            )

    def _refuse_attached(self, what: str) -> None:
        if self._sharing is not None and not self._sharing.hosts:
            raise ValueError(
                f"{what} is about the workers of all ranks of this node, and local rank 0 has them: ask its loader"
            )

    @staticmethod
    def _fresh_memory() -> tuple[ArenaCache, RestingEngine]:
        """What iterators leave to later ones of the same loader, in the same process."""
        from minato.batching.arena import ArenaCache

        return ArenaCache(), RestingEngine()

    def _fresh_experience(self) -> Experience:
        from minato.engine.history import (
            Experience,
        )  # half of the scheduler, which importing minato need not load

        make = Experience.of if self._sharing is None else self._sharing.experience
        return make(self._options, self.num_workers)

    @property
    def _keeps_replicas(self) -> bool:
        return is_stream(self) or is_stateful(self.dataset)

    @property
    def _most_replicas(self) -> int:
        """How many copies of the dataset there can be."""
        scale = self._options.autoscale
        return max((scale and scale.max) or 0, self.num_workers, 1)

    @property
    def _in_threads(self) -> bool:
        return self.num_workers > 0 and self._options.worker_kind != "process"

    def _make_engine(
        self, base_seed: int, reader: type[BatchReader] | None = None, pin: Pin | None = None
    ) -> Engine:
        from minato.engine.engine import Engine  # all stages: the first iterator loads them
        from minato.engine.plan import Plan

        if (resting := self._resting_engine.take(self)) is not None:
            return resting
        arena = self._spare_arenas.take(shared=self.num_workers > 0 and not self._in_threads)
        num_workers = most_workers = self.num_workers
        if self._history.staffing is not None:
            num_workers, most_workers = self._history.staffing.numbers(self.persistent_workers)
        plan = Plan.of(self, base_seed, num_workers, most_workers)
        self._warn_of_generators(plan)
        engine = Engine(plan, arena, self._history, reader, pin)
        # Its pages are warm: the next engine takes it, once nobody writes to it for this one.
        engine.afterwards.append(functools.partial(self._spare_arenas.append, arena))
        if self._trace is not None and plan.tracks is not None:
            engine.afterwards.append(functools.partial(self._trace.give_back, plan.tracks))
        return engine

    def _warn_of_generators(self, plan: Plan) -> None:
        """Name the generators of dataset and transforms that are not bound to samples, once."""
        if self._warned_of_generators or not plan.seeds_samples:
            return
        self._warned_of_generators = True
        owned = OwnedGenerators({"dataset": plan.dataset, **plan.chain.by_name})
        unbound, cause = owned.others, "minato does not know how to write their states"
        if self._in_threads and plan.worker_method == "thread":
            unbound, cause = owned.names, "worker threads share them"
        elif plan.fetching.at_once:
            reads = OwnedGenerators({"dataset": plan.dataset}).names
            if reads:
                unbound, cause = reads, "reads of several samples share them"
        if unbound:
            warnings.warn(
                f"the dataset or its transforms hold random generators that cannot be bound to samples, as {cause}: "
                f"{', '.join(unbound)}. Their numbers depend on which worker runs which sample, so a seeded run does "
                "not repeat. Call minato.numpy_rng(), python_rng() or torch_rng() inside the sample instead",
                MinatoWarning,
                stacklevel=2,
            )

    def _new_pass(self) -> Run:
        course = self._position
        before = None if course.last is None else course.last.replicas
        sharing = None if self._sharing is None or self._sharing.alone else self._sharing
        resumes = course.resumes
        done = None if sharing is None or resumes is None else sharing.done_by_all(self, *resumes)
        persists = self._iterator is not None
        run, state = course.open(self._whole, self._replay, done, persists)
        if sharing is not None:
            from minato.sampling.rank_progress import RankProgress

            assert course.last is not None
            own = None if resumes is None else resumes[1]
            course.last.progress.part = RankProgress(len(index_sampler(self)), own)
        if self._keeps_replicas:
            assert course.last is not None
            if self._iterator is None or before is None:
                from minato.scheduling.dataset_state import DatasetStates

                lasting = self.persistent_workers or self.num_workers == 0
                before = DatasetStates(self._most_replicas, lasting, state)
            course.last.replicas = before  # persistent workers go on as they are
        return run
