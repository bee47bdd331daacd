"""How exceptions travel from a worker to the training loop."""

from __future__ import annotations

from collections.abc import Callable

from minato._compat import ExceptionWrapper

__all__ = ["wrapped"]


def wrapped(worker: str, in_process: bool = False) -> Callable[[BaseException], ExceptionWrapper]:
    """Return a function that puts an exception into torch's wrapper, so that text and traceback read as torch's.

    Args:
        worker: Kind and number of the worker, in torch's words: ``worker process 3``.
        in_process: The worker is a process of its own. Then a Ctrl-C ends it instead of travelling.
    """

    def wrap(error: BaseException) -> ExceptionWrapper:
        if in_process and isinstance(error, KeyboardInterrupt):
            raise error
        if in_process and not isinstance(error, Exception):
            # Raised in the training loop it would end the program, a generator or a task, and not report a bad sample.
            ended = RuntimeError(f"{type(error).__name__} was raised, as if to end the worker")
            ended.__cause__, error = error, ended
        return ExceptionWrapper(
            (type(error), error, error.__traceback__), where=f"in DataLoader {worker}"
        )

    return wrap
