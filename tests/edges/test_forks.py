"""Forks by the program, at any moment and in any place: both processes must be right."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from minato import DataLoader, MinatoWarning

FORK = multiprocessing.get_context("fork")
PATIENCE_S = 60.0
"""For what never comes, however busy the machine."""
N, BATCH, AT = 48, 4, 9

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.* fork:RuntimeWarning"),
]

KINDS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "inline-reads": {"num_workers": 0, "fetch_concurrency": 2},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "fork-persistent": {
        "num_workers": 2,
        "multiprocessing_context": "fork",
        "persistent_workers": True,
    },
    "fork-reads": {"num_workers": 2, "multiprocessing_context": "fork", "fetch_concurrency": 2},
    "fork-arrival": {"num_workers": 2, "multiprocessing_context": "fork", "in_order": False},
    "fork-torch": {"num_workers": 2, "multiprocessing_context": "fork", "compat": "torch"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "thread": {"num_workers": 2, "workers": "thread"},
}
ENDS = ("_exit", "exit", "raise", "killed", "return")
PLACES = ("sample", "list", "transform", "collate", "init", "stream", "sampler", "loop", "thread")


class Journal:
    """What processes have done: lines of a file, which a process writes by one call each.

    Args:
        folder: Where the file lies, and the one that lets the children go on.
    """

    def __init__(self, folder: Path) -> None:
        self.lines, self.gate = str(folder / "lines"), str(folder / "gate")

    def write(self, *words: object) -> None:
        line = " ".join(map(str, (os.getpid(), *words))) + "\n"
        descriptor = os.open(self.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def read(self) -> list[list[str]]:
        if not os.path.exists(self.lines):
            return []
        return [line.split() for line in Path(self.lines).read_text().splitlines()]

    def children(self) -> list[int]:
        return [int(line[0]) for line in self.read() if line[1] == "forked"]

    def open_gate(self) -> None:
        Path(self.gate).touch()

    def fork(self, end: str) -> None:
        """Fork; the child waits until it may go on, and then ends in some way, or returns."""
        if os.fork():
            return
        self.write("forked")
        wait_until(lambda: os.path.exists(self.gate))
        if end == "_exit":
            os._exit(0)
        elif end == "exit":
            sys.exit(3)
        elif end == "raise":
            raise ValueError("in a child")
        elif end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never holds"
        time.sleep(0.002)


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


class Forking:
    """Rows that hold their index, one of which forks; so may each function of a loader that is named as its place."""

    def __init__(self, journal: Journal, place: str, end: str) -> None:
        self.journal, self.place, self.end = journal, place, end
        self.is_told = False

    def at(self, place: str, now: bool = True) -> None:
        if place == self.place and now and not os.path.exists(self.journal.lines + "-told"):
            Path(self.journal.lines + "-told").touch()
            self.journal.fork(self.end)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        self.journal.write("sample", index)
        self.at("sample", index == AT)
        return torch.full((8,), index)

    def transform(self, sample: torch.Tensor) -> torch.Tensor:
        self.at("transform", int(sample[0]) == AT)
        return sample

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.at("collate", any(int(sample[0]) == AT for sample in samples))
        return torch.stack(samples)

    def init(self, number: int) -> None:
        self.at("init", number == 0)


class ForkingLists(Forking):
    """The same, with all samples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.at("list", AT in indices)
        return [self[index] for index in indices]


class ForkingStream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same as a stream."""

    def __init__(self, forking: Forking) -> None:
        self.forking = forking

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(number, N, count):
            self.forking.journal.write("sample", index)
            self.forking.at("stream", index == AT)
            yield torch.full((8,), index)


class Sampler:
    """All indices in order; may fork."""

    def __init__(self, forking: Forking) -> None:
        self.forking = forking

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for index in range(N):
            self.forking.at("sampler", index == AT)
            yield index


class Case(NamedTuple):
    """Where the program forks, how the child ends, and what loads."""

    place: str
    end: str
    kind: str

    @property
    def is_possible(self) -> bool:
        if self.place == "stream":
            return self.kind in ("inline", "fork", "fork-persistent", "forkserver")
        if self.place == "init":
            return not self.kind.startswith("inline")
        if self.place == "list":
            return "reads" not in self.kind
        return True

    @property
    def returns_to_the_program(self) -> bool:
        """Whether the child runs on as a copy of this program."""
        if self.place == "thread" or (self.place, self.kind) == ("sample", "inline-reads"):
            return False
        return self.kind.startswith("inline") or self.place in ("sampler", "loop")

    def __str__(self) -> str:
        return "-".join(self)


CASES = [case for case in map(Case._make, product(PLACES, ENDS, KINDS)) if case.is_possible]
SAMPLED = {*random.Random(7).sample(CASES, 36)}


def loader_of(case: Case, forking: Forking) -> DataLoader:
    arguments: dict[str, Any] = dict(KINDS[case.kind])
    if case.place == "stream":
        return DataLoader(ForkingStream(forking), BATCH, **arguments)
    if case.place == "sampler":
        arguments["sampler"] = Sampler(forking)
    if case.place == "transform":
        arguments["transforms"] = [forking.transform]
    if case.place == "collate":
        arguments["collate_fn"] = forking.collate
    if case.place == "init":
        arguments["worker_init_fn"] = forking.init
    return DataLoader(forking, BATCH, **arguments)


def in_thread(forking: Forking) -> None:
    owner = os.getpid()
    try:
        forking.at("thread")
    finally:
        if os.getpid() != owner:
            os._exit(0)


def epoch(case: Case, loader: DataLoader, forking: Forking) -> list[int]:
    """The indices of an epoch; the child goes on in the middle of it."""
    indices: list[int] = []
    for number, batch in enumerate(loader):
        if number == 1:
            forking.at("loop")
            if case.place == "thread":
                thread = threading.Thread(target=in_thread, args=(forking,))
                thread.start()
                thread.join()
        if number == 6:
            forking.journal.open_gate()
        assert bool((batch == batch[:, :1]).all()), batch
        indices += batch[:, 0].tolist()
    return indices


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in SAMPLED else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_fork_in_any_place(case: Case, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    forking = (ForkingLists if case.place == "list" else Forking)(journal, case.place, case.end)
    loader = loader_of(case, forking)
    owner = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", MinatoWarning)
            first = epoch(case, loader, forking)
    except BaseException as error:
        if os.getpid() != owner:
            journal.write("raised", type(error).__name__, str(error).replace(" ", "_")[:40])
            os._exit(1)
        raise
    if os.getpid() != owner:
        journal.write("returned", *first)
        os._exit(0)
    journal.open_gate()  # also where nothing forked until the end
    second = epoch(case, loader, forking)
    loader.close()
    assert (sorted(first), sorted(second)) == ([*range(N)], [*range(N)])
    children = journal.children()
    assert len(children) == 1
    wait_until(lambda: has_ended(children[0]))
    check_child(case, journal, children[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for child in children:
            try:
                os.waitpid(child, 0)
            except ChildProcessError:  # a worker's child
                continue


def check_child(case: Case, journal: Journal, child: int) -> None:
    """What a child did after it was allowed to go on."""
    lines = [line[1:] for line in journal.read() if int(line[0]) == child]
    after = lines[1:]
    if case.end in ("_exit", "killed"):
        assert after == []
    elif not case.returns_to_the_program:
        # A run of cheap samples ends before the child does.
        assert [line[0] for line in after] == ["sample"] * (
            len(after) if case.end == "return" else 0
        )
    elif case.end == "return" and case.kind == "inline":
        assert after[-1] == ["returned", *map(str, range(N))]
    elif case.end == "return":
        assert after[-1][:2] == ["raised", "RuntimeError"]
        assert after[-1][2].startswith("this_iterator_and_its_workers_belong_to")
    else:
        assert after[-1][:2] in (["raised", "SystemExit"], ["raised", "ValueError"])
