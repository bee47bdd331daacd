"""The live view of a loader, drawn by a thread while an epoch runs: a panel of rich, or lines."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from minato._compat import active_progress_bars
from minato._core import now_ns
from minato._fork_safety import at_work, forget_in_children
from minato._support.threads import at_end, start_thread
from minato._support.values import counted, digits, message_of, printable, type_name
from minato.errors import warn
from minato.observe.epoch_log import EpochLog, EpochRecord, Totals
from minato.observe.figures import Gpu
from minato.observe.machine import MachineSnapshot
from minato.observe.observers import EpochState, MetricsSource, Observer
from minato.observe.report import gpus_of
from minato.observe.text import format_value

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live as RichLive

_RECENT_NS = 5_000_000_000  # rates are averages over this time
_DRAW_EVERY_S, _LINE_EVERY_S = 0.25, 5.0
_JOIN_S = 1.0
_COST = 0.01
"""Share of a core that drawing may take; expensive views are drawn less often, but once a second."""


class _Look(NamedTuple):
    """The loader at one moment."""

    at_ns: int
    totals: Totals
    stages: tuple[tuple[int, int], ...]
    machine: MachineSnapshot


class _ShownEpoch(Observer):
    """Follows an epoch that a view shows, or showed last; ``before`` is the last that had ended when it began."""

    def __init__(
        self, view: Live, title: str, length: int | None, source: MetricsSource | None = None
    ) -> None:
        self._view = view
        self.title, self.length, self.source = title, length, source
        self.began_ns, self.batches = now_ns(), 0
        self.before: EpochRecord | None = None
        self.recent: deque[_Look] = deque()

    def started(self) -> None:
        self._view.show(self)

    def enter(self) -> None:
        if self._view.epoch is not self:
            self._view.show(self)

    def finish(self) -> None:
        self._view.leave_out(self)


class Live(Observer):
    """The result of ``loader.live()``: shows the progress of each epoch while it runs.

    Of several epochs at a time it shows the one whose iterator was asked last.
    """

    def __init__(
        self, observers: list[Observer], log: EpochLog, name: str, stages: Sequence[str]
    ) -> None:
        self._log, self._name, self._stages = log, name, stages
        self._running: list[_ShownEpoch] = []
        self.epoch = _ShownEpoch(self, name, None)
        self._observers = observers
        observers.append(self)

    def begin(self, epoch: int, progress: EpochState, source: MetricsSource) -> _ShownEpoch:
        self.end(source)
        title, past = f"{self._name}, epoch {epoch}", self._log.past
        self.epoch = shown = _ShownEpoch(self, title, progress.length(), source)
        shown.before = past[-1] if past else None
        self._running.append(shown)
        self.rows()
        return shown

    def end(self, source: MetricsSource) -> None:
        for each in [each for each in self._running if each.source is source]:
            self.leave_out(each)

    def show(self, shown: _ShownEpoch) -> None:
        """Show an epoch that runs, unless the view has ended."""
        if shown in self._running:
            self.epoch = shown
            _board.add(self)

    def leave_out(self, shown: _ShownEpoch) -> None:
        """Show an epoch no more."""
        if shown in self._running:
            self._running.remove(shown)
            shown.source = None
            if shown is self.epoch:
                _board.remove(self)
            else:
                _board.tell(self)

    def close(self) -> None:
        """End the view."""
        if self in self._observers:
            self._observers.remove(self)
        self._running.clear()
        self.epoch.source = None
        _board.remove(self, summarize=False)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def rows(self) -> list[tuple[str, str]]:
        """What the view shows of the last seconds: names and texts; empty between two epochs."""
        # First: it reads files, and another thread may look meanwhile.
        machine = self._log.machine()
        now = _Look(now_ns(), self._log.totals(), self._log.stages(), machine)
        if not now.totals.running:
            return []
        recent = self.epoch.recent
        recent.append(now)
        while len(recent) > 2 and now.at_ns - recent[1].at_ns >= _RECENT_NS:
            recent.popleft()
        self.epoch.batches = now.totals.batches
        return list(self._rows(recent[0], now))

    def _rows(self, first: _Look, now: _Look) -> Iterator[tuple[str, str]]:
        seconds = max(now.at_ns - first.at_ns, 1) / 1e9
        added = _added(first.totals.counts, now.totals.counts)
        samples, batches = added["samples"] / seconds, added["batches"] / seconds
        rate = f"{digits(samples)} samples/s, {digits(batches)} batches/s"
        if added["bytes"]:
            rate += f", {format_value(added['bytes'] / seconds, 'bytes per s')}"
        yield "throughput", rate
        waiting = min(max(added["waited_ns"] / 1e9 / seconds, 0.0), 1.0)
        yield "waiting", f"{format_value(waiting, 'share')} of the loop's time"
        busy = added["busy_ns"] / max(added["busy_ns"] + added["idle_ns"], 1)
        loader = now.totals.loader
        yield "workers", f"{loader.workers}, busy {format_value(busy, 'share')} of their time"
        yield "prefetch", f"{loader.ready} of at most {counted(loader.limit, 'batches')} ready"
        yield "slowest", self._slowest(first, now, added)
        machine = now.machine
        used = _added(first.machine.counts, machine.counts)
        yield "machine", _machine_text(machine, used, seconds)
        if machine.gpus:
            gpus = [gpu for gpu in gpus_of(machine, used) if gpu.samples]
            yield "GPUs", "; ".join(map(_gpu_text, gpus))

    def _slowest(self, first: _Look, now: _Look, added: Mapping[str, int]) -> str:
        """The stage that took most time in the last seconds, or else since the workers started."""
        pairs = zip(now.stages, first.stages, strict=False)
        times = [(count - before[0], total - before[1]) for (count, total), before in pairs]
        if not any(count for count, _ in times):
            times = list(now.stages)
        whole_ns = sum(total for _, total in times)
        if whole_ns <= 0:
            return "–"
        number = max(range(len(times)), key=lambda i: times[i][1])
        share = times[number][1] / whole_ns
        told = f"{self._stages[number]}, {format_value(share, 'share')} of the workers' time"
        if added["samples"]:  # as in the report: of all samples, not of those that were timed
            told += f", {format_value(share * added['busy_ns'] / added['samples'] / 1e9, 's')} per sample"
        return told

    def summary(self) -> str:
        """The last epoch in a line; empty if its log was switched off meanwhile."""
        record = self._log.past[-1] if self._log.past else None
        if record is None or record is self.epoch.before:
            return ""
        counts = record.metrics.counts
        wall_s = counts["wall_ns"] / 1e9
        waited_s = record.waited_ns / 1e9
        return (
            f"{self._name}, epoch {record.epoch}{'' if record.finished else ' (not finished)'}: "
            f"{counted(counts['batches'], 'batches')}, {counted(counts['samples'], 'samples')} in "
            f"{format_value(wall_s, 's')}, "
            f"{digits(counts['samples'] / max(wall_s, 1e-9))} samples/s, "
            f"waiting {format_value(waited_s / max(wall_s, 1e-9), 'share')}"
        )


def _added(before: Mapping[str, int], counts: Mapping[str, int]) -> Counter[str]:
    return Counter({name: count - before.get(name, 0) for name, count in counts.items()})


def _machine_text(machine: MachineSnapshot, added: Mapping[str, int], seconds: float) -> str:
    parts = []
    if (total := added["cores_there_ns"]) > 0:
        parts.append(f"cores {format_value(min(added['cores_used_ns'] / total, 1.0), 'share')}")
    free, whole = (format_value(n, "bytes") for n in (machine.available_bytes, machine.limit_bytes))
    parts.append(f"disks {format_value(added['disk_read_bytes'] / seconds, 'bytes per s')}")
    return ", ".join([*parts, f"{free} of {whole} free", *([] if machine.gpus else ["no GPU"])])


def _gpu_text(gpu: Gpu) -> str:
    number, _, _ = gpu.name.partition(" ")
    idle, busy = (format_value(share, "share") for share in (gpu.idle_share, gpu.busy_share))
    memory, total = (format_value(size, "bytes") for size in (gpu.memory_bytes, gpu.total_bytes))
    return f"{number}: idle {idle}, busy {busy} otherwise, {memory} of {total}"


# ---- the terminal ---------------------------------------------------------------------------


class _Board:
    """The live views of this process, and the thread that draws them."""

    def __init__(self) -> None:
        self._views: list[Live] = []
        self._stream: TextIO | None = sys.stderr
        self._panel: RichLive | None = None
        self._streams: tuple[Any, Any] = (None, None)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._drawing = threading.RLock()
        self._ends_with_process = False

    def add(self, view: Live) -> None:
        if view in self._views or sys.stderr is None or sys.stderr.closed:
            return
        self._views.append(view)
        if self._thread is None:
            self._stream, self._streams = sys.stderr, (sys.stdout, sys.stderr)
            self._panel = panel = _panel_on(self._stream)
            self._stop = stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(panel, stop), name="minato-live", daemon=True
            )
            if not self._ends_with_process:
                at_end(self.close)
                self._ends_with_process = True
            try:
                start_thread(self._thread)
            except BaseException:
                self._views.remove(view)
                self._thread = self._panel = None
                stop.set()  # a signal's handler may raise after the start
                _end(panel)
                raise

    def remove(self, view: Live, summarize: bool = True) -> None:
        if view not in self._views:
            return
        self._views.remove(view)
        try:
            if summarize:
                self.tell(view)
        finally:
            if not self._views:
                self.close()

    def tell(self, view: Live) -> None:
        """Print the line of the epoch that has ended last."""
        if line := view.summary():
            _quietly(self._print, line)

    def close(self) -> None:
        """End the thread, which takes the panel away.

        An epoch may end in any thread, by a collection: in the one that draws, or while this holds what that waits for.
        """
        thread, self._thread, self._panel = self._thread, None, None
        if thread is None:
            return
        self._stop.set()
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def forget(self) -> None:
        """Forget everything in a forked child, which writes to the terminal itself: its parent owns the panel."""
        if self._panel is not None:
            sys.stdout, sys.stderr = self._streams
        self._views, self._thread, self._panel = [], None, None
        self._drawing, self._ends_with_process = threading.RLock(), False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Neither draw nor print meanwhile, within limits (``close``): rich erases the panel by its former size."""
        is_alone = self._drawing.acquire(timeout=_JOIN_S)
        try:
            yield
        finally:
            if is_alone:
                self._drawing.release()

    def _print(self, line: str) -> None:
        """Print a line, above the panel or tqdm's progress bars if there are any."""
        line = printable(line)
        if (panel := self._panel) is not None:
            with self._alone():
                panel.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif active_progress_bars(bars := _tqdm()):
            bars.write(line, file=self._stream)
        elif self._stream is not None:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def _run(self, panel: RichLive | None, stop: threading.Event) -> None:
        try:
            self._draw(panel, stop)
        except Exception as error:
            warn(
                f"the live view ends here, because {type_name(error)} was raised: {message_of(error)}. Batches come as "
                "before, and the next epoch is shown again"
            )
        finally:
            with at_work():
                _end(panel)
            if self._thread is threading.current_thread():
                self._thread = self._panel = None  # the next view starts another

    def _draw(self, panel: RichLive | None, stop: threading.Event) -> None:
        """Draw until the last view ends, or nothing can be written."""
        every_s = pause_s = _LINE_EVERY_S if panel is None else _DRAW_EVERY_S
        while not stop.wait(pause_s):
            start_s = time.thread_time()
            with at_work() as may_run:
                if not may_run:
                    continue
                shown = [(view, rows) for view in list(self._views) if (rows := view.rows())]
                if stop.is_set():
                    return
                if panel is not None:
                    with self._alone():
                        written = _quietly(panel.update, _drawn(shown), refresh=True)
                else:
                    written = all(_quietly(self._print, _line(*each)) for each in shown)
                if not written:
                    return
            least_s = (time.thread_time() - start_s) / _COST
            pause_s = max(every_s, min(least_s, 1.0))


def _tqdm() -> Any:
    return getattr(sys.modules.get("tqdm"), "tqdm", None)


def _panel_on(stream: TextIO) -> RichLive | None:
    """A panel of rich in the lowest rows of a terminal; None: only lines can be printed."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    if active_progress_bars(_tqdm()):  # rich's panel and tqdm's bars would overwrite each other
        return None
    try:
        from rich.console import Console
        from rich.file_proxy import FileProxy
        from rich.live import Live as RichLive
    except ImportError:
        warn(
            "the live view prints a line every few seconds, because rich is not installed: for a panel, "
            'pip install "minatoloader[report]"'
        )
        return None
    if isinstance(sys.stdout, FileProxy) or isinstance(sys.stderr, FileProxy):
        return None  # the program has a panel of its own
    panel = RichLive(
        console=Console(file=stream, force_jupyter=False),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )
    return panel if _quietly(panel.start) else None


def _end(panel: RichLive | None) -> None:
    if panel is not None:
        with suppress(Exception):  # the stream may be of any class
            panel.stop()


def _drawn(shown: Sequence[tuple[Live, list[tuple[str, str]]]]) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    panels: list[RenderableType] = []
    for view, rows in shown:
        epoch = view.epoch
        table = Table.grid(padding=(0, 2))
        for name, words in rows:
            table.add_row(f"[dim]{name}[/]", escape(printable(words)))
        bar = Table.grid(expand=True)  # ends the line
        bar.add_row(ProgressBar(epoch.length or 1, min(epoch.batches, epoch.length or 0)))
        title = f"[bold]{escape(printable(epoch.title))}[/]"
        panels.append(Panel(Group(bar, table), title=title, subtitle=_progress(epoch)))
    return Group(*panels)


def _line(view: Live, rows: Sequence[tuple[str, str]]) -> str:
    return f"{view.epoch.title}: " + "; ".join([_progress(view.epoch), *map(" ".join, rows)])


def _progress(epoch: _ShownEpoch) -> str:
    elapsed_s = (now_ns() - epoch.began_ns) / 1e9
    if not epoch.length:
        return f"{epoch.batches} batches in {_clock(elapsed_s)}"
    words = f"{epoch.batches} of {epoch.length} batches in {_clock(elapsed_s)}"
    if not epoch.batches:
        return words
    return f"{words}, {_clock(elapsed_s * max(epoch.length / epoch.batches - 1, 0.0))} left"


def _clock(seconds: float) -> str:
    """A duration as 0:42 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _quietly(write: Callable[..., object], *values: object, **options: object) -> bool:
    """Write, and return whether that succeeded: a closed stream must not end the training."""
    try:
        write(*values, **options)
    except (OSError, ValueError):
        return False
    return True


_board = _Board()
forget_in_children(_board.forget)
