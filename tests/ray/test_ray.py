"""``workers=RayWorkers(...)``: the workers are actors in a cluster, here of one node and then two on this machine."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import psutil
import pytest
from torch.utils.data import Sampler, get_worker_info

import minato
from minato import AutoScale, DataLoader, ErrorPolicy, Observe, RayWorkers
from minato.ray import _pack, unpack
from minato.workers.shared_state import CurrentSample
from minato.workers.supervision import RestartPolicy, WorkerLoss
from tests.datasets import Numbers, add_draws, three_draws, wait_until
from tests.sources import servers

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is missing")
pytestmark = pytest.mark.timeout(400)

SIZE = 1000
BAD, STRANGE, DEADLY, FLAKY, LEAVING = 900, 901, 902, 903, 904
HELD = range(500, 620)
EPOCH = 7
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
_PATIENCE_S = 120.0


class Keys(Sampler[int]):
    """Gives whatever ``now`` holds."""

    def __init__(self) -> None:
        self.now = list(range(40))

    def __iter__(self) -> Iterator[int]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class StrangeError(Exception):
    """Cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Everything(Numbers):
    """Samples that draw and tell who ran them; some do harm until there is ``mark``, or wait for ``mark.left``."""

    def __init__(self, mark: str) -> None:
        super().__init__(SIZE)
        self.mark = mark
        self.prepared = -1

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        if index == BAD:
            raise ValueError("cannot be decoded")
        if index == STRANGE:
            raise StrangeError(1, 2)
        if index == LEAVING:
            sys.exit("enough")
        if index in (DEADLY, FLAKY) and not os.path.exists(self.mark):
            Path(self.mark).touch()
            if index == FLAKY:
                raise OSError("connection reset")
            # Until the results before it have left: they would be lost, and one named.
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        if index in HELD:
            wait_until(Path(f"{self.mark}.left").exists, 300)
        info = get_worker_info()
        assert info is not None
        who = [info.id, info.num_workers, info.dataset.prepared, os.getpid()]
        return [float(index), np.array(three_draws()), minato.numpy_rng().random(), who]


def prepare(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.prepared = number


def in_transform(sample: Any) -> Any:
    """A transform that draws, too."""
    return [*add_draws([]), *sample]


def refuse(failure: minato.SampleFailure) -> Any:
    raise failure.error


class Treatment:
    """An ``on_error`` function that tests change."""

    def __init__(self) -> None:
        self.now: Callable[[minato.SampleFailure], Any] = refuse
        self.seen: list[minato.SampleFailure] = []

    def __call__(self, failure: minato.SampleFailure) -> Any:
        self.seen.append(failure)
        return self.now(failure)


class Rig(NamedTuple):
    """A cluster, and a loader whose two actors stay; ``first`` is what it gave while there was room for one."""

    cluster: Any
    first: list[Any]
    loader: DataLoader[Any]
    keys: Keys
    treatment: Treatment


def indices(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch[4].tolist()]


def crew(batches: Any) -> set[int]:
    """Process ids of the actors that ran these."""
    return {pid for batch in batches for pid in batch[7][3].tolist()}


def content(batches: Any) -> list[Any]:
    """All that does not tell who ran it."""
    return [[np.asarray(part).tolist() for part in batch[:7]] for batch in batches]


def until_both_work(loader: DataLoader[Any]) -> list[Any]:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        batches = list(loader)
        if len(crew(batches)) == 2:
            return batches
        assert time.monotonic() < deadline, "one of the actors never began"
        time.sleep(0.2)  # the other one needs a core to begin


def is_there(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def adopt() -> None:
    """Take the cluster's processes for servers that outlive a test, and what they start, too."""
    servers.PIDS.update(child.pid for child in psutil.Process().children())


@contextlib.contextmanager
def one_node() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    before = {child.pid for child in psutil.Process().children()}
    # Ray's handler must not be left to later helper processes.
    at_sigterm = signal.getsignal(signal.SIGTERM)
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # paths of sockets must be short
    inside = folder / "ray"
    inside.mkdir()  # Ray writes its address here before it makes the folder
    only = {"temp_dir": str(inside), "no_monitor": True, "include_log_monitor": False}
    cluster = Cluster()
    try:
        # By default actors give way to all other programs: on a busy machine they would never begin.
        with mock.patch.dict(os.environ, RAY_TMPDIR=str(folder), RAY_worker_niceness="0"):
            cluster.add_node(**NODE, **only)
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            adopt()
            yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, at_sigterm)
        servers.PIDS.clear()
        servers.THREADS.clear()
        left = [child for child in psutil.Process().children() if child.pid not in before]
        _, alive = psutil.wait_procs(left, timeout=_PATIENCE_S)
        for process in alive:
            process.kill()
        shutil.rmtree(folder, ignore_errors=bool(alive))
        assert alive == []


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> str:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is missing")
    return str(tmp_path_factory.mktemp("ray") / "mark")


def loader_of(mark: str, keys: Keys, **options: Any) -> DataLoader[Any]:
    how: Any = {"transforms": [in_transform], "worker_init_fn": prepare, "persistent_workers": True}
    return DataLoader(Everything(mark), 4, sampler=keys, num_workers=2, seed=5, **how, **options)


def alone(dataset: Any, **options: Any) -> DataLoader[Any]:
    """A loader with an actor that has room anywhere."""
    given = {"num_workers": 1, "workers": RayWorkers({"num_cpus": 0}), **options}
    return DataLoader(dataset, **given)


@pytest.fixture(scope="module")
def from_processes(mark: str) -> list[Any]:
    """Forked before Ray is there."""
    loader = loader_of(mark, Keys())
    loader.set_epoch(EPOCH)
    return list(loader)


@pytest.fixture(scope="module")
def rig(mark: str, from_processes: list[Any]) -> Iterator[Rig]:
    with warnings.catch_warnings(action="ignore"), one_node() as cluster:  # Ray's
        keys, treatment = Keys(), Treatment()
        loader = loader_of(
            mark,
            keys,
            workers=RayWorkers(),
            errors=ErrorPolicy(on_error=treatment, retries=1),
            observe=Observe(trace=f"{mark}.trace"),
        )
        servers.THREADS.update({"minato-0", "minato-1"})  # new ones, where actors are replaced
        first = list(loader)
        cluster.add_node(**NODE)
        adopt()
        until_both_work(loader)
        yield Rig(cluster, first, loader, keys, treatment)
        loader._iterator = None
        del loader


def test_a_sample_is_what_a_worker_process_makes_of_it(rig: Rig, from_processes: list[Any]) -> None:
    rig.keys.now = list(range(40))
    rig.loader.set_epoch(EPOCH)
    assert content(list(rig.loader)) == content(from_processes)


def test_workers_begin_when_the_cluster_has_room_for_them(rig: Rig) -> None:
    """Torch and the dataset know which of them they are in, and costs are measured where they arise."""
    assert indices(rig.first) == list(range(40))
    assert len(crew(rig.first)) == 1
    batches = until_both_work(rig.loader)
    assert len(crew(batches)) == 2
    who = {tuple(each) for batch in batches for each in np.stack(batch[7][:3], 1).tolist()}
    assert who == {(0, 2, 0), (1, 2, 1)}
    report = rig.loader.report()
    assert report.setup.worker_method == "ray"
    [step] = [stage for stage in report.run.stages if stage.name == "in_transform"]
    assert step.count > 0


def test_an_exception_arrives_with_its_type_and_the_actors_traceback(rig: Rig) -> None:
    rig.keys.now = [1, BAD, 2, 3, 4, 5, 6, 7]
    batches = iter(rig.loader)
    with pytest.raises(ValueError, match="cannot be decoded") as caught:
        next(batches)
    assert "in __getitem__" in str(caught.value)
    assert "Ray actor" in str(caught.value)
    assert indices(batches) == [4, 5, 6, 7]
    rig.keys.now = [STRANGE, 2, 3, 4]  # which cannot travel
    with pytest.raises(RuntimeError, match="StrangeError: 1 and 2"):
        next(iter(rig.loader))


def test_what_would_end_an_actor_is_the_error_of_its_sample(rig: Rig) -> None:
    rig.keys.now = [1, LEAVING, 2, 3, 4, 5, 6, 7]
    batches = iter(rig.loader)

    def leave(number: int) -> None:
        sys.exit(number)

    for each in (batches, iter(alone(Points(4), worker_init_fn=leave))):
        with pytest.raises(RuntimeError, match="SystemExit was raised, as if to end the worker"):
            next(each)
    assert indices(batches) == [4, 5, 6, 7]


def test_on_error_decides_here_about_what_failed_there(rig: Rig) -> None:
    rig.keys.now = [1, BAD, 2, 3, 4]
    rig.treatment.now = lambda failure: minato.SKIP
    rig.treatment.seen.clear()
    try:
        with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
            assert indices(rig.loader) == [1, 2, 3, 4]
    finally:
        rig.treatment.now = refuse
    [failure] = rig.treatment.seen
    assert (failure.index, failure.attempts, failure.transform) == (BAD, 2, None)


def test_a_sample_is_tried_again_with_the_same_random_numbers(rig: Rig, mark: str) -> None:
    Path(mark).unlink(missing_ok=True)
    rig.keys.now = [1, FLAKY, 2, 3]
    found = []
    for _ in range(2):  # the second time it does not fail
        rig.loader.set_epoch(EPOCH)
        found.append(content(list(rig.loader)))
    assert os.path.exists(mark)
    assert found[0] == found[1]
    assert rig.loader.report().run.errors.recovered == 1


def test_an_actor_that_is_killed_is_replaced_and_nothing_is_lost(rig: Rig, mark: str) -> None:
    Path(mark).unlink(missing_ok=True)
    rig.keys.now = [*range(20), DEADLY, *range(20, 60)]
    with pytest.warns(RuntimeWarning, match=f"index {DEADLY}.* Another worker takes its place"):
        assert indices(rig.loader) == rig.keys.now
    assert os.path.exists(mark)
    assert rig.loader.report().run.workers.deaths == 1
    trace = Path(f"{mark}.trace").read_text()
    assert '"read"' in trace
    assert "has died (lost)" in trace


def test_an_actor_that_is_killed_at_the_very_end_is_replaced(rig: Rig, mark: str) -> None:
    """Then nothing is left to claim but what it held, and no worker has an actor: two fit, and three are asked for."""
    import ray

    Path(mark).unlink(missing_ok=True)
    room = min(node["Resources"]["memory"] for node in ray.nodes() if node["Alive"])
    keys, workers = Keys(), RayWorkers({"num_cpus": 0, "memory": 0.6 * room})
    keys.now = [1, 2, 3, DEADLY]
    how: Any = {"num_workers": 3, "worker_init_fn": prepare, "timeout": _PATIENCE_S}
    loader = alone(Everything(mark), sampler=keys, workers=workers, **how)
    with pytest.warns(RuntimeWarning, match="Another worker takes its place"):
        assert [int(batch[0]) for batch in loader] == keys.now


class TimelinePoint(NamedTuple):
    index: int
    values: Any


class Points(Numbers):
    def __getitem__(self, index: int) -> TimelinePoint:
        return TimelinePoint(index, np.full(3, index))


def test_an_early_end_leaves_no_actor(rig: Rig) -> None:
    """And a ``collate_fn`` of one's own gets arrays that it may write to."""

    def collate(samples: list[TimelinePoint]) -> list[TimelinePoint]:
        for sample in samples:
            sample.values[0] += 1
        return samples

    loader = alone(Points(100), batch_size=2, collate_fn=collate, worker_init_fn=print)
    rig.keys.now = list(range(40))
    until_both_work(rig.loader)
    before = _actors()
    batches = iter(loader)
    batch = next(batches)
    assert type(batch[0]) is TimelinePoint
    assert [point.values.tolist() for point in batch] == [[1, 0, 0], [2, 1, 1]]
    [actor] = _actors() - before
    del batch, batches
    _, left = psutil.wait_procs([actor], timeout=_PATIENCE_S)
    assert left == []


def test_a_cycle_through_the_dataset_leaves_no_actor(rig: Rig) -> None:
    numbers: Any = Numbers(100)
    loader = alone(numbers)
    before = _actors()
    numbers.held = batches = iter(loader)
    next(batches)
    [actor] = _actors() - before
    del batches, loader, numbers

    def is_gone() -> bool:
        gc.collect()  # again and again: the worker's thread may be inside a sample
        return not is_there(actor)

    wait_until(is_gone)


def _actors() -> set[psutil.Process]:
    mine = psutil.Process().children(recursive=True)
    return {child for child in mine if "SampleServer" in " ".join(child.cmdline())}


class Unable(Numbers):
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _fails, ()


def _fails() -> Any:
    raise OSError("no such disk here")


def test_a_dataset_that_cannot_be_made_there_is_an_error(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        next(iter(alone(Unable(4))))
    assert "no such disk here" in str(caught.value.__cause__)


def test_a_node_leaves_in_mid_epoch(rig: Rig, mark: str) -> None:
    """Stands behind those that need it: the node does not come back."""
    rig.keys.now = list(range(40))
    actors = [psutil.Process(pid) for pid in crew(until_both_work(rig.loader))]
    rig.keys.now = [*range(40), *HELD]
    batches = iter(rig.loader)
    found = indices([next(batches) for _ in range(10)])
    [node] = rig.cluster.worker_nodes
    rig.cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: not all(map(is_there, actors)))
    Path(f"{mark}.left").touch()
    with pytest.warns(RuntimeWarning, match="is lost on .* Another worker takes its place"):
        found += indices(batches)
    assert found == rig.keys.now


def test_a_connection_that_is_closed_is_an_error(rig: Rig) -> None:
    """The very last with the cluster."""
    import ray

    rig.keys.now = list(range(160))
    batches = iter(rig.loader)
    next(batches)
    ray.shutdown()
    with pytest.raises(RuntimeError, match="Ray was shut down"):
        list(batches)


# ---- without a cluster --------------------------------------------------------------------------


@needs_ray
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": "auto"}, "num_workers at most"),
        ({"num_workers": AutoScale(max=4)}, "num_workers at most"),
        ({"compat": "torch"}, "compat='torch'"),
        ({"fetch_concurrency": 2}, "fetch_concurrency=2"),
        ({"errors": ErrorPolicy(sample_timeout=1.0)}, "sample_timeout=1.0"),
        ({"cache": minato.caching.MemoryCache(1000)}, "MemoryCache"),
    ],
    ids=lambda given: str(next(iter(given))) if isinstance(given, dict) else "",
)
def test_what_actors_cannot_do_is_refused(given: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"num_workers": 2, "workers": RayWorkers(), **given}
    with pytest.raises(ValueError, match=named):
        DataLoader(Numbers(8), **arguments)


def test_what_the_loader_decides_of_an_actor_is_refused() -> None:
    with pytest.raises(ValueError, match="actor_options cannot set max_restarts"):
        RayWorkers({"max_restarts": 1})
    with pytest.raises(TypeError, match="actor_options=3 is a int: give a dictionary"):
        RayWorkers(3)  # type: ignore[arg-type]


@needs_ray
def test_what_is_packed_is_unpacked_as_it_was() -> None:
    class Local(NamedTuple):
        array: Any
        empty: Any
        others: Any

    array = np.arange(6).reshape(2, 3)
    fixed = array.copy()
    fixed.flags.writeable = False
    others = [fixed, array.astype(">f4"), array.T, array[::-1], array.astype(np.longlong)]
    sample = unpack(*_pack(Local(array, np.empty(0), others)))
    assert type(sample) is Local
    for given, found in zip(others, sample.others, strict=True):
        assert found.tolist() == given.tolist()
        assert (found.dtype.str, found.dtype.num) == (given.dtype.str, given.dtype.num)
        assert found.strides == given.strides
        assert found.flags.writeable == given.flags.writeable
    sample.array[0, 0] = 7  # Ray's own memory is read-only
    assert sample.array.tolist() == [[7, 1, 2], [3, 4, 5]]


LOST = WorkerLoss("is lost (its node has died)", infrastructure_fault=True, unable=False)
THIRD = CurrentSample(position=3, index=3, epoch=0, seed=0, transform=None, started_ns=0)


def test_a_lost_machine_is_no_fault_of_what_ran_there() -> None:
    """But a sample that loses three actors is the cause, and so is an actor that cannot begin."""
    restart_policy = RestartPolicy(restarts=True)
    for _ in range(5):
        warning, error = restart_policy.report(0, 1, LOST, None, progress=0)
        assert re.search("is lost .* between samples. Another worker", warning)
        assert error is None
    assert restart_policy.total == 5
    restart_policy = RestartPolicy(restarts=True)
    for _ in range(2):
        warning, _ = restart_policy.report(0, 1, LOST, THIRD, progress=5)
        assert "index 3" in warning
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        restart_policy.report(0, 3, LOST, THIRD, progress=5)
    unable = WorkerLoss("is lost", infrastructure_fault=False, unable=True)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        RestartPolicy(restarts=True).report(0, None, unable, None, 0)
    assert "before its first sample" in str(caught.value.__cause__)
