"""What only object stores have: ranges, tar shards, and a runtime that must not be forked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import minato
from minato.sources.base import MissingKey, SourceError, TruncatedObject
from minato.sources.retry import Retry
from tests.sources.kinds import COUNT, Kind, name_of, of_bytes, record, tar_of

pytest.importorskip("obstore", reason="obstore is not installed: install the extra 'test'")

from minato.sources.objects import Objects, Part, tar_members


def test_members_of_a_tar_file_are_read_by_their_ranges(
    kind_named: Callable[[str], Kind],
) -> None:
    shards = kind_named("s3").source(url="s3://minato/shards")
    members = tar_members(shards, "first.tar", suffix=".bin")
    assert list(members) == [f"{name_of(i)}.bin" for i in range(COUNT)]
    source = shards.subset(list(members.values()))
    loader = minato.DataLoader(
        source, batch_size=10, num_workers=2, worker_method="thread", fetch_concurrency=4
    )
    labels = [label for batch in loader for label in batch["label"].tolist()]
    assert labels == list(range(COUNT))
    assert tar_members(shards, "first.tar", suffix=".txt") == {}


def test_a_range_beyond_the_end_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(bytes(100))
    source = Objects(f"file://{tmp_path}", retry=Retry(attempts=1))
    assert source.get(Part("object", 10, 20)) == bytes(10)
    with pytest.raises(SourceError, match=r"Part\(path='object', start=90, end=120\)"):
        source.get(Part("object", 90, 120))
    with pytest.raises(MissingKey, match="'other'"):
        source.get(Part("other", 0, 1))
    assert issubclass(TruncatedObject, SourceError)


FORKS = """
import sys, minato
from minato.sources.objects import Objects
from minato.sources.retry import Retry
from tests.sources.kinds import of_bytes

def labels(source):
    loader = minato.DataLoader(source, batch_size=10, num_workers=2, multiprocessing_context="fork")
    return [label for batch in loader for label in batch["label"].tolist()]

source = Objects("file://" + sys.argv[1], decode=of_bytes, retry=Retry(attempts=1))
assert labels(source) == list(range(20)), "listing the keys lets workers be forked"
assert source[3]["label"] == 3
try:
    labels(source)
except Exception as error:
    assert "forked from one that had read objects" in str(error), error
else:
    raise AssertionError("a worker read though its parent had")
"""


def test_forked_workers_read_unless_their_parent_did(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / name_of(i)).write_bytes(record(i))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_keys_of_a_tar_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.tar").write_bytes(tar_of([]))
    assert tar_members(Objects(f"file://{tmp_path}", decode=of_bytes), "empty.tar") == {}
