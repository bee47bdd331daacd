"""Tar files, row groups and data files of Hugging Face as shards, with real files."""

from __future__ import annotations

import bz2
import gzip
import itertools
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from minato import DataLoader, MinatoWarning
from minato.sources.base import Retry, SourceError
from minato.sources.tars import TarShards
from tests.behaviour.states import saved
from tests.selection import mostly_slow
from tests.sources.kinds import tar_of
from tests.streams.streams import in_runs, interrupted, resumed

COUNT, SHARDS = 10, 4


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> str:
    path.write_bytes(tar_of(members))
    return str(path)


def members(number: int, count: int = COUNT) -> list[tuple[str, bytes]]:
    """Two members for each sample; the data of the second says its number."""
    found = [("folder/__meta__.json", b"{}")]
    for i in numbers_of(number)[:count]:
        found += [(f"folder/{i}.JPG", bytes(700 + i)), (f"folder/{i}.label.txt", b"%d" % i)]
    return found


def tars(folder: Path, first: int = 0) -> Callable[..., Any]:
    files = [write_tar(folder / f"{i}.tar", members(i)) for i in range(first, SHARDS)]
    return lambda **options: TarShards(files, **options)


def numbers_of(i: int) -> range:
    """Of the samples of a shard."""
    return range(100 * i, 100 * i + COUNT)


def groups(folder: Path, first: int = 0) -> Callable[..., Any]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: install 'test'")
    import pyarrow.parquet as pq

    from minato.sources.parquet import ParquetShards

    files = [str(folder / f"{i}.parquet") for i in range(first, SHARDS)]
    for i, file in enumerate(files, first):
        pq.write_table(pa.table({"label.txt": numbers_of(i)}), file, row_group_size=4)
    return lambda **options: ParquetShards(files, **options)


def write_lines(folder: Path, i: int, numbers: range, broken: bool = False) -> str:
    lines = [f'{{"label.txt": {n}}}\n' for n in numbers]
    if broken:
        lines[30] = '{"label.txt"\n'
    (folder / f"{i}.jsonl").write_text("".join(lines), encoding="utf-8")
    return str(folder / f"{i}.jsonl")


def texts(folder: Path, first: int = 0) -> Callable[..., Any]:
    pytest.importorskip("datasets", reason="datasets is not installed: install 'test'")
    from minato.sources.hugging_face import HuggingFaceShards

    files = [write_lines(folder, i, numbers_of(i)) for i in range(first, SHARDS)]
    return lambda **options: HuggingFaceShards("json", files, **options)


KINDS = pytest.mark.parametrize("kind", [tars, groups, texts])
EVERY = [n for i in range(SHARDS) for n in numbers_of(i)]


def labels(batches: Any) -> list[int]:
    return [int(label) for batch in batches for label in batch["label.txt"]]


@KINDS
def test_resumed_with_other_workers_and_once_more(kind: Callable[..., Any], tmp_path: Path) -> None:
    make = kind(tmp_path)
    whole, *three = (
        DataLoader(make(seed=4), 3, readers=2, num_workers=each) for each in (0, 1, 0, 2)
    )
    expected = labels(whole)
    assert sorted(expected) == EVERY
    assert in_runs(three, (5, 3, None), labels) == expected


@KINDS
def test_a_loaded_state_is_the_state_until_an_item_is_asked_for(
    kind: Callable[..., Any], tmp_path: Path
) -> None:
    items, other = (iter(kind(tmp_path)()) for _ in range(2))
    assert len(list(itertools.islice(items, 13))) == 13
    other.load_state_dict(items.state_dict())
    assert other.state_dict() == items.state_dict()


@KINDS
def test_new_shards_join_and_gone_ones_are_told(kind: Callable[..., Any], tmp_path: Path) -> None:
    whole, few = kind(tmp_path), kind(tmp_path, 1)
    first, grown, unchanged = (
        DataLoader(dataset, 4, readers=2)
        for dataset in (few(new_shards="append"), whole(new_shards="append"), whole())
    )
    assert sorted(interrupted(first, 3, grown, labels)) == EVERY
    with pytest.raises(ValueError, match="the shards have changed since the state was taken"):
        list(resumed(saved(first), unchanged))
    first, kept = DataLoader(whole(), 4), DataLoader(few(new_shards="append"), 4)
    with pytest.warns(MinatoWarning, match=r"gone \(.*0\..*\) since the state was taken"):
        got = interrupted(first, 4, kept, labels)  # in order: of shard 3 nothing at first
    assert sorted(got) == EVERY


def broken_tars(folder: Path) -> Callable[[], Any]:
    """The fourth sample of the first file raises, and so does the place behind the sixth of the second."""
    twice = [*members(0), ("folder/3.JPG", b"")]
    twice.sort(key=lambda each: each[0])
    files = [write_tar(folder / "0.tar", twice)]
    files += [write_tar(folder / f"{i}.tar", members(i)) for i in (1, 2)]
    data = Path(files[1]).read_bytes()
    Path(files[1]).write_bytes(data[: data.index(b"folder/106.JPG") + 700])
    return lambda: TarShards(files)


def broken_texts(folder: Path) -> Callable[[], Any]:
    """``datasets`` cannot read the whole first file.

    Not of Parquet: how far ``pyarrow``, which reads ahead in threads, gives out rows before the error, varies.
    """
    pytest.importorskip("datasets", reason="datasets is not installed: install 'test'")
    from minato.sources.hugging_face import HuggingFaceShards

    files = [write_lines(folder, i, range(100 * i, 100 * i + 50), i == 0) for i in range(2)]
    return lambda: HuggingFaceShards("json", files, chunksize=100)


@pytest.mark.filterwarnings("ignore:.*of this epoch w.* skipped")
@pytest.mark.parametrize("kind", [broken_tars, broken_texts])
def test_what_raised_before_the_saved_place_ends_no_reader(
    kind: Callable[..., Any], tmp_path: Path
) -> None:
    make = kind(tmp_path)

    def loader() -> Any:
        return DataLoader(make(), 3, readers=1, errors="skip")

    expected = labels(loader())
    assert 20 < len(expected) < 90
    for stop in range(1, 6):
        loaders = (loader() for _ in range(3))
        assert in_runs(loaders, (stop, 2, None), labels) == expected
    with pytest.raises(SourceError) as raised:
        list(make())
    assert ".tar" in str(raised.value) or "0.jsonl', and leaves out the rest: " in str(raised.value)


def test_a_sample_of_a_tar_file(tmp_path: Path) -> None:
    names = ["x/.hidden", "x/no-suffix", "x.y/1.jpg", "x.y/1.seg.PNG", "1.jpg"]
    file = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    expected = [
        {"__key__": "x.y/1", "jpg": b"x.y/1.jpg", "seg.png": b"x.y/1.seg.PNG"},
        {"__key__": "1", "jpg": b"1.jpg"},
    ]
    assert list(TarShards([Path(file)])) == expected
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(Path(file).read_bytes()))
    pytest.importorskip("fsspec", reason="fsspec is not installed: install the extra 'test'")
    for url in (str(packed), f"file://{file}", f"file://{packed}"):
        shards = TarShards([url])
        assert list(shards) == expected
        rest = iter(shards)
        rest.skip(1)
        assert list(rest) == expected[1:]
    with pytest.raises(TypeError, match=r"files='.*a\.tar' is one: give a list"):
        TarShards(file)


def test_skipping_reads_only_headers(tmp_path: Path) -> None:
    rest = iter(TarShards([write_tar(tmp_path / "0.tar", members(0))]))
    extract = tarfile.TarFile.extractfile
    with mock.patch.object(
        tarfile.TarFile, "extractfile", autospec=True, side_effect=extract
    ) as read:
        rest.skip(COUNT - 1)
        assert [sample["__key__"] for sample in rest] == [f"folder/{COUNT - 1}"]
    names = [call.args[1].name for call in read.call_args_list]
    assert names == [f"folder/{COUNT - 1}.JPG", f"folder/{COUNT - 1}.label.txt"]


AT = b"folder/5.JPG"


def linked(data: bytes) -> bytes:
    at = data.index(AT)
    header = tarfile.TarInfo.frombuf(data[at : at + 512], "utf-8", "strict")
    header.type, header.linkname = tarfile.SYMTYPE, "4.JPG"
    return data[:at] + header.tobuf() + data[at + 512 :]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    ("damage", "text", "kept"),
    [
        (lambda data: data.replace(AT, b"X" * len(AT)), "a header is damaged", 4),
        (lambda data: data[: data.index(AT) + 700], "unexpected end of data", 5),
        (
            lambda data: data[: data.index(AT)],
            "the file ends without the block of zeros that ends an archive",
            4,
        ),
        (linked, r"the member 'folder/5\.JPG' is a link or a device: write it as a plain file", 4),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(
    damage: Any, text: str, kept: int, packs: bool, tmp_path: Path
) -> None:
    """And the other files go on, if the error is skipped."""
    good = write_tar(tmp_path / "1.tar", members(1))
    data = damage(tar_of(members(0)))
    bad = tmp_path / ("0.tar.gz" if packs else "0.tar")
    bad.write_bytes(gzip.compress(data) if packs else data)
    shards = TarShards([str(bad), good])
    text = rf"cannot read '.*{bad.name}' behind {kept} samples.*{text}"
    with pytest.raises(SourceError, match=text):
        list(shards)
    loader = DataLoader(shards, 3, errors="skip")
    with pytest.warns(MinatoWarning, match="1 sample of this epoch was skipped"):
        assert labels(loader) == [*range(kept), *numbers_of(1)]


@pytest.mark.parametrize("data", [gzip.compress(bytes(10_000), mtime=0), b"<html>" * 200])
def test_a_file_that_is_no_tar_file_is_called_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(data)
    with pytest.raises(SourceError, match=r"this is no plain tar file \(names of packed"):
        next(iter(TarShards([tmp_path / "0.tar"])))


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)]
)
def test_an_archive_behind_another_is_an_error(suffix: str, pack: Any, tmp_path: Path) -> None:
    path = tmp_path / f"0.tar{suffix}"
    path.write_bytes(pack(tar_of(members(0)) + tar_of(members(1))))
    with pytest.raises(SourceError, match=rf"behind {COUNT - 1} samples.*another archive follows"):
        list(TarShards([path]))


def test_an_archive_ends_with_a_block_of_zeros(tmp_path: Path) -> None:
    """What follows is not read. Without such a block nobody knows whether the file is whole."""
    path = tmp_path / "0.tar"
    data = tar_of(members(0)).rstrip(b"\0")
    data += bytes(-len(data) % tarfile.BLOCKSIZE)
    for blocks, text in ((1, b""), (2, b""), (100, b""), (1, b"text")):
        path.write_bytes(data + bytes(blocks * tarfile.BLOCKSIZE) + text)
        assert [int(sample["label.txt"]) for sample in TarShards([path])] == [*range(COUNT)]
    path.write_bytes(data)
    samples = iter(TarShards([path]))
    assert [int(next(samples)["label.txt"]) for _ in range(COUNT - 1)] == [*range(COUNT - 1)]
    with pytest.raises(SourceError, match="and may be cut: fetch or write it again"):
        next(samples)


@pytest.mark.parametrize("blocks", [0, 1, 30, 500])
@pytest.mark.parametrize("count", [1, COUNT])
def test_a_wrong_checksum_of_a_gzip_file_is_an_error(
    count: int, blocks: int, tmp_path: Path
) -> None:
    """Wherever the archive ends in it."""
    data = tar_of(members(0, count))
    packed = bytearray(gzip.compress(data + bytes(blocks * tarfile.BLOCKSIZE)))
    path = tmp_path / "0.tar.gz"
    path.write_bytes(packed)
    assert len(list(TarShards([path]))) == count
    packed[-8] ^= 1
    path.write_bytes(packed)
    with pytest.raises(SourceError, match=rf"behind {count - 1} samples.*CRC check failed"):
        list(TarShards([path]))
    path.write_bytes(packed[:15])
    with pytest.raises(SourceError, match=r"cannot read '.*0\.tar\.gz': "):
        list(TarShards([path]))


def test_files_that_cannot_be_opened_and_keys_that_come_twice(tmp_path: Path) -> None:
    for name, data in (("empty.tar", b""), ("text.tar", b"no tar" * 1000)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError, match=f"cannot read '.*{name}': ReadError"):
            list(TarShards([tmp_path / name]))
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        list(TarShards([tmp_path / "none.tar"]))
    twice = write_tar(tmp_path / "2.tar", [("a.x", b"1"), ("a.x", b"2"), ("b.x", b"3")])
    samples = iter(TarShards([twice]))
    with pytest.raises(SourceError, match="the sample 'a' has two members with the suffix 'x'"):
        next(samples)
    assert next(samples) == {"__key__": "b", "x": b"3"}


SIGNED = "https://user:hunter2@example.org/a?token=hunter2"


class Unsteady(BaseHTTPRequestHandler):
    """Serves ranges of files; of each third request it cuts the answer, refuses it, or says that it is busy."""

    files: ClassVar[dict[str, bytes]]
    requests: ClassVar[Iterator[int]]

    def do_GET(self) -> None:
        if self.path not in self.files:
            self.send_error(403)
            return
        data, number = self.files[self.path], next(self.requests)
        start, end = 0, len(data)
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, end)
        if number % 9 == 2:
            self.send_error(503)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "GET":
            cut = {5: (end - start) // 2, 8: 100}.get(number % 9, end - start)
            self.wfile.write(data[start : start + cut])

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def unsteady() -> Iterator[Callable[[Mapping[str, bytes]], str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Unsteady) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def serve(files: Mapping[str, bytes]) -> str:
            Unsteady.files, Unsteady.requests = dict(files), itertools.count()
            return f"http://127.0.0.1:{server.server_port}"

        yield serve
        server.shutdown()


# A block is so small that a file takes several requests; 0: one.
@mostly_slow(
    ("suffix", "block_size"), [(".tar", 2000), (".tar.gz", 0)], [(".tar", 0), (".tar.gz", 2000)]
)
def test_lost_connections_lose_no_sample(suffix: str, block_size: int, unsteady: Any) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: install 'test'")
    files = {f"/{i}{suffix}": tar_of(members(i)) for i in range(4)}
    if suffix == ".tar.gz":
        files = {name: gzip.compress(data) for name, data in files.items()}
    home = unsteady(files)
    options: Any = {"retry": Retry(first_s=0.001), "block_size": block_size}
    dataset = TarShards([home + name for name in files], **options)
    loader = DataLoader(dataset, 3, readers=2, num_workers=2)
    assert sorted(labels(loader)) == EVERY
    assert loader.report().run.reads.retries > 0
    # With ranges or without: if each answer is cut before an item ends, a read has its number of attempts, no more.
    Unsteady.requests = itertools.repeat(8)
    dataset = TarShards([home + next(iter(files))], **options | {"retry": Retry(3, first_s=0)})
    with pytest.raises(SourceError, match="ClientPayloadError"):
        labels(loader := DataLoader(dataset, 3, readers=1, num_workers=1))
    assert loader.report().run.reads.retries == 2


def test_what_a_web_server_refuses_is_told_as_it_said_it(unsteady: Any) -> None:
    """And not as a file that is missing, which fsspec makes of it."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: install 'test'")
    with pytest.raises(SourceError, match="403, message='Forbidden'"):
        list(DataLoader(TarShards([unsteady({}) + "/0.tar"]), num_workers=1))


def signed(kind: str) -> Any:
    if kind == "tar":
        return TarShards([SIGNED])
    pytest.importorskip("datasets", reason="datasets is not installed: install 'test'")
    from minato.sources.hugging_face import HuggingFaceShards

    return HuggingFaceShards(kind, [SIGNED])


@pytest.mark.parametrize("kind", ["tar", "json"])
def test_a_state_has_no_secrets(kind: str) -> None:
    shards = signed(kind)
    assert shards.shards() == ["https://example.org/a"]
    assert "hunter2" not in repr(vars(shards))


@pytest.mark.parametrize(("kind", "opens"), [("tar", False), ("json", True), ("json", False)])
def test_an_error_of_a_library_shows_no_secret_of_the_url(
    kind: str, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

    def fails(url: str, **_: object) -> Any:
        raise OSError(f"status 403, url='{url}'")

    def streams(*_: object, data_files: list[str], **options: object) -> Any:
        if not opens:
            fails(*data_files)
        return mock.Mock(iter=lambda **_: map(fails, data_files))

    shards = signed(kind)
    monkeypatch.setattr(fsspec.core, "url_to_fs", fails)
    if kind == "json":
        monkeypatch.setattr("datasets.load_dataset", streams)
    words = r"'https://example\.org/a'.*status 403, url='https://example\.org/a'"
    with pytest.raises(SourceError, match=words) as told:
        next(iter(shards))
    assert "hunter2" not in str(told.value)
