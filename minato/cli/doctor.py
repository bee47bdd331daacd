"""``minato doctor``: the active fast paths, and the limits of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import mmap
import multiprocessing
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from minato import _compat, _core, _system
from minato._core import tensor_memory
from minato._core.limits import explaining_limits, futex_error, soft_limit
from minato._core.segment import Segment
from minato._distribution import __version__, commit
from minato._support.values import counted
from minato.delivery.device import memory_pinner
from minato.observe.gpus import has_driver
from minato.observe.text import format_value
from minato.transforms import rng_memory

State = Literal["ok", "note", "limit"]

_FILES_BASE, _FILES_PER_WORKER = 128, 8
_PROCESSES_BASE = 64
_ROOMY_ADDRESS_SPACE = 1 << 42
_SPARE_MEMORY = 1 << 30
_SPARE_SHM = 1 << 20
_SHM = Path("/dev/shm")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@dataclass(frozen=True)
class Finding:
    """One line of the report, with a remedy if one is needed.

    Its state is ``"ok"``; ``"note"``: a small cost; or ``"limit"``: makes minato slower, or fail.
    """

    name: str
    state: State
    value: str
    remedy: str = ""


def _finding(name: str, value: str, remedy: str, *, limits: bool) -> Finding:
    return Finding(name, "limit", value, remedy) if limits else Finding(name, "ok", value)


def _active(name: str, active: bool, why_not: str, remedy: str) -> Finding:
    value = "active" if active else f"not active{why_not}"
    return _finding(name, value, remedy, limits=not active)


# --- fast paths -----------------------------------------------------------------------------


def fast_paths() -> list[Finding]:
    """The state of each fast path in this process, with the reason where it is not active."""
    return [*_parts_of_core(), *_of_packages(), *_of_system(), *_private_names()]


def _parts_of_core() -> Iterator[Finding]:
    form, reason = _core.implementation()
    remedy = "reinstall minato with a C compiler present, and leave MINATO_NO_EXTENSIONS unset"
    yield _active("compiled core", form == "compiled", f": {reason}", remedy)
    if not _core.USE_EXTENSIONS:
        for name in ("DLPack exchange", "tensor fields"):
            yield Finding(name, "note", "not active: part of the compiled core")
        return
    yield _active(
        "DLPack exchange",
        hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
        f": torch {torch.__version__} does not offer it",
        "install a newer torch; until then minato reads the shape and strides of each tensor in Python",
    )
    why_not, remedy = _forbidden() or (
        f": not found in torch {torch.__version__}",
        "report this version of torch to the project; until then each tensor costs 0.15 µs more",
    )
    yield _active("tensor fields", tensor_memory.find() is not None, why_not, remedy)


def _forbidden() -> tuple[str, str] | None:
    if _compat.may_access_memory():
        return None
    return ": MINATO_DIRECT_MEMORY=0", "leave MINATO_DIRECT_MEMORY unset"


def _of_packages() -> Iterator[Finding]:
    found = rng_memory.found_in_memory()
    missing = ", ".join(name for name, is_found in found.items() if not is_found)
    why_not, remedy = _forbidden() or (
        f" for {missing}",
        "report the versions of Python, NumPy and torch to the project; until then seed= costs 5 µs more per sample",
    )
    yield _active("generator memory", not missing, why_not, remedy)
    yield _active(
        "batches in place",
        _compat.collates_by_default(),
        ": the rules of torch's default_collate have changed",
        "use the latest minato with this torch; until then torch's default_collate builds the batches",
    )


def _of_system() -> Iterator[Finding]:
    why_not, remedy = "", "allow memfd_create in the security policy (seccomp) of the container"
    if not hasattr(os, "memfd_create"):
        why_not = "this Python has no memfd_create"
        remedy = "use Python on Linux with glibc 2.27 or newer; until then batches are stored in files in TMPDIR"
    else:
        try:
            with explaining_limits("make shared memory"):
                Segment(mmap.PAGESIZE)
        except OSError as error:
            why_not = str(error.strerror or error)
    yield _finding("memfd", why_not or "active", remedy, limits=bool(why_not))
    fault = futex_error()
    yield _active(
        "futex",
        fault is None,
        f": {fault}",
        "use Linux, and allow futex in the security policy (seccomp); until then waiting costs up to 0.5 ms",
    )


def _private_names() -> Iterator[Finding]:
    installed = [name for name in _compat.PRIVATE_NAMES if name.is_installed()]
    missing = [name for name in installed if not name.is_present()]
    if not missing:
        yield Finding("private names", "ok", f"all {len(installed)} are present")
    for name in missing:
        remedy = f"use the latest minato, or another version of {name.name.partition('.')[0]}"
        yield Finding("private names", "limit", f"no {name.name}: {name.without}", remedy)


# --- the machine ----------------------------------------------------------------------------


def machine() -> list[Finding]:
    """The limits of the machine or container, each with a remedy where it limits minato."""
    return [*_software(), *_cores(), *_process_limits(), *_memory(), _gpus(), _start_method()]


def _software() -> Iterator[Finding]:
    try:  # anywhere on the path
        other = importlib.metadata.version("minato")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("distribution", "ok", f"minatoloader {__version__}, imported as minato")
    else:
        yield Finding(
            "distribution",
            "limit",
            f"another project, minato {other} of PyPI, is installed too and has the same import name",
            "uninstall both (pip uninstall minato minatoloader), then install minatoloader",
        )
    for name, version, oldest in (
        ("Python", platform.python_version(), (3, 11)),
        ("torch", str(torch.__version__), (2, 6)),
        ("NumPy", np.__version__, (1, 26)),
    ):
        remedy = f"install {name} {oldest[0]}.{oldest[1]} or newer"
        yield _finding(name, version, remedy, limits=_release(version) < oldest)
    if not _system.has_gil():
        yield Finding("GIL", "ok", "off: worker threads run Python code at the same time")
    elif not sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield Finding("GIL", "ok", "on")
    else:
        remedy = (
            "import no extension module that asks for the GIL, or set PYTHON_GIL=0; until then worker threads take "
            "turns"
        )
        yield Finding("GIL", "note", "on, in a Python that can do without", remedy)
    system = platform.system()
    remedy = "use Linux: minato is tested there only"
    yield _finding("kernel", f"{system} {platform.release()}", remedy, limits=system != "Linux")


def _release(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _cores() -> Iterator[Finding]:
    present, usable = os.cpu_count() or 1, _system.affinity_cores()
    allotted = min(_system.cpuset_cores() or present, present)
    yield _finding(
        "cores",
        f"{usable} of {allotted}" if usable < allotted else str(usable),
        "lift the affinity of the process (taskset, --cpu-bind=none, OMP_PROC_BIND=false), unless it is intended",
        limits=usable < allotted,
    )
    quota = _system.cpu_quota()
    yield _finding(
        "cpu quota",
        "none" if quota is None else f"{quota:g} cores of {usable}",
        f"raise the quota of the container (cpu.max), or use at most num_workers={max(int(quota or 1), 1)}",
        limits=quota is not None and quota < usable,
    )
    nodes = _system.numa_nodes()
    if nodes < 2:
        yield Finding("sockets", "ok", "1")
    else:
        remedy = "the kernel moves workers and memory between them: bind each rank to one of them (numactl, taskset)"
        yield Finding("sockets", "note", f"{nodes} NUMA nodes", remedy)


def _process_limits() -> Iterator[Finding]:
    cores = math.ceil(_system.available_cores(whole_node=True))
    needed = _FILES_BASE + _FILES_PER_WORKER * cores
    yield _limit(
        "open files",
        soft_limit("RLIMIT_NOFILE"),
        needed,
        f"raise the limit (ulimit -n {max(needed, 4096)}): loaders with a worker on each core need about {needed}",
    )
    left = _system.group_processes_left()
    limit = None if os.geteuid() == 0 else soft_limit("RLIMIT_NPROC")  # root has no such limit
    if limit is not None:
        own = limit - _system.user_threads()
        left = own if left is None else min(own, left)
    needed = _PROCESSES_BASE + 4 * cores
    remedy = (
        f"raise the limit (ulimit -u, pids.max): workers and their threads may need {needed} more"
    )
    yield _limit("processes", left, needed, remedy, "{} more")
    yield _limit(
        "address space",
        soft_limit("RLIMIT_AS"),
        4 * _ROOMY_ADDRESS_SPACE,
        "lift the limit (ulimit -v unlimited): a loader reserves terabytes of addresses, which need no memory",
    )
    yield _limit(
        "file size",
        soft_limit("RLIMIT_FSIZE"),
        _ROOMY_ADDRESS_SPACE,
        "lift the limit (ulimit -f unlimited): it also applies to shared memory",
    )
    dumps = soft_limit("RLIMIT_CORE") != 0
    yield _finding(
        "core dumps",
        "on" if dumps else "off",
        "switch them off (ulimit -c 0): this Python cannot keep shared memory out of them",
        limits=dumps and not hasattr(mmap, "MADV_DONTDUMP"),
    )


def _limit(name: str, limit: int | None, needed: int, remedy: str, words: str = "{}") -> Finding:
    if limit is None:
        return Finding(name, "ok", "unlimited")
    shown = words.format(limit if needed < _ROOMY_ADDRESS_SPACE else format_value(limit, "bytes"))
    return _finding(name, shown, remedy, limits=limit < needed)


def _memory() -> Iterator[Finding]:
    mode = "unknown"
    with suppress(OSError):
        mode = _system.text_of(_OVERCOMMIT).strip()
    yield _finding(
        "overcommit",
        mode,
        "set sysctl vm.overcommit_memory to 0 or 1: with 2, reserved addresses count as memory",
        limits=mode == "2",
    )
    available, whole = _system.available_memory_bytes(), _system.memory_limit_bytes()
    yield _finding(
        "memory",
        f"{format_value(available, 'bytes')} of {format_value(whole, 'bytes')} available",
        "raise the container's limit (memory.max), or end other programs: batches in shared memory also count",
        limits=available < _SPARE_MEMORY,
    )
    kills = _system.memory_kills()
    yield _finding(
        "killed by OOM",
        counted(kills, "processes") if kills else "none",
        "raise the container's limit (memory.max), use fewer workers, or set memory_budget=",
        limits=kills > 0,
    )
    if not os.access(_SHM, os.W_OK):
        remedy = (
            "mount a tmpfs there: the locks of multiprocessing need it; minato's batches do not"
        )
        yield Finding("/dev/shm", "limit", "not writable", remedy)
        return
    statistics = os.statvfs(_SHM)
    free = statistics.f_bavail * statistics.f_frsize
    yield _finding(
        "/dev/shm",
        f"{format_value(free, 'bytes')} free; minato's batches do not use it",
        "enlarge it (docker run --shm-size=1g): torch's shared tensors and the locks of multiprocessing use it",
        limits=free < _SPARE_SHM,
    )


def _gpus() -> Finding:
    pinner = memory_pinner()
    if pinner is None:
        remedy = "install torch for CUDA (https://pytorch.org/get-started), if training is to use the GPU"
        if has_driver() and torch.version.cuda is None:
            return Finding("GPU", "note", "this torch has no CUDA", remedy)
        return Finding("GPU", "ok", "none")
    names = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    try:
        segment = Segment(mmap.PAGESIZE)
        pinner.lock(segment.address, mmap.PAGESIZE)
    except OSError as error:
        remedy = "use pin_memory=True: torch pins a copy of each batch"
        told = f"{names}; batches cannot be pinned in place: {error}"
        return Finding("GPU", "note", told, remedy)
    pinner.unlock(segment.address)
    return Finding("GPU", "ok", f"{names}; batches are pinned in place")


def _start_method() -> Finding:
    method = multiprocessing.get_context().get_start_method()
    if method != "spawn":
        return Finding("start method", "ok", method)
    remedy = (
        "use multiprocessing_context='forkserver', or persistent_workers=True: each spawned worker imports the program "
        "again"
    )
    return Finding("start method", "note", method, remedy)


# --- the command ----------------------------------------------------------------------------


def add_to(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the parser of all."""
    parser = add_parser(
        "doctor", help="report the active fast paths and the limits of this machine"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_run, failed="the machine cannot be examined: {}")


def _run(options: argparse.Namespace) -> int:
    sections = {"fast paths": fast_paths(), "machine": machine()}
    limits = sum(each.state == "limit" for found in sections.values() for each in found)
    if options.json:
        listed = {title: [asdict(each) for each in found] for title, found in sections.items()}
        version = {"minato": __version__, "commit": commit()}
        print(json.dumps({**version, "limits": limits, **listed}, indent=2))
    else:
        print(f"minato {__version__}, commit {commit()}")
        for title, found in sections.items():
            print(f"\n{title}\n{_table(found)}")
        found_here = "1 limit found" if limits == 1 else f"{limits} limits found"
        print(f"\n{found_here if limits else 'nothing limits minato here'}")
    return 1 if limits else 0


def _table(findings: Sequence[Finding]) -> str:
    width = max(len(each.name) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"  {each.name:{width}}  {each.state:5}  {each.value}")
        if each.remedy:
            lines.append(f"  {'':{width}}         → {each.remedy}")
    return "\n".join(lines)
