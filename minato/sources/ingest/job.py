"""Writes samples into a store: chunk by chunk, in parallel; an interrupted call resumes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from minato._support.text import message_of, printable
from minato.errors import MinatoError
from minato.loader import DataLoader
from minato.sources.ingest.encoding import as_bytes, as_row, digest
from minato.sources.ingest.journal import Completed, Journal, JournalError
from minato.sources.ingest.store import Store

__all__ = ["IngestError", "Ingested", "ingest"]

_NAMED = 5
"""Most keys in one error message."""
_Task = Callable[[], Any]


class IngestError(MinatoError):
    """The store does not hold the samples that were written; the message names their keys."""


@dataclass(frozen=True)
class Ingested:
    """The result of :func:`ingest`.

    Attributes:
        samples: Number of samples that the store holds now, of this data.
        stored_bytes: Bytes of their values, without keys and the store's own overhead.
        written: Number of samples that this call has written; earlier calls have written the others.
        verified: Number of samples that were read again and compared.
        taken_s: Duration of the call, in seconds.
    """

    samples: int
    stored_bytes: int
    written: int
    verified: int
    taken_s: float


def ingest(
    data: Any,
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

    A journal records the chunks that are in the store. If the call is interrupted, the same call resumes after them.
    Chunks that were not complete are written again, to the same keys. This requires that ``data`` yields the same
    samples in the same order each time.

    Args:
        data: A directory, whose files are the samples and whose relative paths are their keys; a map-style dataset,
            which the workers read, with its ``keys`` or else its indices as keys; or any other iterable. An iterable is
            iterated in this process, again from its beginning when the call resumes. A sample that the store would
            change, and a key that repeats, are refused.
        store: A store, for instance from :func:`open_store`.
        workers: Number of chunks that are read and written in parallel.
        chunk_samples: Number of samples that are written together: a transaction, a Parquet or a tar file.
        encode: Returns the bytes of a sample, or for a table a dict of columns. None: bytes are stored unchanged;
            other samples as :func:`decoded` reads them.
        verify: At the end, read all samples again and compare checksums, also those that earlier calls have written.
        journal: Path of the journal; None: ``minato-ingest-….jsonl`` in the current directory, named after ``data`` and
            ``store``. It is not deleted at the end.
        progress: Show a progress bar, if rich is installed.
        worker_method: ``"process"`` or ``"thread"``. An iterable is always written by threads.
        name: Name of ``data`` in the journal; None: the path of a directory, the type of an object.

    Raises:
        ValueError: Two samples have one key, or the store cannot have a key.
        IngestError: The store does not hold the samples that were written.
        JournalError: The journal belongs to other data or another store, or another process writes it.
        SourceError: The store cannot be written; the message names the keys. Exceptions of ``data`` are not changed.
    """
    if workers < 1 or chunk_samples < 1:
        raise ValueError(f"workers={workers}, chunk_samples={chunk_samples}: give at least 1")
    started = time.monotonic()
    if isinstance(data, (str, Path)):
        name, data = name or str(Path(data).absolute()), _Directory(data, store.takes_rows)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    count = len(data) if indexed else None
    chunks = _Chunks(store, data if indexed else None, chunk_samples, encode)
    about = {
        "what": name or f"{type(data).__module__}.{type(data).__qualname__}",
        "store": repr(store),
        "chunk_samples": chunk_samples,
        "samples": count,
        "keys": chunks.check_keys(),
    }
    run: Callable[[Iterable[_Task]], Iterator[Any]]
    if indexed:
        run = partial(_in_workers, workers=workers, worker_method=worker_method)
    else:
        run = partial(_in_threads, workers=workers)
    path = _journal_path(about) if journal is None else Path(journal)
    with Journal(path, about) as notes, _Progress(progress, count) as bar:
        try:
            _check_chunks(notes.done.values(), chunk_samples, count, path)
            before = _num_samples(notes.done.values())
            bar.add(before)
            # If the store was emptied in the meantime, the samples of earlier calls would be missing without an error.
            _compare(run, chunks, list(notes.done.values())[:1], f"delete {path} to start again")
            tasks = chunks.writes(data, notes.done)
            # The first chunk alone, as it may create a table.
            for done in itertools.chain(run(itertools.islice(tasks, 1)), run(tasks)):
                notes.add(done)
                bar.add(len(done.digests))
            if left := store.others(len(notes.done)):
                raise IngestError(
                    f"{store!r} holds {', '.join(left[:_NAMED])} of an earlier ingest of more samples, which would be "
                    "read with these: delete them"
                )
            verified = 0
            if verify:
                bar.phase("verifying", _num_samples(notes.done.values()))
                again = f"delete {path} to write everything again"
                verified = _compare(run, chunks, notes.done.values(), again, bar)
        finally:
            store.close()
        samples = _num_samples(notes.done.values())
        stored = sum(done.stored_bytes for done in notes.done.values())
    return Ingested(samples, stored, samples - before, verified, time.monotonic() - started)


def _journal_path(about: dict[str, Any]) -> Path:
    text = json.dumps([about["what"], about["store"]])
    return Path(f"minato-ingest-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl")


def _check_chunks(chunks: Iterable[Completed], size: int, count: int | None, path: Path) -> None:
    for done in chunks:
        if len(done.digests) > size or (count is not None and done.chunk * size >= count):
            raise JournalError(
                f"{path} names chunk {done.chunk} of {len(done.digests)} samples, which there cannot be: delete it to "
                "start again"
            )


def _num_samples(chunks: Iterable[Completed]) -> int:
    return sum(len(done.digests) for done in chunks)


def _compare(
    run: Callable[[Iterable[_Task]], Iterator[tuple[int, list[str]]]],
    chunks: _Chunks,
    completed: Iterable[Completed],
    advice: str,
    bar: _Progress | None = None,
) -> int:
    """Compare chunks with the store; returns the number of samples."""
    compared, wrong = 0, []
    for count, found in run([partial(chunks.differences, done) for done in completed]):
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


# ---- samples and chunks ---------------------------------------------------------------------


class _Directory:
    """The files below a directory as a dataset, with their relative paths as keys; hidden files are skipped.

    Args:
        with_labels: Whether a sample is a dict of ``data``, the file's bytes, and ``label``, the relative path of its
            directory; otherwise the bytes.

    Raises:
        ValueError: There is a link out of the directory or in a circle, or something that is no file.
        OSError: A directory cannot be read.
    """

    def __init__(self, path: str | Path, with_labels: bool) -> None:
        self._path = Path(path).absolute()
        self._with_labels = with_labels
        self._home = self._path.resolve()
        self.keys = sorted(self._keys(self._path, {self._home}))

    def _keys(self, directory: Path, above: set[Path]) -> Iterator[str]:
        """The keys of the files below a directory; ``above`` are those that it lies in, without links."""
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            path = directory / name
            real = path.resolve()
            if name.startswith("."):
                continue
            if path.is_symlink() and not real.is_relative_to(self._home):
                raise ValueError(
                    f"{str(path)!r} is a link out of the directory, to {str(real)!r}: copy the files into the "
                    "directory, or name the directory that holds them"
                )
            if path.is_dir():
                if real in above:
                    raise ValueError(
                        f"{str(path)!r} is a link to a directory that it lies in: remove it"
                    )
                yield from self._keys(path, above | {real})
            elif path.is_file():
                yield path.relative_to(self._path).as_posix()
            else:
                raise ValueError(
                    f"{str(path)!r} is no file: it is a link to nothing, a pipe, a socket or a device: remove it"
                )

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Any:
        file = self._path / self.keys[index]
        data = file.read_bytes()
        if not self._with_labels:
            return data
        return {"data": data, "label": file.parent.relative_to(self._path).as_posix()}


class _Chunks:
    """Writes and compares chunks, in any process or thread.

    Args:
        dataset: A map-style dataset, with ``keys`` as sources have them or without; None for samples of an iterable.
    """

    def __init__(
        self,
        store: Store,
        dataset: Any,
        chunk_samples: int,
        encode: Callable[[Any], Any] | None,
    ) -> None:
        self._store = store
        self._dataset = dataset
        self._chunk_samples = chunk_samples
        self._users_encode = encode
        self._encode = as_row if store.takes_rows else as_bytes
        keys: Any = getattr(dataset, "keys", None)
        self._keys: Sequence[Any] | None = None if callable(keys) else keys

    def check_keys(self) -> str | None:
        """A digest of the dataset's keys in the store; None if they are numbers.

        Raises:
            ValueError: A key repeats, or the store cannot have it.
        """
        if self._keys is None or isinstance(self._keys, range):
            return None
        if len(self._keys) != len(self._dataset):
            raise ValueError(
                f"the dataset has {len(self._dataset)} samples and {len(self._keys)} keys: give each sample one"
            )
        seen: dict[Any, int] = {}
        digest_of_all = hashlib.sha256()
        for number, given in enumerate(self._keys):
            key = self._store.key(given)
            first = seen.setdefault(key, number)
            if first != number:
                raise ValueError(
                    f"the keys {self._keys[first]!r} (sample {first}) and {given!r} (sample {number}) are one key, "
                    f"{key!r}, in the store, which would hold only the last of their samples: give each its own"
                )
            digest_of_all.update(f"{key!r}\n".encode())
        return digest_of_all.hexdigest()[:16]

    def writes(self, data: Any, done: dict[int, Completed]) -> Iterator[_Task]:
        """The tasks that write the chunks that are not ``done``."""
        if self._dataset is not None:
            chunks = range(-(-len(data) // self._chunk_samples))
            return (partial(self.write, chunk) for chunk in chunks if chunk not in done)
        samples = iter(data)
        given = iter(lambda: list(itertools.islice(samples, self._chunk_samples)), [])
        return (
            partial(self.write, chunk, some)
            for chunk, some in enumerate(given)
            if chunk not in done
        )

    def _key(self, chunk: int, number: int) -> Any:
        index = chunk * self._chunk_samples + number
        return self._store.key(index if self._keys is None else self._keys[index])

    def write(self, chunk: int, samples: Sequence[Any] | None = None) -> Completed:
        """Write a chunk of these samples, or of those in the dataset."""
        if samples is None:
            first = chunk * self._chunk_samples
            indices = range(first, min(first + self._chunk_samples, len(self._dataset)))
            samples = [self._dataset[index] for index in indices]
        items = [
            (self._key(chunk, number), self._encoded(chunk, number, sample))
            for number, sample in enumerate(samples)
        ]
        self._store.write(chunk, items)
        stored_bytes = sum(_nbytes(value) for _, value in items)
        return Completed(chunk, stored_bytes, [digest(value) for _, value in items])

    def _encoded(self, chunk: int, number: int, sample: object) -> Any:
        try:
            if self._users_encode is not None:
                sample = self._users_encode(sample)
            return self._encode(sample)
        except Exception as error:
            raise MinatoError(
                f"the sample with key {self._key(chunk, number)!r} cannot be encoded: "
                f"{type(error).__name__}: {printable(message_of(error), lines=True)}"
            ) from error

    def differences(self, done: Completed) -> tuple[int, list[str]]:
        """The number of samples in a chunk, and the keys of those that differ from what was written."""
        keys = [self._key(done.chunk, number) for number in range(len(done.digests))]
        try:
            found = self._store.read(done.chunk, keys)
        except Exception as error:
            said = f"{type(error).__name__}: {printable(message_of(error))}"
            return len(keys), [f"{keys[0]!r} … ({said})"]
        return len(keys), [
            repr(key)
            for key, value, written in zip(keys, found, done.digests, strict=True)
            if digest(value) != written
        ]


def _nbytes(value: Any) -> int:
    if not isinstance(value, dict):
        return len(value)
    return sum(len(cell) if isinstance(cell, (bytes, str)) else 8 for cell in value.values())


# ---- parallel tasks -------------------------------------------------------------------------


class _Tasks(Dataset[Any]):
    """Tasks as a dataset, whose samples are the results."""

    def __init__(self, tasks: Sequence[_Task]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> list[Any]:
        return [self._tasks[index]()]


def _in_workers(
    tasks: Iterable[_Task], workers: int, worker_method: Literal["process", "thread"]
) -> Iterator[Any]:
    """The results of tasks in a loader's workers, as they arrive; if a worker dies, another repeats its task."""
    tasks = list(tasks)
    if not tasks:
        return
    with warnings.catch_warnings():
        # More workers than cores are useful here: they wait for the store.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        results = iter(
            DataLoader(
                _Tasks(tasks),
                batch_size=None,
                num_workers=min(workers, len(tasks)),
                order="arrival",
                collate_fn=_unchanged,
                workers=worker_method,
            )
        )
    for (result,) in results:
        yield result


def _unchanged(result: object) -> Any:
    return result


def _in_threads(tasks: Iterable[_Task], workers: int) -> Iterator[Any]:
    """The results of tasks in threads. At most ``workers + 1`` tasks are pending, since each holds its samples."""
    with ThreadPoolExecutor(workers, "minato-ingest") as threads:
        pending: set[Future[Any]] = set()
        for task in tasks:
            if len(pending) > workers:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
            pending.add(threads.submit(task))
        yield from (future.result() for future in pending)


class _Progress:
    """A progress bar in the terminal, for the ``with`` block.

    Args:
        shown: Whether to show it; without rich it is never shown.
        samples: Number of samples; None if unknown.
    """

    def __init__(self, shown: bool, samples: int | None) -> None:
        self._bar: Any = None
        self._stack = contextlib.ExitStack()
        self._task: Any = None
        self._samples = samples
        self._shown = shown

    def __enter__(self) -> _Progress:
        if self._shown:
            self._open()
        return self

    def _open(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        # Without a thread of its own, because the workers are forked from this process.
        self._bar = Bar(
            *columns, TimeRemainingColumn(), console=Console(stderr=True), auto_refresh=False
        )
        self._stack.enter_context(self._bar)
        self.phase("writing", self._samples)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def phase(self, name: str, samples: int | None) -> None:
        """Add a bar for the next phase."""
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=samples)

    def add(self, samples: int) -> None:
        """Add a number of finished samples."""
        if self._bar is not None:
            self._bar.update(self._task, advance=samples)
            self._bar.refresh()
