"""When reads begin and end over a run: the ConcurrentDataloader paper's fade-in and fade-out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import minato
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.far import ABOUT, Pictures, bound_per_s, far_store
from bench.papers.page import Section, Settings, prose
from bench.papers.trial import build, check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKERS, READS, SLOW_START = 4, 16, 4
BATCH_SIZE = 16
RUN_S, SHORT_RUN_S = 3.0, 0.3
_TRIMMED = 0.1
_FULL = 0.9
_BINS = 60
_MOMENTS = 400
_TEXT = """\
{about}. {workers} workers, batches of {batch}; minato reads {reads} samples at once in each, with
`slow_start={slow_start}` in the last row. As many samples as the bound of each loader brings in {run_s:g} s;
time counts from before the loader is built. *Trimmed*: samples per second between the end of the first and of
the last tenth of the reads, which is what a run of any length comes to; *whole*: with both ends. *Fade-in*:
until the reads under way first reach {full:.0%} of their median in the middle of the run; *fade-out*: from when
they last have so many to the end.
"""
Times = npt.NDArray[np.float64]


class Reads(NamedTuple):
    """When each sample of a run was read, in seconds since before the loader was built."""

    begun_s: Times
    ended_s: Times
    whole_s: float

    @property
    def whole_per_s(self) -> float:
        """Samples per second of the whole run."""
        return len(self.ended_s) / self.whole_s

    @property
    def trimmed_per_s(self) -> float:
        """The same without the first and the last tenth of the reads."""
        ended_s = np.sort(self.ended_s)
        first, last = (int(share * (len(ended_s) - 1)) for share in (_TRIMMED, 1 - _TRIMMED))
        return float((last - first) / (ended_s[last] - ended_s[first]))

    @property
    def fades_s(self) -> tuple[float, float]:
        """How long the fade-in and the fade-out took."""
        at_s = np.linspace(0, self.whole_s, _MOMENTS)
        begun, ended = (
            np.searchsorted(np.sort(each), at_s, "right") for each in (self.begun_s, self.ended_s)
        )
        under_way = begun - ended
        middle = under_way[int(_TRIMMED * _MOMENTS) : int((1 - _TRIMMED) * _MOMENTS)]
        full = np.flatnonzero(under_way >= max(_FULL * np.median(middle), 1))
        return float(at_s[full[0]]), float(self.whole_s - at_s[full[-1]])


def run(settings: Settings) -> Section:
    """Record when reads begin and end with each loader, in turn."""
    contenders: dict[str, tuple[str, int, int | None]] = {
        "torch": ("torch", 1, None),
        "torch, in_order=False": ("torch, in_order=False", 1, None),
        "minato": ("minato", READS, None),
        f"minato, slow_start={SLOW_START}": ("minato", READS, SLOW_START),
    }
    labels = [*contenders]
    run_s = SHORT_RUN_S if settings.short else RUN_S
    found: dict[str, list[Reads]] = {label: [] for label in labels}
    with far_store() as port:
        for repeat in range(settings.repeats):
            turn = repeat % len(labels)
            for label in labels[turn:] + labels[:turn]:
                name, reads, slow_start = contenders[label]
                count = max(int(bound_per_s(WORKERS * reads) * run_s), WORKERS * BATCH_SIZE)
                found[label].append(record(name, port, count, reads, slow_start))
    rows = [
        _row(label, found[label], bound_per_s(WORKERS * reads))
        for label, (_, reads, _) in contenders.items()
    ]
    head = ["loader", "bound, samples/s", "trimmed", "of the bound", "whole"]
    text = prose(
        _TEXT,
        about=ABOUT,
        workers=WORKERS,
        batch=BATCH_SIZE,
        reads=READS,
        slow_start=SLOW_START,
        run_s=run_s,
        full=_FULL,
    )
    lines = table([*head, "fade-in, ms", "fade-out, ms"], rows)
    panels = tuple(_histogram(label, runs[-1]) for label, runs in found.items())
    title = "Fade-in and fade-out (ConcurrentDataloader)"
    return Section(title, f"{text}\n{lines}", panels)


def record(name: str, port: int, count: int, reads: int, slow_start: int | None) -> Reads:
    """Run a loader once; each sample must come exactly once."""
    options: dict[str, Any] = {}
    if reads > 1:
        options["fetch_concurrency"] = minato.Fetching(reads, slow_start=slow_start)
    came: list[int] = []
    begun_s: list[float] = []
    ended_s: list[float] = []
    start_s = time.perf_counter()
    dataset, order = Pictures(port, count), range(count)
    for batch in build(
        name, dataset, [], order, batch_size=BATCH_SIZE, num_workers=WORKERS, **options
    ):
        came += batch.key.tolist()
        begun_s += batch.begun_s.tolist()
        ended_s += batch.ended_s.tolist()
    whole_s = time.perf_counter() - start_s
    check(name, came, order)
    return Reads(np.array(begun_s) - start_s, np.array(ended_s) - start_s, whole_s)


def _row(label: str, runs: list[Reads], bound: float) -> list[str]:
    trimmed = Spread.of([one.trimmed_per_s for one in runs])
    fades = [
        spread_text(Spread.of([1e3 * one.fades_s[end] for one in runs]), 0) for end in range(2)
    ]
    share = f"{100 * trimmed.median / bound:.0f} %"
    whole = spread_text(Spread.of([one.whole_per_s for one in runs]), 0)
    return [label, f"{bound:.0f}", spread_text(trimmed, 0), share, whole, *fades]


def _histogram(label: str, reads: Reads) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        edges = np.linspace(0, reads.whole_s, _BINS + 1)
        for times_s, what, colour in (
            (reads.begun_s, "begun", "#8f99a8"),
            (reads.ended_s, "ended", "#1f6fb2"),
        ):
            axes.stairs(np.histogram(times_s, edges)[0], edges, color=colour, label=what)
        axes.set_title(f"{label}: reads, last run")
        axes.set_xlabel(f"s (bins of {1e3 * reads.whole_s / _BINS:.0f} ms)")
        axes.legend(fontsize=6, frameon=False)

    return draw
