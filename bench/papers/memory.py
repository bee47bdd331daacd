"""Training while memory holds a third of the data: figure 10."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
from torch.utils.data import Dataset

from bench.growth.fresh import pss
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.page import COLOURS, Section, Settings
from bench.papers.trial import LOADERS, Run, timed
from bench.workloads.packages import SCANS
from bench.workloads.segmentation import PATCH, Scan, Scans, Shape, segmentation_chain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES, SHORT_FILES = 72, 6
CROP: Shape = (64, 64, 64)
WORKERS, BATCH_SIZE, EPOCHS = 4, 3, 2
STEP_S = 0.03
BUDGET_BYTES = 16 << 20
BUDGETED = f"minato, {BUDGET_BYTES >> 20} MiB ahead"
_LOOK_EVERY_S = 0.05
_BLOCK_BYTES = 512
_TEXT = """\
{files} files of {size:.0f} MB, pieces of the real volumes, and room in memory for a third of them. *How memory is
limited*: a third of the files stays in the page cache, every other file is dropped from it (`posix_fadvise`) as soon
as it has been read, so that each loader must read two thirds of all bytes from the disk, as with a cache of a third
that is used evenly. Processes are not limited; *memory* is what they take at most beyond what was there before
(PSS). {workers} workers, patches of 64³, {epochs} epochs, a step of {step:.0f} ms. *Disk* is what the processes have
read from it, by the kernel's count.
"""


class Cold(Dataset[Scan]):
    """Stored pieces of volumes, most of which are never in the page cache."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Scan:
        image, label = (self._read(index, kind) for kind in (np.float32, np.uint8))
        return Scan(index, image, label)

    def _path(self, index: int, kind: type[Any]) -> Path:
        return self.folder / f"{index}.{kind.__name__}"

    def _read(self, index: int, kind: type[Any]) -> Any:
        with self._path(index, kind).open("rb") as file:
            array = np.fromfile(file, kind).reshape(PATCH)
            if index % 3:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return array

    def write(self, scans: Scans) -> int:
        """Fill the folder with pieces of whole volumes, and drop them from memory; returns all bytes."""
        total = 0
        for index in range(self.count):
            scan = scans[index]
            rng = np.random.default_rng(index)
            corner = [
                int(rng.integers(0, have - cut + 1))
                for have, cut in zip(scan.image.shape, PATCH, strict=True)
            ]
            where = tuple(slice(a, a + cut) for a, cut in zip(corner, PATCH, strict=True))
            for array, kind in ((scan.image, np.float32), (scan.label, np.uint8)):
                with self._path(index, kind).open("wb") as file:
                    np.ascontiguousarray(array[where], kind).tofile(file)
                    file.flush()
                    os.fsync(file.fileno())  # only what is on the disk can be dropped
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    total += file.tell()
        return total


class Found(NamedTuple):
    """One run, and what it took besides time."""

    run: Run
    disk_bytes: int
    peak_bytes: int


def run(settings: Settings) -> Section:
    """Time each loader on cold files, in turn."""
    count = SHORT_FILES if settings.short else FILES
    found: dict[str, list[Found]] = {}
    with tempfile.TemporaryDirectory(dir=settings.data) as folder:
        cold = Cold(Path(folder), count)
        total = cold.write(Scans(settings.data / SCANS))
        for index in range(0, count, 3):
            cold[index]  # these stay
        names = [*LOADERS, BUDGETED]
        for repeat in range(settings.repeats):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                found.setdefault(name, []).append(_measured(name, cold))
    rows = [[name, *_row(found[name], found["torch"])] for name in names]
    head = ["loader", "s", "× torch", "waited", "disk, MB", "disk, MB/s", "memory, MiB"]
    text = _TEXT.format(
        files=count, size=total / count / 1e6, workers=WORKERS, epochs=EPOCHS, step=1e3 * STEP_S
    )

    def draw(axes: Axes) -> None:
        for name in LOADERS:
            at_s = [at for at, _ in found[name][-1].run.arrivals]
            samples = BATCH_SIZE * np.arange(1, len(at_s) + 1)
            axes.plot(at_s, samples, color=COLOURS[name], label=name)
        axes.set_title("Samples delivered, last run")
        axes.set_xlabel("s")
        axes.legend(fontsize=6, frameon=False)

    title = "Memory for a third of the data (figure 10)"
    return Section(title, f"{text}\n{table(head, rows)}", (draw,))


def _measured(name: str, cold: Cold) -> Found:
    options = {"memory_budget_bytes": BUDGET_BYTES} if name == BUDGETED else {}
    order = np.random.default_rng(0).permutation(len(cold)).tolist()
    before = _read_bytes()
    with _peak() as peak:
        one = timed(
            "minato" if name == BUDGETED else name,
            cold,
            segmentation_chain(CROP),
            order,
            STEP_S,
            EPOCHS,
            batch_size=BATCH_SIZE,
            num_workers=WORKERS,
            **options,
        )
    gc.collect()  # the loader and its workers go now; what they read counts once they have
    return Found(one, _read_bytes() - before, peak())


def _read_bytes() -> int:
    """Bytes that this process and those of its children that have ended have read from disks."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return _BLOCK_BYTES * sum(resource.getrusage(each).ru_inblock for each in who)


@contextmanager
def _peak() -> Iterator[Callable[[], int]]:
    """What this process and its children take at most meanwhile, in bytes beyond what was there before."""
    this = psutil.Process()
    before, over, most = pss(this), threading.Event(), [0]

    def look() -> None:
        while not over.wait(_LOOK_EVERY_S):
            most[0] = max(most[0], pss(this))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield lambda: most[0] - before
    finally:
        over.set()
        watcher.join()


def _row(ours: list[Found], theirs: list[Found]) -> list[str]:
    seconds = [one.run.whole_s for one in ours]
    ratios = [b.run.whole_s / a.run.whole_s for a, b in zip(ours, theirs, strict=True)]
    read = statistics.median(one.disk_bytes for one in ours) / 1e6
    return [
        spread_text(Spread.of(seconds), 2),
        spread_text(Spread.of(ratios), 2),
        f"{100 * statistics.median(one.run.waited for one in ours):.0f} %",
        f"{read:.0f}",
        f"{read / statistics.median(seconds):.0f}",
        f"{statistics.median(one.peak_bytes for one in ours) / 2**20:.0f}",
    ]
