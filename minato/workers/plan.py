"""The plan of the workers of one engine: it travels to them, and their parts read from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch.utils.data import default_collate

from minato._compat import WorkerInfo, worker_info
from minato._support.objects import attribute, takes_lists
from minato.batching.collate import Bind, Collate, may_draw
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.options import FetchOptions
from minato.sampling.readers import ReaderState, StateSlots
from minato.sampling.resume import DatasetStates
from minato.scheduling.orders import Order
from minato.transforms.compose import Transforms


class WorkerTracks(Protocol):
    """The tracks of a trace that workers write to (``minato.observe.trace``)."""

    def worker(self, number: int) -> Tracer:
        """The tracer of worker ``number``."""


class Pipeline(NamedTuple):
    """The steps from an index to a batch.

    Attributes:
        given: The dataset as the program knows it; ``dataset`` may look into a cache before it asks this one.
        batched: Samples come in lists (``batch_size`` or a ``batch_sampler``), and ``collate_fn`` gets these.
        drop_last: The incomplete last batch of a stream is dropped.
        refetches: The program has replaced torch's fetcher, which then makes whole batches, collated.
    """

    given: Any
    dataset: Any
    transforms: Transforms
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool
    streams: bool
    refetches: bool = False

    def collate(self, bind: Bind | None = None) -> Collate:
        """The loader's ``collate_fn``, bound to a batch by ``bind``; what a replaced fetcher has made is collated."""
        collate_fn = (lambda batch: batch) if self.refetches else self.collate_fn
        return Collate(collate_fn, self.batched, bind)


class ReaderPlan(NamedTuple):
    """The readers of an iterable dataset.

    Attributes:
        own: The numbers of this rank's, out of ``number``; they have the same distance from each other.
        hosts: Number of workers that host them: the i-th of ``own`` is hosted by worker i modulo ``hosts``. 0: a thread
            of the training process hosts them.
        announces: Each has worker info, seeds and generators of its own. If not, the only one reads the dataset as it
            is, with the generators of the program, as torch does without workers.
        batch: Number of items in the batches of one reader; 1: single items.
        skips: Items that raise are left out, or replaced.
        every: Number of batches after which a reader sends its state; None: never; ``auto``: as often as that is cheap.
        slots: Where the states are, and go; None: the training process has them itself, as ``starts``. A reader whose
            state is None begins with its copy of the dataset as it is.
        rereads: A reader whose worker has died reads from where the epoch began, whatever states there are.
    """

    number: int
    own: range
    hosts: int
    announces: bool
    batch: int
    skips: bool
    every: int | Literal["auto"] | None
    slots: StateSlots | None = None
    starts: Sequence[ReaderState | None] = ()
    rereads: bool = False


class WorkerPlan(NamedTuple):
    """The plan of a worker; travels to worker processes."""

    pipeline: Pipeline
    method: str  # ``process``, ``thread`` or ``ray``
    in_main_process: bool  # there are no workers: the training loop runs the samples
    most_workers: int
    init_fn: Callable[[int], None] | None
    base_seed: int  # torch's draw for the workers, or a seed that follows from ``seed=``
    seeds_samples: bool  # randomness is bound to each sample rather than to the worker
    order: Order
    round_robin: bool  # batch k is for worker k mod n, as in torch
    # The states of the workers' copies of a map-style dataset that has a state.
    dataset_states: DatasetStates | None
    readers: ReaderPlan | None
    fetching: FetchOptions
    stats: bool  # times are measured for a report, and the slowest samples are kept
    tracks: WorkerTracks | None
    # There is a time limit: a lease names each item that a reader is asked for, not the first of some.
    times_items: bool = False

    def tracer(self, number: int) -> Tracer:
        """The tracer of worker ``number``."""
        return NULL_TRACER if self.tracks is None else self.tracks.worker(number)

    def generator_roots(self, at_once: bool) -> dict[str, Any]:
        """The objects whose generators are bound to samples, by name.

        Reads ``at_once`` share those of the dataset, and from those of a stream its iterator draws.
        """
        pipeline = self.pipeline
        roots = {"dataset": pipeline.dataset, **pipeline.transforms.by_name}
        if at_once or self.readers is not None:
            del roots["dataset"]
        collate_fn = pipeline.collate_fn
        of_dataset = at_once and getattr(collate_fn, "__self__", None) is pipeline.given
        if may_draw(collate_fn) and not of_dataset:
            roots["collate_fn"] = collate_fn
        return roots

    def identity(self, number: int) -> tuple[int, int]:
        """Number and number of workers by which a worker knows itself: those of its first reader, if it has one.

        Other workers come after all readers, also those of other ranks.
        """
        readers = self.readers
        if readers is None or not readers.hosts:
            return number, self.most_workers
        if number < readers.hosts:
            return readers.own[number], readers.number
        further = readers.number - readers.hosts
        return further + number, further + self.most_workers

    def worker_info(self, number: int) -> WorkerInfo:
        """What a worker knows of itself; with readers, while it reads for none."""
        own, count = self.identity(number)
        return worker_info(own, count, self.base_seed + own, self.pipeline.given)

    @property
    def offers_items(self) -> bool:
        """Whether the host of a reader may offer items to other workers, which then run their transforms."""
        return (
            self.readers is not None
            and self.most_workers > 1
            and len(self.pipeline.transforms) > 0
            and self.seeds_samples
        ) or self.reads_in_thread

    @property
    def reads_in_thread(self) -> bool:
        """Whether a thread of the training process reads an iterable dataset for the workers."""
        return self.readers is not None and not self.readers.hosts

    def restore_dataset(self, number: int) -> None:
        """Load the state of a worker's copy of the dataset at the end of an earlier epoch."""
        state = None if self.dataset_states is None else self.dataset_states.each[number].dataset
        if state is not None:
            self.pipeline.dataset.load_state_dict(state)

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
