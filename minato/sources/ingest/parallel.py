"""Who does the work: worker processes of a loader, or threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal

from torch.utils.data import Dataset

from minato.loader import DataLoader

__all__ = ["in_processes", "in_threads"]

Task = Callable[[], Any]


class _Tasks(Dataset[Any]):
    """Tasks whose results are the samples."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> list[Any]:
        return [self._tasks[index]()]


def in_processes(
    tasks: Iterable[Task], workers: int, worker_method: Literal["process", "thread"]
) -> Iterator[Any]:
    """Results of tasks, as they come; a task whose worker dies is done again by another."""
    them = list(tasks)
    if not them:
        return
    with warnings.catch_warnings():
        # Workers that wait for a store are more than there are cores.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        results = iter(
            DataLoader(
                _Tasks(them),
                batch_size=None,
                num_workers=min(workers, len(them)),
                order="arrival",
                collate_fn=_as_it_is,
                workers=worker_method,
            )
        )
    for (result,) in results:
        yield result


def _as_it_is(result: Any) -> Any:
    return result


def in_threads(tasks: Iterable[Task], workers: int) -> Iterator[Any]:
    """The same with threads, for tasks that are made one by one: not many more of them than there are threads."""
    with ThreadPoolExecutor(workers, "minato-ingest") as threads:
        pending: set[Future[Any]] = set()
        for task in tasks:
            if len(pending) > workers:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
            pending.add(threads.submit(task))
        yield from (future.result() for future in pending)
