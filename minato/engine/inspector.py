"""Reports, views and single samples of a loader."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import get_worker_info

from minato._fork_safety import signals_deferred, this_process
from minato._support.objects import figures_of
from minato._support.values import counted, message_of, seconds, text_of, type_name
from minato._system import available_cores, environment, local_rank
from minato.checks import check_whole, given_whole
from minato.engine.factory import RankSession
from minato.engine.history import History
from minato.engine.spec import LoaderSpec
from minato.errors import missing, warn
from minato.observe.lateness import Lateness
from minato.options import parse_address
from minato.sampling.epoch import EpochPosition, Seeds
from minato.sampling.progress import Coverage
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness

if TYPE_CHECKING:  # each method imports its own view: most loaders need none of them
    from minato.observe.epoch_log import EpochLog
    from minato.observe.figures import Setup
    from minato.observe.live import Live
    from minato.observe.machine import MachineMonitor
    from minato.observe.metrics import LabelledMetrics
    from minato.observe.report import Report

_AT_EXIT = "minato.observe.at_exit"
"""Imported only where reports at the end of the process are wanted."""


class Inspector:
    """Implements the methods of a loader that report on its epochs."""

    def __init__(
        self,
        spec: LoaderSpec,
        history: History,
        position: EpochPosition,
        session: RankSession | None,
    ) -> None:
        self._spec, self._history, self._position, self._session = spec, history, position, session

    def refuse_ranks(self, method: str) -> None:
        """Raise ValueError if several ranks share the workers."""
        if self._session is not None and not self._session.alone:
            raise ValueError(
                f"{method} is about one rank's own workers, and with workers=SharedPool(...) there are none: use a "
                "loader without it"
            )

    def _refuse_attached(self, method: str) -> None:
        if self._session is not None and not self._session.hosts:
            raise ValueError(
                f"{method} is about the workers of all ranks of this node, and local rank 0 has them: ask its loader"
            )

    def report(self) -> Report:
        """See ``DataLoader.report``."""
        from minato.observe.report import report_of

        figures = figures_of(self._spec.dataset)
        return report_of(self._setup(), self._spec.stages, self._measured(), figures)

    def _setup(self) -> Setup:
        from minato.observe.figures import Setup
        from minato.observe.verdict import uses_pil

        spec = self._spec if self._session is None else self._session.pooled(self._spec)
        workers, options = spec.workers, spec.options
        bounded = workers.count > 0 and workers.bounds_prefetch
        may_fetch_more = not (
            spec.sampling.streams or options.compat == "torch" or options.worker_kind == "ray"
        )
        return Setup(
            num_workers=workers.count,
            worker_method=options.worker_kind,
            order=options.order,
            in_order=options.returns_in_order and not options.replays,
            batch_size=spec.sampling.batch_size,
            fetch_concurrency=options.fetch_concurrency.concurrency,
            may_fetch_more=may_fetch_more,
            prefetch_factor=workers.prefetch_factor if bounded else None,
            persistent_workers=workers.persistent,
            pin_memory=spec.pin_memory,
            readers=None if options.readers is None else len(spec.sampling.own_readers),
            reads_here=options.readers is not None and options.readers.where == "main",
            cores=available_cores(whole_node=options.shared_pool is not None),
            name=options.name,
            uses_pil=uses_pil([spec.dataset, *spec.transforms.steps]),
            ranks=1 if self._session is None else len(self._session.ranks),
            reader_ranks=spec.sampling.dealt[1],
            is_stream=spec.sampling.streams,
            needs_workers=workers.context is not None
            or workers.timeout_s > 0
            or options.errors.sample_timeout is not None
            or options.shared_pool is not None,
            most_workers=_most_workers(spec),
            max_lag=options.max_lag if options.mixes_batches and options.max_lag > 1 else None,
            window_grows=not isinstance(options.snapshot_every_n_steps, int)
            if spec.sampling.streams
            else options.compat != "torch",
        )

    def live(self) -> Live:
        """See ``DataLoader.live``."""
        from minato.observe.live import Live

        self.watch_gpus()
        log = self._measured()
        return Live(self._history.observers, log, self._spec.options.name, self._stages)

    @property
    def _stages(self) -> list[str]:
        return ["dataset", *self._spec.stages]

    def metrics(self) -> dict[str, float]:
        """See ``DataLoader.metrics``."""
        from minato.observe.metrics import values_of

        return values_of(self._measured("metrics()").totals())

    def labelled_metrics(self) -> LabelledMetrics:
        """The metrics of this loader for Prometheus."""
        from minato.observe.metrics import LabelledMetrics

        return LabelledMetrics(self._measured("metrics"), self._spec.options.name, self._stages)

    def _measured(self, method: str = "a report") -> EpochLog:
        self._refuse_attached(method)
        if self._history.epoch_log is None:
            raise ValueError("observe=False: nothing was measured; leave it out to have a report")
        return self._history.epoch_log

    @property
    def metrics_url(self) -> str | None:
        """See ``DataLoader.metrics_url``."""
        served = self._history.served_metrics
        return None if served is None else served.url

    def open_views(self) -> None:
        """Open what options or environment request in the main process: live view, metrics endpoint, last report."""
        if get_worker_info() is None and self._history.epoch_log is not None:
            self._open_views(self._history.epoch_log)
        self._history.views_of = self._spec, this_process.pid

    def _open_views(self, epoch_log: EpochLog) -> None:
        _open("the report at the end", self._keep_for_exit, epoch_log)
        _open("the figures of the machine", self._watch_machine, epoch_log)
        if environment("MINATO_LIVE") and local_rank() == 0:
            from minato.observe.live import Live

            if not any(isinstance(observer, Live) for observer in self._history.observers):
                _open("the live view", self.live)
        observe = self._spec.options.observe
        if observe.address is not None:
            self._serve_metrics(observe.address)
        elif (port := environment(variable := "MINATO_METRICS_PORT")) is not None:
            _open("the metrics", lambda: self._serve_metrics(parse_address(port, variable)))
        if self.metrics_url is not None or observe.stats == "gpu":
            _open("the figures of the GPUs", self.watch_gpus)

    def close_views(self) -> None:
        """Close the metrics endpoint, unless other loaders use it; the next ``open_views`` opens it again."""
        self._history.served_metrics = self._history.views_of = None

    def _keep_for_exit(self, epoch_log: EpochLog) -> None:
        """Have a report printed or written when the process ends, if ``minato run`` or the environment asks for it."""
        path = environment("MINATO_REPORT")
        if path is None and _AT_EXIT not in sys.modules:
            return
        if self._session is not None and not self._session.hosts:
            return
        from minato.observe import at_exit

        if path is not None:
            at_exit.write_at_exit(path)
        at_exit.keep(self._setup, self._spec.stages, epoch_log)

    def _watch_machine(self, epoch_log: EpochLog) -> MachineMonitor:
        from minato.observe.machine import MachineMonitor, storage_counts

        if not isinstance(epoch_log.machine, MachineMonitor):
            epoch_log.machine = MachineMonitor()
            reads = self._spec.options.fetch_concurrency.counters
            cache = None if self._spec.cache is None else self._spec.cache.counters
            epoch_log.storage = storage_counts(self._spec.dataset, cache, reads)
        return epoch_log.machine

    def watch_gpus(self) -> None:
        """Start to record the use of the GPUs, only in local rank 0, which sees those of the other ranks too."""
        machine = self._watch_machine(self._measured())
        if machine.gpus is None and local_rank() == 0:
            from minato.observe.gpus import gpu_table

            machine.gpus = gpu_table()

    def _serve_metrics(self, address: tuple[str, int]) -> None:
        """Serve the metrics, unless they are; OSError: the address is taken. RuntimeError: no thread can start."""
        if self._history.served_metrics is not None:
            return
        from minato.observe.metrics import ServedMetrics

        host, port = address
        port += local_rank() if port else 0
        try:
            with signals_deferred():  # one that nobody holds would keep the address for good
                self._history.served_metrics = ServedMetrics(self.labelled_metrics(), (host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or message_of(error)
            raise OSError(
                getattr(error, "errno", errno.EINVAL),
                f"the metrics of a loader cannot be served at {host}:{port}: {reason}; use another port, or "
                "metrics=0 for any that is free",
            ) from None
        except ImportError:
            raise missing("serving metrics", "prometheus_client", "metrics") from None

    def slow_samples(self) -> SlowSamples:
        """See ``DataLoader.slow_samples``."""
        self._refuse_attached("slow_samples()")
        last = self._position.last
        return SlowSamples.of(self._history, last.progress.lateness if last else Lateness())

    def coverage(self) -> Coverage:
        """See ``DataLoader.coverage``."""
        self._refuse_attached("coverage()")
        return self._position.coverage()

    def randomness(self, seed: int) -> SampleRandomness:
        """Binds all generators of this process that a sample may use: the global ones, and the dataset's own."""
        owned = {"dataset": self._spec.dataset, **self._spec.transforms.by_name}
        return SampleRandomness(seed, owned=OwnedGenerators(owned))

    def reproduce(self, index: object, epoch: int | None, seed: int | None, occurrence: int) -> Any:
        """See ``DataLoader.reproduce``."""
        from minato.workers.fetch import Fetcher

        spec, position = self._spec, self._position
        epoch = max(position.epoch, 0) if epoch is None else given_whole("epoch", epoch, None)
        seed, occurrence = check_whole("seed", seed, None), given_whole("occurrence", occurrence, 0)
        sampling = spec.sampling
        if seed is None and sampling.replay is not None:
            seed = sampling.replay.seed(epoch)
        elif seed is None:
            own = sampling.seed
            seed = position.seed_of(epoch) if own is None else Seeds(own).of(epoch)
        if seed is None:
            raise ValueError(
                "the random numbers of a sample follow from a seed that is drawn when iteration starts, and it has "
                "not: give seed=, as in the file of ErrorPolicy.log"
            )
        randomness = self.randomness(seed)
        with randomness.saved():
            fetcher = Fetcher(spec.dataset, spec.transforms, spec.sampling.batched)
            if not spec.options.seeds_samples:
                return fetcher.single(index)
            randomness.bind(epoch, index, occurrence)
            sample = fetcher.single(index)
            if randomness.look():  # this sample made generators that were not bound
                randomness.bind(epoch, index, occurrence)
                sample = fetcher.single(index)
            return sample


def _most_workers(spec: LoaderSpec) -> int | None:
    """The largest number of workers that goes with the other arguments; None: any."""
    fetch, cache = spec.options.fetch_concurrency, spec.cache
    if cache is not None and not cache.shared and spec.options.worker_kind == "process":
        return spec.workers.count  # each process has a cache of its own
    if fetch.max_in_flight is None:
        return None
    return fetch.max_in_flight - (fetch.hedge_percentile is not None)


def _open(what: str, make: Callable[..., object], *arguments: object) -> None:
    """Make a view; without it, the loader goes on, but where warnings are errors."""
    try:
        make(*arguments)
    except Exception as error:
        if isinstance(error, Warning):
            raise
        warn(
            f"{what} of a loader will be missing, because {type_name(error)} was raised: {message_of(error)}"
        )


class RunningSample(NamedTuple):
    """A slow sample that a worker is still loading.

    Attributes:
        index: Of the dataset; of an iterable one, reader and number of the item.
        worker: Number of the worker.
        running_s: Time that it has taken so far, in seconds; without the time before it was deferred, if it was.
        transform: Name of the running transform; None: the dataset.
    """

    index: Any
    worker: int
    running_s: float
    transform: str | None


class SlowSamples(NamedTuple):
    """Which samples are slow, and where they are in the batches of one epoch.

    Attributes:
        threshold_s: A sample that takes longer, in seconds, is slow; 0: none is.
        why: ``warm-up``, ``uniform`` (costs differ too little), ``following`` (the threshold follows the costs) or
            ``fixed`` (by ``StragglerPolicy.after_s``).
        share: Share of slow samples among the latest, from 0 to 1.
        lags: Number of samples of the newest epoch for each lag, in batches behind strict order; negative: ahead of it.
        shares: Share of slow samples in each returned batch of that epoch.
        running: Slow samples that are still being loaded, the longest first.
    """

    threshold_s: float
    why: str
    share: float
    lags: Mapping[int, int]
    shares: tuple[float, ...]
    running: tuple[RunningSample, ...]

    @classmethod
    def of(cls, history: History, lateness: Lateness) -> SlowSamples:
        """Make it from a loader's history and the lateness of its newest epoch."""
        decision, running = history.decision, list[RunningSample]()
        for reference in list(history.engines) if decision.threshold_ns else ():
            if (engine := reference()) is not None:
                running += [
                    RunningSample(sample.index, worker, taken_ns / 1e9, sample.transform)
                    for worker, sample, taken_ns in engine.running(decision.threshold_ns)
                ]
        return cls(
            decision.threshold_ns / 1e9,
            decision.phase,
            decision.slow_share,
            dict(sorted(lateness.lags.items())),
            tuple(lateness.slow_shares),
            tuple(sorted(running, key=lambda each: -each.running_s)),
        )

    def __str__(self) -> str:
        if not self.threshold_s:
            return f"No sample is slow ({self.why})."
        lines = [
            f"Samples above {seconds(self.threshold_s)} are slow ({self.why}): {self.share:.1%} of the latest.",
            f"{self.late_share:.1%} of the samples came in a later batch than their own, "
            f"at most {counted(self.most_late, 'batches')} late.",
        ]
        lines += [
            f"Sample {text_of(each.index)} has run for {seconds(each.running_s)} on worker {each.worker}, "
            f"in {each.transform or 'the dataset'}."
            for each in self.running
        ]
        return "\n".join(lines)

    @property
    def late_share(self) -> float:
        """Share of the samples that came in a later batch than their own; 0 before the first one."""
        late = sum(count for lag, count in self.lags.items() if lag > 0)
        return late / max(sum(self.lags.values()), 1)

    @property
    def most_late(self) -> int:
        """Batches by which the latest sample was late; 0 if none was."""
        return max([0, *self.lags])
