"""What a worker does after a sample has raised: it retries, then applies the error policy."""

from __future__ import annotations

from typing import Any

from minato.transforms.compose import Transforms
from minato.workers.error_policy import FailureHandler, SampleFailure
from minato.workers.fetch import Fetcher
from minato.workers.runner import Runner

__all__ = ["SampleRetry"]


class SampleRetry:
    """Applies a policy to the failures of one worker.

    Args:
        worker: Its number.
        lease: Its lease words, the third of which names the transform that ran.
    """

    def __init__(
        self,
        worker: int,
        *,
        policy: FailureHandler,
        runner: Runner,
        fetcher: Fetcher,
        transforms: Transforms,
        lease: Any,
    ) -> None:
        self._worker = worker
        self._policy = policy
        self._runner = runner
        self._fetcher = fetcher
        self._transforms = transforms
        self._lease = lease

    def settle(
        self, position: int, epoch: int, key: Any, error: BaseException
    ) -> tuple[Any, BaseException | None]:
        """The outcome of a sample that raised: a sample or SKIP, and None; or None and the error."""
        if not isinstance(error, Exception):
            return None, error
        policy, runner = self._policy, self._runner
        occurrence = runner.occurrence(position)
        failure = self._failure(epoch, key, error, 1, occurrence)
        for attempt in range(1, policy.retries + 1):
            samples, again = runner.run(position, epoch, [key], self._fetcher.single)
            if again is None:
                policy.recovered(failure)
                return samples[0], None
            failure = self._failure(epoch, key, again, attempt + 1, occurrence)
        try:
            return policy.settle(failure)
        except BaseException as raised:  # by on_error; settle handles an Exception itself
            return None, raised

    def _failure(
        self, epoch: int, key: Any, error: BaseException, attempts: int, occurrence: int
    ) -> SampleFailure:
        step = self._transforms.failed_step(error)
        if step is None and self._lease[2] >= 0:
            step = self._transforms.names[self._lease[2]]
        seed, worker = self._runner.seed, self._worker
        return SampleFailure(key, epoch, seed, worker, attempts, error, step, occurrence)
