"""Where workers run and where batches lie, on machines with several NUMA nodes (sockets)."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minato._system import cores_by_numa_node, numa_node_of_pci_device

__all__ = ["NumaPlacement", "place_pages"]

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call mbind, for which the C library has no function."""
_PREFERRED, _INTERLEAVE = 1, 3
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_logger = logging.getLogger("minato")


@dataclass(frozen=True)
class NumaPlacement:
    """The NUMA nodes of the workers of a loader and of its batches; travels to worker processes.

    Attributes:
        cores: The cores of each worker, by its number: those of one node.
        memory_nodes: The nodes that hold the pages of batches, in turn.
    """

    cores: tuple[frozenset[int], ...]
    memory_nodes: tuple[int, ...]

    @classmethod
    def of(cls, num_workers: int, device: torch.device | None) -> NumaPlacement | None:
        """The placement on this machine; None if this process may use the cores of one node only.

        Args:
            num_workers: Largest number of workers.
            device: Where batches are copied to, or None. Batches for a GPU lie on the GPU's node.
        """
        nodes = cores_by_numa_node()
        if len(nodes) < 2:
            return None
        gpu_node = None if device is None else _node_of_gpu(device)
        return cls(spread(num_workers, nodes), tuple(nodes) if gpu_node is None else (gpu_node,))

    def place_pages(self, memory: np.ndarray[Any, Any]) -> None:
        """Have the pages of the batches' memory come from ``memory_nodes``, in whatever process writes them first."""
        place_pages(memory, self.memory_nodes)

    def enter(self, number: int) -> None:
        """Let this process, worker ``number``, run on its cores only; its own memory then lies on their node."""
        with contextlib.suppress(
            OSError
        ):  # a control group has taken all of them away: it runs on the others
            os.sched_setaffinity(0, self.cores[number])


def spread(num_workers: int, nodes: Mapping[int, frozenset[int]]) -> tuple[frozenset[int], ...]:
    """Divide workers among nodes in proportion to the nodes' cores, the first few as evenly as all of them.

    Args:
        num_workers: Number of workers.
        nodes: The cores of each node.

    Returns:
        The cores of each worker's node.
    """
    counts = dict.fromkeys(nodes, 0)
    cores = []
    for _ in range(num_workers):
        node = min(nodes, key=lambda each: (counts[each] + 1) / len(nodes[each]))
        counts[node] += 1
        cores.append(nodes[node])
    return tuple(cores)


def place_pages(memory: np.ndarray[Any, Any], nodes: tuple[int, ...]) -> bool:
    """Have the pages of shared memory that are not written yet come from ``nodes`` in turn, in whatever process.

    Where only one node is given, pages come from others when it is full.

    Args:
        memory: The memory; starts at a page.
        nodes: Numbers of NUMA nodes, one or more.

    Returns:
        Whether the kernel accepted it. Containers often refuse (they need CAP_SYS_NICE): pages then lie on the node of
        the process that writes them first.
    """
    call = _MBIND.get(platform.machine())
    if call is None:
        return False
    words = (ctypes.c_ulong * (max(nodes) // _BITS + 1))()
    for node in nodes:
        words[node // _BITS] |= 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(call),
        ctypes.c_void_p(memory.ctypes.data),
        ctypes.c_ulong(memory.nbytes),
        ctypes.c_int(_PREFERRED if len(nodes) == 1 else _INTERLEAVE),
        words,
        ctypes.c_ulong(len(words) * _BITS + 1),  # the kernel reads one bit less
        ctypes.c_uint(0),
    )
    if failed:
        _logger.info(
            "affinity='auto' cannot place batches on NUMA nodes %s (%s): their pages lie on the node of the worker "
            "that first writes them. In a container, add the capability SYS_NICE",
            nodes,
            os.strerror(ctypes.get_errno()),
        )
    return not failed


def _node_of_gpu(device: torch.device) -> int | None:
    """The NUMA node of a CUDA device; None if NVML or the kernel does not know it."""
    index: int | None = device.index
    # Only then: the call would initialize CUDA before workers are forked.
    if index is None and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
    if device.type != "cuda" or index is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or not NVIDIA's
        return None
    try:
        return node_of_visible_gpu(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"), index)
    finally:
        pynvml.nvmlShutdown()


def node_of_visible_gpu(nvml: Any, visible: str | None, index: int) -> int | None:
    """The NUMA node of GPU ``index`` of those that ``CUDA_VISIBLE_DEVICES`` names, of all without it.

    Args:
        nvml: The module ``pynvml``, after ``nvmlInit``.
    """
    try:
        names = None if visible is None else visible.split(",")
        name = str(index) if names is None else names[index].strip()
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(name)
        )
        address = nvml.nvmlDeviceGetPciInfo(handle).busId
    except (nvml.NVMLError, IndexError):
        return None
    if isinstance(address, bytes):
        address = address.decode()
    # NVML writes the PCI domain with eight digits, the kernel with four.
    domain, _, rest = address.lower().partition(":")
    return numa_node_of_pci_device(f"{int(domain, 16):04x}:{rest}")
