"""What one run of a loader leaves for the next, and what counts as slow."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from minato import DataLoader, StragglerPolicy
from minato.caching import DiskCache
from minato.engine.history import from_words
from minato.scheduling.slow_samples import SlowThreshold
from tests.datasets import Numbers, Sleepy, flat, indices, plus_one
from tests.disks import small_disk

SLOW = dict.fromkeys(range(0, 80, 5), 0.01)


def loader(order="strict", transforms=None, **policy):
    return DataLoader(
        *(Sleepy(80, 0.001, SLOW), 4),
        num_workers=2,
        workers="thread",
        order=order,
        transforms=transforms,
        stragglers=StragglerPolicy(**policy),
    )


def run_whole(made) -> None:
    assert sorted(flat(indices(made))) == list(range(80))


def threshold_ns(made) -> int:
    """What a worker sees before the first sample of an iterator has run."""
    return int(iter(made)._source.ledger.slow_ns)


def test_a_run_begins_with_what_the_last_one_learned(tmp_path: Path) -> None:
    kept = {"order": "fast_first", "history": tmp_path / "profiles"}
    first = loader(**kept)
    assert threshold_ns(first) == 0
    run_whole(first)
    (file,) = kept["history"].iterdir()
    recent = from_words(json.loads(file.read_text())["recent"])
    known = SlowThreshold(known=recent).decision.threshold_ns
    assert threshold_ns(loader(**kept)) == known > 1_000_000
    assert threshold_ns(loader(transforms=[plus_one], **kept)) == 0


def test_a_cache_has_no_part_in_the_name(tmp_path: Path) -> None:
    history = StragglerPolicy(history=tmp_path / "costs")
    for name in ("one", "other"):
        cache = DiskCache(tmp_path / name, 1 << 20)
        assert len(flat(indices(DataLoader(Numbers(8), 2, cache=cache, stragglers=history)))) == 8
    assert len(os.listdir(tmp_path / "costs")) == 1


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        run_whole(loader(history=tmp_path / "file"))


def test_limits_reach_the_policy_from_the_start() -> None:
    assert threshold_ns(loader("fast_first", after_s=0.25)) == 250_000_000
    iterator = iter(loader("fast_first", percentile=60))
    assert iterator._source.slow_threshold.percentile == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"percentile": 100}, ValueError, "percentile=100 is not between"),
        ({"percentile": "75"}, TypeError, "percentile='75' is a str"),
        ({"after_s": 0}, ValueError, "after_s=0 is too small"),
        ({"percentile": 90, "after_s": 1.0}, ValueError, "give one"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        StragglerPolicy(**arguments)


def test_a_full_disk_costs_the_profile_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = disk.path / "costs"
        run_whole(loader(history=folder))
        (file,) = folder.iterdir()
        before = file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        disk.fill()
        with pytest.warns(RuntimeWarning, match="cannot be written.*No space left"):
            run_whole(loader(history=folder))
        assert file.read_bytes() == before
        assert list(folder.iterdir()) == [file]
