"""The plan of one engine, made of a loader's arguments, and the part of it that travels to the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.utils.data import default_collate

from minato._compat import fetcher_is_replaced
from minato._core import mix_seed
from minato._core.limits import explaining_limits
from minato._support.objects import attribute, takes_lists
from minato._system import local_ranks, recent_available_memory_bytes
from minato.engine.spec import LoaderSpec
from minato.observe.trace import Tracks
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.options import FetchOptions, Options
from minato.sampling.epoch import Epoch
from minato.sampling.resume import DatasetStates
from minato.sampling.samplers import largest_batch
from minato.scheduling.orders import Order, make_order
from minato.scheduling.slow_threshold import SlowThresholdSettings
from minato.transforms.compose import Transforms
from minato.workers.error_policy import FailureHandler, FailureLog

__all__ = ["Pipeline", "Plan", "WorkerPlan"]

_SHARE_OF_MEMORY = 4
"""The default budget of all loaders of a node is available memory divided by this."""


class Pipeline(NamedTuple):
    """The steps from an index to a batch.

    Attributes:
        batched: Samples come in lists (``batch_size`` or a ``batch_sampler``), and ``collate_fn`` gets these.
        drop_last: The incomplete last batch of a stream is dropped.
        streams: The dataset is iterable.
        refetches: The program has replaced torch's fetcher, which then makes whole batches, collated.
    """

    dataset: Any
    transforms: Transforms
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool
    streams: bool
    refetches: bool = False

    @classmethod
    def of(cls, spec: LoaderSpec) -> Pipeline:
        """The pipeline of a loader, with its cache after the dataset."""
        dataset, transforms, sampling = spec.dataset, spec.transforms, spec.sampling
        if spec.cache is not None:
            from minato.engine.caching import wrap_dataset

            dataset, transforms = wrap_dataset(spec.cache, dataset, transforms)
        return cls(
            dataset=dataset,
            transforms=transforms,
            collate_fn=spec.collate_fn,
            batched=sampling.batched,
            drop_last=sampling.drop_last,
            streams=sampling.streams,
            refetches=not sampling.streams and fetcher_is_replaced(),
        )


class WorkerPlan(NamedTuple):
    """The plan of a worker; travels to worker processes.

    Attributes:
        method: ``process``, ``thread`` or ``ray``.
        in_main_process: There are no workers: the training loop runs the samples.
        most_workers: Largest number of workers.
        base_seed: torch's draw for the workers, or a seed that follows from ``seed=``.
        seeds_samples: Randomness is bound to each sample rather than to the worker.
        round_robin: Batch k is for worker k mod n, as in torch.
        dataset_states: The states of the workers' copies of the dataset, if it is iterable or has a state.
        state_every: Number of batches after which a stream's worker sends its state again; None: never; ``auto``: as
            often as that is cheap.
        fetching: How samples are read concurrently.
        stats: Times are measured for a report, and the slowest samples are kept.
        tracks: Of the trace, or None.
    """

    pipeline: Pipeline
    method: str
    in_main_process: bool
    most_workers: int
    init_fn: Callable[[int], None] | None
    base_seed: int
    seeds_samples: bool
    order: Order
    round_robin: bool
    dataset_states: DatasetStates | None
    state_every: int | Literal["auto"] | None
    fetching: FetchOptions
    stats: bool
    tracks: Tracks | None

    def tracer(self, number: int) -> Tracer:
        """The tracer of worker ``number``."""
        return NULL_TRACER if self.tracks is None else self.tracks.worker(number)

    @property
    def in_processes(self) -> bool:
        """Whether the workers are processes of this machine."""
        return not self.in_main_process and self.method == "process"

    @property
    def hands_over(self) -> bool:
        """Whether samples may go to other workers than the one that made them before ``collate_fn`` gets them."""
        collates = self.pipeline.collate_fn is not default_collate or not self.pipeline.batched
        return self.in_processes and collates and not (self.round_robin or self.pipeline.refetches)

    @property
    def sends_states(self) -> bool:
        """Whether the state of a worker's copy of a map-style dataset is sent with each of its batches."""
        return self.dataset_states is not None and self.in_processes and self.order.keeps_places

    @property
    def takes_lists(self) -> bool:
        """Whether the dataset loads all samples of a batch in one call."""
        pipeline = self.pipeline
        return pipeline.batched and (pipeline.refetches or takes_lists(pipeline.dataset))

    @property
    def begins_lists(self) -> bool:
        """Whether a worker may begin to read further batches while it waits for one."""
        return (
            self.takes_lists
            and not self.pipeline.refetches
            and self.order.keeps_places
            and not (self.in_main_process or self.round_robin or self.fetching.at_once)
            and self.method != "ray"
            and self.dataset_states is None
            and attribute(self.pipeline.dataset, "__beginitems__") is not None
        )

    @property
    def starts_early(self) -> bool:
        """Whether slow samples may start before those that precede them."""
        return not (
            self.in_main_process or self.round_robin or self.pipeline.streams or self.takes_lists
        )

    @property
    def defers(self) -> bool:
        """Whether a worker may defer a slow sample for faster ones.

        Where each sample has its own place, the batch that the consumer waits for needs the slow sample itself. With
        concurrent reads a slow read delays no other.
        """
        return (
            not self.order.keeps_places
            and not self.in_main_process
            and len(self.pipeline.transforms) > 0
            and not self.fetching.at_once
            and not (self.round_robin or self.dataset_states is not None)
        )


class PoolSettings(NamedTuple):
    """Number and start of the workers, and what happens when one dies.

    Attributes:
        first: Workers that are active at first; 0: the main process does the work.
        context: Context of ``multiprocessing``.
        persistent: The workers stay for later epochs.
        restarts: Worker processes that die are replaced.
        ray_options: Options of each actor.
    """

    first: int
    context: Any
    persistent: bool
    restarts: bool
    ray_options: Mapping[str, Any]


class PrefetchSettings(NamedTuple):
    """Bounds of the batches in flight.

    Attributes:
        batches: Number of open batches; None: the budget decides.
        budget_bytes: Limit of the batches in flight together.
        shares_budget: The loaders of this process divide the budget among them.
        largest_batch: Number of samples in the largest batch, if it is known.
        device: The device that batches are copied to; None: they stay in host memory.
        to_device: Number of batches that are copied there ahead.
    """

    batches: int | None
    budget_bytes: int
    shares_budget: bool
    largest_batch: int
    device: torch.device | None
    to_device: int


class FailureSettings(NamedTuple):
    """What happens to samples that raise or exceed the sample timeout.

    Attributes:
        policy: Handles their errors; None: ``next()`` raises them.
        budget: Number or share of an epoch's samples that may fail, or None.
        log: Path of the file that records failures, or None.
        sample_timeout_s: Time limit of a sample in seconds, or None.
    """

    policy: FailureHandler | None
    budget: float | None
    log: str | None
    sample_timeout_s: float | None


@dataclass(frozen=True)
class Plan:
    """All settings of one engine.

    Attributes:
        timeout_s: torch's ``timeout``, 0 for none.
        slow: Decides which samples are slow.
        cost_history: Directory that keeps the costs of samples, or None.
    """

    worker: WorkerPlan
    pool: PoolSettings
    prefetch: PrefetchSettings
    failures: FailureSettings
    slow: SlowThresholdSettings
    cost_history: str | None
    timeout_s: float

    @classmethod
    def of(
        cls,
        spec: LoaderSpec,
        epoch: Epoch,
        *,
        num_workers: int,
        most_workers: int,
        tracks: Tracks | None = None,
    ) -> Plan:
        """The plan of a loader's next engine.

        Args:
            epoch: The first epoch that it loads.
            num_workers: Number of workers that are active at first.
            most_workers: Largest number of workers.
            tracks: Of the trace.

        Raises:
            ValueError: The workers are Ray actors, and the dataset has a state.
        """
        options, errors, dataset_states = spec.options, spec.options.errors, epoch.dataset_states
        if dataset_states is not None and options.worker_kind == "ray":
            raise ValueError(
                "the dataset has a state_dict() of its own, which workers=RayWorkers(...) does not bring back from the "
                "cluster: use workers='process'"
            )
        streams = spec.sampling.streams
        if not streams and fetcher_is_replaced():
            _refuse_single_samples(options)
        round_robin = streams or options.compat == "torch"
        base_seed = epoch.base_seed
        if options.seed is not None:
            base_seed = mix_seed(options.seed, epoch.number, 0) >> 2
        worker = WorkerPlan(
            pipeline=Pipeline.of(spec),
            method=options.worker_kind,
            in_main_process=not num_workers,
            most_workers=max(most_workers, 1),
            init_fn=spec.workers.init_fn,
            base_seed=base_seed,
            seeds_samples=options.seeds_samples and not streams,
            order=_order(options),
            round_robin=round_robin,
            dataset_states=dataset_states,
            state_every=options.snapshot_every_n_steps or None,
            fetching=options.fetch_concurrency,
            stats=bool(options.observe.stats),
            tracks=tracks,
        )
        pool = PoolSettings(
            first=num_workers,
            context=spec.workers.context or torch.multiprocessing.get_context(),
            persistent=spec.workers.persistent,
            # A worker that holds state cannot be replaced.
            restarts=errors.on_worker_death == "restart"
            and not round_robin
            and dataset_states is None,
            ray_options=options.actor_options,
        )
        policy: FailureHandler | None = None
        if errors.handles_samples or errors.sample_timeout is not None:
            # A log of failures for each iterator.
            log = FailureLog(errors.log_path)
            policy = FailureHandler(errors.outcome, errors.tries_again, log)
        return cls(
            worker=worker,
            pool=pool,
            prefetch=_prefetch(spec, num_workers, most_workers, round_robin),
            failures=FailureSettings(
                policy, errors.max_failures, errors.log_path, errors.sample_timeout
            ),
            slow=SlowThresholdSettings(
                percentile=options.stragglers.share, fixed_s=options.stragglers.after_s
            ),
            cost_history=cast("str | None", options.stragglers.history),
            timeout_s=spec.workers.timeout_s,
        )

    @property
    def starts_as_needed(self) -> bool:
        """Whether workers may start one by one: their number is fixed, and no batch is for a particular one."""
        worker = self.worker
        return (
            self.pool.first == worker.most_workers
            and not worker.round_robin
            and worker.dataset_states is None
        )


def _refuse_single_samples(options: Options) -> None:
    """Raise ValueError for an option about single samples, where the program's fetcher makes whole batches."""
    given = {
        "errors": options.errors.handles_samples,
        "fetch_concurrency": options.fetch_concurrency.at_once,
        "workers=RayWorkers(...)": options.worker_kind == "ray",
    }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{name} is about single samples, and the program has replaced torch's fetcher "
                "(torch.utils.data._utils.fetch), which makes whole batches: leave it out"
            )


def _order(options: Options) -> Order:
    return make_order(options.order, options.max_lag)


def _prefetch(
    spec: LoaderSpec, num_workers: int, most_workers: int, round_robin: bool
) -> PrefetchSettings:
    options, workers = spec.options, spec.workers
    batches: int | None = None
    if workers.count == 0:
        batches = 1
    elif round_robin or workers.bounds_prefetch:
        batches = most_workers * (workers.prefetch_factor or 0)
    return PrefetchSettings(
        batches=batches,
        budget_bytes=options.memory_budget or _default_budget_bytes(options),
        shares_budget=options.memory_budget is None and num_workers > 0,
        largest_batch=largest_batch(spec.sampling.index_sampler, spec.sampling.batched),
        device=options.target,
        to_device=options.to_device,
    )


def _default_budget_bytes(options: Options) -> int:
    """The default limit of the batches in flight in all loaders of this process together, in bytes."""
    # A pool that the ranks of a node share loads for all of them.
    ranks = 1 if options.shared_pool else local_ranks()
    with explaining_limits("read how much memory is available"):
        return max(recent_available_memory_bytes() // (_SHARE_OF_MEMORY * ranks), 1)
