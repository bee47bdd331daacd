"""What a loader's arguments come to: all that its engine and its workers go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minato.chain.chain import Chain
from minato.scheduler.dispatcher import Order
from minato.scheduler.failures import ErrorPolicy

__all__ = ["Plan"]


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
        largest_batch: Samples in the largest batch, as far as it is known.
        policy: What to do about samples that raise; None: they are errors.
        error_budget: How many of them an epoch may have.
        quarantine: Path of the file that keeps them.
        sample_timeout_s: How long a sample may take.
        fetch_concurrency: Samples that a worker reads at once.
    """

    dataset: Any
    chain: Chain
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
    largest_batch: int
    timeout_s: float
    persistent: bool
    streams: bool
    round_robin: bool
    drop_last: bool
    restarts: bool
    policy: ErrorPolicy | None
    error_budget: float | None
    quarantine: str | None
    sample_timeout_s: float | None
    fetch_concurrency: int

    @property
    def foresees(self) -> bool:
        """Whether samples may begin before their turn."""
        lists = self.batched and bool(getattr(self.dataset, "__getitems__", None))
        return self.num_workers > 0 and not (self.round_robin or self.streams or lists)

    @property
    def leaves_samples(self) -> bool:
        """Whether a worker may set a slow sample aside for quicker ones.

        In strict order the sample in hand is older than all that could go before it, and where several are read at once
        a slow read keeps no other sample waiting.
        """
        return (
            self.num_workers > 0
            and self.fetch_concurrency == 1
            and len(self.chain) > 0
            and not (self.round_robin or self.streams)
            and (self.order.name == "batch" or not self.order.bound)
        )
