"""Signal programs that drop iterators, at random moments: ``interrupted.py METHOD MOMENTS SECONDS SEED``.

Each program is a forked child with a session of its own. It gets one signal, SIGINT or SIGTERM, itself or with its
workers, and must end by that signal within five seconds, without leaving a process. Python ignores what a handler
raises in a finalizer, and says so: then the signal is sent again. Writes a line of JSON with what was found, and the
errors of programs that did not.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn

import psutil

from minato import DataLoader
from tests.datasets import Sleepy

LOOK_S = 0.2
"""Time between two looks at what it reports."""
LOOKS = round(5.0 / LOOK_S)
"""In how many of these looks a program must end; looks also come late where a busy machine leaves nobody any time."""
LEAVES_S = 15.0
"""How long what it has started may take after it."""
SERVER_LEAVES_S = 40.0
"""The same with multiprocessing's fork server, which has torch to unload."""
LATEST_S = {"spawn": 6.0, "forkserver": 6.0}
"""When the signal comes at the latest, after the program has begun: where workers start slowly, while they do."""
INTERRUPTED, TERMINATED = 130, 143
OPTIONS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "workers": "thread"},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    # One, as each imports torch, on cores that are few.
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


SOME_SLOW = Sleepy(24, 0, dict.fromkeys((7, 15, 23), 0.02))


def program(method: str, ready: int) -> NoReturn:
    """Drop iterators in all ways, for ever."""
    os.write(ready, b"x")
    number = 0
    while True:
        persistent = number % 3 == 2 and method != "inline"
        loader = DataLoader(SOME_SLOW, 4, persistent_workers=persistent, **OPTIONS[method])
        for i, batch in enumerate(loader):
            assert batch.tolist() == list(range(4 * i, 4 * i + 4))
            if i == number % 7:
                break
        number += 1


def terminated(number: int, frame: Any) -> NoReturn:
    """The handler of SIGTERM that a trainer has."""
    sys.exit(TERMINATED)


def end(code: Any) -> NoReturn:
    """End the program as Python does, but for the objects of torch, which take seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code)


class Moment:
    """One program and its signal."""

    def __init__(self, method: str, draw: random.Random) -> None:
        self.method = method
        self.signal = draw.choice([signal.SIGINT, signal.SIGTERM])
        self.whole_group = draw.random() < 0.5
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        ready, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.setsid()
            os.dup2(self._errors.fileno(), 2)
            os.close(ready)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, terminated)
            try:
                program(method, write)
            except KeyboardInterrupt:
                end(INTERRUPTED)
            except SystemExit as error:
                end(error.code)
        os.close(write)
        begun = os.read(ready, 1)
        os.close(ready)
        if begun != b"x":
            raise RuntimeError(f"a program ended by itself: {self._errors_so_far()}")
        time.sleep(draw.random() * LATEST_S.get(method, 0.3))

    def send(self) -> dict[str, Any]:
        """Send the signal; returns how the program ended."""
        begin, code, looks = time.monotonic(), None, LOOKS
        send = os.killpg if self.whole_group else os.kill
        send(self._pid, self.signal)
        while code is None and looks:
            looks -= 1
            code = self._wait(time.monotonic() + LOOK_S)
            if code is None and "Exception ignored" in self._errors_so_far():
                send(self._pid, self.signal)
        took_s = time.monotonic() - begin
        leaves_s = SERVER_LEAVES_S if self.method == "forkserver" else LEAVES_S
        left = [] if code is None else self._left(time.monotonic() + leaves_s)
        if code is None or left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        if code is None:
            os.waitpid(self._pid, 0)
        text = self._errors_so_far()
        self._errors.close()
        expected = INTERRUPTED if self.signal == signal.SIGINT else TERMINATED
        if code == expected and not left:
            text = ""
        return {"code": code, "expected": expected, "took_s": took_s, "left": left, "errors": text}

    def _errors_so_far(self) -> str:
        descriptor = self._errors.fileno()  # its position is that of the program, too
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def _wait(self, deadline: float) -> int | None:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        return None

    def _left(self, deadline: float) -> list[str]:
        """Command lines of the processes of the group that live on until then."""
        while members := self._members():
            if time.monotonic() > deadline:
                return members
            time.sleep(0.02)
        return []

    def _members(self) -> list[str]:
        try:
            os.killpg(self._pid, 0)
        except ProcessLookupError:
            return []
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                # One that has ended is left to the machine's first process, which may take its time.
                if os.getpgid(process.pid) == self._pid and process.status() != "zombie":
                    members.append(" ".join(process.cmdline()))
        return members


def main(method: str, moments: int, seconds: float, seed: int) -> None:
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(["minato"])
    draw, deadline = random.Random(seed), time.monotonic() + seconds
    found: dict[str, Any] = {"moments": 0, "slowest_s": 0.0, "lost": []}
    while found["moments"] < moments and time.monotonic() < deadline:
        end = Moment(method, draw).send()
        found["moments"] += 1
        found["slowest_s"] = max(found["slowest_s"], round(end["took_s"], 2))
        if end["code"] != end["expected"] or end["left"]:
            found["lost"].append(end)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
