"""Files that minato writes: nothing of somebody else's is cut, nothing is written through a link, modes, full disks."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minato import DataLoader, ErrorPolicy, Observe, Record, Replay
from minato._support.files import write_atomically
from minato.sampling.replay import OrderRecord, Origin, RecordedOrder
from minato.sources.splits import load_splits, save_splits
from tests.datasets import Numbers, indices
from tests.disks import file_size_limit, small_disk

FOREIGN = [
    b"PK\x03\x04 precious, no newline",
    b"a text\nof several lines\nand a last one without its end",
    b'{"format": 1}\n',
    b"\n",
    b"[]\n",
    bytes(100_000),
]
"""Contents that somebody would miss."""

foreign = pytest.mark.parametrize("content", FOREIGN, ids=lambda content: repr(content[:9]))


def record(path: Path) -> None:
    assert sum(len(batch) for batch in DataLoader(Numbers(4), 2, recording=Record(path))) == 4


def quarantine(path: Path) -> None:
    assert len(list(DataLoader(Numbers(4), 2, errors=ErrorPolicy(log=path)))) == 2


def trace(path: Path) -> None:
    assert len(list(DataLoader(Numbers(4), 2, observe=Observe(trace=path)))) == 2


def splits(path: Path) -> None:
    save_splits(path, {"train": [1, 2]})
    assert load_splits(path) == {"train": [1, 2]}


WRITERS = [record, quarantine, trace, splits]
writers = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)


@writers
@foreign
def test_foreign_content_is_refused_and_stays(write: Any, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.pt'? holds something else"):
        write(path)
    assert path.read_bytes() == content


@writers
def test_what_is_written_is_for_this_user_alone(write: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for _ in range(2):  # made, and used again
        write(path)
        assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"")  # as mktemp leaves one
    write(path)


@writers
def test_nothing_is_written_through_a_link(write: Any, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    path = tmp_path / "link"
    path.symlink_to(victim)
    if write is splits:
        write(path)  # which replaces the link
        assert not path.is_symlink()
    else:
        with pytest.raises(OSError, match=r"link.*symbolic link|symbolic link.*link'"):
            write(path)
    assert victim.read_bytes() == b""


@writers
def test_a_pipe_or_a_device_is_refused_at_once(write: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(
            OSError, match=f"Is not a regular file: '{path}'|'{path}' .*Is not a regular file"
        ):
            write(path)
    assert Path("/dev/full").is_char_device()


@writers
def test_a_full_disk_is_named(write: Any, tmp_path: Path) -> None:
    if write in (quarantine, trace):
        return  # these go on without, as their own tests show
    path = tmp_path / "file"
    with file_size_limit(0), pytest.raises(OSError, match="File too large: .*file'"):
        if write is record:
            # The memory of batches is a file without a name, which the limit counts too.
            OrderRecord(str(path), 0, 0, 0, Origin(True, 8))
        else:
            write(path)
    assert not path.exists() or not path.stat().st_size


# ---- a recorded order ---------------------------------------------------------------------------


def test_a_full_disk_while_an_order_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.path / "order.jsonl"
        # With this seed the first line is so long that the disk is full within a line.
        loader = DataLoader(Numbers(4000), 4, seed=3, recording=Record(path))
        disk.fill(left_bytes=4096)
        batches = iter(loader)
        seen = []
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            seen += [indices(batch) for batch in batches]
        del batches, loader
        assert "ignored" not in capsys.readouterr().err
        assert path.read_bytes()[-1:] != b"\n"
        disk.clear()
        loader = DataLoader(Numbers(8), 4, recording=Record(path))  # cuts the torn line
        assert [indices(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert RecordedOrder(str(path)).seed(0) is not None


def test_of_its_own_file_only_a_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    record(path)
    whole = path.read_bytes()
    for torn in (b"[1,2", b'{"minato_or', b"[" * 9000):
        path.write_bytes(whole + torn)
        record(path)
        assert path.read_bytes().startswith(whole + b'{"minato_order":')
    for head in range(len(b'{"minato_order":2,"epoch":')):  # killed within its very first line
        path.write_bytes(whole[:head])
        record(path)
        RecordedOrder(str(path))


LINE = st.one_of(
    st.builds(
        lambda **head: {"minato_order": 2, **head},
        epoch=st.integers(-1, 2),
        seed=st.integers(-(2**70), 2**70) | st.integers(0, 3),
        first_batch=st.integers(-2, 3),
        batched=st.booleans() | st.booleans() | st.integers(0, 1),
        length=st.sampled_from([10, 10, 9, None, -1, "10"]),
    ),
    st.lists(
        st.integers(-3, 9) | st.text(max_size=3) | st.lists(st.integers(-1, 2), max_size=3),
        max_size=4,
    ),
    st.builds(lambda end: {"end": end}, st.integers(-1, 4) | st.none() | st.floats()),
    st.recursive(st.none() | st.booleans() | st.floats(), st.lists, max_leaves=3),
    st.just({"minato_order": 3}),
)


def lines_of(parts: list[Any]) -> bytes:
    return b"".join(
        part if isinstance(part, bytes) else json.dumps(part).encode() + b"\n" for part in parts
    )


@settings(max_examples=150)
@given(parts=st.lists(LINE | st.binary(max_size=20), max_size=8))
@example(parts=[b"[" * 100_000 + b"\n"])
@example(
    parts=[
        b'{"minato_order":2,"epoch":0,"seed":0,"first_batch":0,"batched":true,"length":3}\n',
        b"[" + b"9" * 5000 + b"]\n",
    ]
)
@example(parts=[{"minato_order": 2, "epoch": 0, "seed": 0, "first_batch": -1}, [1], {"end": 1}])
def test_any_recorded_order_is_replayed_or_refused_by_name(parts: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.jsonl"
        path.write_bytes(lines_of(parts))
        check_order(path)


def named(path: Path, refusal: type[Exception], call: Callable[[], Any]) -> Any:
    """What a call returns; None if it refuses a file in words that name it."""
    try:
        return call()
    except refusal as error:
        if str(path) not in str(error):
            raise
        return None


def check_order(path: Path) -> None:
    """A file is refused in words that name it, or every epoch of it is replayed or refused."""
    order = named(path, ValueError, lambda: RecordedOrder(str(path)))
    if order is None:
        return
    for epoch in (-1, 0, 1, 2):
        seed = named(path, ValueError, functools.partial(order.seed, epoch))
        if seed is None:
            continue
        batches = list(order.batches(epoch))
        assert -(1 << 63) <= seed < 1 << 63
        loader = DataLoader(Numbers(10), batch_size=None, sampler=range(10), recording=Replay(path))
        assert loader is not None
        assert all(type(key) in (int, str) for keys, _ in batches for key in keys)


def test_an_order_that_changes_while_it_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    record(path)
    order = RecordedOrder(str(path))
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"order.jsonl has changed since it was opened: batch 0"):
        list(order.batches(0))


def test_an_order_from_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Is not a regular file"):
        DataLoader(Numbers(4), recording=Replay(tmp_path / "pipe"))


# ---- files that are replaced --------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / ("報" * 85)  # the longest name that a directory holds, in bytes
    write_atomically(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    assert path.read_text() == "before"
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        write_atomically(disk.path / "file", "before")
        with pytest.raises(OSError, match=r"No space left on device: '.*/disk/file'"):
            write_atomically(disk.path / "file", "x" * 100_000)
        assert (disk.path / "file").read_text() == "before"
        assert [each.name for each in disk.path.iterdir()] == ["file"]
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "disk"}


def test_a_mode_that_the_user_gave_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")
    path.chmod(0o644)
    write_atomically(path, "after")
    assert path.stat().st_mode & 0o777 == 0o644


def test_names_of_unfinished_files_cannot_be_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "splits.json"
    victim.write_text("important")
    with monkeypatch.context() as patch:
        opened = Mock(side_effect=os.open)
        patch.setattr(os, "open", opened)
        splits(path)
        splits(path)
    names = {os.fspath(call.args[0]) for call in opened.mock_calls}
    made = {name for name in names if "/.minato-" in name}
    assert len(made) == 2
    assert not any(str(os.getpid()) == name.rpartition("-")[2] for name in made)
    # And one that was guessed is not written through.
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "guessed")
    (tmp_path / ".minato-guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        splits(path)
    assert victim.read_text() == "important"
