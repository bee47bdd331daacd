"""Data files that Hugging Face's package ``datasets`` reads, as shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from glob import has_magic
from urllib.parse import urlsplit

from minato.checks import refuse_one
from minato.errors import missing
from minato.sources.base import Retry, Row, SourceError
from minato.sources.connections import Place, Settings, described, shown_url
from minato.streams.shards import ShardedDataset, State

try:
    import datasets
except ModuleNotFoundError:
    raise missing("minato.sources.hugging_face", "datasets", "datasets") from None

__all__ = ["HuggingFaceShards"]


class HuggingFaceShards(ShardedDataset[Row]):
    """Streaming, with each data file as a shard: ``datasets.load_dataset(path, data_files=[file], streaming=True)``.

    The state of an open file is that of ``datasets``, which is exact as nothing is shuffled within.

    Args:
        path: As of ``load_dataset``: ``"parquet"``, ``"json"``, ``"text"``, or a repository of the Hub.
        files: Paths, URLs, or paths in the repository. Each is one file: ``datasets`` takes names with one of the
            characters ``*``, ``?`` and ``[`` for patterns, so that they are refused. The name in messages and states is
            the URL without passwords and tokens.
        seed, new_shards, retry: See :class:`~minato.ShardedDataset`.
        options: Further arguments of ``load_dataset`` (``name``, ``revision``, ``columns``, ``token`` …), each of them
            a value or an :class:`~minato.sources.connections.Env`.

    Raises:
        ValueError: A file is a pattern.
        SourceError: While iterating: ``datasets`` cannot read on in a file. If this is skipped, so is the rest of it.
            How many rows of a damaged Parquet file come first may vary: ``pyarrow`` reads ahead in threads.
    """

    def __init__(
        self,
        path: str,
        files: Sequence[str | os.PathLike[str]],
        *,
        seed: int | None = None,
        new_shards: str = "refuse",
        retry: Retry | None = None,
        **options: object,
    ) -> None:
        super().__init__(seed=seed, new_shards=new_shards, retry=retry)
        refuse_one("files", files)
        urls = [os.fspath(file) for file in files]
        self._path, self._names = path, [shown_url(url) for url in urls]
        for name, url in zip(self._names, urls, strict=True):
            # It would read other files, or none, without a word.
            if has_magic(urlsplit(url).path if "://" in url else url):
                raise ValueError(
                    f"{name!r} in files is a pattern to datasets: give names of files, as sorted(glob.glob(...)) does, "
                    "without the characters * ? ["
                )
        self._places = {name: Place(url) for name, url in zip(self._names, urls, strict=True)}
        self.settings = Settings(options)

    def shards(self) -> Sequence[str]:
        return self._names

    def iter_shard(self, name: str, state: State = None) -> Iterator[Row]:
        files, settings = [self._places[name].url], self.settings.values()
        try:
            stream = datasets.load_dataset(
                self._path, data_files=files, split="train", streaming=True, **settings
            )
        except StopIteration:  # it has found no row from which the columns would follow
            return iter(())
        except Exception as error:  # its text may have the URL
            raise SourceError(f"cannot open {name!r}: {described(error)}") from error
        if state is not None:
            stream.load_state_dict(state)
        return _Rows(name, stream, state)


class _Rows(Iterator[Row]):
    """The rows of a stream, whose state is the stream's."""

    def __init__(self, name: str, stream: datasets.IterableDataset, state: State) -> None:
        self._name, self._stream = name, stream
        self._start = state  # the stream returns another one until a row was asked for
        self._has_failed = False
        # In batches of one: without batches the stream would take get_worker_info() as the reason to divide itself.
        self._batches = stream.iter(batch_size=1)

    def __next__(self) -> Row:
        self._start = None
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._has_failed = True
            raise SourceError(
                f"cannot read on in {self._name!r}, and leaves out the rest: {described(error)}"
            ) from error
        return {name: values[0] for name, values in batch.items()}

    def state_dict(self) -> State:
        """The state of the stream after the last row; None behind an error, so that the file is read again."""
        if self._has_failed:
            return None
        return self._stream.state_dict() if self._start is None else self._start
