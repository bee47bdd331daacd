"""The conditions of a measurement: machine, versions, and which backend of minato ran."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "benchmarks"


def environment() -> dict[str, str]:
    """Describe this machine and the software in use, as ordered name and value pairs."""
    import numpy
    import torch

    import minato
    from minato import _system

    implementation, reason = minato.implementation()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "usable cores": str(usable_cores()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "global interpreter lock": "on" if _system.has_gil() else "off",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "minato": f"{minato.__version__}, {implementation} core ({reason})",
        "commit": _commit() or "unknown",
        "load average before": load_average(),
        "sleeping 1 ms takes": f"{1e3 * sleep_cost_s(0.001):.2f} ms",
    }


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> str:
    return f"{os.getloadavg()[0]:.2f}"


def sleep_cost_s(asked_s: float, repeats: int = 50) -> float:
    """Median time that ``time.sleep(asked_s)`` really takes."""
    taken_s = []
    for _ in range(repeats):
        begun = time.perf_counter()
        time.sleep(asked_s)
        taken_s.append(time.perf_counter() - begun)
    return statistics.median(taken_s)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """Hash of the checked-out commit, marked when tracked files differ; None outside git."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit} (with local changes)" if _git("status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
