"""Use loaders in some ways and print what is left of them: ``residue.py KIND CASE …``, a line of JSON for each.

The garbage collector is off: what is left to it stays for as long as it pleases.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from minato import DataLoader
from tests.datasets import Failing, Numbers, Sleepy
from tests.isolated.shared import KINDS, measure, name_semaphores, settled

NUMBERS, BAD = Sleepy(40, 0.001), Failing(40, {7: ValueError})


class Nested(Numbers):
    """Numbers that a loader of each sample's own delivers."""

    def __getitem__(self, index: int) -> int:
        inner = DataLoader(NUMBERS, 2, **OPTIONS)
        return sum(int(batch.sum()) for batch in inner) + index


def stops() -> None:
    for number, _ in enumerate(DataLoader(NUMBERS, 2, **OPTIONS)):
        if number == 3:
            break


def raises() -> None:
    with suppress(KeyError):
        for number, _ in enumerate(DataLoader(NUMBERS, 2, **OPTIONS)):
            if number == 3:
                raise KeyError(number)


def sample_raises(consumers: int = 0) -> None:
    loader = DataLoader(BAD, 2, **OPTIONS)
    [batches] = loader.consumers(consumers) if consumers else [loader]
    try:
        list(batches)
    except ValueError:
        return
    raise AssertionError("no error")


def consumer_raises() -> None:
    """A thread that shares the loader with others; here it is alone."""
    sample_raises(consumers=1)


class Torn:
    """A sampler that fails after 20 indices."""

    def __iter__(self) -> Iterator[int]:
        yield from range(20)
        raise LookupError("torn list")


def sampler_raises_unheard() -> None:
    """With workers it has been asked too far ahead, and nobody waits for what it raised."""
    ahead = {"prefetch_factor": 2} if OPTIONS["num_workers"] else {}
    iterator = iter(DataLoader(NUMBERS, 2, sampler=Torn(), **ahead, **OPTIONS))
    for _ in range(7):
        next(iterator)


def deletes() -> None:
    loader = DataLoader(NUMBERS, 2, **OPTIONS)
    iterator = iter(loader)
    kept = next(iterator)
    del loader, iterator
    assert kept.tolist() == [0, 1]


def two_at_once() -> None:
    loader = DataLoader(NUMBERS, 2, **{**OPTIONS, "persistent_workers": False})
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 20
    assert all(one.tolist() == other.tolist() for one, other in pairs)


def in_a_thread() -> None:
    thread = threading.Thread(target=stops)
    thread.start()
    thread.join()


def within_samples() -> None:
    """A loader in the training process over samples that have loaders."""
    assert sum(int(batch) for batch in DataLoader(Nested(4), None)) == 4 * 780 + 6


def inside_workers() -> None:
    """The same in worker processes, which may have children once they are no daemons."""
    outer = DataLoader(Nested(4), None, num_workers=2, worker_init_fn=undaemonic)
    assert sum(int(batch) for batch in outer) == 4 * 780 + 6


def undaemonic(_: int) -> None:
    multiprocessing.current_process()._config["daemon"] = False


def forks() -> None:
    """A child of the program's own that ends as programs do, while the loader is in use."""
    iterator = iter(DataLoader(NUMBERS, 2, **OPTIONS))
    next(iterator)
    child = os.fork()
    if child == 0:
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert sum(1 for _ in iterator) == 19


def is_interrupted() -> None:
    """By a Ctrl-C that reaches this process only, while it waits for a batch, and is caught."""
    main = os.getpid()
    timer = threading.Timer(0.1, lambda: os.kill(main, signal.SIGINT))
    iterator = iter(DataLoader(Sleepy(10_000, 0.05), 10, **OPTIONS))
    try:
        timer.start()
        list(iterator)
    except KeyboardInterrupt:
        timer.join()
        return
    raise AssertionError("no interrupt")


CASES: dict[str, Callable[[], None]] = {
    "break": stops,
    "exception": raises,
    "sample's exception": sample_raises,
    "del": deletes,
    "two iterators": two_at_once,
    "in a thread": in_a_thread,
    "nested": within_samples,
    "inside workers": inside_workers,
    "os.fork": forks,
    "Ctrl-C": is_interrupted,
    "consumer's exception": consumer_raises,
    "sampler's exception": sampler_raises_unheard,
}


name_semaphores()


def left() -> dict[str, int]:
    segments = Path("/proc/self/maps").read_text().count("memfd:minato")
    return {**measure(), "segments": segments}


def main(cases: list[str]) -> None:
    CASES["break"]()  # multiprocessing's own helpers stay
    gc.collect()
    gc.disable()
    for case in cases:
        before = left()
        CASES[case]()
        after = settled(left, before.__eq__)
        print(json.dumps([case, {name: after[name] - before[name] for name in before}]), flush=True)


if __name__ == "__main__":
    OPTIONS = KINDS[sys.argv[1]]
    main(sys.argv[2:])
