"""What one can ask a loader about itself: a part of ``DataLoader``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch

from minato.chain.chain import Chain
from minato.chain.rng import SampleRandomness
from minato.engine import Experience
from minato.fetching import Fetching
from minato.options import Options
from minato.plan import Unbound
from minato.report.build import report_of, setup_of
from minato.report.figures import Prediction, Report
from minato.report.headroom import HeadRoom
from minato.scheduler.fetch import Fetcher
from minato.slow_samples import SlowSamples
from minato.source.prediction import quality_of
from minato.source.progress import Coverage
from minato.source.run import Course, is_stream

__all__ = ["Insight"]


class Insight:
    """Reports on a loader, and repeats single samples."""

    dataset: Any
    generator: torch.Generator | None
    num_workers: int
    prefetch_factor: int | None
    _auto_collation: Any
    _options: Options
    _course: Course
    _chain: Chain
    _experience: Experience

    def report(self) -> Report:
        """What limits the training, and all figures of the run and of each epoch so far.

        It can be asked for at any time; ``print`` shows it as text, ``rich.print`` in colour and Jupyter as a table.

        Raises:
            ValueError: The loader was made with ``measure=False``.
        """
        if self._experience.journal is None:
            raise ValueError("measure=False: nothing was measured; leave it out to have a report")
        options = self._options
        may_fetch_more = not (
            is_stream(self) or options.schedule == "round_robin" or options.rng == "worker"
        )
        concurrency = Fetching.of(options.fetch_concurrency).concurrency
        bounded = self.num_workers > 0 and not isinstance(self.prefetch_factor, Unbound)
        return report_of(
            setup_of(self, concurrency, may_fetch_more, bounded),
            self._chain.names,
            self._experience.journal,
            self._prediction(),
        )

    def _prediction(self) -> Prediction:
        known = self._experience
        threshold_ns = known.decision.threshold_ns
        quality = quality_of(known.foresight.pairs, threshold_ns)
        return Prediction(known.known.model or "none", *quality)

    def slow_samples(self) -> SlowSamples:
        """Which samples are slow, where they lay in the newest iterator's batches, and how well they were foretold."""
        return SlowSamples.of(self._experience, self._course.lateness())

    def headroom(self, steps: int = 50) -> HeadRoom:
        """How fast training could be if data were free.

        What it returns stands for the loader in a training loop of yours: it gives batches as the loader does, and then
        a few of these again and again. ``print`` it after the loop. On a GPU, let the loop wait for each step
        (``torch.cuda.synchronize()``), or it times how fast steps are queued.

        The loader itself, its present epoch and torch's generators stay as they are.

        Args:
            steps: How many steps of each kind are timed, after two that warm up; fewer if there are fewer batches.

        Raises:
            ValueError: ``steps`` is less than 1.
        """
        return HeadRoom(self._fresh_batches, steps)

    def _fresh_batches(self) -> Iterator[Any]:
        """The batches of a copy of this loader."""
        twin: Any = copy.copy(self)
        vars(twin).update(_iterator=None, _course=self._course.twin(), _trace=None)
        generators = [torch.default_generator]
        if self.generator is not None:
            generators.append(self.generator)
        states = [each.get_state() for each in generators]
        batches = iter(twin)
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        return cast(Iterator[Any], batches)

    def coverage(self) -> Coverage:
        """What has become of the samples of the newest iterator's epoch so far.

        At the end of an epoch minato compares this by itself and raises ``CoverageError`` if a sample was lost or
        repeated.
        """
        return self._course.coverage()

    def reproduce(self, index: Any, epoch: int | None = None, seed: int | None = None) -> Any:
        """Load one sample in this process as a worker did, random numbers included.

        Args:
            index: What the dataset is asked for.
            epoch: By default the one that is running, or ran last.
            seed: As a quarantine file tells it; by default that of the loader, or of the pass that is running.

        Returns:
            ``dataset[index]`` after all transforms, not collated. What it raises is not caught.

        Raises:
            ValueError: No pass has begun and ``seed`` is not given.
        """
        if seed is None:
            seed = self._options.seed if self._options.seed is not None else self._course.seed
        if seed is None:
            raise ValueError(
                "the random numbers of a sample follow from a seed that is drawn when iteration starts, and it has "
                "not: give seed=, as the quarantine file tells it"
            )
        randomness = SampleRandomness(seed)
        with randomness.saved():
            if self._options.rng == "sample":
                randomness.bind(max(self._course.epoch, 0) if epoch is None else epoch, index)
            return Fetcher(self.dataset, self._chain, self._auto_collation).single(index)
