"""Placement of workers and batches on machines with several sockets, which are made up."""

from __future__ import annotations

import ctypes
import itertools
import logging
import multiprocessing
import os
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from minato import DataLoader, _system
from minato._core.segment import Segment
from minato._support import numa
from minato._support.numa import NumaPlacement, node_of_visible_gpu, place_pages, spread

TWO_SOCKETS = {"node0/cpulist": "0-3,8-11\n", "node1/cpulist": "4-7,12-15\n", "has_memory": "0-1\n"}
GET_POLICY = {"x86_64": 239, "aarch64": 236}
INTERLEAVED, OF_THE_ADDRESS = 3, 2


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the files of a machine on which this process may use cores 0 to 15."""
    monkeypatch.setattr(_system, "_NUMA_NODES", tmp_path)
    monkeypatch.setattr(_system, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(_system, "_OWN_STATUS", tmp_path / "status")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    def write(files: dict[str, str], allowed: str = "0-1") -> None:
        for name, content in {"status": f"Mems_allowed_list:\t{allowed}\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)

    return write


def test_cores_of_each_socket(machine):
    machine(TWO_SOCKETS)
    assert _system.cores_by_numa_node() == {
        0: {0, 1, 2, 3, 8, 9, 10, 11},
        1: {4, 5, 6, 7, 12, 13, 14, 15},
    }


def test_only_what_this_process_may_use_counts(machine, monkeypatch):
    machine(TWO_SOCKETS, allowed="1")
    assert [*_system.cores_by_numa_node()] == [1]
    machine(TWO_SOCKETS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    assert _system.cores_by_numa_node() == {0: {2, 3}}


def test_nodes_without_cores_or_memory_are_left_out(machine):
    machine({**TWO_SOCKETS, "node2/cpulist": "\n", "has_memory": "0,2\n"}, allowed="0-2")
    assert [*_system.cores_by_numa_node()] == [0]


def test_a_system_that_hides_them_has_none(machine):
    assert _system.cores_by_numa_node() == {}
    machine({})
    assert _system.cores_by_numa_node() == {}


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 64), min_size=1), st.integers(1, 200))
def test_workers_are_spread_in_proportion_to_the_cores(sizes: dict[int, int], count: int) -> None:
    first = 0
    nodes = {}
    for node, size in sizes.items():
        nodes[node] = frozenset(range(first, first + size))
        first += size
    placed = spread(count, nodes)
    assert len(placed) == count
    for used in range(1, count + 1):
        counts = {cores: placed[:used].count(cores) for cores in nodes.values()}
        for cores, others in itertools.permutations(nodes.values(), 2):
            # The last worker there would share its cores with no fewer on the other node.
            assert counts[cores] * len(others) <= (counts[others] + 1) * len(cores)


def test_batches_alternate_between_the_sockets(machine):
    machine(TWO_SOCKETS)
    placement = NumaPlacement.of(3, None)
    assert placement is not None
    assert placement.memory_nodes == (0, 1)
    assert [min(cores) for cores in placement.cores] == [0, 4, 0]


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_one_socket_needs_no_placement(machine, allowed: str):
    machine(TWO_SOCKETS, allowed=allowed)
    assert NumaPlacement.of(4, None) is None


class NoSuchGpuError(Exception):
    """NVML's error."""


def nvml(addresses: dict[str, str | bytes]) -> Any:
    """NVML on a machine with these GPUs: addresses by UUID, in the order of the indices."""

    def by_index(index: int) -> str:
        if not 0 <= index < len(addresses):
            raise NoSuchGpuError
        return [*addresses][index]

    def by_uuid(uuid: str) -> str:
        if uuid not in addresses:
            raise NoSuchGpuError
        return uuid

    return SimpleNamespace(
        NVMLError=NoSuchGpuError,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetPciInfo=lambda uuid: SimpleNamespace(busId=addresses[uuid]),
    )


@pytest.mark.parametrize(
    ("visible", "index", "node"),
    [
        (None, 0, 0),
        (None, 1, 1),
        (None, 2, None),
        ("1,0", 0, 1),
        ("1", 0, 1),
        ("1", 1, None),
        ("GPU-b", 0, 1),
        ("GPU-c", 0, None),
        ("-1", 0, None),
        ("", 0, None),
    ],
)
def test_the_socket_of_a_gpu(machine, visible: str | None, index: int, node: int | None):
    machine({**TWO_SOCKETS, "0000:3b:00.0/numa_node": "0\n", "0001:af:00.0/numa_node": "1\n"})
    gpus = {"GPU-a": "00000000:3B:00.0", "GPU-b": b"00000001:AF:00.0"}
    assert node_of_visible_gpu(nvml(gpus), visible, index) == node


def test_a_gpu_whose_socket_the_kernel_does_not_know(machine):
    machine({"0000:3b:00.0/numa_node": "-1\n"})
    gpus = {"GPU-a": "00000000:3B:00.0", "GPU-b": "00000000:5E:00.0"}
    assert node_of_visible_gpu(nvml(gpus), None, 0) is None
    assert node_of_visible_gpu(nvml(gpus), None, 1) is None


def test_batches_for_a_gpu_lie_on_its_socket(machine, monkeypatch):
    machine(TWO_SOCKETS)
    monkeypatch.setattr(numa, "_node_of_gpu", lambda device: 1 if device.index == 3 else None)
    placement = NumaPlacement.of(2, torch.device("cuda", 3))
    assert placement is not None
    assert placement.memory_nodes == (1,)
    placement = NumaPlacement.of(2, torch.device("cuda", 0))
    assert placement is not None
    assert placement.memory_nodes == (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "meta"])
def test_without_a_driver_no_socket_is_a_gpus(device: str):
    assert numa._node_of_gpu(torch.device(device)) is None


def policy_of(memory: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The kernel's policy of a page of memory, and its nodes as bits."""
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(GET_POLICY[platform.machine()]),
        ctypes.byref(mode),
        nodes,
        ctypes.c_ulong(1024),
        ctypes.c_void_p(memory.ctypes.data),
        ctypes.c_ulong(OF_THE_ADDRESS),
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return mode.value, nodes[0]


def _send_policy(segment: Segment, connection: Any) -> None:
    connection.send(policy_of(segment.array))


def test_the_kernel_alternates_pages_for_all_processes():
    segment = Segment(1 << 30)
    if not place_pages(segment.array, (0,)):
        pytest.skip("this kernel or container does not place pages")
    assert place_pages(segment.array, (0, 1))
    assert policy_of(segment.array)[0] == INTERLEAVED
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_send_policy, args=(segment, theirs))
    child.start()
    assert ours.poll(30)
    assert ours.recv() == policy_of(segment.array)
    child.join(30)


def test_a_kernel_that_refuses_is_reported(caplog):
    caplog.set_level(logging.INFO, "minato")
    assert not place_pages(Segment(1 << 20).array, (1000,))
    assert "cannot place batches on NUMA nodes (1000,)" in caplog.text


def test_a_worker_whose_cores_were_taken_away_runs_on_the_others():
    before = os.sched_getaffinity(0)
    NumaPlacement((frozenset({100_000}),), (0,)).enter(0)
    assert os.sched_getaffinity(0) == before


class CoresOfTheWorker:
    """Sample i: the number of the worker that made it, and the cores it may run on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, list[int]]:
        info = get_worker_info()
        assert info is not None
        return info.id, sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_run_on_their_cores(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("one core")
    nodes = {0: frozenset({first}), 1: frozenset(others)}
    monkeypatch.setattr(numa, "cores_by_numa_node", lambda: nodes)
    loader = DataLoader(
        CoresOfTheWorker(),
        num_workers=2,
        affinity="auto",
        multiprocessing_context=method,
        collate_fn=list,
    )
    cores = dict(sample for batch in loader for sample in batch)
    expected = dict(enumerate(map(sorted, spread(2, nodes))))
    assert cores == {number: expected[number] for number in cores}
    assert cores
    assert os.sched_getaffinity(0) == {first, *others}


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2, "workers": "thread"}])
def test_it_needs_worker_processes(arguments: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="affinity='auto' says where worker processes run: use num_workers=1"
    ):
        DataLoader([1, 2], affinity="auto", **arguments)


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match="affinity='spread'"):
        DataLoader([1, 2], num_workers=1, affinity="spread")  # type: ignore[arg-type]
