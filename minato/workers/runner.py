"""Running samples: their randomness, costs and slices in a trace.

A sample may run stage by stage, the dataset and then each transform, with a clock in between. A worker may defer a slow
sample between two transforms, and resume it later.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import thread_time_ns
from typing import Any

from minato._core import Lease, WorkerLedger, now_ns, run_samples, run_steps
from minato._fork_safety import end_copy
from minato._support.hashes import index_hash
from minato._support.items import Item, item_of
from minato._support.objects import nbytes_of
from minato.batching.blobs import Kinds
from minato.observe.meters import UNKNOWN, Meters
from minato.observe.tracer import NULL_TRACER, REPEATED, SAMPLE, Tracer
from minato.sampling.samplers import copied_index
from minato.transforms.compose import CollateFn, Transforms
from minato.transforms.rng import Captured, SampleRandomness
from minato.workers.plan import WorkerPlan
from minato.workers.reads import Read

_PROBES = 16  # number of first samples that are watched for draws
WORTH_BINDING_NS = 50_000
"""Samples that cost more are always bound, which takes about a microsecond."""
_WORTH_WATCHING = 8
"""Watching a run for draws takes as long as binding this many samples, where no generator is saved for the program."""
_WORTH_MEASURING_NS, _FOR_EACH_STEP_NS = 4_000_000, 600_000
"""Samples that cost more than the sum, with its second part for each transform, are all timed stage by stage.

It takes three microseconds, but twenty, and six for each transform, where samples have emptied the processor's caches.
"""
_MEASURE_EVERY, _MEASURE_OFTEN, _EXPENSIVE = 32, 8, 4
"""Of cheaper samples, one is timed in the first run and every 32nd; every 8th from a quarter of that cost on."""
_MEASURE_RARELY = 256
"""Of the runs of ``run_quickly``, each 256th makes way for one with a timed sample, which takes as long as three."""
_FIRST_GUESS_NS = 1.9e6
"""The mean cost per sample before one has run: no two are claimed at once, and they are not worth measuring."""
_RISE, _FALL = 0.2, 0.7  # the smoothing of the mean cost per sample

Fetch = Callable[[Any], Any]
Bind = Callable[[int, Any], None]
Ran = tuple[list[Any], BaseException | None]
"""The samples that have run, and what the next one raised, or None."""
Occurrences = Callable[[int, int], list[int] | None]


def of_copies(fetch: Fetch, index: object) -> Fetch:
    """Return what gives ``fetch`` a copy of each index, where they are like this one.

    The dataset may change an index that is a list or a dictionary, and its sample may run again.
    """
    if type(index) in (int, str):
        return fetch
    return lambda index: fetch(copied_index(index))


@dataclass(eq=False)
class DeferredSample:
    """A sample between two of its transforms, claimed as before; ``value`` is the result of those so far."""

    position: int
    index: Any
    value: Any
    step: int  # the transform that is next
    # State of its generators (``SampleRandomness.capture``); None: they are not bound to samples.
    randomness: Captured | None
    active_ns: int  # time spent on it so far
    cpu_ns: int | None  # processor time spent on it so far; None: not measured
    # The longest stage so far (-1: the dataset) and its time in ns; unused if not measured.
    longest: tuple[int, int]
    deferred_ns: int


@dataclass(eq=False)
class Deferral:
    """Decides which slow sample a worker defers, keeps it, and decides when the worker resumes it.

    Deferral changes the order of work, not its amount. A worker therefore defers a sample only while the consumer waits
    for a batch that quicker samples can fill. It resumes the sample when the consumer no longer waits, or when few
    other samples remain: otherwise the other workers would idle at the end while this one completes it. It defers one
    sample at a time: more would only pile up work, and need memory.

    ``num_workers`` returns how many workers share the samples that are left to claim.
    """

    ledger: WorkerLedger
    meters: Meters
    num_workers: Callable[[], int]
    num_deferred: int = field(default=0, init=False)
    """How many samples the worker has deferred so far."""
    _sample: DeferredSample | None = field(default=None, init=False)

    def allows(self, position: int) -> bool:
        """Whether the worker defers the slow sample at this position now."""
        ledger = self.ledger
        return (
            self._sample is None
            and bool(ledger.waiting)
            and self._others_have_work()
            # A sample that started early must be complete when its batch is due.
            and position < ledger.front
            and not ledger.is_placed(position)
        )

    def defer(self, sample: DeferredSample) -> None:
        """Keep a sample until ``take``."""
        self._sample = sample
        self.num_deferred += 1

    def is_due(self) -> bool:
        """Whether the deferred sample goes before samples that no worker has begun."""
        sample, ledger = self._sample, self.ledger
        return sample is not None and (
            not ledger.waiting
            or not self._others_have_work()
            # ``max_lag`` is reached: the batch that needs this sample is settled.
            or ledger.is_placed(sample.position)
        )

    def take(self) -> DeferredSample | None:
        """Return the deferred sample, which the worker then resumes; None if there is none."""
        sample, self._sample = self._sample, None
        if sample is not None:
            self.meters.deferred.record(max(now_ns() - sample.deferred_ns, 0))
        return sample

    def _others_have_work(self) -> bool:
        """Whether each worker can claim another sample meanwhile."""
        return self.ledger.unclaimed() > self.num_workers()


class StageRunner:
    """Runs samples stage by stage, so that it can time the stages and defer a slow sample.

    The step of the worker's ``lease`` always names the stage that runs, -1 being the dataset's. ``meters`` receive the
    times of the stages of measured samples.
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Transforms,
        *,
        lease: Lease,
        meters: Meters,
        deferral: Deferral | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self._dataset = dataset
        self._steps = transforms.steps
        self._lease = lease
        self._meters = meters
        self.deferral = deferral
        self._names = transforms.names
        self._tracer = tracer
        self._laps = array("q", bytes(8 * len(transforms.steps)))
        self._longest = -1, 0
        self.longest: list[tuple[int, int]] = []
        """The longest stage (-1: the dataset) and its time, of each sample measured since it was cleared."""
        self.slow_ns = 0
        """A sample that has taken longer may be deferred; 0: none is, as without a ``deferral``."""
        self.capture: Callable[[], Captured] | None = None
        """Saves the randomness of the current sample; None while it is not bound to samples."""

    def straight(self, index: object) -> Any:
        """The sample of an index, not measured; a DeferredSample if it was deferred."""
        value = self._dataset[index]
        return self._transform(index, value, 0, 0, None, self._is_slow())

    def measured(self, index: object) -> Any:
        """The sample of an index, measured; a DeferredSample if it was deferred."""
        cpu_ns, begin_ns = thread_time_ns(), now_ns()
        value = self._dataset[index]
        end_ns = now_ns()
        if self._tracer.enabled:
            self._tracer.slice("dataset", begin_ns, end_ns)
        return self.transformed(index, value, end_ns - begin_ns, cpu_ns)

    def transformed(self, index: object, value: object, dataset_ns: int, cpu_ns: int) -> Any:
        """``measured`` for a read that took ``dataset_ns``; here, it would have begun at the thread time ``cpu_ns``."""
        self._meters.dataset.record(dataset_ns)
        self._meters.size.record(nbytes_of(value))
        self._longest = -1, dataset_ns
        return self._transform(index, value, 0, 0, cpu_ns, self._is_slow())

    def resume(self, sample: DeferredSample) -> Any:
        """Resume a deferred sample, for at least one transform; a DeferredSample if it is deferred again."""
        self._longest = sample.longest
        cpu_ns = None if sample.cpu_ns is None else thread_time_ns() - sample.cpu_ns
        # Transforms may change the value in place: no other reference may remain.
        value, sample.value = sample.value, None
        return self._transform(sample.index, value, sample.step, sample.active_ns, cpu_ns, False)

    def _is_slow(self) -> bool:
        """Whether the dataset alone has made the sample slow."""
        return self.slow_ns > 0 and now_ns() - self._lease.started_ns >= self.slow_ns

    def _transform(
        self,
        index: object,
        value: object,
        step: int,
        active_ns: int,
        cpu_ns: int | None,
        is_slow: bool,
    ) -> Any:
        """Run the transforms from ``step`` on, or those until the sample is deferred, at once if it ``is_slow``.

        Before this lease it took ``active_ns``. Without the deferral, it would have begun at the thread time
        ``cpu_ns``; None: not measured.
        """
        steps, num_steps, laps, lease = self._steps, len(self._steps), self._laps, self._lease
        deferral = self.deferral if self.slow_ns else None
        deadline_ns = 0
        if deferral is not None:
            deadline_ns = max(lease.started_ns + self.slow_ns - active_ns, 1)
        while step < num_steps:
            position = lease.position if is_slow and deferral is not None else None
            if position is not None and deferral is not None and deferral.allows(position):
                now = now_ns()
                sample = DeferredSample(
                    position=position,
                    index=index,
                    value=value,
                    step=step,
                    randomness=None if self.capture is None else self.capture(),
                    active_ns=active_ns + now - lease.started_ns,
                    cpu_ns=None if cpu_ns is None else thread_time_ns() - cpu_ns,
                    longest=self._longest,
                    deferred_ns=now,
                )
                deferral.defer(sample)
                return sample
            # Past its deadline a sample runs one transform at a time.
            first, is_slow = step, True
            timed = None if cpu_ns is None else laps
            value, step = run_steps(steps, value, step, deadline_ns, timed, lease)
            if timed is not None:
                self._note(first, step)
        if cpu_ns is not None:
            self._meters.cpu.record(max(thread_time_ns() - cpu_ns, 0))
            self._meters.transforms.record(num_steps)
            self.longest.append(self._longest)
        return value

    def _note(self, first: int, stop: int) -> None:
        laps = self._laps
        for i in range(first, stop):
            self._meters.steps[i].record(laps[i])
            if laps[i] > self._longest[1]:
                self._longest = i, laps[i]
        if self._tracer.enabled:
            # Computed backwards from now, so that no slice overlaps the one before it.
            begin_ns = now_ns() - sum(laps[first:stop])
            for i in range(first, stop):
                end_ns = begin_ns + laps[i]
                self._tracer.slice(self._names[i], begin_ns, end_ns)
                begin_ns = end_ns


@dataclass
class CostEstimate:
    """A worker's estimate of the samples that it runs.

    ``mean_ns`` is the moving average of their cost. ``draws`` and ``collate_draws`` tell whether samples, or
    ``collate_fn``, draw random numbers that are bound; None while they are ``watched`` and it is unknown.
    ``has_looked``: it has looked for generators that its first sample made.
    """

    mean_ns: float = _FIRST_GUESS_NS
    draws: bool | None = None
    watched: int = 0
    has_looked: bool = False
    collate_draws: bool | None = None
    watched_batches: int = 0


class Runner:
    """Runs the samples of one worker, whose ``lease`` always says which.

    Args:
        make_randomness: Makes, of a seed, what binds the generators to each sample; None leaves them alone.
        stage_runner: Runs samples stage by stage; None: they have no stages.
        cost_estimate: That of an earlier worker on the same samples.
        occurrences: Returns how often the index of each of ``count`` samples from a position on came before in the
            epoch; None: none did.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        *,
        lease: Lease,
        meters: Meters,
        make_randomness: Callable[[int], SampleRandomness] | None = None,
        stage_runner: StageRunner | None = None,
        cost_estimate: CostEstimate | None = None,
        occurrences: Occurrences = lambda position, count: None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self.tracer = tracer
        self._stats = plan.stats
        self._occurrences = occurrences
        self.lease = lease
        self._make_randomness = make_randomness
        self.randomness: SampleRandomness | None = None
        """What binds the generators, since ``enter``."""
        self.meters = meters
        self._total, self._slowest = meters.total, meters.slowest
        self._stage_runner = stage_runner
        self._stages: list[tuple[int, int]] = [] if stage_runner is None else stage_runner.longest
        self._streams = plan.pipeline.streams
        self.may_repeat = not self._streams
        """Whether cheap samples may run unbound, and again if one draws: not those that are read only once."""
        self.failure: BaseException | None = None
        """Every sample raises it: what ``worker_init_fn`` raised."""
        self.catches: Kinds = (Exception,)
        """What a sample may raise without ending the worker."""
        # In the main process the consumer must find its generators unchanged.
        self._in_main_process = plan.in_main_process
        # In the main process, a copy of the worker is one of the program, and its own.
        self._owner = None if plan.in_main_process else os.getpid()
        self.cost_estimate = cost_estimate or CostEstimate()
        if make_randomness is None:
            self.cost_estimate.draws = False
        self.durations = array("q", bytes(8))
        """Active time in ns of each sample that ``run`` or ``resume`` returned last."""
        self.longest_ns = 0
        """The largest of these."""
        self.deferral = None if stage_runner is None else stage_runner.deferral
        self.ahead_ns = 0
        """Cost of the next sample before it runs: the time of its concurrent read."""
        num_steps = 0 if stage_runner is None else len(meters.steps)
        # A trace shows the stages of every sample.
        self._worth_measuring_ns = (
            0 if tracer.enabled else _WORTH_MEASURING_NS + num_steps * _FOR_EACH_STEP_NS
        )
        self._runs = 0

    def observe(self, cost_ns: float) -> None:
        """Update the estimate with the mean cost of the samples of a run."""
        # Fast down, slow up: the first samples of a run are often the most expensive, and a straggler is no trend.
        mean_ns = self.cost_estimate.mean_ns
        weight = _RISE if cost_ns > mean_ns else _FALL
        if mean_ns == _FIRST_GUESS_NS:
            weight = 1.0
        self.cost_estimate.mean_ns = mean_ns + weight * (cost_ns - mean_ns)

    @property
    def seed(self) -> int:
        """Seed of the randomness of samples; 0 if it is not bound."""
        return 0 if self.randomness is None else self.randomness.base_seed

    def enter(self, seed: int, *, looks: bool = False) -> None:
        """Bind randomness to this seed; ``looks``: search for generators again, as the program may have made others."""
        randomness = self.randomness
        if randomness is not None:
            if (looks or randomness.base_seed != seed) and randomness.restart(seed):
                self.cost_estimate.draws = self.cost_estimate.collate_draws = True
        elif self._make_randomness is not None:
            self.randomness = randomness = self._make_randomness(seed)
            if self._stage_runner is not None:
                self._stage_runner.capture = randomness.capture

    def be_program(self) -> None:
        """Leave nothing of a sample in the program's generators, wherever a call was interrupted."""
        if self.randomness is not None:
            self.randomness.be_program()

    @property
    def is_looking(self) -> bool:
        """Whether the next sample may run again, because it may make generators."""
        return self.cost_estimate.draws is None and not self.cost_estimate.has_looked

    @property
    def is_plain(self) -> bool:
        """Whether samples are neither traced nor bound, nor have stages: ``run_quickly`` may run them."""
        return (
            self._stage_runner is None
            and not self.tracer.enabled
            and self.randomness is None
            and self.failure is None
        )

    def may_run_quickly(self, count: int, collates: bool) -> bool:
        """Whether ``count`` samples are cheap, and it is known whether they draw: ``run_quickly`` may run them.

        With ``collates``, what the program makes of them must not draw either. Where samples did not draw until now,
        which saves the cost of binding them, the caller watches them, and runs them again, bound, if one does.
        """
        estimate = self.cost_estimate
        mean_ns = estimate.mean_ns
        return (
            estimate.draws is not None
            and (mean_ns < WORTH_BINDING_NS or self.longest_ns < WORTH_BINDING_NS)
            and mean_ns * _EXPENSIVE < self._worth_measuring_ns  # nothing where samples are traced
            and self._runs % _MEASURE_RARELY > 0
            and count <= len(self.durations)
            and self._stage_runner is not None
            and (
                not collates
                or self.randomness is None
                or not (estimate.draws or estimate.collate_draws is not False)
            )
        )

    def undo_draws(self, randomness: SampleRandomness) -> None:
        """Undo what samples drew that ran unbound: they run again, and from now on all are bound."""
        self.cost_estimate.draws = self.cost_estimate.collate_draws = True
        randomness.rewind()

    def run_quickly(
        self, position: int, epoch: int, indices: list[object], fetch: Fetch, bind: Bind | None
    ) -> Ran:
        """Run samples as ``run`` does, where ``may_run_quickly`` or ``is_plain``."""
        lease, durations = self.lease, self.durations
        self._runs += 1
        samples, error = run_samples(
            fetch, indices, position, lease, durations, bind, epoch, self.catches
        )
        self.longest_ns = longest_ns = self._total.record_all(durations, len(samples))
        if self._stats and longest_ns > self._slowest.floor_ns:
            self._stages.clear()
            self._note_slowest(samples, indices, epoch)
        return samples, error

    def record_call(self, items: list[object], keys: object, epoch: int, taken_ns: int) -> None:
        """Record a call of a reader that was made without ``run_quickly``."""
        self.longest_ns = self.durations[0] = taken_ns
        self._total.record(taken_ns)
        if self._stats and taken_ns > self._slowest.floor_ns:
            self._stages.clear()
            self._note_slowest([items], [keys], epoch)

    def read(self, position: int, epoch: int, keys: Sequence[int], take: Fetch) -> Ran:
        """The items that one call of a reader gives, with its generators left alone, and what the next one raised."""
        if self.failure is not None:
            return [], self.failure
        if self.tracer.enabled:
            take = self._recorded_many(take, epoch, lambda taken: len(taken.items) or None)
        results, error = self._run(position, epoch, [keys], take, None)
        self._stages.clear()
        items, error = results[0] if results else ([], error)
        if count := len(items):
            each = array("q", [self.durations[0] // count]) * count
            self.meters.reading.record_all(each, count)
        return items, error

    def collated(
        self, collate: CollateFn, samples: object, bound: AbstractContextManager[None]
    ) -> Any:
        """What ``collate`` makes of samples, bound to the batch; finds out whether it draws."""
        randomness, estimate = self.randomness, self.cost_estimate
        with bound:
            if randomness is None or estimate.collate_draws is not None or not randomness.watches:
                return collate(samples)
            randomness.mark(unbind=False)
            made = collate(samples)
            estimate.watched_batches += 1
            if randomness.drawn():
                estimate.collate_draws = True
            elif estimate.watched_batches == _PROBES:
                estimate.collate_draws = False
        return made

    def bound_to_batch(
        self, seed: int, epoch: int, index: object, occurrence: int
    ) -> AbstractContextManager[None]:
        """Bind randomness to a batch inside the ``with`` block, by the first of its samples."""
        if self._make_randomness is None:
            return nullcontext()
        self.enter(seed)
        randomness = self.randomness
        assert randomness is not None
        # An index and its occurrence belong to one batch of an epoch. Negative: the sample itself draws others.
        return randomness.bound(epoch, index, ~occurrence, restores=self._in_main_process)

    def instead_of(
        self, epoch: int, index: object, occurrence: int
    ) -> AbstractContextManager[None]:
        """Bind randomness, inside the ``with`` block, to what takes the place of a sample that has failed."""
        if self.randomness is None:
            return nullcontext()
        return self.randomness.instead(epoch, index, occurrence, restores=self._in_main_process)

    def transformed(self, read: Read, transform: Fetch, again: Fetch, index: object) -> Any:
        """The sample of a read that has finished in another thread, without stages by ``transform``; or its error.

        One that runs once more is loaded ``again``.
        """
        if read.used:
            return again(index)
        read.used = True
        if read.error is not None:
            self.lease.step = read.step
            raise read.error
        if self.randomness is not None:
            self.randomness.asked = read.asked  # generators that it has got from minato
        if self._stage_runner is None:
            return transform(read.value)
        cpu_ns = thread_time_ns() - read.cpu_ns
        return self._stage_runner.transformed(read.index, read.value, read.duration_ns, cpu_ns)

    def run_steps(
        self, position: int, epoch: int, indices: list[object], plain: Fetch, slow_ns: int
    ) -> Ran:
        """Run samples until one raises, stage by stage where that costs little, or where one may be deferred.

        ``plain`` runs a sample without a clock between its stages. One that has taken longer than ``slow_ns`` may be
        deferred; 0: none may. A DeferredSample stands for one that was.
        """
        stage_runner = self._stage_runner
        if stage_runner is None:
            return self.run(position, epoch, indices, plain)
        stage_runner.slow_ns = slow_ns
        if slow_ns and self.randomness is not None:
            draws = self.cost_estimate.draws
            if draws is None or (draws is False and self._are_cheap(len(indices))):
                # Samples that may run again are not deferred. The lease names the transform that runs all the same.
                stage_runner.slow_ns = 0
        self._runs += 1
        mean_ns, worth_ns = self.cost_estimate.mean_ns, self._worth_measuring_ns
        if mean_ns >= worth_ns:
            return self.run(position, epoch, indices, stage_runner.measured)
        fetch = stage_runner.straight if slow_ns else plain
        every = _MEASURE_OFTEN if mean_ns * _EXPENSIVE >= worth_ns else _MEASURE_EVERY
        if self._runs % every != 1:
            return self.run(position, epoch, indices, fetch)
        lease, last, measured = self.lease, position + len(indices) - 1, stage_runner.measured
        return self.run(
            position,
            epoch,
            indices,
            lambda index: measured(index) if lease.position == last else fetch(index),
        )

    def run(
        self,
        position: int,
        epoch: int,
        indices: list[object],
        fetch: Fetch,
        batch_size: int = 0,
        repeats: bool = False,
    ) -> Ran:
        """Run samples until one raises; returns them and what it raised.

        With a ``batch_size``, the only index stands for all samples of a batch. ``repeats``: they have run before.
        """
        self._stages.clear()
        if len(indices) > len(self.durations):
            self.durations = array("q", bytes(8 * len(indices)))
        if self.failure is not None:
            return [], self.failure
        if indices and not batch_size:
            fetch = of_copies(fetch, indices[0])
        if self.tracer.enabled:
            if batch_size:
                fetch = self._recorded_many(
                    fetch, epoch, lambda made: len(made) if isinstance(made, list) else batch_size
                )
            else:
                fetch = self._recorded(fetch, epoch, repeats=repeats)
        randomness, draws = self.randomness, self.cost_estimate.draws
        if randomness is None:
            samples, error = self._run(position, epoch, indices, fetch, None)
        elif draws is False and self._are_cheap(len(indices)):
            # Binding costs as much as these samples, and earlier ones did not draw. If one draws after all, these few
            # run again, bound, and all later ones are bound.
            randomness.mark()
            samples, error = self._run(position, epoch, indices, fetch, None)
            if randomness.drawn():
                self.cost_estimate.draws = True
                randomness.rewind()
                self._stages.clear()
                samples, error = self._run_bound(position, epoch, indices, fetch, batch_size)
        else:
            samples, error = self._run_bound(position, epoch, indices, fetch, batch_size)
        self._record(samples, indices, epoch)
        return samples, error

    def record_rows(self, indices: list[object], epoch: int, begun_ns: int) -> None:
        """Record samples that were copied together, from ``begun_ns`` until now."""
        count = len(indices)
        self.durations = array("q", [(now_ns() - begun_ns) // count]) * count
        self._stages.clear()
        self._record(indices, indices, epoch)
        self.tracer.slice(f"{SAMPLE}s", begun_ns, args={"count": count, "epoch": epoch})

    def occurrence(self, position: int) -> int:
        """How often the index of the sample at a position came before in the epoch."""
        found = self._occurrences(position, 1)
        return 0 if found is None else found[0]

    def _binder(self, position: int, count: int, batch_size: int = 0) -> Bind:
        """Return a function that binds the randomness to each of ``count`` samples, in order, once each."""
        randomness = self.randomness
        assert randomness is not None
        found = self._occurrences(position, batch_size or count)
        if found is None:
            return randomness.bind
        if batch_size:
            found = [index_hash(tuple(found))]
        following = iter(found)
        return lambda epoch, index: randomness.bind(epoch, index, next(following))

    def _are_cheap(self, count: int) -> bool:
        # The mean, too: one sample is long where its process had to wait for a processor.
        cost_ns = min(self.longest_ns, self.cost_estimate.mean_ns)
        return cost_ns < WORTH_BINDING_NS and count >= (
            1 if self._in_main_process else _WORTH_WATCHING
        )

    def resume(self, deferred: DeferredSample, epoch: int) -> Ran:
        """Resume a deferred sample; returns it, complete or deferred again, or no sample and what it raised."""
        stage_runner, randomness = self._stage_runner, self.randomness
        captured = deferred.randomness
        assert stage_runner is not None

        self._stages.clear()
        fetch: Fetch = stage_runner.resume
        if self.tracer.enabled:
            fetch = self._recorded(fetch, epoch)
        bind: Bind | None = None
        if randomness is not None and captured is not None:
            bind = lambda epoch, index: randomness.restore(captured)  # noqa: E731
        samples, error = self._run(deferred.position, epoch, [deferred], fetch, bind)
        self.durations[0] += deferred.active_ns
        self._record(samples, [deferred.index], epoch)
        return samples, error

    def _run(
        self,
        position: int,
        epoch: int,
        indices: list[object],
        fetch: Fetch,
        bind: Bind | None,
        done: int = 0,
    ) -> Ran:
        """Run samples from the one after ``done`` others on, until one raises."""
        durations = memoryview(self.durations)[done:] if done else self.durations
        samples, error = run_samples(
            fetch, indices, position + done, self.lease, durations, bind, epoch, self.catches
        )
        if self._owner is not None:
            end_copy(self._owner, error)
        return samples, error

    def _run_bound(
        self, position: int, epoch: int, indices: list[object], fetch: Fetch, batch_size: int
    ) -> Ran:
        """Run samples bound to their randomness; in the main process the program finds its generators as before."""
        assert self.randomness is not None
        with self.randomness.saved() if self._in_main_process else nullcontext():
            if self.cost_estimate.draws is not None:
                bind = self._binder(position, len(indices), batch_size)
                return self._run(position, epoch, indices, fetch, bind)
            samples, error = self._run_watched(position, epoch, indices, fetch, batch_size)
            k = len(samples)
            if error is not None or k == len(indices) > 0:
                return samples, error
            bind = self._binder(position + k, len(indices) - k, batch_size)
            rest, error = self._run(position, epoch, indices[k:], fetch, bind, k)
            return samples + rest, error

    def _run_watched(
        self, position: int, epoch: int, indices: list[object], fetch: Fetch, batch_size: int
    ) -> Ran:
        """Run the first samples singly, until it is known whether they draw; none if all are to run again."""
        randomness, estimate = self.randomness, self.cost_estimate
        assert randomness is not None
        count, samples = len(indices), list[Any]()
        bind = self._binder(position, count, batch_size)

        def watch(epoch: int, index: object) -> None:
            bind(epoch, index)
            randomness.mark(unbind=False)

        while estimate.draws is None and (k := len(samples)) < count:
            one, error = self._run(position, epoch, indices[k : k + 1], fetch, watch, k)
            samples += one
            estimate.watched += 1
            if not estimate.has_looked:
                estimate.has_looked = True
                # The first sample of a worker may make generators, which were not bound while it ran.
                if randomness.look():
                    estimate.draws = True
                    self._stages.clear()
                    return [], None
            if randomness.drawn():
                estimate.draws = True
            elif estimate.watched == _PROBES:
                estimate.draws = not (randomness.watches and self.may_repeat)
            if error is not None:
                return samples, error
        return samples, None

    def _record(self, samples: list[object], indices: list[object], epoch: int) -> None:
        durations, total, slowest = self.durations, self._total, self._slowest
        if self.ahead_ns:
            durations[0] += self.ahead_ns
            self.ahead_ns = 0
        if self.deferral is None or DeferredSample not in set(map(type, samples)):
            self.longest_ns = total.record_all(durations, len(samples))
        else:
            self.longest_ns = max(durations[: len(samples)])
            for i, sample in enumerate(samples):
                if type(sample) is not DeferredSample:
                    total.record(durations[i])
        if self._stats and self.longest_ns > slowest.floor_ns:
            self._note_slowest(samples, indices, epoch)

    def _note_slowest(self, samples: list[object], indices: list[object], epoch: int) -> None:
        # If some were measured, they are the last ones.
        durations, slowest, stages = self.durations, self._slowest, self._stages
        for i in reversed(range(len(samples))):
            if type(samples[i]) is DeferredSample:
                continue
            stage, stage_ns = stages.pop() if stages else (UNKNOWN, 0)
            if durations[i] > slowest.floor_ns:
                slowest.offer(self._named(indices[i]), epoch, durations[i], stage, stage_ns)

    def _recorded(self, fetch: Fetch, epoch: int, *, repeats: bool = False) -> Fetch:
        """``fetch``, but each sample is recorded; ``repeats``: it has run before, and the earlier result counts."""
        tracer, lease = self.tracer, self.lease

        def fetched(index: object) -> Any:
            begin_ns, position = tracer.now(), lease.position or 0
            named = self._named(index.index if type(index) is DeferredSample else index)
            args = {"index": str(named) if type(named) is Item else named, "epoch": epoch}
            try:
                sample = fetch(index)
            except BaseException as error:
                args["error"] = type(error).__name__
                tracer.sample(position, f"{SAMPLE} (failed)", begin_ns, args)
                raise
            name = REPEATED if repeats else SAMPLE
            if type(sample) is DeferredSample:
                name = f"{SAMPLE} (deferred)"
            tracer.sample(position, name, begin_ns, args)
            return sample

        return fetched

    def _recorded_many(
        self, fetch: Fetch, epoch: int, count_of: Callable[..., int | None]
    ) -> Fetch:
        """``fetch``, which loads several samples, but these are recorded, unless their number is None."""
        tracer = self.tracer

        def fetched(indices: object) -> Any:
            begin_ns = tracer.now()
            found = fetch(indices)
            if (count := count_of(found)) is not None:
                tracer.slice(f"{SAMPLE}s", begin_ns, args={"count": count, "epoch": epoch})
            return found

        return fetched

    def _named(self, index: object) -> object:
        """An index, or the item of an iterable dataset for which it stands."""
        return item_of(index) if self._streams and type(index) is int else index
