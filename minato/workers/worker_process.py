"""How a process, or a thread, becomes a worker: its parts, signals, seeds, worker info; its main function.

It imports only what a worker needs: spawned processes import it again.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from minato._compat import (
    applies_state_later,
    be_worker,
    forget_dataset,
    forget_executor_threads,
    name_process_thread,
    numpy_seed,
    serves_other_processes,
    set_signal_handlers,
    take_own_epoch,
    worker_info,
)
from minato._core import Lease, WorkerLedger, now_ns
from minato._core.codes import STARTING
from minato._core.segment import Segment
from minato._fork_safety import end_copy, renew_in_children
from minato._support.items import item_of
from minato._support.objects import Search, module_of
from minato._support.pickling import ForChild, Snapshot, take_own_name
from minato._system import process_usage
from minato.batching.blobs import BEFORE_SAMPLES, ErrorTransport, wrapped
from minato.batching.collate import RunAgain
from minato.batching.serialization import Store, StoredIndices
from minato.batching.writer import BatchWriter
from minato.errors import add_note, not_the_end
from minato.observe.meters import Meters
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness
from minato.workers.error_policy import FailureHandler, SampleFailure, SampleRetry
from minato.workers.fetch import Fetcher, fetcher_of
from minato.workers.hosting import HostWorker
from minato.workers.plan import WorkerPlan
from minato.workers.reading import Host, seed_generators
from minato.workers.reads import BegunLists, InFlight, Reads, reads_of
from minato.workers.runner import Deferral, Ran, Runner, StageRunner
from minato.workers.sample_timeout import StackFile
from minato.workers.shared_state import SharedLayout, SharedState
from minato.workers.worker import ConcurrentWorker, Worker, WorkerParts, run_again

if sys.platform != "win32":  # which has threads only
    import fcntl

_SERVING_S = 0.02  # interval between two looks whether a worker that has sent descriptors may end


@dataclass
class WorkerContext:
    """All that a worker needs besides its number; travels to worker processes, with ``sent`` in place of the plan.

    ``stacks`` is the file that stuck workers write their stacks to. The ``policy`` for samples that raise is not in the
    plan, because only a starting child can inherit its log.
    """

    plan: WorkerPlan
    layout: SharedLayout
    store: Store
    sent: Snapshot | ForChild | None = None
    stacks: StackFile | None = None
    policy: FailureHandler | None = None

    def __getstate__(self) -> dict[str, Any]:
        policy = self.policy
        if self.sent is not None and policy is not None:
            # Its function goes by value, as those of the plan do; the log is inherited.
            policy = policy._replace(on_error=ForChild(policy.on_error))
        return {**vars(self), "plan": self.sent or self.plan, "sent": None, "policy": policy}

    def given_up(self, failure: SampleFailure) -> Ran:
        """What becomes of a sample whose worker has ended: the training process settles it, bound as there."""
        plan, policy = self.plan, self.policy
        assert policy is not None
        if not plan.seeds_samples:
            return policy.settle(failure)
        in_main = threading.current_thread() is threading.main_thread()
        owned = OwnedGenerators(plan.generator_roots(plan.fetching.at_once))
        randomness = SampleRandomness(failure.seed, bind_globals=in_main, owned=owned)
        place = failure.epoch, failure.index, failure.occurrence
        with randomness.instead(*place, restores=True):
            return policy.settle(failure)

    def worker(
        self,
        ledger: WorkerLedger,
        state: SharedState,
        errors: ErrorTransport,
        failure: BaseException | None = None,
        remote_reads: Callable[[Lease, Meters], Reads] | None = None,
        host: Host | None = None,
        kind: type[HostWorker] = HostWorker,
    ) -> Worker:
        """Make a worker, of a ``kind`` if it hosts readers; ``remote_reads`` makes reads on another machine."""
        plan, number = self.plan, ledger.number
        reads = remote_reads and remote_reads(ledger.lease, state.meters(number))
        fetcher = fetcher_of(plan, reads)
        runner = _runner(plan, ledger, state, fetcher, reads is not None, errors, failure)
        retry: SampleRetry | None = None
        if self.policy is not None and failure is None:
            transforms, name = plan.pipeline.transforms, None if host is None else item_of
            retry = SampleRetry(number, self.policy, transforms, runner, fetcher, name)
        rerun: RunAgain | None = None
        if host is None:
            rerun = functools.partial(run_again, ledger, runner, fetcher, retry)
        writer = BatchWriter(
            ledger,
            self.store,
            plan.pipeline.collate(runner.bound_to_batch),
            errors=errors,
            run_again=rerun,
            # An item cannot be read again where its batch is collated: it is sent as it is.
            handover=state.handover if plan.in_processes and host is None else None,
            # Where items take free places, SKIP also stands for those that do not exist.
            skips=retry is not None
            or plan.offers_items
            or (host is not None and not plan.order.keeps_places),
            tracer=runner.tracer,
        )
        if fetcher.keeps_state:
            writer.state = fetcher.state
        parts = WorkerParts(plan, ledger, state, fetcher, runner, writer, retry)
        if host is not None:
            host.catches = errors.kinds
            writer.indices = StoredIndices(ledger, self.store, item_of)
            return kind(host, self.store, parts)
        flight = None if failure is not None else _flight(plan, number, state, reads)
        return Worker(parts) if flight is None else ConcurrentWorker(flight, parts)


def _runner(
    plan: WorkerPlan,
    ledger: WorkerLedger,
    state: SharedState,
    fetcher: Fetcher,
    is_remote: bool,
    errors: ErrorTransport,
    failure: BaseException | None,
) -> Runner:
    """The runner of a worker, which runs samples stage by stage where single ones run on this machine."""
    pipeline, number = plan.pipeline, ledger.number
    meters, tracer = state.meters(number), plan.tracer(number)
    stage_runner: StageRunner | None = None
    has_stages = len(pipeline.transforms) > 0 or not pipeline.streams
    if has_stages and not (pipeline.refetches or fetcher.takes_lists or is_remote):
        deferral: Deferral | None = None
        if plan.defers:
            active = state.active
            deferral = Deferral(ledger=ledger, meters=meters, num_workers=lambda: active.count)
        stage_runner = StageRunner(
            fetcher.dataset,
            pipeline.transforms,
            lease=ledger.lease,
            meters=meters,
            deferral=deferral,
            tracer=tracer,
        )
    randomness: Callable[[int], SampleRandomness] | None = None
    if plan.seeds_samples:
        # Concurrent reads share the dataset's generators.
        roots = plan.generator_roots(plan.fetching.at_once and not is_remote)
        randomness = functools.partial(_randomness, plan, roots)
    runner = Runner(
        plan,
        lease=ledger.lease,
        meters=meters,
        make_randomness=randomness,
        stage_runner=stage_runner,
        occurrences=ledger.occurrences,
        tracer=tracer,
    )
    runner.catches, runner.failure = errors.kinds, failure
    return runner


def _randomness(plan: WorkerPlan, roots: dict[str, object], seed: int) -> SampleRandomness:
    """The randomness of samples from a seed; threads share the generators, which are not bound there."""
    bind = plan.method == "process"
    owned = OwnedGenerators(roots) if bind else None
    return SampleRandomness(seed, bind_globals=bind, owned=owned)


def _flight(
    plan: WorkerPlan, number: int, state: SharedState, reads: Reads | None
) -> InFlight | None:
    """The reads of a worker that reads several samples, or batches, at once; None: it reads one after the other."""
    dataset, fetching = plan.pipeline.dataset, plan.fetching
    if plan.begins_lists:
        reads = BegunLists(dataset.__beginitems__, lambda: sum(process_usage([os.getpid()])))
    elif reads is None and fetching.at_once:
        reads = reads_of(dataset, fetching.concurrency)
    if reads is None:
        return None
    return InFlight(number, reads, state.read_limit(fetching.max_in_flight), fetching)


def run_worker_process(number: int, context: WorkerContext) -> None:
    """Run as worker ``number`` until nothing is left to do, or the training process ends."""
    # A collection would write to every object, and so copy the pages that a forked worker shares with its parent.
    gc.freeze()
    take_own_name()
    # A copy of this worker that a sample forks must not write to batches, until it ends.
    renew_in_children(context.store.segment, Segment.separate)
    try:
        _work(number, context, parent_watch())
    except KeyboardInterrupt:
        pass  # the training process was interrupted too, and reports it
    finally:
        # The process ends without a last collection: the dataset's files are flushed as it is destroyed here.
        forget_dataset()
        vars(context).clear()
        gc.collect()


def _work(number: int, context: WorkerContext, parent_lives: Callable[[], bool]) -> None:
    plan = context.plan
    enter_worker_process(*plan.identity(number), plan.base_seed, plan.pipeline.given)
    if plan.pipeline.streams and "datasets" in sys.modules:
        _take_own_epochs(plan.pipeline.given)
    if context.stacks is not None:
        context.stacks.listen()
    state = SharedState(context.layout)
    if not state.wait_until_active(number, parent_lives):
        return
    ledger = state.worker_ledger(number)
    if plan.init_fn is not None:
        ledger.lease.enter(STARTING, now_ns())
    host = host_of(plan, number, state)
    failure = initialise(plan, number, host)
    ledger.lease.step = -1
    wrap = wrapped(f"worker process {number}", in_process=True)
    transport = ErrorTransport((BaseException,), wrap)
    worker = context.worker(ledger, state, transport, failure, host=host)
    worker.loop(parent_lives)
    worker.close()
    # What the training loop has not unpickled yet may need this process: an end of a pipe, memory of a device.
    while serves_other_processes() and not ledger.stopping and parent_lives():
        time.sleep(_SERVING_S)


def enter_worker_process(number: int, num_workers: int, base_seed: int, dataset: object) -> None:
    """Prepare this process as torch prepares a worker: signal handlers, one thread, seeds, worker info."""
    set_signal_handlers()
    # At exit Python joins the threads of executors; one of them may have forked this process, which would join itself.
    forget_executor_threads()
    _end_with_parent()
    name_process_thread("minato_worker")
    seed_worker(number, num_workers, base_seed, dataset)


def _take_own_epochs(dataset: object) -> None:
    """Have streams of Hugging Face go through epochs of their own, as other workers may be in another pass.

    Each sets the epoch before it asks for the first item.
    """
    of_library = Search(
        lambda kind: module_of(kind.kind).startswith("datasets."), wants=applies_state_later
    )
    for node in of_library.run({"dataset": dataset}):
        take_own_epoch(node.thing)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the process that requested its start ends or runs another program.

    The other side of the pipe between the two is then closed, and the kernel sends the chosen signal. That does not
    depend on the activity of this process nor on the thread that started it.
    """
    creator = multiprocessing.parent_process()
    # A context of another package may have no such pipe.
    if sys.platform != "linux" or creator is None or getattr(creator, "sentinel", 0) is None:
        return
    fcntl.fcntl(creator.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(creator.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(creator.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(creator.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if connection.wait([creator.sentinel], 0):  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def seed_worker(number: int, num_workers: int, base_seed: int, dataset: object) -> None:
    """Prepare a process that acts for a worker, local or remote: one thread, seeds, worker info."""
    torch.set_num_threads(1)
    seed = base_seed + number
    seed_generators(seed, numpy_seed(base_seed, number))
    be_worker(worker_info(number, num_workers, seed, dataset))


def parent_watch() -> Callable[[], bool]:
    """Return a function that returns whether the process that requested the start of this one is alive."""
    creator = multiprocessing.parent_process()
    assert creator is not None
    if os.getppid() == creator.pid:
        return lambda: os.getppid() == creator.pid
    # It has ended, or a fork server is between the two. Then the state of a pipe decides. Forked siblings inherit its
    # other end, but only those that start later.
    return creator.is_alive


def host_of(plan: WorkerPlan, number: int, state: SharedState) -> Host | None:
    """The readers that a worker hosts, which may be none; None if the dataset is map-style."""
    return None if plan.readers is None else Host(plan, number, state.board)


def initialise(plan: WorkerPlan, number: int, host: Host | None = None) -> Exception | None:
    """Prepare a worker, or each reader of its host, as one of torch's; returns the error of its first sample."""
    owner = os.getpid()
    failure: Exception | None = None
    step = "worker_init_fn"
    if host is not None:
        try:
            host.make_readers()
        except TypeError as error:  # the dataset cannot be copied
            return error
    try:
        if host is not None and host.has_readers:
            host.initialise()
        elif plan.init_fn is not None:
            plan.init_fn(plan.identity(number)[0])
        step = "the dataset's load_state_dict()"
        plan.restore_dataset(number)
    except Exception as error:
        failure = not_the_end(step, error)
        add_note(failure, f"  raised by {step}, {BEFORE_SAMPLES}")
    except BaseException as error:
        end_copy(owner, error)
        raise
    end_copy(owner, failure)
    return failure
