"""``minato.DataLoader``: torch's loader on minato's engine."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from minato import _distribution  # noqa: F401  # minato/__init__.py may be another project's
from minato._compat import (
    INDEX_SAMPLER,
    TorchIterator,
    fetcher_is_replaced,
    in_starting_child,
    index_sampler,
    is_batched,
    is_constructed,
    is_iterable,
    parts_stay,
    replaced_parts,
)
from minato._fork_safety import this_process
from minato._support.loader_class import (
    StandIn,
    TorchDataLoader,
    compat_of_all,
    is_being_made,
    is_made,
    made_only,
)
from minato._support.objects import attribute, is_own_class
from minato._support.values import message_of, plain, text_of, type_name
from minato._system import environment
from minato.checks import (
    check_platform,
    check_undivided,
    explain_dataset,
    given_whole,
    refuse_class,
    warn_of_parts,
)
from minato.engine.spec import LoaderSpec, WorkerSpec
from minato.errors import add_note, log, shortened, warn
from minato.options import (
    DEFAULTS,
    IN_PLACE,
    NEXT_EPOCH,
    OPTION_NAMES,
    OWN_NAMES,
    Arrival,
    AutoScale,
    CostBatches,
    DeviceCopies,
    ErrorPolicy,
    FastFirst,
    FetchOptions,
    Observe,
    Options,
    RayWorkers,
    Readers,
    Record,
    Replay,
    SharedPool,
    StragglerPolicy,
    TorchArguments,
    Unbound,
    advice,
    advice_on_numbers,
    refuse_beside_cost_batches,
)
from minato.sampling.cost_batches import check_costs
from minato.sampling.epoch import Epoch, EpochPosition
from minato.sampling.progress import Coverage
from minato.sampling.replay import RecordedOrder
from minato.sampling.samplers import (
    SamplingSpec,
    SeededSampler,
    independent,
    nested,
    next_sampler,
    set_sampler_epoch,
    with_own_epochs,
)
from minato.transforms.compose import TransformingCollate, Transforms
from minato.workers.error_policy import FailureLog, SampleFailure

if TYPE_CHECKING:  # imported by the methods that return them
    from typing import Self

    from minato.caching import Cache
    from minato.consumers import Consumer
    from minato.delivery.iterator import BatchIterator
    from minato.engine.factory import EngineFactory, RankSession
    from minato.engine.history import History
    from minato.engine.inspector import Inspector, SlowSamples
    from minato.observe.headroom import Headroom
    from minato.observe.live import Live
    from minato.observe.metrics import Collector
    from minato.observe.report import Report

__all__ = ["DataLoader", "is_active", "metrics_collector", "torch_arguments"]

F = TypeVar("F", bound=Callable[..., None])
M = TypeVar("M", bound=Callable[..., Any])
T_co = TypeVar("T_co", covariant=True)


class _Indexed(Protocol[T_co]):
    """A sequence or mapping, which torch takes for a dataset too."""

    def __getitem__(self, index: Any, /) -> T_co: ...

    def __len__(self) -> int: ...


def _explaining(init: F) -> F:
    """Decorate a constructor: its errors say what to write in place of a wrong argument."""

    @functools.wraps(init)
    def construct(*arguments: object, **named: object) -> None:
        if _is_torchs(arguments[0]):
            cast(Any, TorchDataLoader.__init__)(*arguments, **named)
            return
        try:
            init(*arguments, **named)
        except Exception as error:
            names = [*inspect.signature(init).parameters]
            given = {**dict(zip(names, arguments, strict=False)), **named}
            explain_dataset(given.get("dataset", error), error)
            if note := advice(error, names, given):
                add_note(error, note)
            shortened(error)
            raise

    return cast(F, construct)


def _is_torchs(loader: object) -> bool:
    """Whether a loader is not ours: a class from before ``patch()`` may call our methods by the name of its base."""
    return DataLoader not in type(loader).__mro__


def _stateful_only(method: M) -> M:
    """Decorate a method that a loader lacks, as torch's do, where it can have no state: trainers look for it."""
    feature = f"{method.__name__}()"
    return made_only(
        method, lambda loader: cast("DataLoader[Any]", loader)._minato_why_stateless(feature)
    )


class DataLoader(TorchDataLoader[T_co], metaclass=StandIn):
    """A drop-in replacement for ``torch.utils.data.DataLoader`` that schedules samples instead of batches.

    All arguments of torch's class have torch's meaning and defaults
    (https://docs.pytorch.org/docs/stable/data.html); the following are minato's own, or take more values here. They
    are defined in ``minato/options.py``. ``batch_size`` may also be a ``CostBatches``: batches are closed by the cost
    of their samples, once these are loaded, and ``len(loader)`` is unknown.

    Args:
        num_workers: Also ``"auto"`` or an ``AutoScale``: the number of active workers follows the load. It rises while
            the loop waits and more workers help, and falls while they idle. An iterable dataset needs
            ``readers`` then. Default: ``0``.
        pin_memory: Also ``"in_place"``: pinned where the workers write it, without torch's copy. After
            you drop a batch, its memory is reused when the current stream has finished its queued work.
            Default: ``False``.
        persistent_workers: Also ``"next_epoch"``: the workers stay, and those that run out of work begin the next epoch
            before the loop asks for it. Its samples then see what the loop had prepared by then, not what it prepares
            between epochs. Default: ``False``.
        transforms: Callables applied one after the other to ``dataset[i]``, or an object with such a list in its
            attribute ``transforms``. Torchvision's ``Compose`` counts as the list of its transforms; those of
            ``v2`` take a pair of image and label. Any other callable, such as the ``Compose`` of another library, is
            one transform. A list is copied. Default: none.
        order: Which samples a batch holds and when it is returned. ``"strict"``: torch's batches in torch's order.
            ``"batch"``: torch's batches, each as soon as it is complete. ``"arrival"``: samples that are ready go into
            the oldest open batch. ``"fast_first"``: as ``arrival``, but slow samples wait for the newest open batch
            while enough batches are ready. ``Arrival`` and ``FastFirst`` also say by how many batches a sample may be
            late. Default: follows from ``in_order``.
        seed: The permutation of each epoch and the random numbers of each sample follow from it, as functions of (seed,
            epoch, index). Default: torch's generator decides.
        device: Where batches are returned. Their tensors, and objects with torch's ``to``, are copied there while the
            training runs. The copy is from pinned memory, which the workers write to. Default: host memory.
        readers: How many sequential readers an iterable dataset has. To the dataset each is one of torch's workers. The
            workers, whatever their number, host them. Strict order is torch's with as many workers as readers.
            Default: ``num_workers``, at least 1, if that is a number.
        fetch_concurrency: How many samples each worker reads at once: ``dataset[i]`` in as many threads or, if the
            dataset has ``async def __aget__(self, i)``, as coroutines of one thread. The transforms run one after the
            other in the worker's main thread. Default: ``1``.
        cache: Stores each sample after the first of its transforms (by default after all); later epochs do not repeat
            these. Default: none.
        compat: ``"torch"``: batch k is for worker k mod n, with torch's seeds and one random stream per worker. All
            content is then bit for bit torch's. None: samples go to any free worker, and the global generators are
            seeded for each sample. Content then does not depend on the number of workers. Default: none.
        memory_budget: Bound of the prefetched batches in bytes. Default: a quarter of the available memory, divided
            by the node's ranks and the loaders in use.
        workers: What a worker is: a process, a thread, or an actor in a Ray cluster. ``SharedPool()``: processes that
            the ranks of a node share under ``torchrun``: each sample goes to any free one. Each rank gets its part of
            the dataset, and as many batches as every other. Default: ``"process"``.
        errors: What happens when a sample raises. An ``ErrorPolicy`` also holds retries, limits, a log, a timeout, and
            what happens when a worker dies. Default: ``"raise"``.
        stragglers: When a sample counts as slow. Default: ``StragglerPolicy(percentile=75)``.
        observe: What is measured of a run, and where it goes: the report, a trace, metrics. Default: ``True``.
        recording: Writes down the order of the batches, or repeats it. Default: none.
        snapshot_every_n_steps: A reader of an iterable dataset keeps its state after every n-th batch. ``'auto'``: as
            often as that takes less than 1 % of its worker's time. 0 or ``None``: never. ``state_dict()`` stays exact:
            later items are read again on resume. Default: ``"auto"``.

    Raises:
        ValueError, TypeError: As torch, or naming the argument, its value and the remedy.

    The tensors of a batch view memory that is recycled when they are no longer referenced; they stay valid for as
    long as anything refers to them.
    """

    @_explaining
    def __init__(
        self,
        dataset: Dataset[T_co] | _Indexed[T_co],
        batch_size: int | CostBatches | None = 1,
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
        persistent_workers: bool | Literal["next_epoch"] = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        transforms: Iterable[Callable[[Any], Any]] | Any | None = None,
        order: Literal["strict", "batch", "arrival", "fast_first"]
        | Arrival
        | FastFirst
        | None = None,
        seed: int | None = None,
        device: str | torch.device | DeviceCopies | None = None,
        readers: int | Readers | None = None,
        fetch_concurrency: int | FetchOptions = 1,
        cache: Cache | None = None,
        compat: Literal["torch"] | None = None,
        memory_budget: int | str | None = None,
        workers: Literal["process", "thread"] | SharedPool | RayWorkers = "process",
        errors: Literal["raise", "skip", "retry"]
        | Callable[[SampleFailure], Any]
        | ErrorPolicy = "raise",
        stragglers: StragglerPolicy | None = None,
        observe: bool | Observe = True,
        recording: Record | Replay | None = None,
        snapshot_every_n_steps: int | Literal["auto"] | None = "auto",
    ) -> None:
        if issubclass(type(collate_fn), TransformingCollate):  # of another loader of ours
            theirs = cast(TransformingCollate, collate_fn)
            transforms = theirs.transforms.steps if transforms is None else transforms
            collate_fn = theirs.collate_fn
        arguments = locals()
        given = {name: arguments[name] for name in OPTION_NAMES}
        if compat is None and compat_of_all:
            given.update(compat=compat_of_all[-1])
        from minato.integrations import connect, counts_batches

        connect()
        if counts_batches(batch_sampler) and (not in_order or order not in (None, "strict")):
            warn(
                "Lightning relates predictions to samples by the sequence of the batches, so that here they are "
                "returned in strict order"
            )
            in_order = True
            given.update(order=None)
        warn_of_parts(dataset)
        if is_own_class(collate_fn):
            refuse_class("collate_fn", cast(type, collate_fn))
        torchs = TorchArguments(
            in_order=in_order,
            has_batch_sampler=batch_sampler is not None,
            is_stream=isinstance(dataset, IterableDataset),
            drop_last=bool(drop_last),
            in_threads=_starts_threads(multiprocessing_context),
            is_single=batch_sampler is None
            and (batch_size is None or isinstance(batch_size, CostBatches)),
            dataset_name=type_name(dataset),
        )
        self._minato_options = options = Options.of(given, torchs)
        if options.deals_readers:
            check_undivided(dataset)
        self._minato_transforms = Transforms.of(transforms)
        if cache is not None:
            from minato.engine.caching import check_cache

            check_cache(cache, options, self._minato_transforms, dataset)
        # What a subclass has under the name of an option stays what it is.
        self._minato_given = {name: given[name] for name in OWN_NAMES}
        self._minato_shown = frozenset(
            name for name in OWN_NAMES if not (name in vars(self) or hasattr(type(self), name))
        )
        vars(self).update({name: given[name] for name in self._minato_shown})
        self._minato_position = EpochPosition()
        self._minato_open_iterators: list[weakref.ref[Any]] = []
        self._minato_replay = (
            RecordedOrder(str(recording.path)) if isinstance(recording, Replay) else None
        )
        recorder = None
        if options.observe.trace is not None:
            from minato.observe.trace import Trace

            recorder = Trace(str(options.observe.trace), options.name)
        elif environment("MINATO_TRACE") and get_worker_info() is None:
            from minato.observe.trace import trace_of_environment

            recorder = trace_of_environment(options.name)
        if options.errors.log_path is not None:
            FailureLog.check(options.errors.log_path)
        from minato.engine.factory import EngineFactory

        session = None
        if options.shared_pool is not None:
            from minato.shared_pool.session import PoolSession

            session = PoolSession.of(options)
        if session is not None:
            shuffle, sampler = session.divided(
                dataset, shuffle, sampler, batch_sampler, drop_last, seed
            )
        self._minato_session: RankSession | None = session
        self._minato_cost_batches: CostBatches | None = None
        if isinstance(batch_size, CostBatches):
            from minato.batching.collate import PadCollate

            refuse_beside_cost_batches(options, torchs)
            self._minato_cost_batches, batch_size = batch_size, None
            collate_fn = PadCollate() if collate_fn is None else collate_fn
        self._minato_engines = EngineFactory(session=session, trace=recorder)
        shuffles = shuffle and sampler is None and batch_sampler is None
        if seed is not None and shuffles and not isinstance(dataset, IterableDataset):
            shuffle, sampler = None, SeededSampler(cast(Sized, dataset), seed)
        super().__init__(
            cast("Dataset[T_co]", dataset),
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            options.num_workers,  # as given, if it is a plain number: torch checks it
            collate_fn,
            cast(bool, pin_memory),
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=bool(persistent_workers),
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        in_batches = self.batch_size is not None
        check_costs(dataset, self.sampler, self.batch_sampler, in_batches=in_batches)
        if prefetch_factor is None and self.prefetch_factor is not None:
            self.prefetch_factor = Unbound(self.prefetch_factor)
        if options.begins_next_epoch and next_sampler(index_sampler(self)) is None:
            raise ValueError(
                f"persistent_workers={NEXT_EPOCH!r} needs an order that is known in advance, and that of "
                f"{type(self.sampler).__name__} is not: shuffle with seed=, use a SequentialSampler or a "
                "DistributedSampler, or give True"
            )
        if self._minato_transforms.steps:
            self.collate_fn = self.collate_fn  # from now on it transforms, too
        self._minato_history = self._minato_fresh_history()
        check_platform(
            worker_processes=self.num_workers > 0 and options.worker_kind == "process",
            handled_errors=options.errors.handles_samples
            or options.errors.sample_timeout is not None,
        )
        log("%r is made", self, level=logging.DEBUG)

    @classmethod
    def from_torch(cls, loader: TorchDataLoader[T_co], /, **arguments: object) -> DataLoader[T_co]:
        """A loader with the arguments of one of torch's.

        Args:
            loader: Stays as it is; its dataset, samplers and generator are shared. If it is one of this class, the new
                one has its options too.
            arguments: More arguments of this class, which go before those of ``loader``: a sampler also before its
                ``shuffle``, and ``num_workers=0`` before those about workers. Without ``prefetch_factor``, torch's
                default of 2 does not bound the prefetch window.

        Raises:
            ValueError, TypeError: As the constructor.
        """
        given = torch_arguments(loader)
        for name, others in _INSTEAD.items():
            value = arguments.get(name)
            if value is not None and (name != "num_workers" or value == 0):
                for each in others:
                    given.pop(each, None)
        return cls(**{**given, **arguments})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        if _is_torchs(self):
            return TorchDataLoader.__len__(self)
        if vars(self).get("_minato_cost_batches") is not None:
            raise TypeError(
                "the number of batches is unknown: CostBatches closes them by what was loaded"
            )
        return super().__len__()

    def __iter__(self) -> TorchIterator:
        if _is_torchs(self):
            return TorchDataLoader.__iter__(self)
        iterator = getattr(self, "_iterator", None)
        # A program may have ended its workers. Those that persist may have read ahead of a state, with which their
        # datasets begin again.
        if iterator is not None and (
            getattr(iterator, "has_ended", False)
            or (is_made(self) and self._minato_position.has_state)
        ):
            self._iterator = None
        try:
            made: TorchIterator | None = super().__iter__()
            # None: another thread has closed the loader meanwhile.
            return super().__iter__() if made is None else made
        except Exception as error:
            explain_dataset(self.dataset, shortened(error))
            if note := advice_on_numbers(message_of(error), vars(self)):
                add_note(error, note)
            raise

    @made_only
    def close(self) -> None:
        """End all workers and free their memory, as the end of a ``with`` block does; a second call does nothing.

        ``next()`` of an iterator whose epoch is not over raises RuntimeError afterwards. The loader itself can be used
        again: ``iter()`` starts new workers. Reports stay available, and batches in use stay valid. The port of
        ``Observe(metrics=...)`` is free until then.
        """
        log("%r is closed", self, level=logging.DEBUG)
        for each in self._minato_open_iterators:
            iterator = each()
            end = getattr(iterator, "shut_down", None) or getattr(
                iterator, "_shutdown_workers", None
            )
            if end is not None:  # torch's own iterator of a data pipe without workers has neither
                end()
        self._minato_inspector().close_views()
        self._minato_open_iterators = []
        self._iterator = None
        self._minato_engines = self._minato_engines.fresh()

    def __repr__(self) -> str:
        if not is_made(self):
            return super().__repr__()
        workers, order = int(self.num_workers), self._minato_options.order
        named = {"batch_size": self.batch_size, "num_workers": workers, "order": order}
        for name in OWN_NAMES:
            value, default = self._minato_given[name], DEFAULTS[name]
            if name != "order" and (type(value) is not type(default) or value != default):
                named[name] = value
        shown = (f"{name}={text_of(value)}" for name, value in named.items() if value is not None)
        return f"{type_name(self)}({', '.join([type_name(self.dataset), *shown])})"

    @made_only
    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` starts; by default it is the one after the last.

        An iterator that has not been asked for a batch begins that epoch too, unless ``compat="torch"``. Calls
        ``set_epoch`` of samplers that have it; it is enough to call that of the sampler instead, where its number
        changes. The rest of an epoch whose state was loaded comes first, whatever is chosen here.
        """
        number = given_whole("epoch", epoch, None)
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"epoch={number} is not possible: give an integer of 64 bits")
        set_sampler_epoch(nested(index_sampler(self)), number)
        self._minato_position.set_epoch(number)

    @_stateful_only
    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iterator, by torchdata's protocol.

        A batch counts as done when ``next()`` has returned it, or raised the error of one of its samples. The state is
        plain data that ``json`` can write, apart from what the ``state_dict()`` of a sampler or dataset of your own
        puts there; later batches do not change it. It costs no worker a step and can be taken at any time, before the
        first iteration too. With ``workers=SharedPool()`` it is about this rank's part: each rank keeps its own.

        Raises:
            AttributeError: torch's engine loads, as for data pipes. Or the dataset keeps a state, and the order or the
                worker threads leave open which samples it belongs to.
        """
        return self._minato_position.state(self._minato_spec().sampling)

    @_stateful_only
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Resume where a state was taken: the next ``iter()`` yields what was left of its epoch.

        The number of workers and their kind may change, except with datasets that are iterable or have a state of
        their own. An empty dictionary means the beginning. With ``workers=SharedPool()`` all ranks load the states that
        they saved at the same step. If their number changes, all load one result of ``minato.merge_states``.

        Raises:
            ValueError: The state belongs to another dataset length, sampler, batch size, order or seed, or is none.
                The next ``iter()`` raises it if the sampler yields other indices than before.
            TypeError: It is no dictionary.
            AttributeError: The loader has no state, see ``state_dict``.
        """
        if state_dict == {}:
            self._minato_position = self._minato_position.without_state()
        else:
            spec = self._minato_spec()
            self._minato_position.load(spec.sampling, state_dict, spec.max_dataset_states)
        self._iterator = None

    @made_only
    def report(self) -> Report:
        """What limits the training, and all figures of the run and of each epoch so far.

        It can be asked for at any time; ``print`` shows it as text, ``rich.print`` in colour.

        Raises:
            ValueError: The loader was made with ``observe=False``, or torch's engine loads, as for data pipes.
        """
        self._minato_refuse_torchs("report()")
        return self._minato_inspector().report()

    @made_only
    def metrics(self) -> dict[str, float]:
        """Counters and gauges of this loader now, for loggers: numbers by name, always with the same names.

        Counters, whose names end with ``_total``, are sums over all epochs. Gauges are about the current epoch, or the
        last one between two; number of workers and batches are those after a recent batch. A call takes microseconds,
        and any thread may make it. The reference lists the names and their units.

        Raises:
            ValueError: The loader was made with ``observe=False``, or other ranks' shared pool has its workers.
        """
        return self._minato_inspector().metrics()

    @made_only
    def live(self) -> Live:
        """Show the progress of each epoch from now on: a panel below what the program prints, four times a second.

        Where standard error is no terminal, or a dumb one, it is a line every five seconds; in a notebook, an output of
        the cell. Each epoch leaves a line behind. The environment variable ``MINATO_LIVE=1`` does the same for all
        loaders of a program.

        Returns:
            Ends the view by ``close()``, or at the end of a ``with`` block.

        Raises:
            ValueError: The loader was made with ``observe=False``.
        """
        return self._minato_inspector().live()

    @property
    def is_padding(self) -> bool:
        """Whether the batch that ``next()`` returned last stands for one that this rank lacks.

        See ``epoch_end="pad"`` of :class:`Readers`. A trainer that asks for a batch ahead of its step sees it one batch
        early.
        """
        last = self._minato_position.last
        return last is not None and last.progress.is_padding

    def watch_gpus(self) -> None:
        """Record the use of the GPUs from now on, as ``Observe(stats="gpu")`` does from the start.

        Raises:
            ValueError: Nothing is measured (``observe=False``).
        """
        self._minato_inspector().watch_gpus()

    @property
    def metrics_url(self) -> str | None:
        """Address of the loader's metrics; None without ``Observe(metrics=...)`` or ``MINATO_METRICS_PORT``.

        Also before the first iteration, once it is closed, and in a forked child.
        """
        return self._minato_inspector().metrics_url

    @made_only
    def slow_samples(self) -> SlowSamples:
        """Which samples are slow, and where they lay in the newest iterator's batches."""
        return self._minato_inspector().slow_samples()

    @made_only
    def headroom(self, steps: int = 50) -> Headroom:
        """How fast training could be if data were free.

        The returned object stands for the loader in a training loop of yours: it yields batches as the loader does,
        and then a few of these again and again. ``print`` it after the loop. On a GPU, let the loop wait for each step
        (``torch.cuda.synchronize()``), or it times how fast steps are queued.

        The loader, its epochs, its samplers, all generators and all files but a ``cache`` stay as they are: the batches
        are those of an epoch of its own. What a dataset changes when it is asked for a sample, it changes here too.

        Args:
            steps: Number of timed steps of each kind, after two that warm up; fewer if there are fewer batches.

        Raises:
            ValueError: ``steps`` is less than 1, or iteration starts and the sampler cannot be copied.
        """
        from minato.observe.headroom import Headroom

        self._minato_inspector().refuse_ranks("headroom()")
        if why := self._minato_why_not("headroom()"):
            raise ValueError(why)
        return Headroom(self._minato_separate_batches, steps)

    @made_only
    def coverage(self) -> Coverage:
        """What has become of the samples of the newest iterator's epoch so far.

        At the end of an epoch minato compares this by itself and raises ``CoverageError`` if a sample was lost or
        repeated.

        Raises:
            ValueError: torch's engine loads, as for data pipes.
        """
        self._minato_refuse_torchs("coverage()")
        return self._minato_inspector().coverage()

    @made_only
    def reproduce(
        self,
        index: object,
        epoch: int | None = None,
        seed: int | None = None,
        occurrence: int = 0,
    ) -> Any:
        """Load one sample in this process as a worker did, random numbers included.

        Args:
            index: Of the dataset.
            epoch: By default the present or last one.
            seed: As in ``ErrorPolicy.log``; by default that which follows from the loader's ``seed``, or from torch's
                draw for the present iterator.
            occurrence: How often the index came before in that epoch, where the sampler repeats indices.

        Returns:
            ``dataset[index]`` after all transforms, not collated. What it raises is not caught.

        Raises:
            ValueError: No epoch has begun and ``seed`` is not given.
        """
        return self._minato_inspector().reproduce(index, epoch, seed, occurrence)

    @made_only
    def consumers(
        self, n: int | None = None, *, devices: Sequence[str | torch.device] | None = None
    ) -> tuple[Consumer, ...]:
        """Let several threads share this loader's epochs, its workers and its memory.

        Each batch goes to the consumer that has waited longest, so that all of them together get each index once per
        epoch. The loader itself is not to be iterated meanwhile.

        Args:
            n: Number of consumers.
            devices: Or a device for each of them, to which its batches are copied when it asks for them.

        Returns:
            The consumers; ``for batch in consumer`` is one epoch.

        Raises:
            ValueError, TypeError: The number or a device is not possible.
        """
        from minato.consumers import make_consumers

        if self._minato_options.target is not None and (n is None) != (devices is None):
            raise ValueError(
                f"device={str(self._minato_options.device)!r} is one device for all: leave it out, and name one for "
                "each consumer by devices="
            )
        return make_consumers(functools.partial(iter, self), n, devices)

    @property
    def name(self) -> str:
        """The label of the loader, see :class:`Observe`; programs that name loaders of any kind may set it."""
        if "name" in vars(self):
            return cast(str, vars(self)["name"])
        return self._minato_options.name

    @name.setter
    def name(self, value: str) -> None:
        vars(self)["name"] = value
        if is_made(self):
            observe = replace(self._minato_options.observe, name=str(value))
            self._minato_options = replace(self._minato_options, observe=observe)

    def __setattr__(self, attr: str, val: object) -> None:
        if _is_torchs(self):
            TorchDataLoader.__setattr__(self, attr, val)
            return
        if is_constructed(self) and is_made(self):
            if attr in self._minato_shown:
                if not is_being_made(self):
                    raise ValueError(
                        f"{attr} attribute should not be set after {self.__class__.__name__} is initialized"
                    )
                self._minato_shown -= {attr}
            if attr == "in_order" and bool(val) != bool(self.in_order):
                order = "strict" if val else "batch"
                self._minato_options = replace(self._minato_options, order=order)
                self._minato_given = {**self._minato_given, "order": order}
                if "order" in self._minato_shown:
                    vars(self).update(order=order)
            if attr == "multiprocessing_context":
                given = self._minato_given["workers"]
                self._minato_options = self._minato_options.in_context(given, _starts_threads(val))
            ours = issubclass(type(val), TransformingCollate)
            if attr == "collate_fn" and self._minato_transforms.steps and not ours:
                # Others take the attribute for a loader of their own, which then transforms samples as this one.
                val = TransformingCollate(self._minato_transforms, cast(Any, val), is_batched(self))
        super().__setattr__(attr, val)

    def __getstate__(self) -> dict[str, Any]:
        if not is_made(self):
            return self.__dict__
        # A copy must not write to the same arenas, nor go on in these epochs; what was measured is not worth sending.
        engines, history = self._minato_engines.fresh(), self._minato_fresh_history()
        fresh = {
            "_minato_engines": engines,
            "_minato_history": history,
            "_minato_open_iterators": [],
        }
        fresh["sampler"], fresh["batch_sampler"] = with_own_epochs(self.sampler, self.batch_sampler)
        return {**self.__dict__, **fresh, "_minato_position": copy.copy(self._minato_position)}

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        # Without the iterator of workers that persist, whose epoch the copy would end.
        vars(copied).update(self.__getstate__(), _iterator=None)
        return copied

    @made_only
    def _minato_rebuilt(self, dataset: Any, **arguments: Any) -> DataLoader[Any]:
        """A loader with torch's arguments as given, and all others as this one's.

        For wrappers that shard or shorten what this loader's sampler yields: they may do so by a ``batch_sampler``,
        and yet mix batches if this loader did.
        """
        if self._minato_session is not None:
            raise ValueError(
                "workers=SharedPool(...) divides the dataset among the ranks by itself: do not prepare the loader, or "
                "leave it out"
            )
        if self._minato_options.deals_readers:
            dataset = self.dataset  # that of the wrapper would divide it once more
        if arguments.get("num_workers", 0) > 0:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                arguments.setdefault(name, getattr(self, name))
        loader: DataLoader[Any] = DataLoader(dataset, **arguments)
        parts = ("options", "transforms", "replay", "cost_batches", "given")
        kept = ("name", *(f"_minato_{part}" for part in parts))
        vars(loader).update({name: vars(self)[name] for name in kept if name in vars(self)})
        vars(loader).update(self._minato_given)
        loader._minato_engines = self._minato_engines.fresh()
        # So this loader's report covers what the wrapper iterates.
        loader._minato_history = self._minato_history
        keeps_order = index_sampler(loader) is index_sampler(self)
        position = self._minato_position
        if position.resumes is not None and not keeps_order:
            raise ValueError(
                "the loaded state belongs to this loader's sampler, and the trainer builds a loader with another one: "
                "load the state into the loader that it returns"
            )
        loader._minato_position = copy.copy(position) if keeps_order else position.without_state()
        return loader

    def _minato_spec(self) -> LoaderSpec:
        """This loader as it is now; its attributes may change between epochs. The same one while they stay."""
        streams, stays = is_iterable(self), parts_stay()
        own = streams, stays, not stays and fetcher_is_replaced()
        of_stream = (self._minato_items_of_a_batch(), self._minato_num_readers()) if streams else ()
        parts = *_SPEC_PARTS(self), *own, *of_stream
        kept, spec = self._minato_engines.spec
        alone = self._minato_session is None
        is_kept = alone and spec is not None and spec.sampling.dealt == self._minato_dealt
        if spec is None or not is_kept or not all(map(operator.is_, parts, kept)):
            self._minato_engines.spec = parts, spec = parts, self._minato_new_spec()
        return spec

    def _minato_new_spec(self) -> LoaderSpec:
        options, persistent = self._minato_options, self.persistent_workers
        recording = options.recording
        collate_fn: Any = self.collate_fn
        is_ours = issubclass(type(collate_fn), TransformingCollate)
        inside = collate_fn.inside if is_ours and self._minato_transforms.steps else collate_fn
        if self._minato_cost_batches is not None:
            from minato.batching.collate import unchanged

            inside = unchanged
        sampling = SamplingSpec(
            dataset=self.dataset,
            streams=is_iterable(self),
            index_sampler=index_sampler(self),
            batched=is_batched(self),
            batch_size=self._minato_items_of_a_batch(),
            drop_last=self.drop_last,
            generator=self.generator,
            order=options.order,
            mixes_batches=options.mixes_batches,
            seed=options.seed,
            has_workers=self.num_workers > 0,
            predictable=persistent and options.begins_next_epoch,
            record_order=str(recording.path) if isinstance(recording, Record) else None,
            replay=self._minato_replay,
            rank=None if self._minato_session is None else self._minato_session.place,
            pooled=None if self._minato_session is None else self._minato_session.ranks,
            readers=self._minato_num_readers(),
            dealt=self._minato_dealt,
            # The program's own dataset is iterated, with its generators, as torch does without workers.
            persists_datasets=persistent or (self.num_workers == 0 and options.readers is None),
            rereads=options.readers is not None and options.readers.resume == "read",
            by_cost=self._minato_cost_batches is not None,
        )
        count: Any = self.num_workers
        workers = WorkerSpec(
            count=count if isinstance(count, int) else plain(count),  # torch takes NumPy's, too
            context=self.multiprocessing_context,
            init_fn=self.worker_init_fn,
            prefetch_factor=plain(self.prefetch_factor),
            bounds_prefetch=not isinstance(self.prefetch_factor, Unbound),
            persistent=persistent,
            timeout_s=self.timeout,
        )
        return LoaderSpec(
            sampling=sampling,
            transforms=self._minato_transforms,
            collate_fn=inside,
            cache=self._minato_given["cache"],
            workers=workers,
            pin_memory=bool(self.pin_memory),
            options=options,
        )

    @property
    def _minato_dealt(self) -> tuple[int, int]:
        """Rank and number of ranks among which the readers of an iterable dataset are dealt."""
        readers = self._minato_options.readers
        return (0, 1) if readers is None else readers.dealt()

    def _minato_items_of_a_batch(self) -> int | None:
        """The batch size; that of an iterable dataset is the batch sampler's, which programs change."""
        if not is_batched(self):
            return None  # whatever the attribute says, which programs set for their own use
        if not is_iterable(self):
            return self.batch_size
        return cast("int | None", attribute(self.batch_sampler, "batch_size", self.batch_size))

    def _minato_num_readers(self) -> int:
        """Number of readers of an iterable dataset; 0: it is map-style."""
        if not is_iterable(self):
            return 0
        readers = self._minato_options.readers
        if readers is not None and (readers.count is not None or readers.where == "main"):
            return readers.count or 1
        if self.num_workers > 0 and (kept := getattr(self._iterator, "num_readers", 0)):
            return int(kept)  # of workers that stay, whatever num_workers is now
        return max(int(self.num_workers), 1)

    def _minato_fresh_history(self) -> History:
        from minato.engine.history import History  # half of the scheduler

        return (History.of if self._minato_session is None else self._minato_session.history)(
            self._minato_spec()
        )

    def _minato_inspector(self, spec: LoaderSpec | None = None) -> Inspector:
        from minato.engine.inspector import Inspector

        return Inspector(
            spec or self._minato_spec(),
            self._minato_history,
            self._minato_position,
            self._minato_session,
        )

    def _get_iterator(self) -> TorchIterator:
        if _is_torchs(self):
            return TorchDataLoader._get_iterator(self)
        if not is_made(self):
            return super()._get_iterator()
        # Not in __iter__, which returns what a subclass has made of it.
        iterator = self._minato_new_iterator()
        opened = self._minato_open_iterators
        opened[:] = [each for each in opened if each() is not None]
        opened.append(weakref.ref(iterator))
        return iterator

    def _minato_new_iterator(self) -> TorchIterator:
        spec = self._minato_spec()
        is_known = self._minato_history.views_of == (spec, this_process.pid)
        if self.num_workers > 0 or not is_known:
            iterator = self._minato_torchs_iterator()
            if iterator is not None:
                return iterator
            self._minato_check_workers(spec)
        if not is_known:
            self._minato_inspector(spec).open_views()
        epochs = _Epochs(spec, self._minato_engines, self._minato_position)
        return self._minato_batch_iterator(spec, self._minato_engines, self._minato_history, epochs)

    def _minato_torchs_iterator(self) -> TorchIterator | None:
        """An iterator of torch's engine, where that loads; None: minato's does."""
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            # torch shards and seeds data pipes by its own protocol.
            if self._minato_transforms.steps:
                raise ValueError("transforms= is not for data pipes: use their .map(...)")
            if self._minato_options.observe.trace is not None:
                raise ValueError(self._minato_why_not("observe=Observe(trace=...)"))
            if self._minato_session is not None:
                raise ValueError(self._minato_why_not("workers=SharedPool(...)"))
            if self._minato_options.readers is not None:
                raise ValueError(self._minato_why_not("readers="))
            return super()._get_iterator()
        if parts := self._minato_replaced_parts():
            self._minato_refuse_beside(parts)
            return super()._get_iterator()
        return None

    def _minato_replaced_parts(self) -> list[str]:
        """The parts of torch's engine that the program has replaced, and that only torch's engine uses."""
        return replaced_parts(
            streams=is_iterable(self),
            worker_processes=self.num_workers > 0 and self._minato_options.worker_kind == "process",
            workers=self.num_workers,
            pins=bool(self.pin_memory),
        )

    def _minato_refuse_beside(self, parts: list[str]) -> None:
        """Refuse options that torch's engine lacks, where the program has replaced parts of it; warn of these once."""
        names = ", ".join(parts)
        options = self._minato_options
        for name in OPTION_NAMES:
            value = self._minato_given.get(name, vars(self).get(name))
            if name == "num_workers":
                value = options.autoscale
            elif name == "pin_memory":
                value = value if value == IN_PLACE else None
            elif name == "persistent_workers":
                value = NEXT_EPOCH if options.begins_next_epoch else None
            elif name == "observe":
                value = value if options.observe.trace or options.observe.metrics else None
            elif name in _HARMLESS or value == DEFAULTS[name]:
                continue
            if value is not None:
                raise ValueError(
                    f"the program has replaced {names}, which only torch's engine uses, and that one does without "
                    f"{name}={value!r}: leave the argument out, or torch's part as it is"
                )
        if parts != self._minato_engines.told_parts:
            self._minato_engines.told_parts = parts
            warn(
                f"the program has replaced {names}, which minato's engine does not use: torch's engine loads"
            )

    def _minato_why_not(self, feature: str) -> str:
        """Why a feature of minato's engine is not there, as torch's loads; empty: it is."""
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return f"{feature} is not for data pipes, which torch's own loader iterates: it keeps no account of them"
        if parts := self._minato_replaced_parts():
            return (
                f"{feature} is about batches of minato's engine, and torch's loads here: the program has replaced "
                f"{', '.join(parts)}"
            )
        return ""

    def _minato_refuse_torchs(self, feature: str) -> None:
        """Raise ValueError where torch's engine loads, and minato's has loaded nothing before."""
        if self._minato_position.last is None and (why := self._minato_why_not(feature)):
            raise ValueError(why)

    def _minato_why_stateless(self, feature: str) -> str:
        """Why a loader has no state; empty: it has one."""
        if (why := self._minato_why_not(feature)) or is_iterable(self):
            return why
        spec, options = self._minato_spec(), self._minato_options
        mixes = spec.sampling.mixes_batches
        if not (spec.keeps_dataset_states and (mixes or spec.in_threads)):
            return ""
        cause = f"order={options.order!r}" if mixes else f"workers={options.workers!r}"
        return (
            f"no {feature}: the dataset has a state_dict() of its own, and with {cause} there is no moment at which "
            "that belongs to the delivered batches: use order='strict' or 'batch', and worker processes"
        )

    def _minato_check_workers(self, spec: LoaderSpec) -> None:
        if self.num_workers > 0 and self._minato_options.worker_kind != "ray":
            self.check_worker_number_rationality()
        if (
            self.num_workers > 0
            and self._minato_options.worker_kind == "process"
            and in_starting_child()
        ):
            context = spec.workers.context or torch.multiprocessing.get_context()
            if context.get_start_method() != "fork":
                from minato._support.pickling import refuse_unguarded

                refuse_unguarded()

    def _minato_batch_iterator(
        self,
        spec: LoaderSpec,
        engines: EngineFactory,
        history: History,
        epochs: _Epochs,
        loader: object = None,
    ) -> BatchIterator:
        """An iterator; neither it nor its engine refers to this loader.

        Args:
            loader: Has torch's attributes; by default this one.
        """
        wrap: Callable[[Any], Any] | None = None
        may_pin = self._minato_options.target is None
        pins_ahead = self._minato_session is None and self.num_workers > 0
        if self._minato_cost_batches is not None:
            from minato.engine.measured_batches import MeasuredBatches

            if spec.keeps_dataset_states:
                raise ValueError(
                    "the dataset has a state_dict() of its own, which belongs to no batch while samples wait for "
                    "theirs: with CostBatches leave the state out of the dataset"
                )
            collate: Any = self.collate_fn
            if issubclass(type(collate), TransformingCollate):
                collate = collate.collate_fn
            wrap = functools.partial(
                MeasuredBatches, batches=self._minato_cost_batches, collate=collate
            )
            pins_ahead = False
        make_source = functools.partial(engines.source, spec, history, wrap)
        return _iterator_class()(loader or self, make_source, epochs, may_pin, pins_ahead)

    def _minato_separate_batches(self) -> Iterator[Any]:
        """Batches of an epoch that changes nothing of this loader, and no file."""
        spec = self._minato_spec()
        self._minato_check_workers(spec)
        engines, history = self._minato_engines.fresh(traced=False), self._minato_fresh_history()
        sampler = independent(spec.sampling.index_sampler, self.dataset)
        generator = self.generator
        if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
            generator = copy.deepcopy(generator)
        twin = _Twin(self, _index_sampler=sampler, generator=generator)
        options = self._minato_options
        errors = replace(options.errors, log=None)
        stragglers = replace(options.stragglers, history=None)
        # No rank waits for this epoch of another one.
        readers = options.readers and replace(options.readers, epoch_end="drop")
        silent = replace(options, errors=errors, stragglers=stragglers, readers=readers)
        own = {"index_sampler": sampler, "generator": generator, "record_order": None}
        spec = replace(spec, sampling=replace(spec.sampling, **own), options=silent)

        epochs = _Epochs(spec, engines, self._minato_position.without_state())
        kept = self._minato_inspector(spec).randomness(0).saved
        with kept():
            batches = self._minato_batch_iterator(spec, engines, history, epochs, twin)
        while True:
            with kept():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


@functools.cache
def _iterator_class() -> type[BatchIterator]:
    from minato.delivery.iterator import BatchIterator  # with it come all stages

    return BatchIterator


class _Epochs:
    """The epochs of one iterator; holds no loader."""

    def __init__(self, spec: LoaderSpec, engines: EngineFactory, position: EpochPosition) -> None:
        self._spec = spec
        self._engines = engines
        self._position = position
        self._is_new = True

    def begin(self, loader: Any) -> Epoch:
        persists = not self._is_new and loader._iterator is not None
        if not self._is_new:
            before, self._spec, self._engines = (
                self._spec,
                loader._minato_spec(),
                loader._minato_engines,
            )
            old, new = before.sampling.dealt, self._spec.sampling.dealt
            if old != new:
                raise RuntimeError(
                    f"this process is rank {new[0]} of {new[1]} now, and the persistent workers have the readers of "
                    f"rank {old[0]} of {old[1]}: initialise torch.distributed before the first iteration, or call "
                    "loader.close()"
                )
            self._position = loader._minato_position
        self._is_new = False
        return self._engines.epoch(self._spec, self._position, persists=persists)

    def again(self, epoch: Epoch) -> Epoch | None:
        return self._engines.again(self._spec, self._position, epoch)


class _Twin:
    """A loader with other values of some attributes; the loader itself keeps its own."""

    def __init__(self, loader: DataLoader[object], **values: object) -> None:
        self._loader = loader
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def is_active(loader: object) -> bool:
    """Whether minato loads what a loader yields, also where a trainer has wrapped it.

    False for any other loader, and where torch's engine loads for one of minato's: with data pipes, and where the
    program has replaced parts of torch's engine.
    """
    found = getattr(loader, "base_dataloader", loader)  # Accelerate's wrappers
    return isinstance(found, DataLoader) and is_made(found) and not found._minato_why_not("")


def metrics_collector(*loaders: DataLoader[object]) -> Collector:
    """Metrics of loaders for a registry of ``prometheus_client``: ``REGISTRY.register(metrics_collector(loader))``.

    A registry takes one such collector: give it all loaders. It keeps none of them alive.

    Raises:
        TypeError: One of them is no loader of minato's.
        ValueError: A loader was made with ``observe=False``, or other ranks' shared pool has its workers.
    """
    from minato.observe.metrics import Collector

    for each in loaders:
        if not isinstance(each, DataLoader):
            raise TypeError(
                f"metrics_collector() takes loaders of minato's, one after the other, and got a {type_name(each)}"
            )
    found = [each._minato_inspector().labelled_metrics() for each in loaders]
    return Collector(lambda: found)


_HARMLESS = ("compat", "memory_budget", "snapshot_every_n_steps")
"""Arguments of ours that change no batch."""
_ALIKE = (
    *("dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout"),
    *("worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor"),
    *("persistent_workers", "pin_memory_device", "in_order"),
)
"""torch's arguments that are attributes of a loader."""
_INSTEAD = {
    "sampler": ("shuffle",),
    "batch_sampler": ("shuffle", "sampler", "batch_size", "drop_last"),
    "num_workers": ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"),
}
"""Arguments with which torch allows no others; ``num_workers`` where it is 0."""


def torch_arguments(loader: TorchDataLoader[object], *, own: bool = True) -> dict[str, Any]:
    """The arguments with which torch's class makes a loader such as this one.

    Args:
        own: Add the arguments that only minato has, where the loader is minato's.
    """
    given = {name: getattr(loader, name) for name in _ALIKE if hasattr(loader, name)}
    if "prefetch_factor" not in given:
        raise TypeError(f"loader is a {type_name(loader)}: give a torch.utils.data.DataLoader")
    ours = is_made(loader)
    if ours and (cost_batches := vars(loader).get("_minato_cost_batches")) is not None:
        given["batch_size"] = cost_batches
    if ours and own:
        mine = cast("DataLoader[Any]", loader)
        given.update(mine._minato_given)
        collate: Any = mine.collate_fn
        is_ours = issubclass(type(collate), TransformingCollate)
        if is_ours and collate.transforms is mine._minato_transforms:  # transforms= has them
            given["collate_fn"] = collate.collate_fn
        if mine._minato_options.begins_next_epoch:
            given["persistent_workers"] = NEXT_EPOCH
    if given["collate_fn"] is (default_collate if is_batched(loader) else default_convert):
        del given["collate_fn"]  # it follows from the batch size, which may become another
    unbound = isinstance(given["prefetch_factor"], Unbound)
    if unbound or (not ours and given["prefetch_factor"] == 2):  # torch's default
        del given["prefetch_factor"]
    if isinstance(loader.dataset, IterableDataset):
        return given
    sampler, batches = loader.sampler, loader.batch_sampler
    is_torchs = (
        type(batches) is BatchSampler
        and batches.sampler is sampler
        and (batches.batch_size, batches.drop_last) == (loader.batch_size, loader.drop_last)
    )
    if batches is not None and not is_torchs:
        del given["batch_size"], given["drop_last"]
        return {**given, "batch_sampler": batches}
    # One over something else than the dataset yields the indices of that.
    of_dataset = getattr(sampler, "data_source", None) is loader.dataset
    if of_dataset and type(sampler) is SequentialSampler:
        return given
    if of_dataset and (
        type(sampler) is SeededSampler
        or (
            type(sampler) is RandomSampler
            and vars(sampler)
            == vars(RandomSampler(sampler.data_source, generator=loader.generator))
        )
    ):
        return {**given, "shuffle": True}  # so that seed= decides it, where it is given
    return {**given, "sampler": sampler}


def _starts_threads(context: object) -> bool:
    process = getattr(context, "Process", None)
    return isinstance(process, type) and issubclass(process, threading.Thread)


_SPEC_PARTS = operator.attrgetter(
    *("dataset", "batch_size", "drop_last", "generator", "num_workers", "multiprocessing_context"),
    *("worker_init_fn", "prefetch_factor", "persistent_workers", "timeout", "collate_fn"),
    *("pin_memory", "_minato_transforms", "_minato_options", "_minato_replay", "_minato_session"),
    *("batch_sampler", INDEX_SAMPLER),
)
"""The attributes that decide a ``LoaderSpec``, apart from ``cache``, which cannot be set."""
