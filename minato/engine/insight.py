"""What one can ask a loader about itself: a part of ``DataLoader``."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import get_worker_info

from minato._compat import is_batched
from minato._support.loader_class import made_only
from minato._system import available_cores, local_rank
from minato.engine.factory import Opening
from minato.errors import MinatoWarning
from minato.options import Unbound, metrics_address
from minato.sampling.coverage import Coverage
from minato.sampling.epoch import is_stream
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness

if TYPE_CHECKING:  # each method imports what it shows: a loader that nobody asks has no use for it
    from minato.engine.slow_samples import SlowSamples
    from minato.observe.monitor.machine import MachineMonitor
    from minato.observe.report.bias import Labels
    from minato.observe.report.headroom import Headroom
    from minato.observe.report.live import Live
    from minato.observe.report.report import Report
    from minato.observe.stats.epoch_log import EpochLog

__all__ = ["Insight"]


class Insight(Opening):
    """Reports on a loader, and repeats single samples."""

    cache: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    _auto_collation: Any

    @made_only
    def report(self, labels: Labels | None = None) -> Report:
        """What limits the training, and all figures of the run and of each epoch so far.

        It can be asked for at any time; ``print`` shows it as text, ``rich.print`` in colour and Jupyter as a table.

        Args:
            labels: Tells whether samples that come late, or that ``on_error`` left out, have other labels: a sequence
                or mapping from the dataset's indices to labels, or a function. Labels of type float are numbers,
                others are classes.

        Raises:
            ValueError: The loader was made with ``stats=False``, or a sample has no label.
        """
        from minato.observe.report.build import report_of
        from minato.observe.report.figures import Setup

        journal = self._measured()
        options = self._options
        may_fetch_more = not (
            is_stream(self) or options.compat == "torch" or options.worker_kind == "ray"
        )
        concurrency = options.fetch_concurrency.concurrency
        bounded = self.num_workers > 0 and not isinstance(self.prefetch_factor, Unbound)
        whole = self._whole
        setup = Setup(
            num_workers=whole.num_workers,
            worker_method=whole._options.worker_kind,
            order=whole._options.order,
            batch_size=whole.batch_size,
            fetch_concurrency=concurrency,
            may_fetch_more=may_fetch_more,
            prefetch_factor=whole.prefetch_factor if bounded else None,
            persistent_workers=whole.persistent_workers,
            pin_memory=bool(whole.pin_memory),
            cores=available_cores(whole_node=bool(whole.shared_pool)),
            name=whole._options.name,
        )
        return report_of(setup, self._transforms.names, journal, labels)

    @made_only
    def live(self) -> Live:
        """Show how each epoch goes, from now on: a panel below what the program prints, four times a second.

        Where standard error is no terminal, or a dumb one, it is a line every five seconds; in a notebook, an output of
        the cell. Each epoch leaves a line behind. The environment variable ``MINATO_LIVE=1`` does the same for all
        loaders of a program.

        Returns:
            Ends the view by ``close()``, or at the end of a ``with`` block.

        Raises:
            ValueError: The loader was made with ``stats=False``.
        """
        from minato.observe.report.live import Live

        self._watch_gpus()
        return Live(self._measured(), self._options.name, ["dataset", *self._transforms.names])

    def _measured(self) -> EpochLog:
        self._refuse_attached("a report")
        if self._history.journal is None:
            raise ValueError("stats=False: nothing was measured; leave it out to have a report")
        return self._history.journal

    @property
    def metrics_url(self) -> str | None:
        """Where the loader's figures are told; None without ``metrics``, and before the first iteration."""
        from minato.observe.monitor.prometheus import LoaderMetrics

        journal = self._history.journal
        found = (
            [each.url for each in journal.observers if isinstance(each, LoaderMetrics)]
            if journal
            else []
        )
        return found[0] if found else None

    def _open_views(self) -> None:
        """Be live, and tell figures, if that is wished, in the training process."""
        if self._history.journal is None or get_worker_info() is not None:
            return
        self._watch_machine(self._history.journal)
        rank = local_rank()
        if _wished("MINATO_LIVE") and rank == 0:
            from minato.observe.report.live import Live

            watchers = self._history.journal.observers
            if not any(isinstance(watcher, Live) for watcher in watchers):
                self.live()
        place = self._options.metrics
        if place is None and (wished := _wished("MINATO_METRICS_PORT")) is not None:
            place = metrics_address(wished, "MINATO_METRICS_PORT")
        if place is not None and self.metrics_url is None:
            self._tell_figures(place, rank)
        if place is not None or self._options.stats == "gpu":
            self._watch_gpus()

    def _watch_machine(self, journal: EpochLog) -> MachineMonitor:
        """Note from now on what the machine does."""
        from minato.observe.monitor.machine import MachineMonitor
        from minato.observe.monitor.storage import StorageCounters

        if not isinstance(journal.machine, MachineMonitor):
            journal.machine = MachineMonitor()
            reads = self._options.fetch_concurrency.counters
            journal.storage = StorageCounters(self.dataset, self.cache, reads).counts
        return journal.machine

    def _watch_gpus(self) -> None:
        """Note the use of the GPUs, too: in local rank 0 alone, which sees those of the other ranks."""
        machine = self._watch_machine(self._measured())
        if machine.gpus is None and local_rank() == 0:
            from minato.observe.monitor.gpus import gpu_monitor

            machine.gpus = gpu_monitor()

    def _tell_figures(self, place: tuple[str, int], rank: int) -> None:
        from minato.observe.monitor.endpoint import serve
        from minato.observe.monitor.prometheus import LoaderMetrics

        host, port = place
        port += rank if port else 0
        stages = ["dataset", *self._transforms.names]
        exported = LoaderMetrics(self._measured(), self._options.name, stages)
        try:
            exported.url = serve(exported, host, port)
        except OSError as error:
            self._measured().observers.remove(exported)
            words = (
                f"the metrics of a loader cannot be told at {host}:{port}: {error.strerror}; use another port, or "
                "metrics=0 for any that is free"
            )
            if self._options.metrics is not None:
                raise OSError(error.errno, words) from None
            warnings.warn(words, MinatoWarning, stacklevel=4)

    @made_only
    def slow_samples(self) -> SlowSamples:
        """Which samples are slow, and where they lay in the newest iterator's batches."""
        from minato.engine.slow_samples import SlowSamples

        self._refuse_attached("slow_samples()")
        return SlowSamples.of(self._history, self._position.lateness())

    @made_only
    def headroom(self, steps: int = 50) -> Headroom:
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
        from minato.observe.report.headroom import Headroom

        self._refuse_ranks("headroom()")
        return Headroom(self._fresh_batches, steps)

    def _fresh_batches(self) -> Iterator[Any]:
        """The batches of a copy of this loader."""
        twin: Any = copy.copy(self)
        if hasattr(twin, "__del__"):  # what that ends, the loader itself still uses
            twin.__class__ = type(type(self).__name__, (type(self),), {"__del__": _nothing})
        vars(twin).update(_iterator=None, _position=self._position.twin(), _trace=None)
        generators = [torch.default_generator]
        if self.generator is not None:
            generators.append(self.generator)
        states = [each.get_state() for each in generators]
        batches = iter(twin)
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        return cast(Iterator[Any], batches)

    @made_only
    def coverage(self) -> Coverage:
        """What has become of the samples of the newest iterator's epoch so far.

        At the end of an epoch minato compares this by itself and raises ``CoverageError`` if a sample was lost or
        repeated.
        """
        self._refuse_attached("coverage()")
        return self._position.coverage()

    @made_only
    def reproduce(
        self,
        index: Any,
        epoch: int | None = None,
        seed: int | None = None,
        occurrence: int = 0,
    ) -> Any:
        """Load one sample in this process as a worker did, random numbers included.

        Args:
            index: What the dataset is asked for.
            epoch: By default the one that is running, or ran last.
            seed: As a quarantine file tells it; by default that of the loader, or of the pass that is running.
            occurrence: How often the index came before in that epoch, where the sampler repeats indices.

        Returns:
            ``dataset[index]`` after all transforms, not collated. What it raises is not caught.

        Raises:
            ValueError: No pass has begun and ``seed`` is not given.
        """
        from minato.workers.fetch import Fetcher

        epoch = max(self._position.epoch, 0) if epoch is None else epoch
        if seed is None:
            seed = (
                self._position.seed_of(epoch) if self._options.seed is None else self._options.seed
            )
        if seed is None:
            raise ValueError(
                "the random numbers of a sample follow from a seed that is drawn when iteration starts, and it has "
                "not: give seed=, as the quarantine file tells it"
            )
        randomness = SampleRandomness(
            seed, owned=OwnedGenerators({"dataset": self.dataset, **self._transforms.by_name})
        )
        with randomness.saved():
            fetcher = Fetcher(self.dataset, self._transforms, is_batched(self))
            if not self._options.seeds_samples:
                return fetcher.single(index)
            randomness.bind(epoch, index, occurrence)
            sample = fetcher.single(index)
            if (
                randomness.look()
            ):  # generators that this sample has made were bound to nothing in it
                randomness.bind(epoch, index, occurrence)
                sample = fetcher.single(index)
            return sample


def _nothing(loader: Any) -> None:
    """In place of a ``__del__``."""


def _wished(variable: str) -> str | None:
    """The value of an environment variable that is set."""
    value = os.environ.get(variable, "")
    return None if value in ("", "0") else value
