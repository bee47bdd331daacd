"""Writes samples into a store: chunk by chunk, in parallel, and recorded in a journal; an interrupted call resumes."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset

from minato._support.files import cut_torn_line, gets_lock, open_regular, write_all
from minato._support.text import message_of, printable
from minato.errors import MinatoError
from minato.loader import DataLoader
from minato.sources.base import SourceError
from minato.sources.stores import Store

__all__ = ["IngestError", "Ingested", "JournalError", "ingest"]

_NAMED = 5
"""Most keys in one error message."""
_LONGEST_HEAD_BYTES = 1 << 16
_log = logging.getLogger("minato.ingest")


class IngestError(MinatoError):
    """The store does not hold the samples that were written; the message names their keys."""


class JournalError(MinatoError, ValueError):
    """A journal belongs to another ingest, is damaged, or another process writes it."""


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
    worker_method: Literal["process", "thread"] = "process",
) -> Ingested:
    """Write samples into a store, several chunks at a time.

    A journal records the chunks that are in the store. If the call is interrupted, the same call resumes after them.
    Chunks that were not complete are written again, to the same keys. This requires that ``data`` yields the same
    samples in the same order each time. The logger ``minato.ingest`` tells the progress.

    Args:
        data: A directory, whose files are the samples and whose relative paths are their keys; a map-style dataset,
            which the workers read, with its ``keys`` or else its indices as keys; or any other iterable. An iterable is
            iterated in this process, again from its beginning when the call resumes.
        store: A store, for instance from :func:`~minato.sources.stores.open_store`. A sample that it would change, and
            a key that repeats, are refused.
        workers: Number of chunks that are read and written in parallel.
        chunk_samples: Number of samples that are written together: a transaction, a Parquet or a tar file.
        encode: Returns, for a sample, bytes or a dict of the store's columns. None: the samples are such.
        verify: At the end, read all samples again and compare checksums, also those that earlier calls have written.
        journal: Path of the journal; None: ``minato-ingest-….jsonl`` in the current directory, named after ``data`` and
            ``store``. It is not deleted at the end.
        worker_method: ``"process"`` or ``"thread"``. An iterable is always written by threads.

    Raises:
        ValueError: Two samples have one key, or the store cannot have a key.
        IngestError: The store does not hold the samples that were written.
        JournalError: The journal belongs to other data or another store, or another process writes it.
        SourceError: The store cannot be written, or would change a sample; the message names the keys. Exceptions of
            ``data`` are not changed.
    """
    if workers < 1 or chunk_samples < 1:
        raise ValueError(f"workers={workers}, chunk_samples={chunk_samples}: give at least 1")
    started = time.monotonic()
    name = f"{type(data).__module__}.{type(data).__qualname__}"
    if isinstance(data, (str, Path)):
        name = str(Path(data).absolute())
        data = _Directory(name, "label" in store.columns)
    chunks = _Chunks(data, store, chunk_samples, encode)
    run: _Run = partial(_in_threads, workers=workers)
    if chunks.count is not None:
        run = partial(_in_workers, workers=workers, worker_method=worker_method)
    about = {"what": name, **chunks.about()}
    with Journal(_journal_path(about) if journal is None else Path(journal), about) as notes:
        before = notes.num_samples
        try:
            verified = _write(data, chunks, notes, run, verify)
        finally:
            store.close()
        stored_bytes = sum(done.stored_bytes for done in notes.done.values())
    written = notes.num_samples - before
    return Ingested(notes.num_samples, stored_bytes, written, verified, time.monotonic() - started)


def _write(data: Any, chunks: _Chunks, notes: Journal, run: _Run, verify: bool) -> int:
    """Write the chunks that the journal lacks; returns the number of samples that were compared."""
    # If the store was emptied in the meantime, the samples of earlier calls would be missing without an error.
    earlier = list(notes.done.values())[:1]
    _compare(run, chunks, earlier, f"delete {notes.path} to start again")
    if chunks.count != 0:
        chunks.store.create(chunks.key(0))
    for done in run(chunks.writes(data, notes.done)):
        notes.add(done)
        _log.info("writing: %d/%s samples", notes.num_samples, chunks.count or "?")
    if left := chunks.store.others(len(notes.done)):
        raise IngestError(
            f"{chunks.store!r} holds {', '.join(left[:_NAMED])} of an earlier ingest of more samples, which would be "
            "read with these: delete them"
        )
    if not verify:
        return 0
    again = f"delete {notes.path} to write everything again"
    return _compare(run, chunks, list(notes.done.values()), again)


def _compare(run: _Run, chunks: _Chunks, completed: Sequence[Completed], advice: str) -> int:
    """Compare chunks with the store; returns the number of samples."""
    compared, samples = 0, sum(len(done.digests) for done in completed)
    wrong: list[str] = []
    for count, found in run(partial(chunks.differences, done) for done in completed):
        compared += count
        wrong += found
        _log.info("verifying: %d/%d samples", compared, samples)
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

    def __init__(self, path: str, with_labels: bool) -> None:
        self._path = Path(path)
        self._with_labels = with_labels
        self._home = self._path.resolve()
        self.keys = sorted(self._keys(self._path, {self._home}))

    def _keys(self, directory: Path, above: set[Path]) -> Iterator[str]:
        """The keys of the files below a directory; ``above`` are those that it lies in, without links."""
        for path in directory.iterdir():
            real = path.resolve()
            if path.name.startswith("."):
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
        label = file.parent.relative_to(self._path).as_posix()
        return {"data": data, "label": label} if self._with_labels else data


class Completed(NamedTuple):
    """A chunk that is in the store.

    Attributes:
        chunk: Its number.
        stored_bytes: Bytes of its samples.
        digests: The checksum of each sample, in their order.
    """

    chunk: int
    stored_bytes: int
    digests: list[int]


class _Chunks:
    """Writes and compares chunks, in any process or thread.

    Args:
        data: A map-style dataset, with ``keys`` as sources have them or without, or an iterable.

    Attributes:
        count: Number of samples; None of an iterable.
    """

    def __init__(
        self, data: Any, store: Store, chunk_samples: int, encode: Callable[[Any], Any] | None
    ) -> None:
        indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        keys: Any = getattr(data, "keys", None) if indexed else None
        self.store = store
        self.count = len(data) if indexed else None
        self._dataset = data
        self._keys: Sequence[Any] | None = None if callable(keys) else keys
        self._size = chunk_samples
        self._users_encode = encode

    def about(self) -> dict[str, Any]:
        """What must be the same when a call resumes, for JSON; raises like ``check_keys``."""
        return {
            "store": repr(self.store),
            "columns": {name: kind.__name__ for name, kind in self.store.columns.items()},
            "chunk_samples": self._size,
            "samples": self.count,
            "keys": self.check_keys(),
        }

    def check_keys(self) -> str | None:
        """A digest of the dataset's keys in the store; None if they are numbers.

        Raises:
            ValueError: A key repeats, or the store cannot have it.
        """
        if self._keys is None or isinstance(self._keys, range):
            return None
        if len(self._keys) != self.count:
            raise ValueError(
                f"the dataset has {self.count} samples and {len(self._keys)} keys: give each sample one"
            )
        seen: dict[Any, int] = {}
        digest_of_all = hashlib.sha256()
        for number, given in enumerate(self._keys):
            key = self.store.key(given)
            first = seen.setdefault(key, number)
            if first != number:
                raise ValueError(
                    f"the keys {self._keys[first]!r} (sample {first}) and {given!r} (sample {number}) are one key, "
                    f"{key!r}, in the store, which would hold only the last of their samples: give each its own"
                )
            digest_of_all.update(f"{key!r}\n".encode())
        return digest_of_all.hexdigest()[:16]

    def key(self, index: int) -> Any:
        """The key of a sample in the store."""
        return self.store.key(index if self._keys is None else self._keys[index])

    def writes(self, data: Any, done: Mapping[int, Completed]) -> Iterator[_Task]:
        """The tasks that write the chunks that are not ``done``."""
        chunks: Iterable[tuple[int, list[Any] | None]]
        if self.count is not None:
            chunks = ((chunk, None) for chunk in range(-(-self.count // self._size)))
        else:
            samples = iter(data)
            chunks = enumerate(iter(lambda: list(itertools.islice(samples, self._size)), []))
        return (partial(self.write, chunk, some) for chunk, some in chunks if chunk not in done)

    def write(self, chunk: int, samples: list[Any] | None) -> Completed:
        """Write a chunk of these samples, or of those in the dataset."""
        first = chunk * self._size
        if samples is None:
            indices = range(first, min(first + self._size, self.count or 0))
            samples = [self._dataset[index] for index in indices]
        rows = [
            (self.key(i), self._row(self.key(i), each)) for i, each in enumerate(samples, first)
        ]
        self.store.write(chunk, rows)
        stored_bytes = sum(map(_nbytes, (row for _, row in rows)))
        return Completed(chunk, stored_bytes, [_digest(row) for _, row in rows])

    def _row(self, key: Any, sample: object) -> dict[str, Any]:
        try:
            encoded = sample if self._users_encode is None else self._users_encode(sample)
            return self.store.row(key, encoded)
        except SourceError:
            raise
        except Exception as error:
            raise MinatoError(
                f"the sample with key {key!r} cannot be encoded: {type(error).__name__}: "
                f"{printable(message_of(error), lines=True)}"
            ) from error

    def differences(self, done: Completed) -> tuple[int, list[str]]:
        """The number of samples in a chunk, and the keys of those that differ from what was written."""
        keys = [self.key(done.chunk * self._size + i) for i in range(len(done.digests))]
        try:
            found = self.store.read(done.chunk, keys)
        except Exception as error:
            said = f"{type(error).__name__}: {printable(message_of(error))}"
            return len(keys), [f"{keys[0]!r} … ({said})"]
        return len(keys), [
            repr(key)
            for key, row, written in zip(keys, found, done.digests, strict=True)
            if _digest(row) != written
        ]


def _digest(row: Mapping[str, Any]) -> int:
    """The CRC-32 of a row."""
    crc = 0
    for name in sorted(row):
        cell = row[name]
        data = cell if isinstance(cell, bytes) else repr(cell).encode()
        crc = zlib.crc32(data, zlib.crc32(f"{name}:{len(data)}:".encode(), crc))
    return crc


def _nbytes(row: Mapping[str, Any]) -> int:
    return sum(len(cell) if isinstance(cell, (bytes, str)) else 8 for cell in row.values())


# ---- the journal ----------------------------------------------------------------------------


class Journal:
    """A file with a line that describes the ingest, and a line for each chunk, appended when the store has it.

    Args:
        path: The file; created with mode 0600 if it does not exist.
        about: Describes data, store and chunks, for JSON; a journal with another description is refused.
        patience_s: How long to wait for other processes that write it. The workers of a killed process end by
            themselves, but not in the middle of a chunk.

    Raises:
        JournalError: The file is no journal of this ingest and stays unchanged, or is damaged; or other processes write
            it for too long.
        OSError: It cannot be written, or is a link or no regular file.
    """

    def __init__(self, path: Path, about: dict[str, Any], patience_s: float = 20.0) -> None:
        self.done: dict[int, Completed] = {}
        self.path = path
        self._about = about
        self._head = json.dumps(about).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            if not gets_lock(self._descriptor, patience_s):
                raise JournalError(f"another ingest is writing {path}: wait for its end")
            self._check_head()
            cut_torn_line(self._descriptor)
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def num_samples(self) -> int:
        """Number of samples in the chunks that are done."""
        return sum(len(done.digests) for done in self.done.values())

    def _check_head(self) -> None:
        head = os.pread(self._descriptor, max(len(self._head), _LONGEST_HEAD_BYTES), 0)
        if self._head.startswith(head[: len(self._head)]):
            return
        found = _parsed(head.partition(b"\n")[0])
        if isinstance(found, dict) and found.keys() == self._about.keys():
            raise JournalError(
                f"{self.path} is about something else, {found}, and this is {self._about}: delete it to start again, "
                "or name another journal"
            )
        raise JournalError(
            f"{self.path} holds something else than a journal of an ingest, and is left as it is: name another file"
        )

    def _read(self) -> None:
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(itertools.islice(file, 1, None), 2):
                done = _done(_parsed(line))
                if done is None:
                    raise JournalError(
                        f"{self.path}, line {number}: it is no chunk that was written; delete the file to start again"
                    )
                self._check(done)
                self.done[done.chunk] = done
        if not os.fstat(self._descriptor).st_size:
            write_all(self._descriptor, self._head, self.path)

    def _check(self, done: Completed) -> None:
        size, count = self._about["chunk_samples"], self._about["samples"]
        if len(done.digests) > size or (count is not None and done.chunk * size >= count):
            raise JournalError(
                f"{self.path} names chunk {done.chunk} of {len(done.digests)} samples, which there cannot be: delete "
                "it to start again"
            )

    def add(self, done: Completed) -> None:
        """Record a chunk."""
        self.done[done.chunk] = done
        write_all(self._descriptor, json.dumps(done).encode() + b"\n", self.path)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _journal_path(about: dict[str, Any]) -> Path:
    text = json.dumps([about["what"], about["store"]])
    return Path(f"minato-ingest-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _done(line: object) -> Completed | None:
    """The chunk that a line describes; None if it describes none."""
    if type(line) is not list or len(line) != len(Completed._fields) or type(line[2]) is not list:
        return None
    numbers = [*line[:2], *line[2]]
    return Completed(*line) if all(type(each) is int and each >= 0 for each in numbers) else None


# ---- parallel tasks -------------------------------------------------------------------------

_Task = Callable[[], Any]
_Run = Callable[[Iterable[_Task]], Iterator[Any]]


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
