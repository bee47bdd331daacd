"""GPUs are watched from a process beside this one; here they are made up."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import psutil
import pytest

import minato
from minato.observe import gpus
from minato.observe.gpus import NBYTES, GpuTable, gpu_table, run, visible
from minato.observe.machine import MachineMonitor
from tests.datasets import Numbers, wait_until
from tests.edges.test_forks import forked

FAKE = """
# Two GPUs: one that is idle at every second look, one that always works.
from types import SimpleNamespace
looks = [0, 0]
class NVMLError(Exception):
    pass
def nvmlDeviceGetHandleByIndex(number):
    if number not in (0, 1):
        raise NVMLError("invalid")
    return number
def nvmlDeviceGetUtilizationRates(handle):
    looks[handle] += 1
    return SimpleNamespace(gpu=80 if handle else 50 * (looks[handle] % 2))
def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=(handle + 1) << 30, total=16 << 30)
nvmlInit = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByUUID = {"GPU-a": 0, "GPU-b": 1}.__getitem__
nvmlDeviceGetName = [b"Made up", "Other"].__getitem__
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose driver is made up."""
    (tmp_path / "pynvml.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_DRIVER", (tmp_path,))
    monkeypatch.setattr(gpus, "_GRACE_S", 60.0)
    return tmp_path


def nvml() -> Any:
    module = SimpleNamespace()
    exec(FAKE, vars(module))
    return module


def until_looked(watch: GpuTable, times: int) -> None:
    wait_until(lambda: watch.counts()["gpu1_samples"] >= times)


def until_consistent(watch: GpuTable) -> None:
    """One GPU was idle at every second look, and the other one busy at all; looks may come between the counts."""

    def is_consistent() -> bool:
        counts = watch.counts()
        idle = abs(2 * counts["gpu0_idle"] - counts["gpu0_samples"]) <= 1
        return idle and abs(counts["gpu1_busy_percent"] - 80 * counts["gpu1_samples"]) <= 80

    wait_until(is_consistent)


def side_processes() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if any("observe/gpus.py" in part for part in each.cmdline()):
                found.append(each)
    return found


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_those_that_the_program_may_use() -> None:
    both, other = ["Made up", "Other"], ["Other"]
    expected = {None: both, "1": other, "1, 0": both[::-1], "GPU-b": other, "": [], "-1": []}
    for named, names in {**expected, "0,7,1": ["Made up"]}.items():
        assert [gpu.name for gpu in visible(nvml(), named)] == names, named


def test_a_gpu_that_does_not_tell_its_use_is_left_out() -> None:
    module = nvml()
    silent = Mock(side_effect=module.NVMLError("not supported"))
    module.nvmlDeviceGetUtilizationRates = silent
    assert visible(module, None) == []


def test_what_is_seen_is_added_up() -> None:
    class Gpu:
        name = "a name that is much longer than what fits into the row of a table, é"
        percents = iter([0, 40, 0, 60])

        def look(self) -> tuple[float, int, int]:
            return next(self.percents), 3 << 20, 8 << 20

    table, looks = GpuTable(bytearray(NBYTES)), iter([True] * 4 + [False])
    run([Gpu()], table, lambda: next(looks))
    assert table.gpus() == ((Gpu.name[:64], 8 << 20),)
    names = ["gpu0_samples", "gpu0_idle", "gpu0_busy_percent", "gpu0_used_mib"]
    assert table.counts() == dict(zip(names, [4, 2, 100, 12], strict=True))


def test_one_process_watches_for_all_and_ends_with_the_last(driver: Path) -> None:
    watch = gpu_table()
    assert watch is not None
    assert gpu_table() is watch
    until_looked(watch, 4)
    assert len(side_processes()) == 1
    assert watch.gpus() == (("Made up", 16 << 30), ("Other", 16 << 30))
    until_consistent(watch)
    assert watch.counts()["gpu1_idle"] == 0
    monitor = MachineMonitor()
    monitor.gpus = watch
    machine = monitor()
    assert machine.gpus == watch.gpus()
    assert machine.counts["gpu1_samples"] >= 4
    assert 0 < machine.available_bytes <= machine.limit_bytes
    assert machine.counts["disk_read_bytes"] >= 0
    del watch, monitor
    assert side_processes() == []


def test_it_ends_with_the_process_that_started_it(driver: Path) -> None:
    pid = forked(lambda: [gpu_table(), time.sleep(60)])
    try:
        wait_until(lambda: bool(psutil.Process(pid).children()))
        (side,) = psutil.Process(pid).children()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_until(lambda: has_ended(side))


def test_one_that_cannot_be_ended_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in the hands of a driver that hangs."""
    monkeypatch.setattr(gpus, "_GRACE_S", 0.01)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        with monkeypatch.context() as patch:
            patch.setattr(process, "kill", lambda: None)
            gpus._end(process, os.getpid())
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("stats", [True, "gpu"])
def test_the_report_tells_of_them(driver: Path, stats: Literal[True, "gpu"]) -> None:
    loader = minato.DataLoader(Numbers(60), 2, num_workers=1, observe=minato.Observe(stats=stats))
    if stats is True:
        loader.watch_gpus()
    for number, _ in enumerate(loader):
        if number == 3:
            watch = gpu_table()
            assert watch is not None
            until_looked(watch, watch.counts()["gpu1_samples"] + 6)
            del watch
    report = loader.report()
    assert report.run.machine.gpus == 2
    first, second = report.run.gpus
    assert (first.name, second.name) == ("0 Made up", "1 Other")
    assert first.idle_share == pytest.approx(0.5, abs=0.1)
    assert first.busy_share == pytest.approx(0.5)
    assert (second.idle_share, second.busy_share) == (0, pytest.approx(0.8))
    assert second.memory_bytes == 2 << 30
    assert "1 Other" in report.details()
    del loader
    gc.collect()
    assert side_processes() == []


def test_without_a_driver_nobody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DRIVER", (tmp_path / "none",))
    assert gpu_table() is None
    loader = minato.DataLoader(Numbers(4), 2, observe=minato.Observe(stats="gpu"))
    list(loader)
    report = loader.report()
    assert report.run.gpus == ()
    assert report.run.machine.gpus == 0
    assert "GPU" not in report.details()
    assert 0 < report.run.machine.available_bytes <= report.run.machine.limit_bytes


@pytest.mark.parametrize("measure", [False, True])
def test_gpus_are_not_watched_unasked(driver: Path, measure: bool) -> None:
    loader = minato.DataLoader(Numbers(4), 2, observe=minato.Observe(stats=measure))
    list(loader)
    assert side_processes() == []
    assert not measure or loader.report().run.machine.gpus == 0


@pytest.mark.parametrize("asked", ["stats", "live", "MINATO_LIVE", "metrics"])
@pytest.mark.parametrize("local_rank", [0, 1])
def test_one_process_of_the_node_watches_where_somebody_reads_it(
    driver: Path, monkeypatch: pytest.MonkeyPatch, asked: str, local_rank: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    if asked == "metrics":
        pytest.importorskip("prometheus_client")
    observe = {"stats": minato.Observe(stats="gpu"), "metrics": minato.Observe(metrics=0)}
    loaders = [minato.DataLoader(Numbers(4), 2, observe=observe.get(asked, True)) for _ in range(2)]
    if asked == "MINATO_LIVE":
        monkeypatch.setenv("MINATO_LIVE", "1")
    views = []
    for loader in loaders:
        views += [loader.live()] if asked == "live" else []
        list(loader)
    watched = asked != "MINATO_LIVE" or local_rank == 0
    assert len(side_processes()) == (1 if watched and local_rank == 0 else 0)
    while views:
        views.pop().close()
    del loaders, loader
    gc.collect()
    wait_until(lambda: side_processes() == [])


@pytest.mark.parametrize("refused", ["process", "memory"])
def test_a_side_process_that_cannot_start_is_done_without(
    refused: str, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(driver / "no python"))
    if refused == "memory":
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=PermissionError(1, "no")))
    assert gpu_table() is None
