"""Epochs and engines for the iterators of one loader: a new engine each time, or the last one reused."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from minato.engine.spec import LoaderSpec
from minato.sampling.epoch import Epoch, EpochPosition
from minato.sampling.progress import Completed, RankProgress
from minato.sampling.resume import DatasetStates
from minato.transforms.owned import OwnedGenerators

if TYPE_CHECKING:  # all stages: the first iterator loads them
    from minato.batching.arena import Arena
    from minato.batching.reader import BatchReader
    from minato.delivery.device import Pin
    from minato.delivery.iterator import BatchSource
    from minato.engine.engine import Engine
    from minato.engine.history import History
    from minato.engine.inline import InlineEngine
    from minato.engine.plan import Plan
    from minato.observe.trace import Trace

AnyEngine: TypeAlias = "Engine | InlineEngine"
Wrap: TypeAlias = "Callable[[Any], BatchSource]"


class RankSession(Protocol):
    """The part of a loader in a pool of workers that several ranks share (``minato.shared_pool``)."""

    @property
    def place(self) -> str:
        """Text that names this rank and the number of ranks."""

    @property
    def ranks(self) -> range:
        """The ranks that share its pool."""

    @property
    def hosts(self) -> bool:
        """Whether this rank starts the workers."""

    @property
    def alone(self) -> bool:
        """Whether there is no other rank on this node."""

    def pooled(self, spec: LoaderSpec) -> LoaderSpec:
        """The spec of all ranks of the node; the same spec if this rank does not start their workers."""

    def history(self, spec: LoaderSpec) -> History:
        """The history of a new loader."""

    def source(
        self, spec: LoaderSpec, epoch: Epoch, make_engine: Callable[..., Any]
    ) -> BatchSource:
        """The source of a new iterator's batches; ``make_engine``: :meth:`EngineFactory.engine` with history."""

    def done_by_all(self, spec: LoaderSpec, epoch: int, own: Completed) -> Completed:
        """The complete part, of all ranks, of the epoch that they resume; that of this rank if it starts no workers."""


class EngineFactory:
    """Begins epochs and makes engines for one loader; it holds no loader.

    Attributes:
        idle: The engine that an iterator has left for the next one, after the loader and the process it is for.
        told_parts: Replaced parts of torch's engine that a warning has named.
        spec: The loader as it was last, after the attributes that it was made of; None before.
    """

    def __init__(self, *, session: RankSession | None = None, trace: Trace | None = None) -> None:
        from minato.batching.arena import ArenaCache

        self._session = session
        self._trace = trace
        self._spare_arenas = ArenaCache()
        self._looked_for_generators = False
        self.idle: list[tuple[LoaderSpec, int, InlineEngine]] = []
        self.told_parts: list[str] = []
        self.spec: tuple[tuple[Any, ...], LoaderSpec | None] = (), None

    def fresh(self, *, traced: bool = True) -> EngineFactory:
        """A factory for a copy of the loader, which must not write to the same arenas.

        Ranks that share a pool map each of its arenas until the pool ends: there it takes those that nobody uses.
        """
        made = EngineFactory(session=self._session, trace=self._trace if traced else None)
        if self._session is not None and not self._session.alone:
            made._spare_arenas = self._spare_arenas
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(EngineFactory, session=self._session, trace=self._trace), ()

    def epoch(self, spec: LoaderSpec, position: EpochPosition, *, persists: bool) -> Epoch:
        """Begin the next epoch; ``persists``: the iterator of the last one continues."""
        session = None if self._session is None or self._session.alone else self._session
        whole, done, resumes = spec, None, None
        if session is not None:
            whole, resumes = session.pooled(spec), position.resumes
            if resumes is not None:
                done = session.done_by_all(spec, *resumes)
        epoch, state = position.open(whole.sampling, done=done, persists=persists)
        if session is not None:
            own = None if resumes is None else resumes[1]
            epoch.progress.part = RankProgress(epoch.batches_of_rank(), own)
        persist = spec.workers.persistent or spec.workers.count == 0
        if spec.keeps_dataset_states and epoch.dataset_states is None:
            epoch.dataset_states = DatasetStates(spec.max_dataset_states, persist, state)
        # With compat="torch" an epoch is what it was when it began, as with torch.
        epoch.may_be_replaced = spec.options.seeds_samples
        return epoch

    def again(self, spec: LoaderSpec, position: EpochPosition, epoch: Epoch) -> Epoch | None:
        """Begin an epoch again if ``set_epoch`` has chosen another one since; None if it has not."""
        session = None if self._session is None or self._session.alone else self._session
        whole = spec if session is None else session.pooled(spec)
        other = position.begin_again(whole.sampling, epoch)
        if other is not None and session is not None:
            other.progress.part = RankProgress(other.batches_of_rank())
        return other

    def source(
        self, spec: LoaderSpec, history: History, wrap: Wrap | None, epoch: Epoch, **pin: Any
    ) -> BatchSource:
        """The source of a new iterator's batches: an engine, or a client of the engine of all ranks.

        Args:
            wrap: Makes another source of an engine of this rank alone; None: that stays as it is.
            pin: ``pin=``, if the engine copies batches to pinned memory.
        """
        if self._session is None:
            made = self.engine(spec, epoch, history=history, **pin)
            engine: BatchSource = made if wrap is None else wrap(made)
            readers, dealt = spec.options.readers, spec.sampling.dealt
            if readers is None or readers.epoch_end == "drop" or dealt[1] == 1:
                return engine
            from minato.delivery.rank_ends import EvenEnds

            again = functools.partial(self._repeated, spec, wrap, pin.get("pin"))
            told = made.observers.waited_for_ranks
            return EvenEnds(engine, readers.epoch_end, dealt, again, pin.get("pin"), told)
        return self._session.source(spec, epoch, functools.partial(self.engine, history=history))

    def _repeated(
        self, spec: LoaderSpec, wrap: Wrap | None, pin: Pin | None, epoch: Epoch
    ) -> BatchSource:
        """The batches of an epoch from its start, without any trace of it here."""
        from minato.engine.history import History

        factory, position = self.fresh(traced=False), EpochPosition()
        position.set_epoch(epoch.number)
        again = factory.epoch(spec, position, persists=False)
        if again.readers is not None and epoch.readers is not None:
            again.readers.set_epoch = epoch.readers.set_epoch
        again.set_base_seed(epoch.base_seed)
        source: BatchSource = factory.engine(spec, again, history=History.of(spec), pin=pin)
        if wrap is not None:
            source = wrap(source)
        try:
            source.begin(again, again.batches(iter(())))
        except BaseException:
            source.shut_down()
            raise
        return source

    def engine(
        self,
        spec: LoaderSpec,
        epoch: Epoch,
        *,
        history: History,
        make_reader: type[BatchReader] | None = None,
        pin: Pin | None = None,
    ) -> AnyEngine:
        """The engine of a new iterator that begins with an epoch."""
        try:  # another thread may take it
            kept, pid, inline = self.idle.pop()
        except IndexError:
            pass
        else:
            # Threads that read, counts of failures and tracks of a trace are those of its process.
            if kept is spec and pid == os.getpid():
                return inline
            inline.end()
        from minato.engine.plan import Plan

        in_processes = spec.workers.count > 0 and not spec.in_threads
        arena = self._spare_arenas.take(shared=in_processes)
        num_workers = most_workers = spec.workers.count
        if history.autoscale is not None and spec.scale is not None:
            num_workers, most_workers = history.autoscale.numbers(spec.workers.persistent)
        tracks = None if self._trace is None else self._trace.take()
        plan = Plan.of(
            spec, epoch, num_workers=num_workers, most_workers=most_workers, tracks=tracks
        )
        if plan.worker.in_main_process:
            from minato.engine.inline import InlineEngine

            keep = functools.partial(_kept, weakref.ref(self), spec)
            made = InlineEngine(plan, arena, history, keep)
            return self._returning(made, arena)
        from minato.engine.engine import Engine

        self._warn_of_generators(plan, history)
        engine = Engine(plan, arena, history, make_reader=make_reader, pin=pin)
        return self._returning(engine, arena)

    def _returning(self, engine: AnyEngine, arena: Arena) -> AnyEngine:
        # The next engine takes the arena, whose pages are warm, when no worker writes to it any more.
        engine.afterwards.append(functools.partial(self._spare_arenas.append, arena))
        return engine

    def _warn_of_generators(self, plan: Plan, history: History) -> None:
        worker, spec = plan.worker, plan.spec
        if self._looked_for_generators or not worker.seeds_samples:
            return
        self._looked_for_generators = True
        owned = {"dataset": spec.dataset, **spec.transforms.by_name, "collate_fn": spec.collate_fn}
        if worker.readers is not None:
            del owned["dataset"]  # each reader has a copy
        found = OwnedGenerators(owned)
        if worker.method == "thread":
            history.warn_of_generators(found.names, "worker threads share them")
            return
        if worker.fetching.at_once:
            reads = OwnedGenerators({"dataset": spec.dataset}).names
            history.warn_of_generators(reads, "reads of several samples share them")
        history.warn_of_generators(found.others)


def _kept(reference: weakref.ref[EngineFactory], spec: LoaderSpec, engine: InlineEngine) -> bool:
    """Keep the engine of an iterator that has ended for the next one; False if it will not serve another."""
    factory = reference()
    # The keys of a cache follow from the dataset as each epoch finds it.
    if factory is None or factory.idle or spec.cache is not None:
        return False
    factory.idle.append((spec, os.getpid(), engine))
    return True
