"""How cost grows with samples, workers, batch size and sample size; the cold start; memory."""

from __future__ import annotations

import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import chart, environments, report
from bench.harness.datasets import Counted, SleepingWork, Vectors, Work
from bench.harness.loaders import MINATO, TORCH, TORCH_ANY_ORDER, named
from bench.harness.suite import Row, Spread, measure
from bench.harness.trial import WrongDeliveryError

CONTENDERS = named(TORCH, TORCH_ANY_ORDER, MINATO)
NAP_S = 0.010
WORKERS = (2, 12, 32)
METHODS = ("fork", "forkserver", "spawn")
SAMPLE_BYTES = (4096, 602112)
Points = list[tuple[int, Spread]]
"""``(size, seconds per unit)``."""
_LIMIT_S = 120.0
_LOOK_EVERY_S = 0.01
ALT = "Speed of each loader relative to torch, as samples, workers, batches and sizes grow"
HEAD = """\
# Cost as work grows

Written by `python -m bench.growth`.

{images}
One quantity grows while the others stay. Each loader gets the same dataset object and arguments, with workers that
stay, loaders in turn. The second epoch is measured, and every sample is checked. The exponent is that of the larger
half of the sizes. At 0 the time per unit does not depend on the size, at 1 it grows in proportion. More than 1 would
be a fault. *Ideal* is all sleep divided by the workers. Without sleep it is the calls of `dataset[i]` divided by the
workers, or one copy of all bytes if that takes longer. Figures are medians of {repeats} repeats, with the minimum and
maximum in brackets.
"""


@dataclass(frozen=True)
class Curve:
    """One quantity that grows.

    Args:
        unit: the unit of work that the time is given for.
        row: ``row(size) -> (dataset, batch size, workers, shuffle)``.
        units: ``units(size)``: units of work in an epoch.
        most: the largest value for a loader that would take too long beyond.
    """

    name: str
    unit: str
    sizes: tuple[int, ...]
    row: Callable[[int], tuple[Work, int, int, bool]]
    units: Callable[[int], float]
    most: dict[str, int] = field(default_factory=dict)


def _length(nbytes: int) -> int:
    return max(16, min(4096, (1 << 28) // nbytes))


CURVES = (
    Curve(
        "samples of an epoch",
        "sample",
        (1_000, 10_000, 100_000, 1_000_000, 10_000_000),
        lambda size: (Vectors(size), 256, 2, True),
        lambda size: size,
        {TORCH.name: 1_000_000, TORCH_ANY_ORDER.name: 1_000_000},
    ),
    Curve(
        "workers",
        "sample and worker",
        (1, 2, 4, 8, 16, 32, 64),
        lambda size: (SleepingWork([NAP_S] * 60 * size), 4, size, False),
        lambda size: 60,
    ),
    Curve(
        "samples of a batch",
        "batch",
        (1, 4, 16, 64, 256, 1024, 4096),
        lambda size: (Vectors(max(8192, 8 * size)), size, 2, False),
        lambda size: max(8192, 8 * size) / size,
    ),
    Curve(
        "bytes of a sample",
        "sample",
        (8, 64, 512, 4096, 32768, 1 << 18, 1 << 21, 1 << 24, 1 << 26),
        lambda size: (Vectors(_length(size), size), 4, 2, False),
        _length,
    ),
)


def points_of(
    curve: Curve, sizes: Sequence[int], repeats: int, say: Callable[[str], None]
) -> dict[str, Points]:
    found: dict[str, Points] = {"ideal": [], **{name: [] for name in CONTENDERS}}
    for size in sizes:
        work, batch_size, workers, shuffle = curve.row(size)
        row = Row(
            *(f"{curve.name} {size}", ""),
            lambda _, work=work: work,  # type: ignore[misc]
            *(len(work), batch_size, workers, 2),
            loaders=tuple(name for name in CONTENDERS if size <= curve.most.get(name, size)),
            shuffle=shuffle,
            persistent=True,
            skips_first_epoch=True,
        )
        (result,) = measure([row], CONTENDERS, repeats, say)
        per_unit = 1 / curve.units(size)
        found["ideal"].append((size, result.ideal_speed.scaled(per_unit)))
        for name in result.trials:
            found[name].append((size, result.figures(name).speed.scaled(per_unit)))
    return found


def slope(points: Points) -> float:
    """The exponent of growth: least squares through the logarithms of the larger half of the sizes."""
    upper = points[len(points) // 2 - 1 :]
    x = [math.log(size) for size, _ in upper]
    y = [math.log(value.median) for _, value in upper]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def curve_table(curve: Curve, found: dict[str, Points]) -> str:
    labels = {"ideal": "*ideal*", **{name: one.label for name, one in CONTENDERS.items()}}
    cells: dict[int, dict[str, str]] = {}
    for name, points in found.items():
        for size, one in points:
            cells.setdefault(size, {})[name] = report.spread_text(one.scaled(1e6), 2)
    lines = [[f"{size:,}", *(row.get(name, "") for name in labels)] for size, row in cells.items()]
    if len(lines) > 3:
        lines.append(["*exponent*", *(f"{slope(found[name]):.2f}" for name in labels)])
    head = f"## {curve.name.capitalize()}\n\nMicroseconds per {curve.unit}.\n\n"
    return head + report.table([curve.name, *labels.values()], lines)


def first_batch(loader: str, workers: str, method: str) -> float:
    """Milliseconds from building the loader to its first batch of 8 samples, in a fresh process that has imported torch
    and minato. With `forkserver`, most of the time is the import of torch by the server, once. With `spawn`, it is the
    import by the first worker that is ready.
    """
    import minato  # noqa: F401  (as scripts do at their top; torch is imported already)

    begun = time.perf_counter()
    arguments = {"batch_size": 8, "num_workers": int(workers), "multiprocessing_context": method}
    iterator = iter(CONTENDERS[loader].build(SleepingWork([0.0] * 4096), arguments, 0))
    next(iterator)
    return 1e3 * (time.perf_counter() - begun)


def second_loader(loader: str, workers: str, method: str) -> float:
    """The same for the second loader of a process."""
    first_batch(loader, workers, method)
    return first_batch(loader, workers, method)


class _Pids(Counted):
    """Samples of 1 ms that are the pid of their worker."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        return os.getpid()


def replacement(loader: str, workers: str, method: str) -> float:
    """Milliseconds from the end of a worker to the first batch of the one that replaces it; the batches before come
    from the others. torch raises an error instead.
    """
    arguments = {"num_workers": int(workers), "multiprocessing_context": method}
    iterator = iter(CONTENDERS[loader].build(_Pids(1_000_000), arguments, 0))
    alive: set[int] = set()
    while len(alive) < int(workers):
        alive.add(int(next(iterator)))
    for _ in range(100):  # all are at work, and all that was fast at first is over
        next(iterator)
    begun = time.perf_counter()
    os.kill(min(alive), signal.SIGKILL)
    while int(next(iterator)) in alive:
        pass
    return 1e3 * (time.perf_counter() - begun)


def memory(loader: str, workers: str, nbytes: str) -> float:
    """MiB that an epoch of 2048 samples takes at most in the training process and its 4 workers, beyond what was there
    before. Batches hold 32, and the consumer takes 5 ms for each. Each page counts once. Shared memory counts as long
    as a process holds it: torch's batches on their way to the training process are in no process's resident set.
    minato's memory is largely that of batches: of as many as were in flight, and of four more, which it keeps for the
    next ones.
    """
    import psutil

    arguments = {"batch_size": 32, "num_workers": int(workers)}
    made = CONTENDERS[loader].build(Vectors(2048, int(nbytes)), arguments, 0)
    this = psutil.Process()
    before, over = memory_used(this), threading.Event()
    peak = 0

    def look() -> None:
        nonlocal peak
        while not over.wait(_LOOK_EVERY_S):
            peak = max(peak, memory_used(this))

    iterator = iter(made)  # forks before there is a thread
    watcher = threading.Thread(target=look)
    watcher.start()
    labels: list[int] = []
    for batch in iterator:
        labels += batch[1].tolist()
        time.sleep(0.005)
    over.set()
    watcher.join()
    if sorted(labels) != list(range(2048)):
        raise WrongDeliveryError(f"{loader}: not each sample once")
    return (peak - before) / 2**20


def memory_used(process: Any, files: bool = True) -> int:
    """Memory of a process and its children, in bytes, each page counted once; without ``files``, no mapped files.

    Pages of mapped files, libraries mostly, are divided by all processes of the machine that map them: their part
    changes as other programs start and end.

    torch's batches on their way to the training process are files in shared memory that no process maps, so they are in
    no process's resident or proportional set. They count here by the descriptors that hold them.
    """
    import psutil

    private, shared = 0, {}
    for one in (process, *process.children(recursive=True)):
        try:
            private += _private(one.pid, files)
            for folder in ("fd", "map_files"):
                for entry in Path(f"/proc/{one.pid}/{folder}").iterdir():
                    target = os.readlink(entry)
                    if target.startswith(("/memfd:", "/dev/shm/")):
                        status = entry.stat()
                        shared[status.st_dev, status.st_ino] = 512 * status.st_blocks
        except (OSError, psutil.Error):  # it has just ended
            continue
    return private + sum(shared.values())


def _private(pid: int, files: bool) -> int:
    """Proportional set size of a process without shared memory, in bytes."""
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    names = ("Pss_Anon", "Pss_File") if files else ("Pss_Anon",)
    return 1024 * sum(int(fields[name].split()[0]) for name in names)


class Section(NamedTuple):
    """A table of what a function measures in a process of its own; the text above it is the function's docstring."""

    title: str
    columns: tuple[str, str]
    cases: Sequence[tuple[str, str]]
    loaders: Sequence[str] | None = None

    def table(self, what: str, options: Any, page: report.Page) -> str:
        """Median and range by case and loader, loaders in turn; the first case alone in a smoke run."""
        names = self.loaders or [*CONTENDERS]
        lines = []
        for case in self.cases[:1] if options.short else self.cases:
            found = page.turns(
                f"{what} {' '.join(case)}",
                names,
                options.repeats,
                lambda name, _, case=case: environments.call(  # type: ignore[misc]
                    f"bench.growth:{what}", name, *case, limit_s=_LIMIT_S
                ),
                "{:.0f}".format,
            )
            lines.append([*case, *(report.spread_text(values, 0) for values in found.values())])
        return report.table([*self.columns, *(CONTENDERS[name].label for name in names)], lines)


_STARTS = ("workers", "start method")
SECTIONS = {
    "first_batch": Section(
        "Cold first batch",
        _STARTS,
        [(str(workers), method) for method in METHODS for workers in WORKERS],
    ),
    "second_loader": Section(
        "Later loaders",
        _STARTS,
        [(str(workers), method) for method in METHODS for workers in WORKERS[:2]],
    ),
    "replacement": Section(
        "A killed worker", _STARTS, [("2", method) for method in METHODS], ["minato"]
    ),
    "memory": Section(
        "Memory", ("workers", "bytes of a sample"), [("4", str(nbytes)) for nbytes in SAMPLE_BYTES]
    ),
}
ROWS = ("curves", *SECTIONS)


def draw(page: Path) -> None:
    tables = chart.tables_of(page)

    def panel(curve: Curve) -> chart.Bars:
        section = curve.name.capitalize()

        def speed(size: str, loader: str) -> Spread | None:
            times = [chart.spread_in(tables, section, size, each) for each in (TORCH.label, loader)]
            if times[0] is None or times[1] is None:
                return None
            ratio = times[0].median / times[1].median
            return Spread(ratio, ratio, ratio)

        sizes = {f"{size:,}": _short(size) for size in curve.sizes}
        known = {size: label for size, label in sizes.items() if speed(size, TORCH.label)}
        return chart.Bars(f"{section}: speed, torch = 1", known, speed, chart.times)

    chart.bars([panel(curve) for curve in CURVES], 2, page, "ratios of medians")


def _short(size: int) -> str:
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size}"


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("growth", __doc__, 3, publishes=True, rows=ROWS)
    options = parser.parse_args(arguments)
    page = report.Page("growth", options.out)
    page.add(HEAD.format(repeats=options.repeats, images=chart.images("growth", ALT)))
    for curve in CURVES if "curves" in options.rows else ():
        sizes = curve.sizes[:2] if options.short else curve.sizes
        page.add(curve_table(curve, points_of(curve, sizes, options.repeats, page.say)))
    for what, section in SECTIONS.items():
        if what in options.rows:
            page.add(f"## {section.title}\n", f"{inspect.getdoc(globals()[what])}\n")
            page.add(section.table(what, options, page))
    page.finish(draw if "curves" in options.rows else None)


if __name__ == "__main__":
    report.program(main)
