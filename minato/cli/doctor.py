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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from minato import _compat, _core, _system
from minato._core import tensor_memory
from minato._core.limits import explaining_limits, futex_error, soft_limit
from minato._core.segment import Segment
from minato._version import __version__
from minato.observe.text import format_value
from minato.transforms import rng_memory

__all__ = ["Finding", "add_to", "fast_paths", "machine"]

State = Literal["ok", "note", "limit"]

_GIB = 1 << 30
_FILES_BASE, _FILES_PER_WORKER = 128, 8
_PROCESSES_BASE = 64
_ROOMY_ADDRESS_SPACE = 1 << 42
_SPARE_MEMORY = _GIB
_SPARE_SHM = 1 << 20
_OLDEST = {"Python": (3, 11), "torch": (2, 6), "NumPy": (1, 26)}
_SHM = Path("/dev/shm")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        state: ``"ok"``; ``"note"``: a small cost; ``"limit"``: makes minato slower, or fail.
        value: The present value.
        remedy: The remedy; empty if none is needed.
    """

    name: str
    state: State
    value: str
    remedy: str = ""


def _finding(name: str, value: str, remedy: str, *, limits: bool) -> Finding:
    return Finding(name, "limit", value, remedy) if limits else Finding(name, "ok", value)


# --- fast paths -----------------------------------------------------------------------------


def fast_paths() -> list[Finding]:
    """The state of each fast path in this process, with the reason where it is not active."""
    return [
        _compiled_core(),
        _dlpack(),
        _tensor_fields(),
        _generator_memory(),
        _batch_rules(),
        _memfd(),
        _futex(),
        *_private_names(),
    ]


def _active(name: str, active: bool, why_not: str, remedy: str) -> Finding:
    return _finding(name, "active" if active else why_not, remedy, limits=not active)


def _compiled_core() -> Finding:
    form, reason = _core.implementation()
    remedy = "reinstall minato with a C compiler present, and leave MINATO_NO_EXTENSIONS unset"
    return _active("compiled core", form == "compiled", f"not active: {reason}", remedy)


def _needs_core(name: str) -> Finding | None:
    """The finding for a part of the compiled core where that is not in use, else None."""
    if _core.USE_EXTENSIONS:
        return None
    return Finding(name, "note", "not active: part of the compiled core")


def _dlpack() -> Finding:
    name = "DLPack exchange"
    return _needs_core(name) or _active(
        name,
        hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
        f"not active: torch {torch.__version__} does not offer it",
        "install a newer torch; until then minato reads the shape and strides of each tensor in Python",
    )


def _forbidden() -> tuple[str, str] | None:
    if _compat.may_access_memory():
        return None
    return "not active: MINATO_DIRECT_MEMORY=0", "leave MINATO_DIRECT_MEMORY unset"


def _tensor_fields() -> Finding:
    name = "tensor fields"
    why_not, remedy = _forbidden() or (
        f"not active: not found in torch {torch.__version__}",
        "report this version of torch to the project; until then each tensor costs 0.15 µs more",
    )
    return _needs_core(name) or _active(name, tensor_memory.find() is not None, why_not, remedy)


def _generator_memory() -> Finding:
    found = rng_memory.found_in_memory()
    missing = ", ".join(name for name, is_found in found.items() if not is_found)
    why_not, remedy = _forbidden() or (
        f"not active for {missing}",
        "report the versions of Python, NumPy and torch to the project; until then seed= costs 5 µs more per sample",
    )
    return _active("generator memory", not missing, why_not, remedy)


def _batch_rules() -> Finding:
    return _active(
        "batches in place",
        _compat.collates_by_default(),
        "not active: the rules of torch's default_collate have changed",
        "use the latest minato with this torch; until then torch's default_collate builds the batches",
    )


def _memfd() -> Finding:
    name, remedy = "memfd", "allow memfd_create in the security policy (seccomp) of the container"
    if not hasattr(os, "memfd_create"):
        remedy = "use Python on Linux with glibc 2.27 or newer; until then batches are stored in files in TMPDIR"
        return Finding(name, "limit", "this Python has no memfd_create", remedy)
    try:
        with explaining_limits("make shared memory"):
            Segment(mmap.PAGESIZE)
    except OSError as error:
        return Finding(name, "limit", str(error.strerror or error), remedy)
    return Finding(name, "ok", "active")


def _futex() -> Finding:
    error = futex_error()
    return _active(
        "futex",
        error is None,
        f"not active: {error}",
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
    return [
        _distribution(),
        *_versions(),
        _gil(),
        _kernel(),
        _cores(),
        _cpu_quota(),
        _sockets(),
        _open_files(),
        _processes(),
        _address_space(),
        _file_size(),
        _core_dumps(),
        _overcommit(),
        _memory(),
        _out_of_memory(),
        _dev_shm(),
        _start_method(),
    ]


def _distribution() -> Finding:
    """Whether another project with the same import name is installed anywhere on the path."""
    try:
        other = importlib.metadata.version("minato")
    except importlib.metadata.PackageNotFoundError:
        return Finding("distribution", "ok", f"minatoloader {__version__}, imported as minato")
    return Finding(
        "distribution",
        "limit",
        f"another project, minato {other} of PyPI, is installed too and has the same import name",
        "uninstall both (pip uninstall minato minatoloader), then install minatoloader",
    )


def _versions() -> Iterator[Finding]:
    found = {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "NumPy": np.__version__,
    }
    for name, version in found.items():
        oldest = _OLDEST[name]
        words = ".".join(map(str, oldest))
        remedy = f"install {name} {words} or newer"
        yield _finding(name, version, remedy, limits=_numbers(version)[: len(oldest)] < oldest)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _gil() -> Finding:
    if not _system.has_gil():
        return Finding("GIL", "ok", "off: worker threads run Python code at the same time")
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Finding("GIL", "ok", "on")
    return Finding(
        "GIL",
        "note",
        "on, in a Python that can do without",
        "import no extension module that asks for the GIL, or set PYTHON_GIL=0; until then worker threads take turns",
    )


def _kernel() -> Finding:
    system = platform.system()
    return _finding(
        "kernel",
        f"{system} {platform.release()}",
        "use Linux: minato is tested there only",
        limits=system != "Linux",
    )


def _cores() -> Finding:
    present, usable = os.cpu_count() or 1, _system.affinity_cores()
    allotted = min(_system.cpuset_cores() or present, present)
    return _finding(
        "cores",
        f"{usable} of {allotted}" if usable < allotted else str(usable),
        "lift the affinity of the process (taskset, --cpu-bind=none, OMP_PROC_BIND=false), unless it is intended",
        limits=usable < allotted,
    )


def _cpu_quota() -> Finding:
    quota, usable = _system.cpu_quota(), _system.affinity_cores()
    if quota is None:
        return Finding("cpu quota", "ok", "none")
    return _finding(
        "cpu quota",
        f"{quota:g} cores of {usable}",
        f"raise the quota of the container (cpu.max), or use at most num_workers={max(int(quota), 1)}",
        limits=quota < usable,
    )


def _sockets() -> Finding:
    nodes = len(_system.cores_by_numa_node())
    if nodes < 2:
        return Finding("sockets", "ok", "1")
    return Finding(
        "sockets",
        "note",
        f"{nodes} NUMA nodes",
        "the kernel moves workers and memory between them: bind each rank to one of them (numactl, taskset)",
    )


def _limit_words(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _open_files() -> Finding:
    limit = soft_limit("RLIMIT_NOFILE")
    needed = _FILES_BASE + _FILES_PER_WORKER * math.ceil(_system.available_cores(whole_node=True))
    return _finding(
        "open files",
        _limit_words(limit),
        f"raise the limit (ulimit -n {max(needed, 4096)}): loaders with a worker on each core need about {needed}",
        limits=limit is not None and limit < needed,
    )


def _processes() -> Finding:
    left = _system.group_processes_left()
    limit = None if os.geteuid() == 0 else soft_limit("RLIMIT_NPROC")  # root has no such limit
    if limit is not None:
        own = limit - _system.user_threads()
        left = own if left is None else min(own, left)
    needed = _PROCESSES_BASE + 4 * math.ceil(_system.available_cores(whole_node=True))
    return _finding(
        "processes",
        "unlimited" if left is None else f"{left} more",
        f"raise the limit (ulimit -u, pids.max): workers and their threads may need {needed} more",
        limits=left is not None and left < needed,
    )


def _address_space() -> Finding:
    limit = soft_limit("RLIMIT_AS")
    return _finding(
        "address space",
        "unlimited" if limit is None else format_value(limit, "bytes"),
        "lift the limit (ulimit -v unlimited): a loader reserves terabytes of addresses, which need no memory",
        limits=limit is not None and limit < 4 * _ROOMY_ADDRESS_SPACE,
    )


def _file_size() -> Finding:
    limit = soft_limit("RLIMIT_FSIZE")
    return _finding(
        "file size",
        "unlimited" if limit is None else format_value(limit, "bytes"),
        "lift the limit (ulimit -f unlimited): it also applies to shared memory",
        limits=limit is not None and limit < _ROOMY_ADDRESS_SPACE,
    )


def _core_dumps() -> Finding:
    limit = soft_limit("RLIMIT_CORE")
    return _finding(
        "core dumps",
        "off" if limit == 0 else "on",
        "switch them off (ulimit -c 0): this Python cannot keep shared memory out of them",
        limits=limit != 0 and not hasattr(mmap, "MADV_DONTDUMP"),
    )


def _overcommit() -> Finding:
    try:
        mode = _system.text_of(_OVERCOMMIT).strip()
    except OSError:
        return Finding("overcommit", "ok", "unknown")
    return _finding(
        "overcommit",
        mode,
        "set sysctl vm.overcommit_memory to 0 or 1: with 2, reserved addresses count as memory",
        limits=mode == "2",
    )


def _memory() -> Finding:
    available, whole = _system.available_memory_bytes(), _system.memory_limit_bytes()
    return _finding(
        "memory",
        f"{format_value(available, 'bytes')} of {format_value(whole, 'bytes')} available",
        "raise the container's limit (memory.max), or end other programs: batches in shared memory also count",
        limits=available < _SPARE_MEMORY,
    )


def _out_of_memory() -> Finding:
    kills = _system.memory_kills()
    return _finding(
        "killed by OOM",
        f"{kills} processes" if kills else "none",
        "raise the container's limit (memory.max), use fewer workers, or set memory_budget=",
        limits=kills > 0,
    )


def _dev_shm() -> Finding:
    name = "/dev/shm"
    if not os.access(_SHM, os.W_OK):
        remedy = (
            "mount a tmpfs there: the locks of multiprocessing need it; minato's batches do not"
        )
        return Finding(name, "limit", "not writable", remedy)
    statistics = os.statvfs(_SHM)
    free = statistics.f_bavail * statistics.f_frsize
    return _finding(
        name,
        f"{format_value(free, 'bytes')} free; minato's batches do not use it",
        "enlarge it (docker run --shm-size=1g): torch's shared tensors and the locks of multiprocessing use it",
        limits=free < _SPARE_SHM,
    )


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


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "doctor", help="report the active fast paths and the limits of this machine"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_run, failed="the machine cannot be examined: {}")


def _run(options: argparse.Namespace) -> int:
    sections = {"fast paths": fast_paths(), "machine": machine()}
    limits = sum(each.state == "limit" for found in sections.values() for each in found)
    if options.json:
        listed = {title: [asdict(each) for each in found] for title, found in sections.items()}
        print(json.dumps({"minato": __version__, "limits": limits, **listed}, indent=2))
    else:
        print(f"minato {__version__}")
        for title, found in sections.items():
            print(f"\n{title}\n{_table(found)}")
        print(f"\n{_summary(limits)}")
    return 1 if limits else 0


def _summary(limits: int) -> str:
    if not limits:
        return "nothing limits minato here"
    return "1 limit found" if limits == 1 else f"{limits} limits found"


def _table(findings: Sequence[Finding]) -> str:
    width = max(len(each.name) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"  {each.name:{width}}  {each.state:5}  {each.value}")
        if each.remedy:
            lines.append(f"  {'':{width}}         → {each.remedy}")
    return "\n".join(lines)
