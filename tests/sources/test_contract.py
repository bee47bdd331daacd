"""What every source of samples by key must do, whatever stores them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.sources.base import MissingKey, Retry, SourceError
from tests.selection import mostly_slow
from tests.sources import servers
from tests.sources.kinds import COUNT, KINDS, Kind, features

SERVED = ["cassandra", "s3"]
STARTS_SLOWLY = pytest.param("cassandra", marks=pytest.mark.slow)
every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
every_served_kind = pytest.mark.parametrize("kind", SERVED, indirect=True)
every_restarted_kind = pytest.mark.parametrize("kind", [STARTS_SLOWLY, "s3"], indirect=True)


def check(batches: list[Any], expected: list[int]) -> None:
    labels = torch.cat([batch["label"] for batch in batches]).tolist()
    assert labels == expected
    values = torch.cat([batch["x"] for batch in batches])
    assert np.array_equal(values, np.stack([features(i) for i in expected]))


@every_kind
def test_indices_follow_the_keys(kind: Kind, opened: Opened) -> None:
    source = opened()
    assert len(source) == COUNT
    assert list(source.keys) == [kind.key(i) for i in range(COUNT)]
    some = source.subset([kind.key(7), kind.key(3), kind.key(7)])
    assert [some[i]["label"] for i in range(3)] == [7, 3, 7]
    assert len(source) == COUNT
    assert source.get(kind.key(5))["label"] == 5


@every_kind
@mostly_slow(("num_workers", "fetch_concurrency"), [(0, 1), (2, 4)], [(0, 4), (2, 1)])
def test_every_sample_comes_once(
    kind: Kind, opened: Opened, num_workers: int, fetch_concurrency: int
) -> None:
    source, how = opened(), {"num_workers": num_workers, "fetch_concurrency": fetch_concurrency}
    # The parent has connections of its own before the workers are forked, and they still work afterwards.
    assert source[0]["label"] == 0
    loader = loader_of(kind, source, 8, **how)
    for _ in range(2):
        check(list(loader), list(range(COUNT)))
    assert source[1]["label"] == 1


@every_kind
def test_threads_share_a_source(opened: Opened) -> None:
    with ThreadPoolExecutor(8) as threads:
        samples = list(threads.map(opened().__getitem__, list(range(COUNT)) * 3))
    assert [sample["label"] for sample in samples] == list(range(COUNT)) * 3


@every_kind
@pytest.mark.parametrize("fetch_concurrency", [1, 4])
def test_a_missing_key_is_named(kind: Kind, opened: Opened, fetch_concurrency: int) -> None:
    source = opened([kind.key(0), kind.absent, kind.key(1)])
    loader = loader_of(kind, source, num_workers=1, fetch_concurrency=fetch_concurrency)
    for read in (lambda: source[1], lambda: list(loader)):
        with pytest.raises(MissingKey) as raised:
            read()
        assert repr(kind.absent) in str(raised.value)
        assert isinstance(raised.value, KeyError)
        assert source[2]["label"] == 1


@every_kind
def test_what_cannot_be_decoded_is_named(kind: Kind, opened: Opened) -> None:
    source = opened(decode=Picky(kind.decode, 3))
    with pytest.raises(SourceError, match="not what was expected") as raised:
        source[3]
    assert f"cannot decode key {kind.key(3)!r}" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)


class Picky:
    """Decodes all but one."""

    def __init__(self, decode: Callable[[Any], Any], refused: int) -> None:
        self.decode, self.refused = decode, refused

    def __call__(self, value: Any) -> Any:
        sample = self.decode(value)
        if sample["label"] == self.refused:
            raise ValueError("not what was expected")
        return sample


Opened = Callable[..., Any]


@pytest.fixture
def opened(kind: Kind) -> Iterator[Opened]:
    """A function that makes sources, which are closed at the end."""
    with ExitStack() as stack:
        yield lambda *keys, **arguments: stack.enter_context(
            closing(kind.source(*keys, **arguments))
        )


def loader_of(kind: Kind, source: Any, batch_size: int = 1, **options: Any) -> Any:
    return minato.DataLoader(source, batch_size, workers=kind.worker_method, **options)


@every_kind
@pytest.mark.parametrize("fetch_concurrency", [1, 4])
def test_failures_are_skipped_and_named_by_key(
    kind: Kind, opened: Opened, fetch_concurrency: int, tmp_path: Path
) -> None:
    log = tmp_path / "failed.jsonl"
    keys = [kind.key(0), kind.absent, kind.key(1), kind.key(2), kind.key(3)]
    errors = minato.ErrorPolicy(on_error="skip", log=log)
    how: Any = {"num_workers": 1, "fetch_concurrency": fetch_concurrency, "errors": errors}
    loader = loader_of(kind, opened(keys, decode=Picky(kind.decode, 2)), 5, **how)
    with pytest.warns(RuntimeWarning, match="2 samples of this epoch were skipped"):
        check(list(loader), [0, 1, 3])
    told = {
        each["index"]: each["message"] for each in map(json.loads, log.read_text().splitlines())
    }
    assert told.keys() == {1, 3}
    assert f"no key {kind.absent!r}" in told[1]
    assert f"cannot decode key {kind.key(2)!r}" in told[3]


@every_kind
def test_empty_and_single(kind: Kind, opened: Opened) -> None:
    empty, single = (opened().subset(keys) for keys in ([], [kind.key(9)]))
    assert list(loader_of(kind, empty, num_workers=1)) == []
    check(list(loader_of(kind, single, num_workers=1, fetch_concurrency=4)), [9])


@every_kind
def test_a_million_keys(kind: Kind, opened: Opened) -> None:
    keys = [kind.key(i) for i in range(COUNT)] * (10**6 // COUNT)
    wanted = [len(keys) - 1, 0, COUNT // 2, len(keys) // 2]
    loader = loader_of(kind, opened(keys), 4, sampler=wanted, num_workers=1)
    check(list(loader), [i % COUNT for i in wanted])


@every_kind
def test_a_copy_and_a_pickle_open_their_own(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_SECRET", servers.PASSWORD)
    source = kind.source_from_environment("THE_SECRET") if kind.has_secrets else kind.source()
    assert source[0]["label"] == 0
    text = pickle.dumps(source)
    again = pickle.loads(text)
    source.close()
    assert servers.PASSWORD.encode() not in text
    assert again[1]["label"] == 1
    assert copy.copy(again)[2]["label"] == 2
    again.close()


@every_served_kind
def test_secrets_do_not_show(kind: Kind, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened()
    assert servers.PASSWORD not in repr(source)
    with pytest.raises(TypeError, match="is a secret and is not pickled"):
        pickle.dumps(source)
    with pytest.raises(MissingKey) as raised:
        source.get(kind.absent)
    assert servers.PASSWORD not in str(raised.value)
    monkeypatch.delenv("THE_SECRET", raising=False)
    with pytest.raises(SourceError, match="THE_SECRET is not set"):
        kind.source_from_environment(variable="THE_SECRET").get(kind.key(0))
    monkeypatch.setenv("THE_SECRET", "wrong")
    refused = kind.source_from_environment(variable="THE_SECRET", retry=Retry(attempts=1))
    with closing(refused), pytest.raises(SourceError) as refusal:
        refused.get(kind.key(0))
    assert servers.PASSWORD not in str(refusal.value)


@every_restarted_kind
@pytest.mark.parametrize("fetch_concurrency", [1, 4])
def test_a_restart_of_the_server_in_mid_epoch_loses_nothing(
    kind: Kind, opened: Opened, fetch_concurrency: int
) -> None:
    assert kind.server is not None
    how = {"num_workers": 2, "prefetch_factor": 1, "fetch_concurrency": fetch_concurrency}
    batches = []
    for number, batch in enumerate(loader_of(kind, opened(), 4, **how)):
        batches.append(batch)
        if number == 2:
            kind.server.restart()
    check(batches, list(range(COUNT)))


@every_restarted_kind
def test_who_cannot_be_reached_is_named_with_the_key(kind: Kind, opened: Opened) -> None:
    assert kind.server is not None
    source = opened([kind.key(4)], retry=Retry(attempts=3, first_s=0.01))
    failures: list[minato.SampleFailure] = []

    def noted(failure: minato.SampleFailure) -> Any:
        failures.append(failure)
        return minato.SKIP

    kind.server.stop()
    try:
        with pytest.raises(SourceError, match="after .* s of tries") as raised:
            source[0]
        assert source.retries == 2
        loader = minato.DataLoader(source, errors=noted)
        with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
            assert list(loader) == []
    finally:
        kind.server.start()
    for error in (raised.value, failures[0].error):
        assert repr(kind.key(4)) in str(error)
    # A list of keys is asked for first, and then each key by itself.
    assert loader.report().run.reads.retries >= 2


def test_workers_that_are_not_forked_open_their_own(kind_named: Callable[[str], Kind]) -> None:
    """All kinds at once: it is the start of the worker that takes time."""
    sources = [kind_named(name).source() for name in KINDS]
    assert [len(source) for source in sources] == [COUNT] * len(KINDS)
    together = torch.utils.data.ConcatDataset(sources)
    how: Any = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    for batch in minato.DataLoader(together, COUNT, **how):
        check([batch], list(range(COUNT)))
    for source in sources:
        source.close()
