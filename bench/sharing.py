"""Memory of workers that read Python objects, as they are and shared; what an access costs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from torch.utils.data import DataLoader as TorchLoader

from bench.growth import memory_used
from bench.harness import environments, report
from bench.harness.datasets import Counted

WORKERS = 8
SAMPLES = 2048
EPOCHS = (1, 3)
HEAD = f"""\
# Datasets of Python objects

Written by `python -m bench.sharing`.

{WORKERS} workers read all of a dataset's objects in each epoch: {{paths:,}} paths (strings of 62 characters) or
{{records:,}} records (dictionaries of five fields). Every sample reads a part of them that is spread over the whole,
and checks it. Each line runs in a program of its own. Medians of {{repeats}} repeats, with the minimum and maximum in
brackets.

## Memory

MiB of the training process and its workers together after an epoch, each page counted once. What the program had before
it made the dataset does not count. *Objects* is what the dataset takes in the training process before there are
workers. Less is impossible for a loader that leaves the objects as they are.
"""
ACCESS = """\
## Access

Nanoseconds of processor time to read one item at a random place, {count:,} items. A list returns the object that it
holds; a shared list makes a new one.
"""


def path(i: int) -> str:
    return f"/data/imagenet/train/n{i % 1000:08d}/n{i % 1000:08d}_{i:08d}.JPEG"


def annotation(i: int) -> dict[str, Any]:
    return {"id": i, "file": f"{i:012d}.jpg", "width": 640, "area": i / 7, "crowd": i % 3 == 0}


KINDS: dict[str, Callable[[int], Any]] = {"paths": path, "records": annotation}


class Objects(Counted):
    """Sample ``k`` reads every ``SAMPLES``-th object from the ``k``-th on; returns ``k``."""

    def __init__(self, kind: str, count: int) -> None:
        super().__init__(SAMPLES)
        self.make = KINDS[kind]
        self.objects = [self.make(i) for i in range(count)]

    def __getitem__(self, index: int) -> int:
        objects = self.objects
        for i in range(index, len(objects), SAMPLES):
            objects[i]
        last = len(objects) - 1 - (len(objects) - 1 - index) % SAMPLES
        if objects[last] != self.make(last):
            raise RuntimeError(f"item {last} is wrong")
        return index


COUNTS = {"paths": 4_000_000, "records": 1_500_000}
"""About half a gigabyte."""
LOADERS = {
    "torch": "torch",
    "torch-shared": "torch, `minato.share(dataset)`",
    "minato": "minato",
    "minato-shared": "minato, `minato.share(dataset)`",
}


def memory(name: str, kind: str, method: str, count: int) -> dict[str, float]:
    """MiB of objects and after epochs, and the seconds of an epoch; runs in a process of its own."""
    import minato

    this = psutil.Process()
    before = memory_used(this)
    dataset = Objects(kind, count)
    found = {"objects": (memory_used(this) - before) / 2**20}
    if name.endswith("shared"):
        begun = time.perf_counter()
        minato.share(dataset)
        found["share_s"] = time.perf_counter() - begun
    cls: Any = TorchLoader if name.startswith("torch") else minato.DataLoader
    loader = cls(
        dataset,
        16,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    for epoch in range(1, EPOCHS[-1] + 1):
        begun = time.perf_counter()
        seen = sorted(index for batch in loader for index in batch.tolist())
        found["epoch_s"] = time.perf_counter() - begun
        if seen != list(range(SAMPLES)):
            raise RuntimeError(f"{name}: not each sample once")
        if epoch in EPOCHS:
            found[f"after_{epoch}"] = (memory_used(this) - before) / 2**20
    return found


def memory_table(
    kind: str, methods: Sequence[str], count: int, page: report.Page, repeats: int
) -> str:
    """Loaders in turn, one a line, for each start method."""
    columns = ["objects", *(f"after_{epoch}" for epoch in EPOCHS)]
    lines = []
    for method in methods:
        found = page.turns(
            f"{kind} {method}",
            [*LOADERS],
            repeats,
            lambda name, _, method=method: environments.call(  # type: ignore[misc]
                "bench.sharing:memory", name, kind, method, count
            ),
            lambda run: f"{run[columns[-1]]:.0f} MiB",
        )
        for name, runs in found.items():
            cells = [report.spread_text([run[each] for run in runs], 0) for each in columns]
            seconds = report.spread_text([run["epoch_s"] for run in runs], 2)
            lines.append([method, LOADERS[name], *cells, seconds])
    head = ["start method", "loader", "objects", *(f"after epoch {each}" for each in EPOCHS)]
    return report.table([*head, f"s, epoch {EPOCHS[-1]}"], lines)


def access_table(count: int, repeats: int) -> str:
    import minato

    kinds: dict[str, list[Any]] = {
        "`int`": list(range(count)),
        "`float`": [i / 3 for i in range(count)],
        "`str`": [path(i) for i in range(count)],
        "`(str, int)`": [(path(i), i % 1000) for i in range(count)],
        "`dict` of five fields": [annotation(i) for i in range(count)],
        "`dict` with a missing field": [
            {**annotation(i), **({"note": "x"} if i % 2 else {})} for i in range(count)
        ],
    }
    places = random.Random(0).choices(range(count), k=min(count, 200_000))
    lines = []
    for kind, items in kinds.items():
        lines.append(_access_line(f"list of {kind}", items, minato.share(items), places, repeats))
    table = {path(i): i for i in range(count)}
    keys = [path(i) for i in places]
    lines.append(_access_line("dict, `str` to `int`", table, minato.share(table), keys, repeats))
    return report.table(["", "as it is", "shared", "ratio"], lines)


def _access_line(
    name: str, plain: Any, shared: Any, places: Sequence[Any], repeats: int
) -> list[str]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(repeats, 3)):
        for items, found in zip((plain, shared), times, strict=True):
            begun = time.thread_time()
            for place in places:
                items[place]
            found.append((time.thread_time() - begun) / len(places) * 1e9)
    cells = [report.spread_text(each, 0) for each in times]
    return [name, *cells, report.ratio_text(times[1], times[0], 1)]


def main(arguments: list[str] | None = None) -> None:
    options = report.Parser("sharing", __doc__, 3, publishes=True).parse_args(arguments)
    repeats, page = options.repeats, report.Page("sharing", options.out)
    counts = dict.fromkeys(COUNTS, 20_000) if options.short else COUNTS
    page.add(HEAD.format(**counts, repeats=repeats))
    for kind, count in counts.items():
        methods = ["fork"] if options.short or kind == "records" else ["fork", "forkserver"]
        page.add(f"### {kind.capitalize()}\n", memory_table(kind, methods, count, page, repeats))
    count = 20_000 if options.short else 1_000_000
    page.add(ACCESS.format(count=count), access_table(count, repeats))
    page.finish()


if __name__ == "__main__":
    report.program(main)
