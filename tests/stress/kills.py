"""Workers that die at random instructions, path by path through the engine; every byte of every batch is checked.

    python -m tests.stress.kills --seconds 600 --figures docs/benchmarks/chaos.md

Each worker starts a timer whose signal ends it, so it dies wherever it happens to be: in a sample, between two stores
to shared memory, while it collates. Both backends take turns, each in a process of its own. So many workers
of a loader die, and then its epoch can end: what makes little progress under fire is checked to the end as well.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from minato import AutoScale, ErrorPolicy, FetchOptions
from minato._support.counters import shared_integers
from minato.caching import DiskCache
from minato.workers import supervision
from tests.datasets import ORDERS
from tests.stress import scenario
from tests.stress.scenario import Scenario, as_list, complete, content

PROGRAM = "tests.stress.kills"
LENGTH, BATCH = 192, 12
METHODS = (*["fork"] * 14, *["forkserver"] * 5, "spawn")
LIFE_S = 0.02
"""Upper bound of a worker's life after it has begun its first sample, in seconds."""
DEATHS = {"fork": 24, "forkserver": 12, "spawn": 4}
"""How many workers of one loader die, however long that takes; a spawned one imports torch first."""
TURN_S = 30.0
"""How long one backend runs before the other has its turn."""
Figures = dict[str, Counter[str]]
"""Kills, seconds and samples of each path."""


class Fire:
    """Starts a timer in each worker: a random time later its signal ends the process.

    Attributes:
        left: How many timers will be started; shared by all processes.
    """

    def __init__(self) -> None:
        self.left = shared_integers(1)
        self.process = 0

    def arm(self) -> None:
        """Start this process's timer, unless it runs."""
        if self.process != os.getpid():
            self.process = os.getpid()
            if self.left[0] > 0:
                self.left[0] -= 1
                life_s = random.SystemRandom().uniform(1e-4, LIFE_S)
                signal.setitimer(signal.ITIMER_REAL, life_s)


class Plain(scenario.Plain):
    """Samples in a worker that will die."""

    def __init__(self, takes_s: float = 0.0) -> None:
        super().__init__(LENGTH, takes_s)
        self.fire = Fire()

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.fire.arm()
        return super().__getitem__(index)


class Listed(Plain):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        return [self[index] for index in indices]


class Flaky(Plain):
    """The same, but a third of the samples raises once in a while, and some of them always."""

    def __init__(self, retried: bool) -> None:
        super().__init__()
        self.retried = retried

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        # Not from the generators that are bound to the sample: it would raise each time.
        if (index % 3 == 1 and self.retried and random.SystemRandom().random() < 0.2) or (
            not self.retried and index in BAD
        ):
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


class Coroutines(Plain):
    async def __aget__(self, index: int) -> tuple[Any, ...]:
        self.fire.arm()
        await asyncio.sleep(0.0005)
        return self[index]


class Uneven(Plain):
    """Samples of different lengths, which fit no common layout."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.fire.arm()
        return self.true(index, 0)

    def true(self, index: int, epoch: int) -> tuple[Any, ...]:
        return index, content(index)[: 1 + index % 97]


BAD = frozenset(range(7, LENGTH, 41))


def nothing(sample: Any) -> Any:
    return sample


def sometimes_slow(sample: Any) -> Any:
    if sample[0] % 31 == 3:
        time.sleep(0.004)
    return sample


SLOW = {"transforms": [nothing, sometimes_slow, nothing]}
LIST = {"collate_fn": as_list}
RETRY = {"errors": ErrorPolicy(on_error="retry", retries=50)}
SKIP = {"errors": "skip"}
PATHS: dict[str, Callable[[str], tuple[Any, dict[str, Any]]]] = {
    "runs of cheap samples": lambda _: (Plain(), {}),
    "single samples": lambda _: (Plain(0.0005), {}),
    "transforms, some samples slow": lambda _: (Plain(), SLOW),
    "collate_fn": lambda _: (Plain(), LIST),
    "uneven samples": lambda _: (Uneven(), LIST),
    "__getitems__": lambda _: (Listed(), {}),
    "__getitems__ and collate_fn": lambda _: (Listed(), LIST),
    "flaky samples, retried": lambda _: (Flaky(True), RETRY),
    "flaky samples, retried, and collate_fn": lambda _: (Flaky(True), RETRY | LIST),
    "bad samples, skipped": lambda _: (Flaky(False), SKIP),
    "bad samples, skipped, and collate_fn": lambda _: (Flaky(False), SKIP | LIST),
    "bad samples, raised": lambda _: (Flaky(False), {}),
    "cache on disk": lambda directory: (
        Plain(),
        {"cache": DiskCache(f"{directory}/cache", 1 << 24, version="1")},
    ),
    "concurrent reads in threads": lambda _: (Plain(0.0005), {"fetch_concurrency": 4}),
    "concurrent reads in coroutines": lambda _: (
        Coroutines(),
        {"fetch_concurrency": FetchOptions(4)},
    ),
}


def skipped(missing: set[int], errors: list[Exception]) -> None:
    assert (missing, errors) == (BAD, [])


def raised(order: str) -> Callable[[set[int], list[Exception]], None]:
    """The batch of each bad sample was raised, and no other."""

    def check(missing: set[int], errors: list[Exception]) -> None:
        lost = {int(re.findall(r"sample (\d+) is bad", str(error))[-1]) for error in errors}
        assert lost <= BAD, errors
        assert len(missing) == len(lost) * BATCH, (missing, lost)
        if order not in ("arrival", "fast_first"):
            assert {index // BATCH for index in missing} == {index // BATCH for index in lost}

    return check


def play_path(path: str, draw: random.Random, figures: Figures) -> None:
    """Iterate a loader of this path while its workers die, and once more to the end."""
    order = draw.choice(ORDERS)
    method = draw.choice(METHODS)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dataset, options = PATHS[path](directory)
        workers = draw.randint(1, 2 if method == "spawn" else 4)
        scale: Any = workers
        if draw.random() < 0.3:
            scale = AutoScale(start=workers, min=1, max=workers + 2)
        options = {
            "batch_size": BATCH,
            "order": order,
            "num_workers": scale,
            "persistent_workers": draw.random() < 0.5,
            "multiprocessing_context": method,
            **options,
        }
        bad = path.startswith("bad")
        check = complete if not bad else raised(order) if path.endswith("raised") else skipped
        scene = Scenario(dataset, dataset.true, options, watch, check, BAD if bad else ())
        print(f"{path}: {options}", file=sys.stderr, flush=True)
        loader = scene.loader()
        dataset.fire.left[0] = DEATHS[method]
        samples = 0
        while dataset.fire.left[0] > 0:
            scene.run(loader)
            samples += len(scene.found)
        faulthandler.cancel_dump_traceback_later()
        del loader
    row = figures.setdefault(path, Counter())
    row["kills"] += sum("takes its place" in str(one.message) for one in said)
    row["seconds"] += round(time.monotonic() - begin)
    row["samples"] += samples


def watch(iterator: Any, taken: int, errors: list[Exception]) -> None:
    if not taken:
        scenario.watch()


def take_turn(options: argparse.Namespace) -> Figures:
    """Iterate loaders with this process's backend, path by path."""
    # The kills are the test's own: no sample is to blame.
    supervision._FATAL = supervision._HOPELESS = 1 << 30
    multiprocessing.set_forkserver_preload([PROGRAM])
    names = [options.path] if options.path else list(PATHS)
    random.Random(options.seed).shuffle(names)
    figures: Figures = {}
    left: list[str] = []

    def play_next(draw: random.Random) -> None:
        left[:] = left or names
        play_path(left.pop(), draw, figures)

    scenario.play(options.turn, options.seed, play_next)
    return figures


def run(seconds: float, seed: int) -> Figures:
    """Let both backends take turns of this length together; returns the figures of all."""
    total: Figures = {}
    end = time.monotonic() + seconds
    turn = 0
    while (left := end - time.monotonic()) > 1 or turn < 2:
        turn_s = max(min(TURN_S, seconds / 2, left), 1)
        found = scenario.turn(PROGRAM, turn_s, seed + turn, pure=turn % 2 == 1)
        for path, row in found.items():
            total.setdefault(path, Counter()).update(row)
        turn += 1
    return total


def report(seconds: float, seed: int, figures: Figures) -> str:
    """A section of figures, in Markdown."""
    about = [
        "Each worker starts a timer that ends it; `tests/stress/kills.py` has the paths. All orders,",
        "fork, forkserver and spawn, both backends; every byte of every batch is compared.",
    ]
    kills = sum(row["kills"] for row in figures.values())
    lines = [
        f"{kills} kills, 0 samples lost, repeated or altered, {scenario.machine()}:",
        "",
        "| path | kills | seconds | samples |",
        "|---|---|---|---|",
        *(
            f"| {path} | {row['kills']} | {row['seconds']} | {row['samples']} |"
            for path, row in sorted(figures.items())
        ),
    ]
    title = "Workers that die at random instructions"
    return scenario.section(title, about, PROGRAM, seconds, seed, lines)


def section(options: argparse.Namespace) -> str:
    return report(options.seconds, options.seed, run(options.seconds, options.seed))


def main() -> int:
    parser = scenario.parser(PROGRAM)
    parser.add_argument("--turn", type=float, help="only this backend, for so many seconds")
    parser.add_argument("--path", choices=PATHS, help="with --turn: only this path")
    return scenario.main(parser.parse_args(), section, take_turn)


if __name__ == "__main__":
    sys.exit(main())
