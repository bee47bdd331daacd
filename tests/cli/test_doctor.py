"""``minato doctor``: what it finds is true, each finding has a remedy, and the exit status counts them."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import mmap
import multiprocessing
import os
import platform
import re
import resource
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from minato import _compat, _core, _system
from minato._core import limits, tensor_memory
from minato.cli import doctor
from minato.cli.doctor import Finding
from minato.cli.main import main
from minato.transforms import rng_memory
from tests.subprocesses import python
from tests.transforms.test_rng import forget_probes

ROOT = Path(doctor.__file__).parents[1]
GIB = 1 << 30

SOUND: dict[str, Any] = {
    "affinity_cores": lambda: 4,
    "cpuset_cores": lambda: 4,
    "cpu_quota": lambda: None,
    "group_processes_left": lambda: None,
    "available_memory_bytes": lambda: 8 * GIB,
    "memory_limit_bytes": lambda: 16 * GIB,
    "memory_kills": lambda: 0,
}


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine in which nothing is wrong, whatever this one is."""
    for name, answer in SOUND.items():
        monkeypatch.setattr(_system, name, answer)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(_system, "text_of", lambda path: "0\n")
    monkeypatch.setattr(platform, "system", lambda: "Linux")


def found(name: str) -> Finding:
    (finding,) = [each for each in (*doctor.fast_paths(), *doctor.machine()) if each.name == name]
    return finding


@pytest.mark.parametrize("other", [None, "0.12.3"])
def test_another_distribution_of_this_import_name(
    monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    def version(name: str) -> str:
        if name != "minato" or other is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return other

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = found("distribution")
    assert finding.state == ("ok" if other is None else "limit")
    assert ("0.12.3" in finding.value) == (other is not None)


Change = Callable[[pytest.MonkeyPatch], None]


def setting(where: Any, name: str, value: Any) -> Change:
    return lambda patch: patch.setattr(where, name, value)


def with_limit(name: str, soft: int) -> Change:
    def limits_of(asked: int) -> tuple[int, int]:
        return (soft if asked == getattr(resource, name) else resource.RLIM_INFINITY,) * 2

    return setting(resource, "getrlimit", limits_of)


def without(where: Any, name: str) -> Change:
    return lambda patch: patch.delattr(where, name)


def forbid_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MINATO_DIRECT_MEMORY", "0")
    forget_probes()


def few_processes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "geteuid", lambda: 1000)
    patch.setattr(_system, "user_threads", lambda: 90)
    with_limit("RLIMIT_NPROC", 100)(patch)


def full_shm(patch: pytest.MonkeyPatch) -> None:
    values = list(os.statvfs("/"))[:10]
    values[4] = 0  # f_bavail
    patch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))


pure_core = setting(_core, "implementation", lambda: ("pure", "x"))
refuse_memfd = setting(
    os, "memfd_create", Mock(side_effect=PermissionError(errno.EPERM, os.strerror(errno.EPERM)))
)
no_order = setting(rng_memory, "_pcg64_order", lambda: None)
no_rules = setting(_compat, "_DEFAULT_RULES", None)
no_handlers = without(torch._C, "_set_worker_signal_handlers")
NO_HANDLERS = "no torch._C._set_worker_signal_handlers: the words are missing"

LIMITS = [
    ("compiled core", pure_core, "pure|x", "compiler"),
    ("futex", setting(limits, "FUTEX_NUMBER", None), "no futex known", "seccomp"),
    ("futex", setting(limits, "FUTEX_NUMBER", 999_999), "not implemented", "seccomp"),
    ("memfd", refuse_memfd, "not permitted.*security policy", "memfd_create"),
    ("memfd", without(os, "memfd_create"), "no memfd_create", "glibc"),
    ("generator memory", forbid_memory, "MINATO_DIRECT_MEMORY=0", "unset"),
    ("generator memory", no_order, "not active for numpy.random.Generator$", "5 µs"),
    ("batches in place", no_rules, "rules of torch.*changed", "latest minato"),
    ("private names", no_handlers, NO_HANDLERS, "another version of torch"),
    ("Python", setting(platform, "python_version", lambda: "3.9.18"), "3.9.18", "Python 3.11"),
    ("torch", setting(torch, "__version__", "2.5.1+cu124"), "2.5.1", "torch 2.6"),
    ("NumPy", setting(np, "__version__", "1.25.0rc1"), "1.25", "NumPy 1.26"),
    ("kernel", setting(platform, "system", lambda: "Darwin"), "Darwin", "use Linux"),
    ("cores", setting(_system, "affinity_cores", lambda: 1), "1 of 4", "taskset"),
    ("cpu quota", setting(_system, "cpu_quota", lambda: 2.5), "2.5 cores of 4", "num_workers=2"),
    ("open files", with_limit("RLIMIT_NOFILE", 64), "64", "ulimit -n 4096"),
    ("processes", few_processes, "10 more", "ulimit -u"),
    ("processes", setting(_system, "group_processes_left", lambda: 3), "3 more", "pids.max"),
    ("address space", with_limit("RLIMIT_AS", 64 * GIB), "GB", "ulimit -v"),
    ("file size", with_limit("RLIMIT_FSIZE", 1 << 20), "MB", "ulimit -f"),
    ("core dumps", without(mmap, "MADV_DONTDUMP"), "on", "ulimit -c 0"),
    ("overcommit", setting(_system, "text_of", lambda path: "2\n"), "2", "vm.overcommit_memory"),
    ("memory", setting(_system, "available_memory_bytes", lambda: 1 << 20), "MB", "memory.max"),
    ("killed by OOM", setting(_system, "memory_kills", lambda: 3), "3", "fewer workers"),
    ("/dev/shm", full_shm, "0 B free", "--shm-size"),
    ("/dev/shm", setting(doctor, "_SHM", Path("/no/such/directory")), "not writable", "tmpfs"),
]
COMPILED = [
    ("tensor fields", forbid_memory, "MINATO_DIRECT_MEMORY=0", "unset"),
    ("tensor fields", setting(tensor_memory, "find", lambda: None), "not found", "0.15 µs"),
    ("DLPack exchange", setting(torch, "Tensor", object()), "does not offer it", "newer torch"),
]


@pytest.mark.parametrize(("name", "change", "value", "remedy"), [*LIMITS, *COMPILED])
def test_a_limit_is_found_and_has_a_remedy(
    name: str, change: Change, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, change, value, remedy) in COMPILED and not _core.USE_EXTENSIONS:
        pytest.skip("a part of the compiled core")
    before = found(name)
    if _core.USE_EXTENSIONS and name not in ("DLPack exchange", "/dev/shm"):
        assert (before.state, before.remedy) == ("ok", "")
    with monkeypatch.context() as patch:
        change(patch)
        finding = found(name)
    forget_probes()
    assert finding.state == "limit"
    assert re.search(value, finding.value)
    assert remedy in finding.remedy


def test_a_start_method_that_is_slow_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("fork", "forkserver", "spawn"):
        context = multiprocessing.context._concrete_contexts[method]
        monkeypatch.setattr(multiprocessing, "get_context", Mock(return_value=context))
        finding = found("start method")
        assert finding.state == ("note" if method == "spawn" else "ok")
        assert ("forkserver" in finding.remedy) == (method == "spawn")


REFUSING = Mock(
    **{"lock.side_effect": OSError("CUDA error 2"), "unlock.side_effect": AssertionError}
)


@pytest.mark.parametrize(
    ("pinner", "has_driver", "state", "value", "remedy"),
    [
        (None, False, "ok", "none", ""),
        (None, True, "note", "this torch has no CUDA", "install torch for CUDA"),
        (Mock(), True, "ok", "One, Other; batches are pinned in place", ""),
        (REFUSING, True, "note", "cannot be pinned in place: CUDA error 2", "pin_memory=True"),
    ],
)
def test_gpus(
    pinner: Any, has_driver: bool, state: str, value: str, remedy: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(doctor, "memory_pinner", lambda: pinner)
    monkeypatch.setattr(doctor, "has_driver", lambda: has_driver)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["One", "Other"].__getitem__)
    finding = found("GPU")
    assert finding.state == state
    assert value in finding.value
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("has_gil", "could_do_without", "state", "value"),
    [
        (True, False, "ok", "on"),
        (True, True, "note", "on, in a Python that can do without"),
        (False, True, "ok", "off: worker threads run Python code at the same time"),
    ],
)
def test_a_gil_that_need_not_be_on_is_a_note(
    has_gil: bool, could_do_without: bool, state: str, value: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: int(could_do_without))
    finding = found("GIL")
    assert (finding.state, finding.value) == (state, value)
    assert ("PYTHON_GIL=0" in finding.remedy) == (state == "note")


def test_what_the_compiled_core_contains_is_no_limit_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_core, "USE_EXTENSIONS", False)
    for name in ("tensor fields", "DLPack exchange"):
        assert found(name).state == "note"


def test_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _system.user_threads() >= len(os.listdir("/proc/self/task"))


def test_a_sound_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    findings = [*report["fast paths"], *report["machine"]]
    limiting = [each for each in findings if each["state"] == "limit"]
    assert report["limits"] == len(limiting)
    assert status == (1 if limiting else 0)
    assert all(bool(each["remedy"]) for each in limiting)
    assert {each["state"] for each in findings} <= {"ok", "note", "limit"}
    assert main(["doctor"]) == status
    table = capsys.readouterr().out
    assert all(each["name"] in table and each["value"] in table for each in findings)
    if not limiting:
        assert table.endswith("\nnothing limits minato here\n")


def test_what_cannot_be_examined_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(_system, "memory_kills", fail)
    assert main(["doctor"]) == 1
    assert "cannot be examined: OSError" in capsys.readouterr().err


DOCTOR_WITH = """
import resource, sys
{limits}
from minato.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.mark.slow
def test_real_limits() -> None:
    """In a process that has them."""
    limits = {"RLIMIT_NOFILE": 100, "RLIMIT_FSIZE": 1 << 30, "RLIMIT_AS": 200 << 30}
    lines = [f"resource.setrlimit(resource.{name}, ({n}, {n}))" for name, n in limits.items()]
    done = python("-c", DOCTOR_WITH.format(limits="\n".join(lines)))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    limiting = {each["name"] for each in report["machine"] if each["state"] == "limit"}
    assert {"open files", "file size", "address space"} <= limiting
