"""``minato.DataLoader``: torch's loader on minato's engine."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from minato._core.seeding import mix
from minato._machine import available_memory_bytes
from minato._standin import StandIn, TorchDataLoader
from minato.assembler.arena import Arena
from minato.cached import behind, check_cache
from minato.caching.base import Cache
from minato.chain.chain import Chain
from minato.chain.rng import SampleRandomness
from minato.delivery.iterator import BatchIterator
from minato.engine import Engine, Experience
from minato.integrations.lightning import counts_batches
from minato.one_pass import OnePass
from minato.options import Options
from minato.plan import Plan
from minato.scheduler.dispatcher import Order
from minato.scheduler.failures import ErrorPolicy, FailureLog, SampleFailure
from minato.scheduler.fetch import Fetcher
from minato.scheduler.scaling import Staffing
from minato.source.epochs import epoch_of, nested, tell_epoch
from minato.source.passes import SeededSampler

__all__ = ["DataLoader"]

_SHARE_OF_MEMORY = 4
"""The default budget is available memory divided by this."""

_OWN = ("transforms", "cache", *(field.name for field in fields(Options)))
"""Attributes that hold minato's own arguments; code that makes one loader from another's attributes finds them."""

T_co = TypeVar("T_co", covariant=True)


class _Unbound(int):
    """torch's default of ``prefetch_factor``: reads like it, but does not bound what is loaded ahead.

    A type of its own, so that a loader made from another one's attributes is not bound either.
    """


class DataLoader(TorchDataLoader[T_co], metaclass=StandIn):
    """A drop-in replacement of ``torch.utils.data.DataLoader`` that schedules samples instead of batches.

    All arguments of torch's class have torch's meaning and defaults
    (https://docs.pytorch.org/docs/stable/data.html); the following are minato's own.

    Args:
        transforms: Callables applied one after the other to ``dataset[i]``, or an object with such a list in its
            attribute ``transforms`` (torchvision's ``Compose``).
        order: ``"strict"``: batches as torch's, in torch's order (default). ``"batch"``: batches as torch's, each as
            soon as it is complete. ``"arrival"``: whichever samples are ready go into the oldest open batch.
            ``"fast_first"``: as arrival, but slow samples wait for the newest open batch while the consumer has enough.
            With ``in_order=False`` the default is ``"arrival"``, or ``"batch"`` if there is a ``batch_sampler``.
        max_lag: Number of batches by which a sample may be delivered late in the last two orders.
        seed: Makes shuffling and all randomness of samples functions of (seed, epoch, index). Without it torch's
            generator decides, as in torch.
        memory_budget_bytes: What batches that are loaded ahead may take; by default a quarter of the memory that is
            available when iteration starts.
        worker_method: ``"process"`` or ``"thread"``.
        rng: ``"sample"`` (default): the global generators are re-seeded for each sample by (seed, epoch, index), so
            that content does not depend on the number of workers; ``"worker"``: torch's streams, one per worker, as
            always with iterable datasets.
        schedule: ``"dynamic"``: samples go to whoever is free. ``"round_robin"``: batch k to worker k mod n, with
            torch's seeds, so that all content is bit for bit torch's, random augmentations included.
        on_worker_death: ``"restart"``: a worker process that dies is replaced, its samples go out again, and a warning
            says what happened; three deaths on one sample raise. ``"raise"``: torch's RuntimeError at once, as always
            with iterable datasets and ``round_robin``, whose workers hold state that would be lost.
        fetch_concurrency: How many samples each worker reads at once, for datasets that wait for a disk, a database or
            a network: ``dataset[i]`` in so many threads or, if the dataset has ``async def __aget__(self, i)``, as
            coroutines of one thread. The transforms run one after the other in the worker's main thread.
        cache: A ``minato.caching.DiskCache`` or ``MemoryCache``, which keeps samples after the first of the transforms;
            later epochs take them from there, without reading or transforming them again.
        on_error: What becomes of a sample that raises. ``"raise"``: its batch does, as with torch. ``"skip"``: it is
            left out. ``"retry"``: it is tried again, and raises if that does not help. A function, called in the
            worker with a :class:`minato.SampleFailure`: what it returns takes the place of the sample, ``minato.SKIP``
            leaves it out, and what it raises is raised.
        retries: How often a sample is tried again, with the same random numbers, before ``on_error`` decides; by
            default 2 with ``"retry"`` and 0 otherwise.
        error_budget: How many samples of an epoch may be left out or replaced before ``minato.ErrorBudgetError`` ends
            it: a number (integer), or a share of the epoch's samples (below 1). By default any number.
        quarantine: Path of a file to which a line of JSON is added for each failure: index, epoch, seed, worker,
            transform, exception, traceback, and what became of it.
        sample_timeout_s: Seconds after which the worker process of a sample is ended and replaced, and the sample is a
            failure with ``minato.SampleTimeoutError``, whose text holds the worker's stack.
        min_workers, max_workers: Let the number of workers change between these while the loader is in use, beginning
            with ``num_workers``: up while the loop waits and more of them help, down while they idle.
            ``num_workers="auto"`` begins with one per core, 12 at most.
        controller: What decides it: ``"corrected"``, or ``"paper"`` for the MinatoLoader paper's formulas as printed.

    Raises:
        ValueError, TypeError: As torch, or naming the argument, its value and the remedy.

    The tensors of a batch view memory that is recycled when they are no longer referenced; they stay valid for as
    long as anything refers to them.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        transforms: Any = None,
        order: str | None = None,
        max_lag: int | None = None,
        seed: int | None = None,
        memory_budget_bytes: int | None = None,
        worker_method: str = "process",
        rng: str | None = None,
        schedule: str = "dynamic",
        on_worker_death: str = "restart",
        fetch_concurrency: int = 1,
        cache: Cache | None = None,
        on_error: str | Callable[[SampleFailure], Any] = "raise",
        retries: int | None = None,
        error_budget: float | None = None,
        quarantine: str | os.PathLike[str] | None = None,
        sample_timeout_s: float | None = None,
        min_workers: int | None = None,
        max_workers: int | None = None,
        controller: str = "corrected",
    ) -> None:
        if counts_batches(batch_sampler) and (not in_order or order not in (None, "strict")):
            warnings.warn(
                "Lightning relates predictions to samples by the sequence of the batches, so that here they are "
                "delivered in strict order",
                stacklevel=2,
            )
            in_order, order, max_lag = True, None, None
        self._options = Options.of(
            in_order=in_order,
            has_batch_sampler=batch_sampler is not None,
            is_stream=isinstance(dataset, IterableDataset),
            order=order,
            max_lag=max_lag,
            seed=seed,
            memory_budget_bytes=memory_budget_bytes,
            worker_method=worker_method,
            rng=rng,
            schedule=schedule,
            on_worker_death=on_worker_death,
            fetch_concurrency=fetch_concurrency,
            on_error=on_error,
            retries=retries,
            error_budget=error_budget,
            quarantine=quarantine,
            sample_timeout_s=sample_timeout_s,
            num_workers=num_workers,
            min_workers=min_workers,
            max_workers=max_workers,
            controller=controller,
        )
        num_workers = self._options.first_workers(num_workers)
        self._chain = Chain.of(transforms)
        is_stream = isinstance(dataset, IterableDataset)
        workers_end = num_workers > 0 and not persistent_workers
        check_cache(cache, self._options, self._chain, is_stream, workers_end)
        vars(self).update(vars(self._options), transforms=transforms, max_lag=max_lag, cache=cache)
        self._epoch = -1
        self._pass_seed: int | None = None
        self._sampler_epoch: int | None = 0
        self._foretells = True
        self._spare_arenas: list[Arena] = []
        self._experience = self._no_experience(num_workers)
        shuffles = shuffle and sampler is None and batch_sampler is None
        if seed is not None and shuffles and not isinstance(dataset, IterableDataset):
            shuffle, sampler = None, SeededSampler(dataset, seed)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if prefetch_factor is None and self.prefetch_factor is not None:
            self.prefetch_factor = _Unbound(self.prefetch_factor)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter()`` starts; by default each starts the one after the last.

        Samplers with a ``set_epoch`` of their own are told too. It is enough to tell the sampler instead.
        """
        tell_epoch(self._index_sampler, epoch)
        self._epoch = epoch - 1

    def reproduce(self, index: Any, epoch: int | None = None, seed: int | None = None) -> Any:
        """Load one sample in this process as a worker did, random numbers included.

        Args:
            index: What the dataset is asked for.
            epoch: By default the one that is running, or ran last.
            seed: As a quarantine file tells it; by default that of the loader, or of the pass that is running.

        Returns:
            ``dataset[index]`` after all transforms, not collated. What it raises is not caught.

        Raises:
            ValueError: No pass has begun and ``seed`` is not given.
        """
        if seed is None:
            seed = self._options.seed if self._options.seed is not None else self._pass_seed
        if seed is None:
            raise ValueError(
                "the random numbers of a sample follow from a seed that is drawn when iteration starts, and it has "
                "not: give seed=, as the quarantine file tells it"
            )
        randomness = SampleRandomness(seed)
        with randomness.saved():
            if self._options.rng == "sample":
                randomness.bind(max(self._epoch, 0) if epoch is None else epoch, index)
            return Fetcher(self.dataset, self._chain, self._auto_collation).single(index)

    def __setattr__(self, attr: str, val: Any) -> None:
        if self.__initialized and attr in _OWN:
            raise ValueError(
                f"{attr} attribute should not be set after {self.__class__.__name__} is initialized"
            )
        if self.__initialized and attr == "in_order" and bool(val) != bool(self.in_order):
            order = "strict" if val else "batch"
            self._options = replace(self._options, order=order)
            vars(self).update(order=order, max_lag=None)
        super().__setattr__(attr, val)

    def __getstate__(self) -> dict[str, Any]:
        # A copy must not write to the same arenas; what was measured is not worth sending.
        fresh = self._no_experience(self.num_workers)
        return {**self.__dict__, "_spare_arenas": [], "_experience": fresh}

    def _rebuilt(self, dataset: Any, **arguments: Any) -> DataLoader[Any]:
        """A loader with torch's arguments as given, and all others as this one's.

        For wrappers that shard or shorten what this loader's sampler gives: they may do so by a ``batch_sampler``,
        and yet mix batches if this loader did.
        """
        loader: DataLoader[Any] = DataLoader(dataset, **arguments)
        kept = ("_options", "_chain", "_epoch", "_pass_seed", "_sampler_epoch", *_OWN)
        vars(loader).update({name: vars(self)[name] for name in kept})
        loader._experience = loader._no_experience(loader.num_workers)
        return loader

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            # torch shards and seeds data pipes by its own protocol.
            if self._chain.steps:
                raise ValueError("transforms= is not for data pipes: use their .map(...)")
            return super()._get_iterator()
        if self._dataset_kind == _DatasetKind.Iterable and self._in_threads:
            raise ValueError(
                "worker_method='thread' cannot split an iterable dataset, which does so by torch's get_worker_info() "
                "and that knows processes only: use worker_method='process'"
            )
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return BatchIterator(self, self._make_engine, self._new_pass)

    @property
    def _in_threads(self) -> bool:
        return self.num_workers > 0 and self._options.worker_method == "thread"

    def _spare_arena(self) -> Arena:
        """The arena of an iterator that is gone, if it is of the right kind and this process's own."""
        shared = self.num_workers > 0 and not self._in_threads
        while self._spare_arenas:
            arena = self._spare_arenas.pop()
            if (arena.shared, arena.owner) == (shared, os.getpid()):
                return arena
        return Arena(shared=shared)

    def _make_engine(self, base_seed: int) -> Engine:
        options = self._options
        dataset, chain = behind(vars(self)["cache"], self.dataset, self._chain)
        streams = self._dataset_kind == _DatasetKind.Iterable
        round_robin = streams or options.schedule == "round_robin"
        window: int | None = None
        if self.num_workers == 0:
            window = 1
        elif round_robin or not isinstance(self.prefetch_factor, _Unbound):
            most = self._options.max_workers or self.num_workers
            window = most * cast(int, self.prefetch_factor)
        arena = self._spare_arena()
        num_workers = most_workers = self.num_workers
        if self._experience.staffing is not None:
            num_workers, most_workers = self._experience.staffing.numbers(self.persistent_workers)
        engine = Engine(
            Plan(
                dataset=dataset,
                chain=chain,
                collate_fn=self.collate_fn,
                batched=self._auto_collation,
                num_workers=num_workers,
                most_workers=most_workers,
                worker_method=options.worker_method,
                context=self.multiprocessing_context or torch.multiprocessing.get_context(),
                worker_init_fn=self.worker_init_fn,
                base_seed=self._worker_seed(base_seed),
                seeds_samples=options.rng == "sample" and not streams,
                order=Order(options.order, options.max_lag),
                window_batches=window,
                budget_bytes=options.memory_budget_bytes
                or available_memory_bytes() // _SHARE_OF_MEMORY,
                largest_batch=self.batch_size or 1,
                timeout_s=self.timeout,
                persistent=self.persistent_workers,
                streams=streams,
                round_robin=round_robin,
                drop_last=self.drop_last,
                restarts=options.on_worker_death == "restart" and not round_robin,
                fetch_concurrency=options.fetch_concurrency,
                policy=self._policy(),
                error_budget=options.error_budget,
                quarantine=options.quarantine,
                sample_timeout_s=options.sample_timeout_s,
            ),
            arena,
            self._experience,
        )
        # The next iterator writes to this one's warm pages.
        weakref.finalize(engine, self._spare_arenas.append, arena).atexit = False
        return engine

    def _no_experience(self, num_workers: int) -> Experience:
        least, most = self._options.min_workers, self._options.max_workers
        return Experience(staffing=Staffing.of(self._options.controller, num_workers, least, most))

    def _policy(self) -> ErrorPolicy | None:
        """What the workers do about failures; a log of failures for each iterator."""
        options = self._options
        if not options.settles_failures:
            return None
        return ErrorPolicy(options.on_error, options.retries, FailureLog(options.quarantine))

    def _worker_seed(self, base_seed: int) -> int:
        """What the workers' own streams start from: torch's draw, or with ``seed=`` a function of (seed, epoch)."""
        seed = self._options.seed
        return base_seed if seed is None else mix(seed, self._epoch + 1, 0) >> 2

    def _new_pass(self, base_seed: int) -> OnePass:
        said = epoch_of(self._index_sampler)
        self._epoch = self._epoch + 1 if said is None or said == self._sampler_epoch else said
        for sampler in nested(self._index_sampler):
            if isinstance(sampler, SeededSampler):
                sampler.set_epoch(self._epoch)
        self._sampler_epoch = epoch_of(self._index_sampler)
        self._pass_seed = base_seed
        return OnePass(self, base_seed)
