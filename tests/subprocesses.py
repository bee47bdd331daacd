"""Running the scripts of ``tests/isolated`` in processes of their own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "isolated"
TIMEOUT_S = 200


def command(script: str, *arguments: object) -> list[str]:
    """The command line of a script; warnings are errors, except torch's advice about few cores."""
    filters = ["-W", "error", "-W", "ignore:This DataLoader will create:UserWarning"]
    return [sys.executable, *filters, str(SCRIPTS / script), *map(str, arguments)]


def environment(pure: bool = False) -> dict[str, str]:
    """The environment of a script: it finds the package where this process does."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, **({"MINATO_NO_EXTENSIONS": "1"} if pure else {})}


def python(
    *arguments: object,
    cwd: Path = ROOT,
    timeout_s: float = TIMEOUT_S,
    given: str | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, whatever its exit code; it reads ``given``, and finds ``variables`` in its environment."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**environment(), **variables},
        input=given,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def output(*arguments: object, **options: Any) -> str:
    """What Python wrote to stdout, which ended with 0 and wrote nothing to stderr; options are those of ``python``."""
    done = python(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def fork(run: Callable[[], None]) -> int:
    """Run a function in a forked process, which ends with 0, or with 1 and a traceback; returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # only of forking beside threads
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


EACH_IN_A_FORK = """
import contextlib, gc, io, json, os, sys, traceback, warnings
gc.disable()
import numpy, psutil, torch.multiprocessing, torch.utils.data  # once, as it takes longest
gc.enable()
warnings.filterwarnings("ignore", ".* use of fork", DeprecationWarning)
for name, script in json.load(sys.stdin).items():
    if os.fork() == 0:
        out, failure = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(out):
                exec(script, vars(sys.modules["__main__"]))
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps([name, out.getvalue(), failure]), flush=True)
        os._exit(0)
    os.wait()
"""


def in_forks(
    scripts: dict[str, str], *options: str, may_warn: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """Run scripts in forks of a Python that has imported torch: what each printed, and tracebacks of failures."""
    done = python(*options, "-c", EACH_IN_A_FORK, given=json.dumps(scripts))
    assert done.returncode == 0, done.stderr
    assert may_warn or done.stderr == ""
    lines = [*map(json.loads, done.stdout.splitlines())]
    assert [name for name, *_ in lines] == [*scripts]
    return {name: out for name, out, _ in lines}, {name: why for name, _, why in lines if why}


def run(
    script: str, *arguments: object, pure: bool = False, code: int = 0, timeout_s: float = TIMEOUT_S
) -> str:
    """What a script wrote to stdout; it must leave no child, end with ``code`` and write nothing to stderr."""
    with started(script, *arguments, pure=pure) as process:
        out, err = process.communicate(timeout=timeout_s)
    assert (process.returncode, err) == (code, ""), f"exit code {process.returncode}, stderr: {err}"
    return out


@contextmanager
def started(script: str, *arguments: object, pure: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a script beside this process, in a session of its own, of which nothing may be left at the end."""
    with in_session(command(script, *arguments), environment(pure)) as process:
        yield process
        process.wait(TIMEOUT_S)
        assert wait_for_end(process.pid) == [], "processes are left"


@contextmanager
def in_session(
    command: list[str], environment: dict[str, str], folder: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command beside this process, in a session of its own; kill what is left of it at the end."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            end_session(process.pid)


def at_work(process: subprocess.Popen[str]) -> list[int]:
    """Wait until a script says that it is at work; returns the pids of its workers."""
    assert process.stdout is not None
    *pids, are, at, work = process.stdout.readline().split()
    assert (are, at, work) == ("are", "at", "work")
    return [int(pid) for pid in pids]


def session(leader: int) -> list[int]:
    """All living processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def end_session(leader: int) -> None:
    for pid in session(leader):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_end(leader: int, timeout_s: float = 20.0) -> list[int]:
    """Wait until a session is empty, for less time than work would take; returns the processes that do not end."""
    deadline = time.monotonic() + timeout_s
    while (left := session(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def free_port() -> int:
    """A port that is likely to stay free until a program listens there: the system gives it to no connection."""
    lowest = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(lowest.read_text().split()[0]) if lowest.exists() else 32768
    while True:
        port = secrets.choice(range(end // 2, end))
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", port))
            return port


def children(program: str, method: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``children.py``, whose children find each other at a free port; forks are children of this process."""
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    if method != "fork":
        return python(SCRIPTS / "children.py", program, method, **variables)
    from tests.isolated.children import run_all  # which imports torch

    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        codes = run_all("fork", _forked, program, (out.fileno(), err.fileno()), variables)
        print(codes, file=out, flush=True)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([program], 0, out.read(), err.read())


def _forked(program: str, files: tuple[int, int], variables: dict[str, str], rank: int) -> None:
    from tests.isolated.children import run

    os.environ.update(variables)
    for own, file in enumerate(files, 1):
        os.dup2(file, own)
    sys.stdout, sys.stderr = (os.fdopen(own, "w") for own in (1, 2))
    run(program, rank)
