"""``minato.DataLoader``: torch's loader on minato's engine."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from minato._compat import TorchIterator, index_sampler, is_constructed
from minato._standin import StandIn, TorchDataLoader, is_made, made_only
from minato.engine.distribution import Distribution
from minato.engine.insight import Insight
from minato.fetching import Fetching
from minato.options import Options, PaperController, Unbound
from minato.sampling.epoch import Course, is_stream
from minato.sampling.replay import RecordedOrder
from minato.sampling.sampler_epoch import set_sampler_epoch
from minato.sampling.samplers import SeededSampler
from minato.transforms.compose import Transforms
from minato.workers.error_policy import FailureLog, SampleFailure

if TYPE_CHECKING:
    from minato.caching.base import Cache

__all__ = ["DataLoader"]

_OWN = ("transforms", "cache", *(field.name for field in fields(Options)))
"""Attributes that hold minato's own arguments; code that makes one loader from another's attributes finds them."""

T_co = TypeVar("T_co", covariant=True)


class DataLoader(Insight, Distribution, TorchDataLoader[T_co], metaclass=StandIn):
    """A drop-in replacement of ``torch.utils.data.DataLoader`` that schedules samples instead of batches.

    All arguments of torch's class have torch's meaning and defaults
    (https://docs.pytorch.org/docs/stable/data.html); the following are minato's own.

    Args:
        pin_memory: Also ``"in_place"``: pinned where the workers wrote it, without torch's copy. Its memory is used
            again once the stream that is current when a batch is dropped has done all it was told until then.
        transforms: Callables applied one after the other to ``dataset[i]``, or an object with such a list in its
            attribute ``transforms`` (torchvision's ``Compose``).
        order: ``"strict"``: batches as torch's, in torch's order (default). ``"batch"``: batches as torch's, each as
            soon as it is complete. ``"arrival"``: whichever samples are ready go into the oldest open batch.
            ``"fast_first"``: as arrival, but slow samples wait for the newest open batch while the consumer has enough.
            With ``in_order=False`` the default is ``"arrival"``, or ``"batch"`` if there is a ``batch_sampler``.
        max_lag: Number of batches by which a sample may be delivered late in the last two orders.
        seed: Makes shuffling and all randomness of samples functions of (seed, epoch, index). Without it torch's
            generator decides, as in torch.
        memory_budget_bytes: What batches that are loaded ahead may take; by default the share of a quarter of the
            memory that is available when iteration starts, divided by the ranks of the node and the loaders in use.
        worker_method: ``"process"``, ``"thread"``, or ``"ray"``: actors in a Ray cluster (extra ``ray``).
        rng: ``"sample"`` (default): the global generators are re-seeded for each sample by (seed, epoch, index), so
            that content does not depend on the number of workers; ``"worker"``: torch's streams, one per worker, as
            always with iterable datasets.
        schedule: ``"dynamic"``: samples go to whoever is free. ``"round_robin"``: batch k to worker k mod n, with
            torch's seeds, so that all content is bit for bit torch's, random augmentations included.
        on_worker_death: ``"restart"``: a worker process that dies is replaced, its samples go out again, and a warning
            says what happened; three deaths on one sample raise. ``"raise"``: torch's RuntimeError at once, as always
            with iterable and stateful datasets and ``round_robin``, whose workers hold state that would be lost.
        fetch_concurrency: How many samples each worker reads at once, for datasets that wait for a disk, a database or
            a network: ``dataset[i]`` in so many threads or, if the dataset has ``async def __aget__(self, i)``, as
            coroutines of one thread. The transforms run one after the other in the worker's main thread. A
            :class:`minato.Fetching` says more: limits for all workers, a slow start, second requests.
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
            failure with ``minato.SampleTimeoutError``, whose text holds the worker's stack. The same limit holds for a
            call of ``collate_fn`` and for ``worker_init_fn``: these raise, after ``retries`` more tries.
        record_order: File to which the order of the batches is appended while they are delivered.
        replay_order: Such a file: the same samples come in the same batches, in the recorded order, with the recorded
            seed. The sampler is not asked then.
        min_workers, max_workers: Let the number of workers change between these while the loader is in use, beginning
            with ``num_workers``: up while the loop waits and more of them help, down while they idle.
            ``num_workers="auto"`` begins with one per core, 12 at most.
        controller: What decides it: ``"corrected"``, or the MinatoLoader paper's formulas as printed: ``"paper"``, or
            :class:`minato.PaperController` with constants of your own.
        slow_percentile: Samples that cost more than this percentile of all are slow (75); nothing is where costs differ
            little.
        slow_after_s: Or those that take longer than so many seconds.
        profile: Folder in which each epoch leaves what samples cost, so that the next run of the program knows from the
            start which are slow.
        measure: Take the times that ``report()`` is made of, which costs a few microseconds for each batch. ``"gpu"``:
            note also how much the GPUs work, by a process beside the training process of local rank 0.
        metrics_port: Tell figures in Prometheus's format at this port of 127.0.0.1, or at a text of host and port, from
            the first iteration on; 0: any port, as ``metrics_url`` tells.
        trace: File, made anew, to which the run tells what it does moment by moment, for https://ui.perfetto.dev:
            each sample and transform, copies, waiting, steps, and how things stand. It ends at 256 MiB.
        device: Where batches are handed out: their tensors, and objects with torch's ``to``, are copied there beside
            the training, straight from the page-locked memory that the workers write to. None or ``"cpu"``: they stay
            in main memory.
        prefetch_to_device: How many batches are sent there before their turn (2), as far as they are complete.
        shared_pool: Under torchrun the ranks of a node share the workers of all of them: each sample goes to whichever
            is free. Each rank gets its part of the dataset, and as many batches as every other.
        on_rank_death: What the other ranks do if the process of one ends in between: ``"raise"`` a RuntimeError,
            ``"continue"`` without its part of the dataset, or ``"wait"``: go on, and before the next epoch wait until
            another process has taken its place. Without local rank 0, which hosts the workers, none goes on.
        ray_options: What Ray is told of each actor (``ActorClass.options``); by default that it takes one core.
        snapshot_every_n_steps: A worker of an iterable dataset with a state sends it with one of so many batches (1);
            None: with none. The loader's state is exact all the same: batches since then are read again on resume.

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
        pin_memory: bool | Literal["in_place"] = False,
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
        fetch_concurrency: int | Fetching = 1,
        cache: Cache | None = None,
        on_error: str | Callable[[SampleFailure], Any] = "raise",
        retries: int | None = None,
        error_budget: float | None = None,
        quarantine: str | os.PathLike[str] | None = None,
        sample_timeout_s: float | None = None,
        record_order: str | os.PathLike[str] | None = None,
        replay_order: str | os.PathLike[str] | None = None,
        min_workers: int | None = None,
        max_workers: int | None = None,
        controller: str | PaperController = "corrected",
        slow_percentile: float | None = None,
        slow_after_s: float | None = None,
        profile: str | os.PathLike[str] | None = None,
        measure: bool | Literal["gpu"] = True,
        metrics_port: int | str | None = None,
        trace: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        prefetch_to_device: int | None = None,
        shared_pool: bool = False,
        on_rank_death: str = "raise",
        ray_options: Mapping[str, Any] | None = None,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        given = locals()
        given = {name: given[name] for name in _OWN}
        from minato.integrations import connect
        from minato.integrations.lightning import counts_batches

        connect()
        if counts_batches(batch_sampler) and (not in_order or order not in (None, "strict")):
            warnings.warn(
                "Lightning relates predictions to samples by the sequence of the batches, so that here they are "
                "delivered in strict order",
                stacklevel=2,
            )
            in_order, order, max_lag = True, None, None
            given.update(order=None, max_lag=None)
        self._options = Options.of(
            in_order=in_order,
            has_batch_sampler=batch_sampler is not None,
            is_stream=isinstance(dataset, IterableDataset),
            pin_memory=pin_memory,
            order=order,
            max_lag=max_lag,
            seed=seed,
            memory_budget_bytes=memory_budget_bytes,
            worker_method=_worker_method(worker_method, multiprocessing_context),
            rng=rng,
            schedule=schedule,
            on_worker_death=on_worker_death,
            record_order=record_order,
            replay_order=replay_order,
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
            slow_percentile=slow_percentile,
            slow_after_s=slow_after_s,
            profile=profile,
            measure=measure,
            metrics_port=metrics_port,
            trace=trace,
            device=device,
            prefetch_to_device=prefetch_to_device,
            shared_pool=shared_pool,
            on_rank_death=on_rank_death,
            ray_options=ray_options,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )
        if num_workers == "auto":  # of which torch's attribute keeps the first number only
            limits = self._options.min_workers, self._options.max_workers
            given.update(min_workers=limits[0], max_workers=limits[1])
        num_workers = self._options.first_workers(num_workers)
        self._transforms = Transforms.of(transforms)
        if cache is not None:
            from minato.engine.caching import check_cache

            check_cache(
                cache, self._options, self._transforms, dataset, num_workers, persistent_workers
            )
        vars(self).update(given)
        self._course = Course()
        self._replay = None if replay_order is None else RecordedOrder(os.fspath(replay_order))
        self._spare_arenas, self._resting_engine = self._fresh_memory()
        self._trace = None
        if trace is not None:
            from minato.observe.trace.track import Trace

            self._trace = Trace(os.fspath(trace))
        if self._options.quarantine is not None:
            FailureLog.check(self._options.quarantine)
        self._sharing = None
        if shared_pool:
            from minato.shared_pool.session import Sharing

            self._sharing = Sharing.of(self._options)
        if self._sharing is not None:
            shuffle, sampler = self._sharing.divided(
                dataset, shuffle, sampler, batch_sampler, drop_last, seed
            )
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
            cast(bool, pin_memory),
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
        self._experience = self._fresh_experience()
        if prefetch_factor is None and self.prefetch_factor is not None:
            self.prefetch_factor = Unbound(self.prefetch_factor)

    @made_only
    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter()`` starts; by default each starts the one after the last.

        Samplers with a ``set_epoch`` of their own are told too. It is enough to tell the sampler instead.
        """
        set_sampler_epoch(index_sampler(self), epoch)
        self._course.tell(epoch)

    @made_only
    def state_dict(self) -> dict[str, Any]:
        """How far the newest iterator is, by torchdata's protocol.

        A batch counts as done when ``next()`` has returned it, or raised the error of one of its samples. The state is
        plain data that ``json`` can write, apart from what the ``state_dict()`` of a sampler or dataset of your own
        puts there; later batches do not change it. It costs no worker a step and can be taken at any time, before the
        first iteration too. With ``shared_pool=True`` it is about this rank's part: each rank keeps its own.

        Raises:
            ValueError: The dataset keeps a state, and the order or the worker threads leave open which samples it
                belongs to.
        """
        self._refuse_data_pipes("state_dict()")
        if self._keeps_replicas and not is_stream(self):
            mixes = self._options.order not in ("strict", "batch")
            if mixes or self._in_threads:
                method = f"worker_method={self._options.worker_method!r}"
                cause = f"order={self._options.order!r}" if mixes else method
                raise ValueError(
                    f"the dataset has a state_dict() of its own, but with {cause} there is no moment at which it "
                    "belongs to the delivered batches: use order='strict' or 'batch', and worker processes"
                )
        return self._course.state(self)

    @made_only
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was taken: the next ``iter()`` gives what was left of its epoch.

        The number of workers and the worker method may be others, except with datasets that are iterable or have a
        state of their own. An empty dictionary means the beginning. With ``shared_pool=True`` all ranks, as many as
        before, load the states that they saved at the same step.

        Raises:
            ValueError: The state belongs to another dataset length, sampler, batch size, order or seed, or is none.
                That the sampler gives other keys than before is found by the next ``iter()``.
            TypeError: It is no dictionary.
        """
        self._refuse_data_pipes("load_state_dict()")
        self._iterator = None
        if state_dict == {}:
            self._course = self._course.twin()
        else:
            self._course.load(self, state_dict, self._most_replicas)

    def __setattr__(self, attr: str, val: Any) -> None:
        if is_constructed(self) and is_made(self):
            if attr in _OWN:
                raise ValueError(
                    f"{attr} attribute should not be set after {self.__class__.__name__} is initialized"
                )
            if attr == "in_order" and bool(val) != bool(self.in_order):
                order = "strict" if val else "batch"
                self._options = replace(self._options, order=order)
                vars(self).update(order=order, max_lag=None)
            if attr == "multiprocessing_context":
                method = _worker_method(vars(self)["worker_method"], val)
                self._options = replace(self._options, worker_method=method)
        super().__setattr__(attr, val)

    def __getstate__(self) -> dict[str, Any]:
        if not is_made(self):
            return self.__dict__
        # A copy must not write to the same arenas; what was measured is not worth sending.
        arenas, engine = self._fresh_memory()
        fresh = {"_spare_arenas": arenas, "_resting_engine": engine}
        return {**self.__dict__, **fresh, "_experience": self._fresh_experience()}

    def _twin(self, **changed: Any) -> DataLoader[Any]:
        """Our class with this loader's attributes: what a user's class does, as in ``__del__``, is not done for it."""
        twin: DataLoader[Any] = object.__new__(DataLoader)
        vars(twin).update(vars(self), _iterator=None, **changed)
        return twin

    @made_only
    def _rebuilt(self, dataset: Any, **arguments: Any) -> DataLoader[Any]:
        """A loader with torch's arguments as given, and all others as this one's.

        For wrappers that shard or shorten what this loader's sampler gives: they may do so by a ``batch_sampler``,
        and yet mix batches if this loader did.
        """
        if self._sharing is not None:
            raise ValueError(
                "shared_pool=True divides the dataset among the ranks by itself: do not prepare the loader, or leave "
                "shared_pool out"
            )
        loader: DataLoader[Any] = DataLoader(dataset, **arguments)
        kept = ("_options", "_transforms", "_replay", "_trace", *_OWN)
        vars(loader).update({name: vars(self)[name] for name in kept})
        loader._experience = loader._fresh_experience()
        loader._course = self._course.twin()
        return loader

    def _get_iterator(self) -> TorchIterator:
        if not is_made(self):
            return super()._get_iterator()
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            # torch shards and seeds data pipes by its own protocol.
            if self._transforms.steps:
                raise ValueError("transforms= is not for data pipes: use their .map(...)")
            if self._trace is not None:
                self._refuse_data_pipes("trace=")
            if self._sharing is not None:
                self._refuse_data_pipes("shared_pool=True")
            return super()._get_iterator()
        if is_stream(self) and self._in_threads:
            raise ValueError(
                "worker threads cannot split an iterable dataset, which does so by torch's get_worker_info() and that "
                "knows processes only: use worker_method='process', and no multiprocessing_context that starts threads"
            )
        if self.num_workers > 0 and self._options.worker_method != "ray":
            self.check_worker_number_rationality()
        from minato.delivery.iterator import BatchIterator

        self._open_views()
        may_pin, new_pass = self._options.target is None, type(self)._new_pass
        if self._sharing is not None:
            make = functools.partial(self._sharing.source, self)
            return BatchIterator(self, make, new_pass, may_pin)
        put_by = self._resting_engine.put_by
        return BatchIterator(
            self, self._make_engine, new_pass, may_pin, self.num_workers > 0, put_by
        )

    def _refuse_data_pipes(self, what: str) -> None:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            raise ValueError(
                f"{what} is not for data pipes, which torch's own loader iterates: it keeps no account of them"
            )


def _worker_method(given: str, context: Any) -> str:
    """How workers run: in threads, too, where the processes of a multiprocessing context are threads."""
    process = getattr(context, "Process", None)
    threads = isinstance(process, type) and issubclass(process, threading.Thread)
    return "thread" if threads and given == "process" else given
