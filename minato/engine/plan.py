"""The plan of one engine, made of a loader's arguments."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from multiprocessing.context import BaseContext

import torch

from minato._compat import fetcher_is_replaced
from minato._core import Histogram, mix_seed
from minato._core.limits import explaining_limits
from minato._system import local_ranks, recent_available_memory_bytes
from minato.engine.spec import LoaderSpec
from minato.observe.trace import Tracks
from minato.options import Options
from minato.sampling.epoch import Epoch
from minato.sampling.readers import StateSlots
from minato.sampling.samplers import largest_batch
from minato.scheduling.orders import Order, make_order
from minato.scheduling.slow_samples import SlowThreshold
from minato.workers.error_policy import FailureCount, FailureHandler, FailureLog
from minato.workers.plan import Pipeline, ReaderPlan, WorkerPlan

_SHARE_OF_MEMORY = 4
"""The default budget of all loaders of a node is available memory divided by this."""


@dataclass(frozen=True)
class Plan:
    """What one engine does: the loader's arguments (``spec``), and what follows from them."""

    spec: LoaderSpec
    worker: WorkerPlan  # the part that travels to the workers
    first: int  # workers that are active at first; 0: the training loop does the work
    restarts: bool
    policy: FailureHandler | None  # handles the errors of samples; None: ``next()`` raises them
    batches: int | None  # number of open batches; None: the budget decides
    budget_bytes: int
    largest_batch: int  # number of samples in it, if it is known
    tracks: Tracks | None

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
        """The plan of a loader's next engine, for its first epoch and the number of workers that are active at first.

        ValueError: The workers are Ray actors, and the dataset has a state.
        """
        options, errors = spec.options, spec.options.errors
        worker = _worker_plan(spec, epoch, not num_workers, max(most_workers, 1), tracks)
        policy: FailureHandler | None = None
        if errors.handles_samples or errors.sample_timeout is not None:
            # A log of failures for each iterator.
            log = FailureLog(errors.log_path)
            policy = FailureHandler(errors.outcome, errors.tries_again, log)
        batches: int | None = None
        if spec.workers.count == 0:
            batches = 1
        elif (
            worker.round_robin
            or spec.workers.bounds_prefetch
            # Readers keep a state after a fixed number of batches, so that few may be ahead.
            or (worker.readers is not None and isinstance(worker.readers.every, int))
        ):
            # Each reader has as many as one of torch's workers.
            batches = max(most_workers, len(spec.sampling.own_readers))
            batches *= operator.index(spec.workers.prefetch_factor or 0)
        return cls(
            spec=spec,
            worker=worker,
            first=num_workers,
            # A worker that holds state cannot be replaced, and torch replaces none.
            restarts=errors.on_worker_death == "restart"
            and options.compat != "torch"
            and worker.dataset_states is None,
            policy=policy,
            batches=batches,
            budget_bytes=options.memory_budget or _default_budget_bytes(options),
            largest_batch=largest_batch(spec.sampling.index_sampler, spec.sampling.batched),
            tracks=tracks,
        )

    @property
    def options(self) -> Options:
        """Minato's own arguments."""
        return self.spec.options

    @property
    def context(self) -> BaseContext:
        """The context of ``multiprocessing``."""
        context: BaseContext = self.spec.workers.context or torch.multiprocessing.get_context()
        return context

    @property
    def leaves_places(self) -> bool:
        """Whether samples may leave their places to others: they are skipped, or their reader ends before."""
        worker = self.worker
        ends = worker.readers is not None and not worker.order.keeps_places
        return self.policy is not None or ends or worker.offers_items

    @property
    def shares_budget(self) -> bool:
        """Whether the loaders of this process divide the budget among them."""
        return self.options.memory_budget is None and self.first > 0

    @property
    def starts_as_needed(self) -> bool:
        """Whether workers may start one by one: their number is fixed, and no batch is for a particular one."""
        worker = self.worker
        return (
            self.first == worker.most_workers
            and not worker.round_robin
            and worker.dataset_states is None
            and worker.readers is None
        )

    def slow_threshold(self, costs: Histogram | None) -> SlowThreshold:
        """A new decision on which samples are slow, from the costs of recent samples of an earlier engine."""
        policy = self.options.stragglers
        return SlowThreshold(policy.share, policy.after_s, costs)

    def failure_count(self) -> FailureCount | None:
        """The count of the samples that fail; None: the first one raises."""
        errors = self.options.errors
        if self.policy is None:
            return None
        return FailureCount(self.policy.log, errors.max_failures, errors.log_path)


def _worker_plan(
    spec: LoaderSpec, epoch: Epoch, in_main_process: bool, most_workers: int, tracks: Tracks | None
) -> WorkerPlan:
    options, dataset_states = spec.options, epoch.dataset_states
    if dataset_states is not None and options.worker_kind == "ray":
        raise ValueError(
            "the dataset has a state_dict() of its own, which workers=RayWorkers(...) does not bring back from the "
            "cluster: use workers='process'"
        )
    if dataset_states is not None and options.errors.sample_timeout is not None:
        raise ValueError(
            f"sample_timeout={options.errors.sample_timeout} ends workers, and the dataset has a state_dict() of its "
            "own, whose state in a worker would be lost: use torch's timeout="
        )
    streams = spec.sampling.streams
    if not streams and fetcher_is_replaced():
        _refuse_single_samples(options)
    order = make_order(options.order, options.max_lag)
    return WorkerPlan(
        pipeline=_pipeline(spec),
        method=options.worker_kind,
        in_main_process=in_main_process,
        most_workers=most_workers,
        init_fn=spec.workers.init_fn,
        base_seed=base_seed_of(options, epoch),
        # What a reader alone makes is as with torch.
        seeds_samples=options.seeds_samples
        and (not streams or len(spec.transforms) > 0 or not order.keeps_places),
        order=order,
        round_robin=options.compat == "torch" and not streams,
        dataset_states=dataset_states,
        readers=_readers(spec, epoch, in_main_process, order) if streams else None,
        fetching=options.fetch_concurrency,
        stats=bool(options.observe.stats),
        tracks=tracks,
        times_items=spec.workers.timeout_s > 0 or options.errors.sample_timeout is not None,
    )


def base_seed_of(options: Options, epoch: Epoch) -> int:
    """The seed to which the number of a worker, or of a reader, is added for its generators."""
    if options.seed is None:
        return epoch.base_seed
    return mix_seed(options.seed, epoch.number, 0) >> 2


def _readers(spec: LoaderSpec, epoch: Epoch, in_main_process: bool, order: Order) -> ReaderPlan:
    count, every = spec.sampling.readers, spec.options.snapshot_every_n_steps or None
    ends_batches = spec.options.errors.outcome == "raise"
    assert epoch.readers is not None
    reads_here = spec.options.readers is not None and spec.options.readers.where == "main"
    slots: StateSlots | None = None
    if not in_main_process:
        depth = 2
        if isinstance(every, int):
            depth += -(-2 * (spec.workers.prefetch_factor or 1) // every) + 1
        slots = StateSlots(count, depth)
    return ReaderPlan(
        number=count,
        own=spec.sampling.own_readers,
        hosts=1 if in_main_process else spec.hosts,
        announces=not (in_main_process or reads_here)
        or (in_main_process and spec.options.readers is not None),
        batch=(spec.sampling.batch_size or 1)
        if ends_batches and (order.keeps_places or in_main_process)
        else 1,
        skips=not ends_batches and not spec.sampling.rereads,
        every=every,
        slots=slots,
        rereads=spec.sampling.rereads,
    )


def _pipeline(spec: LoaderSpec) -> Pipeline:
    dataset, transforms, sampling = spec.dataset, spec.transforms, spec.sampling
    if spec.cache is not None:
        from minato.engine.caching import CachedDataset, behind

        dataset = CachedDataset(dataset, spec.cache, transforms)
        transforms = behind(spec.cache, transforms)
    return Pipeline(
        given=spec.dataset,
        dataset=dataset,
        transforms=transforms,
        collate_fn=spec.collate_fn,
        batched=sampling.batched,
        drop_last=sampling.drop_last,
        streams=sampling.streams,
        refetches=not sampling.streams and fetcher_is_replaced(),
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


def _default_budget_bytes(options: Options) -> int:
    # A pool that the ranks of a node share loads for all of them.
    ranks = 1 if options.shared_pool else local_ranks()
    with explaining_limits("read how much memory is available"):
        return max(recent_available_memory_bytes() // (_SHARE_OF_MEMORY * ranks), 1)
