"""Running ``programs.py`` as one or more ranks of a job over gloo, and what such programs share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.subprocesses import environment, free_port

PROGRAMS = Path(__file__).parent / "programs.py"
TIMEOUT_S = 200


class Machine(NamedTuple):
    """Where a rank runs: the command that enters it, its address, and the network interface of that."""

    enter: tuple[str, ...]
    address: str
    interface: str


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Hosts with a network, shared memory, processes and a name of their own, and a bridge between them.

    Raises:
        OSError: This takes root, and the commands of Linux for namespaces.
    """
    names = [f"minato-{os.getpid()}-{i}" for i in range(count)]
    bridge = f"mn{os.getpid()}"

    def ip(words: str) -> None:
        done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"ip {words}: {done.stderr}")

    try:
        ip(f"link add {bridge} type bridge")
        ip(f"link set {bridge} up")
        for i, name in enumerate(names):
            ip(f"netns add {name}")
            ip(f"link add {bridge}-{i} type veth peer eth0 netns {name}")
            ip(f"link set {bridge}-{i} master {bridge} up")
            ip(f"-n {name} addr add 10.77.0.{i + 1}/24 dev eth0")
            for interface in ("lo", "eth0"):
                ip(f"-n {name} link set {interface} up")
        apart = "unshare --mount --ipc --uts --pid --fork --kill-child --mount-proc sh -c"
        own = 'hostname "$0" && mount -t tmpfs none /dev/shm && exec "$@"'
        yield [
            Machine(
                (*f"ip netns exec {name} {apart}".split(), own, name), f"10.77.0.{i + 1}", "eth0"
            )
            for i, name in enumerate(names)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _place(rank: int, on_one: bool) -> dict[str, str]:
    local, node = (rank, 0) if on_one else (0, rank)
    places = {"RANK": rank, "LOCAL_RANK": local, "NODE_RANK": node, "GROUP_RANK": node}
    return {name: str(place) for name, place in places.items()}


def run_ranks(
    program: str,
    num_ranks: int = 2,
    killed: Container[int] = (),
    programs: Path = PROGRAMS,
    machines: Sequence[Machine] = (),
) -> list[Any]:
    """What each rank returns, None where it is to be killed; without ``machines`` all are on this one."""
    on_one = not machines
    machines = machines or [Machine((), "127.0.0.1", "lo")] * num_ranks
    job = {
        **environment(),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks if on_one else 1),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    ranks = [
        subprocess.Popen(
            [*machine.enter, sys.executable, programs, program],
            env={**job, **_place(rank, on_one), "GLOO_SOCKET_IFNAME": machine.interface},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(machines)
    ]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        ends = [rank.communicate(timeout=deadline - time.monotonic()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    wanted = [-signal.SIGKILL if number in killed else 0 for number in range(num_ranks)]
    ended = zip(ranks, wanted, ends, strict=True)
    failed = [err for rank, code, (_, err) in ended if rank.returncode != code]
    assert not failed, "\n".join(failed)
    return [
        None if code else json.loads(out.splitlines()[-1])
        for code, (out, _) in zip(wanted, ends, strict=True)
    ]


@contextmanager
def engines() -> Iterator[Callable[[], list[str]]]:
    """Watch which kinds of iterators, torch's or ours, deliver batches; the result lists them when called."""
    seen: set[str] = set()
    original = _BaseDataLoaderIter.__init__

    def watched(self: _BaseDataLoaderIter, loader: Any) -> None:
        seen.add(type(self).__name__)
        original(self, loader)

    _BaseDataLoaderIter.__init__ = watched
    try:
        yield lambda: sorted(seen)
    finally:
        _BaseDataLoaderIter.__init__ = original


def rank_and_count() -> tuple[int, int]:
    """This process among those of the job."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
