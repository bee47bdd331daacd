"""Parts of a worker that runs anywhere: in a process, a thread, or the training loop itself."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate, default_convert

from minato.batching.collate import Bind, Collate
from minato.engine.plan import Pipeline, WorkerPlan
from minato.transforms.compose import Transforms
from minato.workers.fetch import Fetcher, ReplacedFetcher, StreamFetcher

__all__ = ["collate_of", "fetcher_of", "generators_of", "restore"]


def collate_of(pipeline: Pipeline, bind: Bind | None = None) -> Collate:
    """The loader's ``collate_fn``; what a replaced fetcher has made is collated already.

    Args:
        bind: Binds randomness to a batch while a worker collates it.
    """
    collate_fn = _as_it_is if pipeline.refetches else pipeline.collate_fn
    return Collate(collate_fn, pipeline.batched, bind)


def _as_it_is(batch: Any) -> Any:
    return batch


def fetcher_of(
    plan: WorkerPlan, number: int, remote: tuple[Any, Transforms] | None = None
) -> Fetcher | StreamFetcher:
    """The fetcher of worker ``number``.

    Args:
        remote: What takes the place of dataset and transforms, if another machine has them.
    """
    pipeline = plan.pipeline
    dataset, transforms = remote or (pipeline.dataset, pipeline.transforms)
    if pipeline.streams:
        return StreamFetcher(
            dataset,
            transforms,
            batched=pipeline.batched,
            drop_last=pipeline.drop_last,
            at_once=plan.in_main_process,
            initial=None if plan.dataset_states is None else plan.dataset_states.each[number],
            state_every=plan.state_every,
        )
    if pipeline.refetches:
        return ReplacedFetcher(
            dataset,
            transforms,
            pipeline.batched,
            plan.sends_states,
            collate_fn=pipeline.collate_fn,
            drop_last=pipeline.drop_last,
        )
    return Fetcher(dataset, transforms, pipeline.batched, plan.sends_states)


def generators_of(plan: WorkerPlan, at_once: bool | None = None) -> dict[str, Any]:
    """The objects whose generators are bound to samples, by name.

    Args:
        at_once: Whether the dataset reads several samples at once, which share its generators; by default as planned.
    """
    pipeline = plan.pipeline
    roots = {"dataset": pipeline.dataset, **pipeline.transforms.by_name}
    at_once = plan.fetching.at_once if at_once is None else at_once
    if at_once:
        del roots["dataset"]
    collate_fn = pipeline.collate_fn
    of_dataset = at_once and getattr(collate_fn, "__self__", None) is pipeline.dataset
    if not (of_dataset or collate_fn is default_collate or collate_fn is default_convert):
        roots["collate_fn"] = collate_fn
    return roots


def restore(plan: WorkerPlan, number: int) -> None:
    """Load the state of this worker's copy of the dataset at the end of an earlier epoch."""
    state = None if plan.dataset_states is None else plan.dataset_states.each[number].dataset
    if state is not None:
        plan.pipeline.dataset.load_state_dict(state)
