"""Workers that die at random instructions, path by path through the engine; every byte of every batch is checked.

    python -m tests.stress.kills --seconds 600 --figures docs/benchmarks/chaos.md

Each worker starts a timer whose signal ends it, so it dies wherever it happens to be: in a sample, between two stores
to shared memory, while it collates. Both backends take turns, each in a process of its own. When a loader's time is
over the kills end, so that its epoch can: what makes little progress under fire is checked to the end as well.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minato import AutoScale, DataLoader, ErrorPolicy, FetchOptions
from minato.caching import DiskCache
from minato.workers import supervision
from tests import subprocesses
from tests.datasets import ORDERS
from tests.stress.page import PAGE, write_section

LENGTH, BATCH = 192, 12
METHODS = (*["fork"] * 14, *["forkserver"] * 5, "spawn")
LIFE_S = 0.02
"""Upper bound of a worker's life after it has begun its first sample, in seconds."""
FIRE_S = {"fork": 1.0, "forkserver": 1.5, "spawn": 6.0}
"""How long the workers of one loader die; a spawned one imports torch first."""
TURN_S = 30.0
"""How long one backend runs before the other has its turn."""
HANG_S = 100
"""A loader that takes so long hangs: the stacks of all threads are printed, and the process ends."""
Array = np.ndarray[Any, Any]


def content(index: int) -> Array:
    """A sample: 512 numbers that no other sample has. Shape (512,), int64."""
    return np.arange(512, dtype=np.int64) * 4099 + index


class Fire:
    """Starts a timer in each worker: a random time later its signal ends the process.

    Attributes:
        until: When this ends, on ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.until = float("inf")
        self.process = 0

    def arm(self) -> None:
        """Start this process's timer, unless it runs."""
        if self.process != os.getpid():
            self.process = os.getpid()
            if time.monotonic() < self.until:
                life_s = random.SystemRandom().uniform(1e-4, LIFE_S)
                signal.setitimer(signal.ITIMER_REAL, life_s)
        elif time.monotonic() > self.until:
            signal.setitimer(signal.ITIMER_REAL, 0)


class Plain:
    """Samples that hold their index and their content; each takes ``takes_s`` seconds."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.fire = Fire()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, Array]:
        self.fire.arm()
        if self.takes_s:
            time.sleep(self.takes_s)
        return index, content(index)


class Listed(Plain):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Array]]:
        return [self[index] for index in indices]


class Flaky(Plain):
    """The same, but a third of the samples raises once in a while, and some of them always."""

    def __init__(self, retried: bool) -> None:
        super().__init__()
        self.retried = retried

    def __getitem__(self, index: int) -> tuple[int, Array]:
        # Not from the generators that are bound to the sample: it would raise each time.
        if (index % 3 == 1 and self.retried and random.SystemRandom().random() < 0.2) or (
            not self.retried and is_bad(index)
        ):
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


class Coroutines(Plain):
    async def __aget__(self, index: int) -> tuple[int, Array]:
        self.fire.arm()
        await asyncio.sleep(0.0005)
        return self[index]


class Uneven(Plain):
    """Samples of different lengths, which fit no common layout."""

    def __getitem__(self, index: int) -> tuple[int, Array]:
        self.fire.arm()
        return index, content(index)[: 1 + index % 97]


def is_bad(index: int) -> bool:
    return index % 41 == 7


def as_list(samples: list[tuple[int, Array]]) -> list[tuple[int, Array]]:
    """A ``collate_fn`` whose batches are pickled as a whole."""
    return samples


def nothing(sample: tuple[int, Array]) -> tuple[int, Array]:
    return sample


def sometimes_slow(sample: tuple[int, Array]) -> tuple[int, Array]:
    if sample[0] % 31 == 3:
        time.sleep(0.004)
    return sample


Path_ = Callable[[str], tuple[Any, dict[str, Any]]]
PATHS: dict[str, Path_] = {
    "runs of cheap samples": lambda _: (Plain(), {}),
    "single samples": lambda _: (Plain(0.0005), {}),
    "transforms, some samples slow": lambda _: (
        Plain(),
        {"transforms": [nothing, sometimes_slow, nothing]},
    ),
    "collate_fn": lambda _: (Plain(), {"collate_fn": as_list}),
    "uneven samples": lambda _: (Uneven(), {"collate_fn": as_list}),
    "__getitems__": lambda _: (Listed(), {}),
    "__getitems__ and collate_fn": lambda _: (Listed(), {"collate_fn": as_list}),
    "flaky samples, retried": lambda _: (
        Flaky(True),
        {"errors": ErrorPolicy(on_error="retry", retries=50)},
    ),
    "flaky samples, retried, and collate_fn": lambda _: (
        Flaky(True),
        {"errors": ErrorPolicy(on_error="retry", retries=50), "collate_fn": as_list},
    ),
    "bad samples, skipped": lambda _: (Flaky(False), {"errors": "skip"}),
    "bad samples, skipped, and collate_fn": lambda _: (
        Flaky(False),
        {"errors": "skip", "collate_fn": as_list},
    ),
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


def batch_of(loaded: Any) -> list[tuple[int, Array]]:
    """The samples of a batch, however it was collated."""
    if isinstance(loaded, list) and loaded and isinstance(loaded[0], tuple):
        return loaded
    indices, contents = loaded
    return list(zip(indices.tolist(), contents.numpy(), strict=True))


def check_epoch(loader: DataLoader[Any], path: str, order: str) -> int:
    """Iterate once; returns the number of samples, all of which were right."""
    dataset = loader.dataset
    raises = path.endswith("raised")
    found: Counter[int] = Counter()
    lost: set[int] = set()
    iterator = iter(loader)
    while True:
        try:
            samples = batch_of(next(iterator))
        except StopIteration:
            break
        except ValueError as error:
            index = int(re.findall(r"sample (\d+) is bad", str(error))[-1])
            if not raises or not is_bad(index):
                raise
            lost.add(index)
            continue
        indices = [index for index, _ in samples]
        if order in ("strict", "batch"):
            first = indices[0] // BATCH * BATCH
            expected = [i for i in range(first, first + BATCH) if i in indices or not is_bad(i)]
            assert indices == expected or not path.startswith("bad"), (path, order, indices)
            if not path.startswith("bad"):
                assert indices == list(range(first, first + BATCH)), (path, order, indices)
        for index, values in samples:
            true = (
                content(index)[: 1 + index % 97] if isinstance(dataset, Uneven) else content(index)
            )
            assert np.array_equal(values, true), (path, order, index, values[:3])
            found[index] += 1
    assert max(found.values()) == 1, (path, order, found.most_common(3))
    missing = set(range(LENGTH)) - set(found)
    if not path.startswith("bad"):
        assert not missing, (path, order, missing)
    elif raises:
        allowed = {
            i for bad in lost for i in range(bad // BATCH * BATCH, bad // BATCH * BATCH + BATCH)
        }
        assert order in ("arrival", "fast_first") or missing <= allowed, (path, order, missing)
        assert len(missing) == len(lost) * BATCH, (path, order, missing, lost)
    else:
        assert missing == {i for i in range(LENGTH) if is_bad(i)}, (path, order, missing)
    return len(found)


def take_turn(seconds: float, seed: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Iterate loaders with this process's backend, path by path; returns kills, seconds and samples of each path."""
    supervision._FATAL = supervision._HOPELESS = (
        1 << 30
    )  # the kills are the test's own: no sample is to blame
    multiprocessing.set_forkserver_preload(["tests.stress.kills"])
    draw = random.Random(seed)
    names = draw.sample(names, len(names))
    figures: dict[str, dict[str, float]] = {}
    end = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < end:
        path = names[turn % len(names)]
        turn += 1
        order = draw.choice(ORDERS)
        method = draw.choice(METHODS)
        begin = time.monotonic()
        with (
            tempfile.TemporaryDirectory() as directory,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            dataset, options = PATHS[path](directory)
            workers = draw.randint(1, 2 if method == "spawn" else 4)
            scale: Any = workers
            if draw.random() < 0.3:
                scale = AutoScale(start=workers, min=1, max=workers + 2)
            loader = DataLoader(
                dataset,
                BATCH,
                order=order,
                num_workers=scale,
                persistent_workers=draw.random() < 0.5,
                multiprocessing_context=method,
                **options,
            )
            print(f"{path}: {order}, {method}, {scale}, {options}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            dataset.fire.until = begin + FIRE_S[method]
            samples = check_epoch(loader, path, order)
            while time.monotonic() < dataset.fire.until:
                samples += check_epoch(loader, path, order)
            faulthandler.cancel_dump_traceback_later()
            del loader
        row = figures.setdefault(path, {"kills": 0, "seconds": 0.0, "samples": 0})
        row["kills"] += sum("takes its place" in str(one.message) for one in said)
        row["seconds"] += time.monotonic() - begin
        row["samples"] += samples
    return figures


def run(seconds: float, seed: int) -> dict[str, dict[str, float]]:
    """Let both backends take turns of this length together; returns the figures of all."""
    total: dict[str, dict[str, float]] = {}
    end = time.monotonic() + seconds
    turn = 0
    while (left := end - time.monotonic()) > 1 or turn < 2:
        turn_s = max(min(TURN_S, seconds / 2, left), 1)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.stress.kills",
                "--turn",
                str(turn_s),
                "--seed",
                str(seed + turn),
            ],
            cwd=subprocesses.ROOT,
            env={**subprocesses.environment(), "MINATO_NO_EXTENSIONS": str(turn % 2)},
            capture_output=True,
            text=True,
            timeout=turn_s + 2 * HANG_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}\nseed {seed + turn}"
        for path, row in json.loads(done.stdout.splitlines()[-1]).items():
            sums = total.setdefault(path, dict.fromkeys(row, 0))
            for name, value in row.items():
                sums[name] += value
        turn += 1
    return total


def report(seconds: float, seed: int, figures: dict[str, dict[str, float]]) -> str:
    """A section of figures, in Markdown."""
    kills = int(sum(row["kills"] for row in figures.values()))
    lines = [
        "## Workers that die at random instructions",
        "",
        "Each worker starts a timer that ends it; `tests/stress/kills.py` has the paths. All orders,",
        "fork, forkserver and spawn, both backends; every byte of every batch is compared.",
        "",
        f"    python -m tests.stress.kills --seconds {seconds:.0f} --seed {seed} --figures {PAGE}",
        "",
        f"{kills} kills, 0 samples lost, repeated or altered, on {os.cpu_count()} cores",
        f"(load average {os.getloadavg()[2]:.0f}):",
        "",
        "| path | kills | seconds | samples |",
        "|---|---|---|---|",
        *(
            f"| {path} | {row['kills']:.0f} | {row['seconds']:.0f} | {row['samples']:.0f} |"
            for path, row in sorted(figures.items())
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.kills")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--turn", type=float, help="only this backend, for so many seconds")
    parser.add_argument("--path", choices=PATHS, help="with --turn: only this path")
    parser.add_argument("--figures", type=Path, help="write the section to this page as well")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 20)
    if options.turn is not None:
        names = [options.path] if options.path else list(PATHS)
        print(json.dumps(take_turn(options.turn, seed, names)))
        return 0
    text = report(options.seconds, seed, run(options.seconds, seed))
    print(text)
    if options.figures is not None:
        write_section(options.figures, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
