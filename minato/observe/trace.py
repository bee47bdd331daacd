"""A trace: its file, its tracks, one for each thread, and the track of the training loop."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minato._core import now_ns
from minato._support.files import open_lines, open_regular, write_all
from minato._support.values import integer_of, text_of
from minato._system import environment, file_of_process
from minato.errors import warn
from minato.observe.observers import EpochState, LoaderSnapshot, Observer
from minato.observe.tracer import REPEATED, SAMPLE, Args, Tracer

LIMIT_BYTES = 256 << 20
"""Size limit of a trace: about half a million samples with three transforms, which the viewer opens easily."""
_LOOP, _FIRST_WORKER, _TRACKS = 1, 10, 10_000
"""Numbers of the training loop's track and the first worker's; how many numbers an iterator has."""
_LONGEST_TEXT = 200
_EXACT = 1 << 53  # larger integers are texts: the viewer has floats


_spans = itertools.count(1)
"""Of this process: epochs, each of which may have tracks of its own, must not share the name of a span."""


class Trace:
    """A loader's trace; its file is checked now, and truncated at the first iteration.

    ``variable`` is the environment variable that gave the path to all processes of the program, with its value. Each
    process to which the loader travels writes a file of its own, which is checked at its first iteration.

    ValueError, OSError: The file is no trace, and stays unchanged; it cannot be written.
    """

    def __init__(self, path: str, name: str, *, variable: str = "") -> None:
        self._given, self._variable = os.path.abspath(path), variable
        self._name = name
        self._begun: str | None = None  # the file that was truncated
        self._taken: list[weakref.ref[Tracks]] = []  # of engines, some of which are gone
        if variable:
            return  # the rank, which is part of the name, may not be known yet
        try:
            os.close(self._open())
        except OSError as error:
            raise OSError(
                error.errno,
                f"trace={path!r} cannot be written ({error.strerror}): give a file in a directory where you may write",
            ) from None

    @property
    def _path(self) -> str:
        return file_of_process(self._given) if self._variable else self._given

    def _open(self) -> int:
        return open_lines(self._path, b'[\n{"ph":', "a trace (Observe(trace=...))")

    def take(self) -> Tracks | None:
        """Tracks for a new engine, reused ones too; None, with a warning, if the file of ``variable`` is unfit."""
        path = self._path
        if self._begun != path:
            try:
                self._begin(path)
            except (OSError, ValueError) as error:
                if self._variable:
                    warn(f"a loader is not traced: {self._variable}: {error}")
                    return None
                if isinstance(error, ValueError):
                    raise
                # The tracks will report the error: they cannot be written either.
        living = [tracks for one in self._taken if (tracks := one()) is not None]
        taken = {each.number for each in living}
        number = next(each for each in range(len(taken) + 1) if each not in taken)
        tracks = Tracks(path, os.getpid(), number, self._name)
        self._taken[:] = map(weakref.ref, [*living, tracks])
        return tracks

    def _begin(self, path: str) -> None:
        descriptor = self._open()
        try:
            os.ftruncate(descriptor, 0)
            write_all(descriptor, b"[\n", path)  # an array, which the format allows to stay open
        finally:
            os.close(descriptor)
        self._begun = path

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_taken": []}


_numbers = itertools.count(1)
_MOST_TRACES = 16  # a program may make a loader for each epoch; later ones are not recorded


def trace_of_environment(name: str) -> Trace | None:
    """The trace that ``MINATO_TRACE`` asks for, in a file for each loader of this process.

    The second loader writes ``NAME-2.json``, local rank 1 ``NAME.rank1.json``, a child process ``NAME.pid1234.json``. A
    file that cannot be written, or has other content, is a warning.
    """
    given = environment("MINATO_TRACE")
    if given is None or (number := next(_numbers)) > _MOST_TRACES:
        return None
    stem, suffix = os.path.splitext(given)
    path = f"{stem}-{number}{suffix}" if number > 1 else given
    return Trace(path, name, variable=f"MINATO_TRACE={given!r}")


@dataclass(frozen=True)
class Tracks:
    """The tracks of one engine, by ``number`` among the living engines of the loader; travels to its workers."""

    path: str
    pid: int
    number: int
    name: str

    def loop(self) -> Track:
        """That of the training loop."""
        return Track(self, _LOOP, "training loop")

    def worker(self, number: int) -> Track:
        """That of a worker."""
        return Track(self, _FIRST_WORKER + number, f"worker {number}")


class Track(Tracer):
    """A tracer that appends to the file of a trace, as one thread of one process. Nothing is written before ``flush``.

    Events are appended by a single system call, so that lines do not mix and survive the process. Concurrent writes of
    other processes can exceed the limit of the file's size slightly. The first ``error`` ends the recording.
    """

    enabled = True
    now = staticmethod(now_ns)

    def __init__(self, tracks: Tracks, number: int, name: str) -> None:
        self._number = number = tracks.number * _TRACKS + number
        self._suffix = f" of iterator {tracks.number}" if tracks.number else ""
        self._where = f'"pid":{tracks.pid},"tid":{number}'
        self._samples: dict[int, int] = {}  # event of the sample at each position
        named = (
            self._meta("process_name", name=f"minato, {tracks.name}, process {tracks.pid}")
            + self._meta("thread_name", name=name + self._suffix)
            + self._meta("thread_sort_index", sort_index=number)
        )
        self._events = [(0, 0, named)]  # begin, minus end, line
        self.error: OSError | None = None
        self._descriptor: int | None = None  # while events are written
        try:
            descriptor = self._descriptor = open_regular(tracks.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self.error = error
        else:
            weakref.finalize(self, os.close, descriptor)

    def _meta(self, kind: str, **args: object) -> str:
        return f'{{"ph":"M",{self._where},"name":"{kind}","args":{json.dumps(args)}}},\n'

    def slice(
        self, name: str, begin_ns: int, end_ns: int | None = None, args: Args | None = None
    ) -> None:
        if end_ns is None:
            end_ns = now_ns()
        line = (
            f'{{"ph":"X",{self._where},"ts":{begin_ns / 1e3:.3f},"dur":{(end_ns - begin_ns) / 1e3:.3f},'
            f'"name":{_quoted(name)},"args":{{{_members(args)}}}}},\n'
        )
        self._events.append((begin_ns, -end_ns, line))

    def sample(self, position: int, name: str, begin_ns: int, args: Args) -> None:
        if name != REPEATED:
            earlier = self._samples.get(position)
            if earlier is not None:
                begin, end, line = self._events[earlier]
                line = line.replace(_quoted(SAMPLE), _quoted(REPEATED))
                self._events[earlier] = begin, end, line
            self._samples[position] = len(self._events)
        self.slice(name, begin_ns, None, args)

    def span(self, name: str, begin_ns: int, end_ns: int, args: Args | None = None) -> None:
        identity = f'"cat":"minato","id":"{os.getpid()}.{next(_spans)}","name":{_quoted(name)}'
        lines = (
            f'{{"ph":"b",{self._where},"ts":{begin_ns / 1e3:.3f},{identity},"args":{{{_members(args)}}}}},\n'
            f'{{"ph":"e",{self._where},"ts":{end_ns / 1e3:.3f},{identity},"args":{{}}}},\n'
        )
        self._events.append((begin_ns, -end_ns, lines))

    def instant(self, name: str) -> None:
        now = now_ns()
        self._events.append((now, -now, self._instant(name, now)))

    def _instant(self, name: str, at_ns: int) -> str:
        return (
            f'{{"ph":"i","s":"t",{self._where},"ts":{at_ns / 1e3:.3f},"name":{_quoted(name)}}},\n'
        )

    def counter(self, name: str, at_ns: int, **values: int) -> None:
        """Record several counts, which the viewer stacks."""
        line = (
            f'{{"ph":"C",{self._where},"ts":{at_ns / 1e3:.3f},"name":{_quoted(name + self._suffix)},'
            f'"args":{json.dumps(values)}}},\n'
        )
        self._events.append((at_ns, -at_ns, line))

    def flush(self) -> None:
        if self._events:
            self._events.sort()  # a slice comes before those inside it, which were recorded before it
            self._append("".join([line for _, _, line in self._events]).encode("ascii"))
            self._events.clear()
        self._samples.clear()

    def _append(self, data: bytes) -> None:
        """Append lines; if they would exceed the limit, append one that says so instead, and then nothing more."""
        descriptor = self._descriptor
        if descriptor is None:
            return
        try:
            if os.fstat(descriptor).st_size + len(data) > LIMIT_BYTES:
                full = f"the trace is full ({LIMIT_BYTES} bytes): nothing more of this track"
                self._descriptor, data = None, self._instant(full, now_ns()).encode("ascii")
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._descriptor, self.error = None, error


def _members(args: Args | None) -> str:
    members = (args or {}).items()
    return ",".join([f'"{n}":{_in_json(v)}' for n, v in members])


def _in_json(value: object) -> str:
    if type(value) is bool:
        return "true" if value else "false"
    number = integer_of(value)
    if number is not None and abs(number) < _EXACT:
        return str(number)
    return json.dumps((value if type(value) is str else text_of(value))[:_LONGEST_TEXT])


@functools.lru_cache(maxsize=1000)
def _quoted(text: str) -> str:
    return json.dumps(text)


# ---- the training loop ----------------------------------------------------------------------

_COUNT_EVERY_NS = 5_000_000


class LoopTrack(Observer):
    """Records the calls of an engine: steps, waiting, and the state of the loader."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._epoch = self._batches = 0
        self._entered_ns = self._counted_ns = 0
        self._left_ns: int | None = None  # when a batch was returned, until the next is asked for
        self._warned = False

    def begin(self, epoch: int, progress: EpochState, _source: object) -> LoopTrack:
        self._epoch, self._batches, self._left_ns = epoch, 0, None
        self._entered_ns = progress.began_ns
        return self

    def started(self) -> None:
        self._track.slice("iter()", self._entered_ns, args={"epoch": self._epoch})
        self._track.flush()

    def enter(self) -> None:
        self._entered_ns = now = now_ns()
        if self._left_ns is not None:
            self._track.slice("step", self._left_ns, now, self._batch())
            self._left_ns = None

    def leave(self, samples: int, nbytes: int, loader: Callable[[], LoaderSnapshot]) -> None:
        self._batches += 1
        track, now = self._track, now_ns()
        args = {**self._batch(), "samples": samples, "bytes": nbytes}
        track.slice("next()", self._entered_ns, now, args)
        if now - self._counted_ns >= _COUNT_EVERY_NS:
            self._counted_ns, state = now, loader()
            loading = state.in_flight - state.ready
            track.counter("batches in flight", now, ready=state.ready, loading=loading)
            track.counter("prefetch window (batches)", now, limit=state.limit)
            track.counter("workers", now, active=state.workers)
            track.counter("memory in flight (bytes)", now, bytes=state.memory_bytes)
        track.flush()
        self._left_ns = now_ns()
        if track.error is not None and not self._warned:
            self._warned = True
            warn(f"the trace ends here: {track.error}")

    def pinned(self, duration_ns: int) -> None:
        now = now_ns()
        self._track.slice("pin memory", now - duration_ns, now, self._batch())
        self._left_ns = now

    def waited_for_ranks(self, duration_ns: int) -> None:
        now = now_ns()
        self._track.slice("wait for ranks", now - duration_ns, now, self._batch())
        self._left_ns = self._left_ns and now

    def finish(self) -> None:
        self._track.slice("next()", self._entered_ns, args={"epoch": self._epoch, "end": True})
        self._track.flush()

    def _batch(self) -> dict[str, int]:
        return {"epoch": self._epoch, "batch": self._batches - 1}
