"""Limits and usage of the machine, or of the container on it."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NUMA_NODES = Path("/sys/devices/system/node")
_DISKS = Path("/sys/block")
_DISK_COUNTERS = Path("/proc/diskstats")
_SECTOR_BYTES = 512
FIRST_PID = os.getpid()
"""Of the process that has imported this module; forked children have it, too."""


def _psutil() -> Any:
    """Import psutil on demand: it takes a tenth of a second, and workers do not need it."""
    import psutil

    return psutil


def available_memory_bytes() -> int:
    """Available memory in bytes, within the limits of the control groups."""
    left = [limit - used for limit, used in _memory_of_groups()]
    return max(min([_memory_of_machine("available", "SC_AVPHYS_PAGES"), *left]), 0)


def _memory_of_machine(name: str, pages: str) -> int:
    """Bytes of memory, as psutil calls it; where /proc is hidden or replaced, as ``os.sysconf`` does."""
    try:
        return int(getattr(_psutil().virtual_memory(), name))
    except Exception:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def recent_available_memory_bytes() -> int:
    """Available memory in bytes, measured at most once a second."""
    return _memory_in_second(int(time.monotonic()))


@functools.lru_cache(1)
def _memory_in_second(second: int) -> int:
    return available_memory_bytes()


def memory_limit_bytes() -> int:
    """Memory limit in bytes of this process's control groups, or of the machine."""
    limits = [limit for limit, _ in _memory_of_groups()]
    return min([_memory_of_machine("total", "SC_PHYS_PAGES"), *limits])


def memory_kills() -> int:
    """Processes of this control group that the kernel has killed for lack of memory; 0 if it keeps no count."""
    kills = 0
    for folder, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        for group in set(_groups(folder)):
            with suppress(OSError):
                lines = text_of(f"{_CGROUP}/{folder}/{group}/{name}").splitlines()
                kills += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return kills


def _memory_of_groups() -> Iterator[tuple[int, int]]:
    """Limit in bytes of each control group of this process that has one, and its use without the kernel's caches."""
    # A program that reads files fills the group up to its limit with their pages, and with their names and inodes,
    # which the kernel drops when it needs room.
    first = "memory.limit_in_bytes", "memory.usage_in_bytes"
    second = "memory.max", "memory.current"
    for folder, names, whole in (("", second, ""), ("memory", first, "total_")):
        for at, limit, used in _numbers(folder, *names):
            yield limit, used - _cached_bytes(at, whole)


def _cached_bytes(group: str, whole: str) -> int:
    """Bytes that the kernel caches of files for a control group; 0 where it keeps no statistics."""
    names, found = {f"{whole}active_file", f"{whole}inactive_file", "slab_reclaimable"}, 0
    with suppress(OSError):
        for line in text_of(f"{group}/memory.stat").splitlines():
            name, _, number = line.partition(" ")
            found += int(number) if name in names else 0
    return found


def _numbers(folder: str, first: str, second: str) -> Iterator[tuple[str, int, int]]:
    """Each group in a hierarchy that has a number in both files, with the numbers."""
    for at in _around(folder):
        with suppress(OSError, ValueError):  # no such group or version; "max"
            yield at, int(text_of(f"{at}/{first}")), int(text_of(f"{at}/{second}"))


def machine_usage() -> tuple[float, float]:
    """Return ``(busy, total)`` seconds of all cores together since boot; zeros where /proc is hidden or replaced."""
    try:
        times = _psutil().cpu_times()
    except Exception:
        return 0.0, 0.0
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # The guests' time is contained in the users'.
    whole_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return whole_s - idle_s, whole_s


class CpuUsage(NamedTuple):
    """Nanoseconds of processes or threads on a core, and without one but ready to run: 0 where that is not measured."""

    ran_ns: int
    queued_ns: int


def process_usage(pids: Iterable[int]) -> CpuUsage:
    """The sum over processes, with all their threads; those that have ended count as zero."""
    return _total(task for pid in pids for task in _tasks(pid))


def thread_usage(native_ids: Iterable[int]) -> CpuUsage:
    """The sum over threads of this process."""
    return _total(f"/proc/self/task/{native_id}" for native_id in native_ids)


def _tasks(pid: int) -> list[str]:
    directory = f"/proc/{pid}/task"
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]
    except OSError:
        return []


def _total(tasks: Iterable[str]) -> CpuUsage:
    ran_ns = queued_ns = 0
    for task in tasks:
        try:
            ran, queued, _ = text_of(f"{task}/schedstat").split()
        except (OSError, ValueError):
            ran, queued = _ticks(task), "0"
        ran_ns += int(ran)
        queued_ns += int(queued)
    return CpuUsage(ran_ns, queued_ns)


def _ticks(task: str) -> str:
    """Time on a core from a kernel without scheduler statistics, to a hundredth of a second."""
    try:
        fields = text_of(f"{task}/stat").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return str(ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return "0"


def disk_read_bytes() -> int:
    """Bytes that all disks have read since boot; 0 where a container hides them."""
    # psutil asks the kernel about each partition, for each new loader.
    try:
        disks = {name.replace("!", "/") for name in os.listdir(_DISKS)}
        rows = map(str.split, text_of(_DISK_COUNTERS).splitlines())
        return _SECTOR_BYTES * sum(int(row[5]) for row in rows if row[2] in disks)
    except (OSError, ValueError, IndexError):
        return 0


def available_cores(whole_node: bool = False) -> float:
    """Cores for this process: those it may run on, within the quota of its control groups.

    Where a launcher started several processes here (:func:`local_ranks`), each counts on its share of them, unless
    ``whole_node``: for what it does for the others too. A quota may be a fraction; at least one core is assumed.
    """
    cores = min([float(affinity_cores()), *_quotas()])
    return max(cores if whole_node else cores / local_ranks(), 1.0)


def has_gil() -> bool:
    """Whether threads of this process run Python code one at a time."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def affinity_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpuset_cores() -> int | None:
    """Cores that the control groups of this process allow; None if they name none."""
    texts = *_texts("", "cpuset.cpus.effective"), *_texts("cpuset", "cpuset.effective_cpus")
    return min(filter(None, (len(_members(text.strip())) for (text,) in texts)), default=None)


def _members(text: str) -> set[int]:
    """The numbers in a list of the kernel, such as ``0-3,8``."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    }


def numa_nodes() -> int:
    """NUMA nodes with memory on which this process may run; 0 where the kernel has none, or a container hides them."""
    try:
        nodes = _members(text_of(f"{_NUMA_NODES}/has_memory").strip())
        usable = os.sched_getaffinity(0)
        cores = [_members(text_of(f"{_NUMA_NODES}/node{node}/cpulist").strip()) for node in nodes]
    except (OSError, AttributeError):
        return 0
    return sum(not usable.isdisjoint(each) for each in cores)


def cpu_quota() -> float | None:
    """Cores by the smallest quota of the control groups; it may be a fraction. None if there is none."""
    return min(_quotas(), default=None)


def group_processes_left() -> int | None:
    """Processes and threads that the control groups of this process still allow; None if they set no limit."""
    names = "pids.max", "pids.current"
    limits = *_numbers("", *names), *_numbers("pids", *names)
    return min((most - used for _, most, used in limits), default=None)


def user_threads() -> int:
    """Processes and threads of this user, as the limit on processes counts them."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
        except OSError:  # it has ended
            continue
    return count


def environment(variable: str) -> str | None:
    """The value of an environment variable; None if it is unset, empty or 0."""
    value = os.environ.get(variable, "")
    return None if value in ("", "0") else value


def local_ranks() -> int:
    """Number of this job's processes on this node, from the launcher's variables; 1 without them."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if (count := _number_in(variable)) is not None:
            return max(count, 1)
    ranks = _on_this_node_alone()
    return 1 if ranks is None else ranks[1]


def local_rank() -> int:
    """Index of this process among them, from 0."""
    for variable in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if (rank := _number_in(variable)) is not None:
            return rank
    ranks = _on_this_node_alone()
    return 0 if ranks is None else ranks[0]


def file_of_process(path: str) -> str:
    """The file that this process writes where the environment gives one name to all processes of a program.

    Local rank 1 gets ``NAME.rank1.json``, a child process ``NAME.pid1234.json``.
    """
    stem, suffix = os.path.splitext(os.path.abspath(path))
    rank, pid = local_rank(), os.getpid()
    is_child = pid != FIRST_PID or parent_process() is not None
    return f"{stem}{f'.rank{rank}' if rank else ''}{f'.pid{pid}' if is_child else ''}{suffix}"


def rank_and_ranks() -> tuple[int, int]:
    """Rank of this process and number of ranks: those of torch.distributed, else of the environment, else 0 of 1."""
    if (found := ranks_by_torch()) is not None:
        return found
    rank, ranks = _number_in("RANK"), _number_in("WORLD_SIZE")
    return (0, 1) if rank is None or ranks is None or not 0 <= rank < ranks else (rank, ranks)


def ranks_by_torch() -> tuple[int, int] | None:
    """Rank of this process and number of ranks by torch.distributed; None: it is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _number_in(variable: str) -> int | None:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return None


def _on_this_node_alone() -> tuple[int, int] | None:
    """Rank and number of ranks by torch.distributed, where these meet at an address that only this node has."""
    here = os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")
    return ranks_by_torch() if here else None


def _quotas() -> Iterator[float]:
    """The cores that each control group of this process allows: its own and all around it."""
    second = "cpu.cfs_quota_us", "cpu.cfs_period_us"
    for names in (("", "cpu.max"), ("cpu", *second), ("cpu,cpuacct", *second)):
        for texts in _texts(*names):
            with suppress(ValueError, IndexError, ZeroDivisionError):  # "max", or damaged
                quota, period = map(int, " ".join(texts).split()[:2])
                if quota / period > 0:  # -1: no quota
                    yield quota / period


def _texts(folder: str, *names: str) -> Iterator[list[str]]:
    """The texts of some files, of each group around this process in a hierarchy that has them all."""
    for at in _around(folder):
        try:
            found = [text_of(f"{at}/{name}") for name in names]
        except OSError:  # no such group or version
            continue
        yield found


def _around(controllers: str) -> Iterator[str]:
    """Folders of this process's groups in a hierarchy, and of those that these lie in."""
    # Without pathlib, which takes longer than the reading: each epoch asks.
    top = f"{_CGROUP}/{controllers}"
    yield top
    for group in _groups(controllers):
        while group:
            yield f"{top}/{group}"
            group = group.rpartition("/")[0]


def _groups(controllers: str) -> Iterator[str]:
    """Paths of this process's groups in a hierarchy, and its root, which a container may see as its own."""
    yield ""
    try:
        lines = text_of(_OWN_GROUPS).splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == controllers:
            yield path.lstrip("/")


def text_of(path: str | Path) -> str:
    """Return the text of a system file, or raise OSError. Some are read a hundred times a second, hence unbuffered."""
    # Not by open(), in whose place a test of the program's may have put another function.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b"")).decode()
    finally:
        os.close(descriptor)
