"""Ingesting: chunk by chunk, in parallel, and from where it was stopped."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from minato.errors import MinatoError
from minato.sources.ingest.feed import Folder, chunks_of
from minato.sources.ingest.journal import Completed, Journal, JournalError
from minato.sources.ingest.parallel import in_processes, in_threads
from minato.sources.ingest.progress import Progress
from minato.sources.ingest.store import Store
from minato.sources.ingest.work import Work

__all__ = ["IngestError", "Ingested", "ingest"]

_NAMED = 5
"""Wrong keys that a message names."""


class IngestError(MinatoError):
    """Samples do not lie in the store as they were written; the message names their keys."""


@dataclass(frozen=True)
class Ingested:
    """What came of it.

    Attributes:
        samples: How many lie in the store.
        stored_bytes: What they take there, keys and the store's own overhead not counted.
        written: How many of them this call has written; the others were there.
        verified: How many were read again and compared.
        taken_s: Seconds.
    """

    samples: int
    stored_bytes: int
    written: int
    verified: int
    taken_s: float


def ingest(
    what: Any,
    store: Store,
    *,
    workers: int = 4,
    chunk_samples: int = 256,
    encode: Callable[[Any], Any] | None = None,
    verify: bool = False,
    journal: str | Path | None = None,
    progress: bool = False,
    worker_method: Literal["process", "thread"] = "process",
    name: str | None = None,
) -> Ingested:
    """Write samples into a store, several chunks at a time.

    A journal notes which chunks the store has. When the call was stopped, however that happened, the same call goes on
    behind them; what was being written is written again, in the same place. So the samples must be the same in the
    same order each time.

    Args:
        what: A folder, whose files are the samples and whose paths are their keys; a map-style dataset, read by the
            workers, with ``keys`` of its own or else numbers as keys; or any other iterable, which is iterated here,
            and again from its beginning when the call goes on.
        store: Of :mod:`minato.sources.ingest`, for instance from :func:`open_store`.
        workers: How many chunks are read and written at a time.
        chunk_samples: How many samples are written together: a transaction, a Parquet or a tar file.
        encode: Makes bytes of a sample, or for a table a dict of columns. None: bytes as they are, arrays, tensors,
            numbers and dicts or tuples of them in NumPy's format, for :func:`decoded` to read.
        verify: Read everything back at the end and compare checksums, also of what earlier calls have written.
        journal: The file; None: ``minato-ingest-….jsonl`` in the current folder, named after ``what`` and ``store``. It
            stays at the end.
        progress: Show a bar, if rich is installed.
        worker_method: ``"process"`` or ``"thread"``. An iterable is written by threads always.
        name: What the journal calls ``what``; None: a folder's path, an object's type.

    Raises:
        IngestError: The store holds something else than was written.
        JournalError: The journal is about something else, or in use.
        SourceError: The store could not be written; names the keys. What the dataset raises passes.
    """
    if workers < 1 or chunk_samples < 1:
        raise ValueError(f"workers={workers}, chunk_samples={chunk_samples}: give at least 1")
    started = time.monotonic()
    if isinstance(what, (str, Path)):
        name, what = name or str(Path(what).absolute()), Folder(what, store.takes_rows)
    by_number = hasattr(what, "__getitem__") and hasattr(what, "__len__")
    count = len(what) if by_number else None
    about = {
        "what": name or f"{type(what).__module__}.{type(what).__qualname__}",
        "store": repr(store),
        "chunk_samples": chunk_samples,
        "samples": count,
    }
    run: Callable[..., Iterator[Any]] = partial(in_threads, workers=workers)
    if by_number:
        run = partial(in_processes, workers=workers, worker_method=worker_method)
    work = Work(store, what if by_number else None, chunk_samples, encode)
    path = _journal_of(about) if journal is None else Path(journal)
    with Journal(path, about) as notes, Progress(progress, count) as bar:
        try:
            most = None if count is None else -(-count // chunk_samples)
            _check_chunks(notes.done.values(), chunk_samples, most, path)
            before = _samples(notes.done.values())
            bar.add(before)
            # A store that was emptied meanwhile would otherwise keep gaps.
            _compare(run, work, list(notes.done.values())[:1], f"delete {path} to start again")
            for done in _written(run, work, what, by_number, chunk_samples, notes.done):
                notes.add(done)
                bar.add(len(done.digests))
            verified = 0
            if verify:
                bar.phase("verifying", _samples(notes.done.values()))
                again = f"delete {path} to write everything again"
                verified = _compare(run, work, notes.done.values(), again, bar)
        finally:
            store.close()
        samples = _samples(notes.done.values())
        stored = sum(done.stored_bytes for done in notes.done.values())
    return Ingested(samples, stored, samples - before, verified, time.monotonic() - started)


def _journal_of(about: dict[str, Any]) -> Path:
    text = json.dumps([about["what"], about["store"]])
    return Path(f"minato-ingest-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl")


def _check_chunks(chunks: Iterable[Completed], size: int, most: int | None, path: Path) -> None:
    for done in chunks:
        if len(done.digests) > size or (most is not None and done.chunk >= most):
            raise JournalError(
                f"{path} names chunk {done.chunk} of {len(done.digests)} samples, which there cannot be: delete it to "
                "start again"
            )


def _samples(chunks: Iterable[Completed]) -> int:
    return sum(len(done.digests) for done in chunks)


def _written(
    run: Callable[..., Iterator[Completed]],
    work: Work,
    what: Any,
    by_number: bool,
    chunk_samples: int,
    done: dict[int, Completed],
) -> Iterator[Completed]:
    """Write what is not done; the first chunk by itself, since that may make a table."""
    tasks: Iterator[Callable[[], Completed]]
    if by_number:
        chunks = range(-(-len(what) // chunk_samples))
        tasks = (partial(work.write, chunk) for chunk in chunks if chunk not in done)
    else:
        given = chunks_of(what, chunk_samples)
        tasks = (partial(work.write, chunk, some) for chunk, some in given if chunk not in done)
    yield from run(itertools.islice(tasks, 1))
    yield from run(tasks)


def _compare(
    run: Callable[..., Iterator[tuple[int, list[str]]]],
    work: Work,
    chunks: Iterable[Completed],
    advice: str,
    bar: Progress | None = None,
) -> int:
    """Compare chunks with the store; returns how many samples there are."""
    compared, wrong = 0, []
    for count, found in run([partial(work.wrong, done) for done in chunks]):
        compared += count
        wrong += found
        if bar is not None:
            bar.add(count)
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise IngestError(
            f"the store does not hold what was written: {', '.join(wrong[:_NAMED])}{more}; {advice}"
        )
    return compared
