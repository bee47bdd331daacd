"""``recording=``: a run in an order that depends on timing comes again, batch for batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato import DataLoader, Record, Replay
from minato.sampling.epoch import Seeds
from tests.behaviour.states import begun, resumed
from tests.datasets import Draws, Numbers, Stream, flat, indices, rows
from tests.selection import mostly_slow


class Jerky(Draws):
    def __getitem__(self, index: int) -> list[float]:
        if index % 7 == 3:
            torch.randperm(200_000)  # a while, and draws
        return super().__getitem__(index)


def draws(batches: Any) -> list[list[tuple[float, ...]]]:
    return [*map(rows, batches)]


@mostly_slow("order", ["arrival", "batch", "fast_first", "strict"], quick=2)
def test_a_run_is_repeated_batch_for_batch(order: str, tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"

    def loader(num_workers: int, **options: Any) -> Any:
        return DataLoader(Jerky(30), 4, shuffle=True, num_workers=num_workers, **options)

    torch.manual_seed(1)
    recorded = loader(3, order=order, recording=Record(path))
    epochs = [draws(recorded) for _ in range(2)]
    torch.manual_seed(2)
    for workers in (0, 2):
        again = loader(workers, recording=Replay(str(path)))
        assert again._minato_options.order == "strict"
        assert [draws(again), draws(again)] == epochs
        with pytest.raises(ValueError, match=r"order.jsonl holds no epoch 2, only \[0, 1\]"):
            iter(again)
        again.set_epoch(1)
        assert draws(again) == epochs[1]


def test_the_file_says_what_came_before_the_loop_has_it(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    loader = DataLoader(Numbers(6), 4, seed=5, recording=Record(path))
    iterator = iter(loader)
    next(iterator)
    head, batch = (json.loads(line) for line in path.read_text().splitlines())
    origin, seed = {"batched": True, "length": 6}, Seeds(5).of(0)
    assert head == {"minato_order": 2, "epoch": 0, "seed": seed, "first_batch": 0, **origin}
    assert batch == [0, 1, 2, 3]
    assert len(list(iterator)) == 1
    assert [json.loads(line) for line in path.read_text().splitlines()][2:] == [[4, 5], {"end": 2}]


class Words(Numbers):
    def __getitem__(self, key: Any) -> str:
        return str(key)


def test_strings_and_numpys_integers(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    keys = [["ä", "b"], [np.int64(3)], []]
    loader = DataLoader(Words(1), batch_sampler=keys, collate_fn=list, recording=Record(path))
    expected = list(loader)
    again = DataLoader(Words(1), batch_sampler=[[1]], collate_fn=list, recording=Replay(path))
    assert list(again) == expected == [["ä", "b"], ["3"], []]
    broken = DataLoader(Words(1), sampler=[(1, 2)], recording=Record(tmp_path / "other"))
    with pytest.raises(TypeError, match=r"integers or strings, and \(1, 2\) is a tuple"):
        list(broken)


def test_a_resumed_run_goes_on_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"

    def loader() -> Any:
        options = {"shuffle": True, "num_workers": 2, "order": "arrival", "seed": 3}
        return DataLoader(Jerky(30), 4, recording=Record(path), **options)

    first = loader()
    iterator = iter(first)
    got = draws(next(iterator) for _ in range(3))
    state = first.state_dict()
    draws(next(iterator) for _ in range(2))  # trained, and lost with the process
    del iterator
    with path.open("a") as file:
        file.write("[1,2")  # it died while it wrote
    got += draws(resumed(state, loader()))
    replay = DataLoader(Jerky(30), 4, shuffle=True, recording=Replay(path))
    assert draws(replay) == got


def test_a_file_that_another_iterator_writes_or_somebody_cuts_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    loader = DataLoader(Numbers(6), 2, recording=Record(path))
    for disturb in (lambda: indices(loader), lambda: path.write_text("")):
        iterator = iter(loader)
        next(iterator)
        disturb()
        before = path.read_text()
        with pytest.raises(ValueError, match="another iterator or process writes to it, too"):
            next(iterator)
        assert path.read_text() == before


def test_a_replay_is_resumed_too_more_than_once(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    in_any_order = {"num_workers": 2, "order": "arrival", "recording": Record(path)}
    expected = indices(DataLoader(Numbers(30), 4, **in_any_order))
    first, second, last = (DataLoader(Numbers(30), 4, recording=Replay(path)) for _ in range(3))
    got, state = begun(first, 3)
    more, state = begun(resumed(state, second), 2)
    assert got + more + indices(resumed(state, last)) == expected
    assert last.coverage().complete


HEAD = (
    '{"minato_order": 2, "batched": true, "length": 4, "epoch": 0, "seed": 5, "first_batch": 0}\n'
)
LATER = HEAD.replace("0}", "1}")
NO_RECORDS = [
    ("", "is empty"),
    ("[1, 2]\n", "line 1: an epoch must begin with a line that names it"),
    ("hello\n", "line 1: it is no line of a recorded order"),
    ('{"a": 1}\n', "line 1: it is no line of a recorded order"),
    (HEAD + "[1, 2", "line 2: it is no line"),
    (HEAD + "[1.5]\n", "line 2: it is no line"),
    (HEAD + "[true]\n", "line 2: it is no line"),
    (HEAD + '[1]\n{"end": 2}\n', "line 3: 1 batches stand before it"),
    (HEAD + '[1]\n{"end": 1}\n[2]\n', "line 4: a batch after the end of its epoch"),
    ('{"minato_order": 7}\n', "line 1: version 7, and this minato reads 2: record"),
    (HEAD.replace("4", "null") + "[1", "line 2: it is no line"),
    (HEAD.replace("true", "1"), "line 1: it must give batched and the length"),
    (HEAD.replace("4", "-4"), "line 1: it must give batched and the length"),
    (HEAD + "[1]\n" + LATER.replace("4", "5"), "line 3: what it goes on from"),
    ('{"minato_order": 2, "epoch": 0}\n', "line 1: it must give epoch, seed and first_batch"),
    (HEAD.replace("0}", "3}"), "line 1: what it goes on from does not stand before it"),
    (HEAD + "[1]\n" + LATER.replace("5", "6"), "line 3: what it goes on from"),
]


@pytest.mark.parametrize(("text", "message"), NO_RECORDS)
def test_what_is_no_record_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    with pytest.raises(FileNotFoundError):
        DataLoader(Numbers(4), recording=Replay(path))
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        DataLoader(Numbers(4), recording=Replay(path))
    assert str(path) in str(caught.value)


def test_an_epoch_that_was_not_recorded_to_its_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    begun(DataLoader(Numbers(8), 2, recording=Record(path)), 1)
    loader = DataLoader(Numbers(8), 2, recording=Replay(path))
    with pytest.raises(
        ValueError, match="line 1: epoch 0 was recorded only for its first 1 batches"
    ):
        iter(loader)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    assert flat(indices(DataLoader(Numbers(4), 2, recording=Record(path)))) == [0, 1, 2, 3]
    for recording in (Record(path), Replay(path)):
        with pytest.raises(ValueError, match="an iterable dataset has none"):
            DataLoader(Stream(3), recording=recording)
    with pytest.raises(ValueError, match="order='arrival' would change them"):
        DataLoader(Numbers(4), order="arrival", recording=Replay(path))
    for wrong in (str(path), [Record(path)]):
        with pytest.raises(TypeError, match="give a Record or a Replay"):
            DataLoader(Numbers(4), recording=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path=None: give a path"):
        Record(None)  # type: ignore[arg-type]
    in_any_order = DataLoader(Numbers(4), 2, in_order=False, recording=Replay(path))
    assert indices(in_any_order) == [[0, 1], [2, 3]]
