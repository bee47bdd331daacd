"""What a loader's arguments come to: all that its engine and its workers go by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minato._compat import index_sampler, is_batched
from minato._core.limits import explaining_limits
from minato._core.seeding import mix
from minato._system import local_ranks, memory_of_late_bytes
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.observe.trace.track import Tracks
from minato.options import FetchOptions, Options, Unbound
from minato.sampling.epoch import Standing, is_stream
from minato.sampling.samplers import largest_batch
from minato.scheduling.dataset_state import DatasetStates
from minato.scheduling.orders import Order, make_order
from minato.scheduling.slow_threshold import TimeoutSettings
from minato.transforms.compose import Transforms
from minato.workers.error_policy import FailureHandler, FailureLog

__all__ = ["Plan"]

_SHARE_OF_MEMORY = 4
"""The default budget of all loaders of a node is available memory divided by this."""


@dataclass(frozen=True)
class Plan:
    """All that defines the work, as the loader's arguments give it.

    Attributes:
        batched: Keys come in lists (``batch_size`` or a ``batch_sampler``).
        num_workers: Workers that work at first.
        most_workers: Workers that there can be.
        seeds_samples: Randomness is bound to each sample rather than to the worker.
        window_batches: Batches in flight, None to let the budget decide.
        persistent: The workers stay for further passes.
        streams: The dataset is iterable.
        round_robin: Batch k is for worker k mod n, as with torch.
        restarts: A dead worker process is replaced.
        drop_last: Whether a stream's incomplete batch is dropped.
        budget_bytes: What batches in flight may take together; by default of all loaders of this process …
        shares_budget: … which then divide it among them.
        largest_batch: Samples in the largest batch, as far as it is known.
        policy: What to do about samples that raise; None: they are errors.
        error_budget: How many of them an epoch may have.
        quarantine: Path of the file that keeps them.
        sample_timeout_s: How long a sample may take.
        replicas: The states of the workers' copies of the dataset, if it is iterable or has a state.
        state_every: Of how many batches of a stream's worker one comes with the state; None: none does.
        slow: From which cost on a sample is slow.
        profile: Folder that keeps what samples cost, None for none.
        fetching: How samples are read at once.
        measure: Keep what a report needs.
        tracks: Of the trace, None for none.
        device: Where batches go, None for main memory.
        prefetch_to_device: How many go there before their turn.
        ray_options: What Ray is told of each actor.
    """

    dataset: Any
    chain: Transforms
    collate_fn: Callable[[Any], Any]
    batched: bool
    num_workers: int
    most_workers: int
    worker_method: str
    context: Any
    worker_init_fn: Callable[[int], None] | None
    base_seed: int
    seeds_samples: bool
    order: Order
    window_batches: int | None
    budget_bytes: int
    shares_budget: bool
    largest_batch: int
    timeout_s: float
    persistent: bool
    streams: bool
    round_robin: bool
    drop_last: bool
    restarts: bool
    policy: FailureHandler | None
    error_budget: float | None
    quarantine: str | None
    sample_timeout_s: float | None
    replicas: DatasetStates | None
    state_every: int | None
    slow: TimeoutSettings
    profile: str | None
    fetching: FetchOptions
    measure: bool
    tracks: Tracks | None
    device: torch.device | None
    prefetch_to_device: int
    ray_options: Mapping[str, Any]

    @classmethod
    def of(cls, loader: Any, base_seed: int, num_workers: int, most_workers: int) -> Plan:
        """The plan of a loader's next iterator.

        Args:
            loader: A ``minato.DataLoader`` whose next run is opened.
            base_seed: What torch drew for the workers.
            num_workers: Workers that work at first.
            most_workers: Workers that there can be.

        Raises:
            ValueError: The dataset's state would be that of copies in the cluster.
        """
        options: Options = loader._options
        run: Standing = loader._position.last
        if run.replicas is not None and options.worker_kind == "ray":
            raise ValueError(
                "the dataset has a state_dict() of its own, which workers=RayWorkers(...) does not bring back from the "
                "cluster: use workers='process'"
            )
        streams = is_stream(loader)
        round_robin = streams or options.compat == "torch"
        window: int | None = None
        if loader.num_workers == 0:
            window = 1
        elif round_robin or not isinstance(loader.prefetch_factor, Unbound):
            window = most_workers * loader.prefetch_factor
        policy: FailureHandler | None = None
        if options.errors.handles_samples or options.errors.sample_timeout is not None:
            # A log of failures for each iterator.
            log = FailureLog(options.errors.log_path)
            policy = FailureHandler(options.errors.outcome, options.errors.tries_again, log)
        dataset, chain = loader.dataset, loader._transforms
        if loader.cache is not None:
            from minato.engine.caching import behind

            dataset, chain = behind(loader.cache, dataset, chain)
        if options.seed is not None:
            base_seed = mix(options.seed, run.epoch, 0) >> 2
        return cls(
            dataset=dataset,
            chain=chain,
            collate_fn=loader.collate_fn,
            batched=is_batched(loader),
            num_workers=num_workers,
            most_workers=most_workers,
            worker_method=options.worker_kind,
            context=loader.multiprocessing_context or torch.multiprocessing.get_context(),
            worker_init_fn=loader.worker_init_fn,
            base_seed=base_seed,
            seeds_samples=options.seeds_samples and not streams,
            order=make_order(options.order, options.max_lag),
            window_batches=window,
            budget_bytes=options.memory_budget or _default_budget_bytes(options),
            shares_budget=options.memory_budget is None and num_workers > 0,
            largest_batch=largest_batch(index_sampler(loader), is_batched(loader)),
            timeout_s=loader.timeout,
            persistent=loader.persistent_workers,
            streams=streams,
            round_robin=round_robin,
            drop_last=loader.drop_last,
            # State that workers hold would be lost with them.
            restarts=options.errors.on_worker_death == "restart"
            and not round_robin
            and run.replicas is None,
            policy=policy,
            error_budget=options.errors.max_failures,
            quarantine=options.errors.log_path,
            sample_timeout_s=options.errors.sample_timeout,
            replicas=run.replicas,
            state_every=options.snapshot_every_n_steps or None,
            slow=TimeoutSettings(options.stragglers.share, options.stragglers.after_s),
            profile=options.cost_history,
            fetching=options.fetch_concurrency,
            measure=bool(options.stats),
            tracks=None if loader._trace is None else loader._trace.take(),
            device=options.target,
            prefetch_to_device=options.prefetch_to_device,
            ray_options=options.actor_options,
        )

    def worker_tracer(self, number: int) -> Tracer:
        """What records the work of worker ``number``."""
        return NULL_TRACER if self.tracks is None else self.tracks.worker(number)

    @functools.cached_property
    def can_rest(self) -> bool:
        """Whether the same engine will do for a later iterator, because nothing of an earlier one is left in it."""
        keeps = (self.policy, self.replicas, self.profile, self.tracks, self.device)
        return (
            self.num_workers == 0
            and all(part is None for part in keeps)
            and not self.fetching.at_once
        )

    def suits(self, loader: Any) -> bool:
        """Whether a loader's next iterator would get the same plan, if this one can rest, but for the seed."""
        options, batched = loader._options, is_batched(loader)
        return bool(
            loader.num_workers == 0
            and loader._position.last.replicas is None
            and self.dataset is loader.dataset
            and self.collate_fn is loader.collate_fn
            and self.order == make_order(options.order, options.max_lag)
            and (self.batched, self.drop_last) == (batched, loader.drop_last)
            and self.timeout_s == loader.timeout
            and self.largest_batch == largest_batch(index_sampler(loader), batched)
        )

    @property
    def sends_states(self) -> bool:
        """Whether the state of a worker's copy of a map-style dataset goes with each batch, to which it belongs."""
        in_processes = self.num_workers > 0 and self.worker_method == "process"
        return self.replicas is not None and in_processes and self.order.keeps_places

    @property
    def starts_as_needed(self) -> bool:
        """Whether workers may be started later than others: their number is fixed, and nothing is for a certain one."""
        is_fixed = self.num_workers == self.most_workers
        return is_fixed and not self.round_robin and self.replicas is None

    @property
    def starts_early(self) -> bool:
        """Whether samples may start before their turn."""
        lists = self.batched and bool(getattr(self.dataset, "__getitems__", None))
        return self.num_workers > 0 and not (self.round_robin or self.streams or lists)

    @property
    def defers(self) -> bool:
        """Whether a worker may defer a slow sample for quicker ones.

        Where each sample has its own place, the batch that the consumer waits for needs the slow sample itself. Where
        several samples are read at once, a slow read keeps no other waiting.
        """
        return (
            not self.order.keeps_places
            and self.num_workers > 0
            and len(self.chain) > 0
            and not self.fetching.at_once
            and not (self.round_robin or self.replicas is not None)
        )


def _default_budget_bytes(options: Options) -> int:
    """What the loaders of this process may load ahead together."""
    # A pool that the ranks of a node share loads for all of them.
    ranks = 1 if options.shared_pool else local_ranks()
    with explaining_limits("read how much memory is available"):
        return max(memory_of_late_bytes() // (_SHARE_OF_MEMORY * ranks), 1)
