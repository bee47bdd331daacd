"""``minato.DataLoader``: torch's loader on minato's engine."""

from __future__ import annotations

import functools
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sized
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from minato._compat import TorchIterator, index_sampler, is_constructed
from minato._support.loader_class import StandIn, TorchDataLoader, is_made, made_only
from minato.engine.distribution import Distribution
from minato.engine.insight import Insight
from minato.errors import MinatoWarning
from minato.options import (
    DEFAULTS,
    OPTION_NAMES,
    OWN_NAMES,
    AutoScale,
    ErrorPolicy,
    FetchOptions,
    Options,
    RayWorkers,
    SharedPool,
    StragglerPolicy,
    TorchArguments,
    Unbound,
    with_options,
)
from minato.sampling.epoch import Course, is_stream
from minato.sampling.replay import RecordedOrder
from minato.sampling.sampler_epoch import set_sampler_epoch
from minato.sampling.samplers import SeededSampler
from minato.transforms.compose import Transforms
from minato.workers.error_policy import FailureLog, SampleFailure

if TYPE_CHECKING:
    from typing_extensions import Self

    from minato.caching.base import Cache

__all__ = ["DataLoader"]

_log = logging.getLogger("minato")

T_co = TypeVar("T_co", covariant=True)


class _Indexed(Protocol[T_co]):
    """A sequence or mapping, which torch takes for a dataset too."""

    def __getitem__(self, index: Any, /) -> T_co: ...

    def __len__(self) -> int: ...


class DataLoader(Insight, Distribution, TorchDataLoader[T_co], metaclass=StandIn):
    """A drop-in replacement of ``torch.utils.data.DataLoader`` that schedules samples instead of batches.

    All arguments of torch's class have torch's meaning and defaults
    (https://docs.pytorch.org/docs/stable/data.html); the following are minato's own, or take more values here. They
    are defined in ``minato/options.py``.

    Raises:
        ValueError, TypeError: As torch, or naming the argument, its value and the remedy.

    The tensors of a batch view memory that is recycled when they are no longer referenced; they stay valid for as
    long as anything refers to them.
    """

    def __init__(
        self,
        dataset: Dataset[T_co] | _Indexed[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] | AutoScale = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | Literal["in_place"] = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        transforms: Iterable[Callable[[Any], Any]] | Any | None = None,
        order: Literal["strict", "batch", "arrival", "fast_first"] | None = None,
        max_lag: int | None = None,
        seed: int | None = None,
        device: str | torch.device | None = None,
        prefetch_to_device: int | None = None,
        fetch_concurrency: int | FetchOptions = 1,
        cache: Cache | None = None,
        name: str | None = None,
        compat: Literal["torch"] | None = None,
        memory_budget: int | str | None = None,
        workers: Literal["process", "thread"] | RayWorkers = "process",
        errors: Literal["raise", "skip", "retry"]
        | Callable[[SampleFailure], Any]
        | ErrorPolicy = "raise",
        stragglers: StragglerPolicy | None = None,
        shared_pool: bool | SharedPool = False,
        cost_history: str | os.PathLike[str] | None = None,
        stats: bool | Literal["gpu"] = True,
        trace: str | os.PathLike[str] | None = None,
        metrics: int | str | None = None,
        record_order: str | os.PathLike[str] | None = None,
        replay_order: str | os.PathLike[str] | None = None,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        arguments = locals()
        given = {name: arguments[name] for name in OPTION_NAMES}
        from minato.integrations import connect
        from minato.integrations.lightning import counts_batches

        connect()
        if counts_batches(batch_sampler) and (not in_order or order not in (None, "strict")):
            warnings.warn(
                "Lightning relates predictions to samples by the sequence of the batches, so that here they are "
                "returned in strict order",
                MinatoWarning,
                stacklevel=2,
            )
            in_order = True
            given.update(order=None, max_lag=None)
        torchs = TorchArguments(
            in_order=in_order,
            has_batch_sampler=batch_sampler is not None,
            is_stream=isinstance(dataset, IterableDataset),
            in_threads=_starts_threads(multiprocessing_context),
            dataset_name=type(dataset).__name__,
        )
        self._options = options = Options.of(given, torchs)
        # A plain number of torch's stays as it is, so that torch checks it.
        first_workers = options.num_workers
        self._transforms = Transforms.of(transforms)
        if cache is not None:
            from minato.engine.caching import check_cache

            check_cache(
                cache, options, self._transforms, dataset, first_workers, persistent_workers
            )
        # A method of a subclass with the name of an option stays what it is.
        own = (name for name in OWN_NAMES if not hasattr(type(self), name))
        vars(self).update({name: given[name] for name in own})
        self._position = Course()
        self._open_iterators: list[weakref.ref[Any]] = []
        self._replay = None if replay_order is None else RecordedOrder(os.fspath(replay_order))
        self._spare_arenas, self._resting_engine = self._fresh_memory()
        self._trace = None
        if trace is not None:
            from minato.observe.trace.track import Trace

            self._trace = Trace(os.fspath(trace), options.name)
        if options.errors.log_path is not None:
            FailureLog.check(options.errors.log_path)
        self._sharing = None
        if options.shared_pool is not None:
            from minato.shared_pool.session import PoolSession

            self._sharing = PoolSession.of(options)
        if self._sharing is not None:
            shuffle, sampler = self._sharing.divided(
                dataset, shuffle, sampler, batch_sampler, drop_last, seed
            )
        shuffles = shuffle and sampler is None and batch_sampler is None
        if seed is not None and shuffles and not isinstance(dataset, IterableDataset):
            shuffle, sampler = None, SeededSampler(cast(Sized, dataset), seed)
        super().__init__(
            cast("Dataset[T_co]", dataset),
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            first_workers,
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
        self._history = self._fresh_experience()
        if prefetch_factor is None and self.prefetch_factor is not None:
            self.prefetch_factor = Unbound(self.prefetch_factor)
        _log.debug("%r is made", self)

    @classmethod
    def from_torch(cls, loader: TorchDataLoader[T_co], /, **arguments: Any) -> DataLoader[T_co]:
        """A loader with the arguments of one of torch's.

        Args:
            loader: Stays as it is; its dataset, samplers and generator are shared.
            arguments: More arguments of this class, which go before those of ``loader``. Without ``prefetch_factor``,
                torch's default of 2 does not bound the prefetch window.

        Raises:
            ValueError, TypeError: As the constructor.
        """
        return cls(**{**_torch_arguments(loader), **arguments})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> TorchIterator:
        iterator = super().__iter__()
        if is_made(self):
            alive = [each for each in self._open_iterators if each() is not None]
            self._open_iterators = [*alive, weakref.ref(iterator)]
        return iterator

    @made_only
    def close(self) -> None:
        """End all workers and free their memory, as the end of a ``with`` block does; a second call does nothing.

        ``next()`` of an iterator whose epoch is not over raises RuntimeError afterwards. The loader itself can be used
        again: ``iter()`` starts new workers. Reports stay available, and batches in use stay valid.
        """
        _log.debug("%r is closed", self)
        for each in self._open_iterators:
            iterator = each()
            end = getattr(iterator, "close", None) or getattr(iterator, "_shutdown_workers", None)
            if end is not None:  # torch's own iterator of a data pipe without workers has neither
                end()
        self._open_iterators = []
        self._iterator = None
        self._spare_arenas, self._resting_engine = self._fresh_memory()

    def __repr__(self) -> str:
        if not is_made(self):
            return super().__repr__()
        given = {name: vars(self).get(name, default) for name, default in DEFAULTS.items()}
        named = {
            "name": given["name"],
            "batch_size": self.batch_size,
            "num_workers": int(self.num_workers),
            "order": self._options.order,
        }
        for name in OWN_NAMES:
            value, default = given[name], DEFAULTS[name]
            if name != "order" and (type(value) is not type(default) or value != default):
                named[name] = value
        shown = (f"{name}={value!r}" for name, value in named.items() if value is not None)
        return f"{type(self).__name__}({', '.join([type(self.dataset).__name__, *shown])})"

    @made_only
    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter()`` starts; by default each starts the one after the last.

        Samplers with a ``set_epoch`` of their own are told too. It is enough to tell the sampler instead.
        """
        set_sampler_epoch(index_sampler(self), epoch)
        self._position.tell(epoch)

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
                method = f"workers={self._options.workers!r}"
                cause = f"order={self._options.order!r}" if mixes else method
                raise ValueError(
                    f"the dataset has a state_dict() of its own, but with {cause} there is no moment at which it "
                    "belongs to the delivered batches: use order='strict' or 'batch', and worker processes"
                )
        return self._position.state(self)

    @made_only
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was taken: the next ``iter()`` gives what was left of its epoch.

        The number of workers and their kind may change, except with datasets that are iterable or have a
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
            self._position = self._position.twin()
        else:
            self._position.load(self, state_dict, self._most_replicas)

    def __setattr__(self, attr: str, val: Any) -> None:
        if is_constructed(self) and is_made(self):
            if attr == "name":  # which programs give loaders of any kind
                self._options = replace(self._options, name=str(val))
            elif attr in OWN_NAMES:
                raise ValueError(
                    f"{attr} attribute should not be set after {self.__class__.__name__} is initialized"
                )
            if attr == "in_order" and bool(val) != bool(self.in_order):
                order = "strict" if val else "batch"
                self._options = replace(self._options, order=order)
                vars(self).update(order=order, max_lag=None)
            if attr == "multiprocessing_context":
                given = vars(self).get("workers", self._options.workers)
                in_threads = given == "process" and _starts_threads(val)
                self._options = replace(self._options, workers="thread" if in_threads else given)
        super().__setattr__(attr, val)

    def __getstate__(self) -> dict[str, Any]:
        if not is_made(self):
            return self.__dict__
        # A copy must not write to the same arenas; what was measured is not worth sending.
        arenas, engine = self._fresh_memory()
        fresh = {
            "_spare_arenas": arenas,
            "_resting_engine": engine,
            "_open_iterators": [],
        }
        return {**self.__dict__, **fresh, "_history": self._fresh_experience()}

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
        kept = ("_options", "_transforms", "_replay", "_trace", *OWN_NAMES)
        vars(loader).update({name: vars(self)[name] for name in kept if name in vars(self)})
        loader._history = loader._fresh_experience()
        loader._position = self._position.twin()
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
                "knows processes only: use workers='process', and no multiprocessing_context that starts threads"
            )
        if self.num_workers > 0 and self._options.worker_kind != "ray":
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


_ALIKE = (
    *("dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout"),
    *("worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor"),
    *("persistent_workers", "pin_memory_device", "in_order"),
)
"""torch's arguments that are attributes of a loader."""


def _torch_arguments(loader: TorchDataLoader[Any]) -> dict[str, Any]:
    """The arguments with which torch's class makes a loader such as this one."""
    given = {name: getattr(loader, name) for name in _ALIKE if hasattr(loader, name)}
    if given["prefetch_factor"] == 2:  # torch's default
        del given["prefetch_factor"]
    if isinstance(loader.dataset, IterableDataset):
        return given
    sampler = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        del given["batch_size"], given["drop_last"]
        return {**given, "batch_sampler": loader.batch_sampler}
    if type(sampler) is RandomSampler and vars(sampler) == vars(
        RandomSampler(sampler.data_source, generator=loader.generator)
    ):
        return {**given, "shuffle": True}  # so that seed= decides it, where it is given
    return given if type(sampler) is SequentialSampler else {**given, "sampler": sampler}


def _starts_threads(context: Any) -> bool:
    """Whether the processes of a multiprocessing context are threads."""
    process = getattr(context, "Process", None)
    return isinstance(process, type) and issubclass(process, threading.Thread)


DataLoader.__doc__ = with_options(DataLoader.__doc__)
