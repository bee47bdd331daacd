"""Streams of Hugging Face's package below minato's: a run that stops and goes on has the rows of one that does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import minato
from minato import DataLoader
from tests.datasets import flat
from tests.selection import mostly_slow, numbers_for
from tests.streams.streams import in_runs

datasets = pytest.importorskip("datasets", reason="datasets is not installed: install 'test'")

from minato.sources.hugging_face import HuggingFaceShards  # noqa: E402

FOLDER = Path()
"""Of data files, in tests."""


def plain(first: int, count: int) -> Any:
    table = datasets.Dataset.from_dict({"row": list(range(first, first + count))})
    return table.to_iterable_dataset(num_shards=3)


def shuffled(first: int, count: int) -> Any:
    return plain(first, count).shuffle(seed=1, buffer_size=7)


def mapped(first: int, count: int) -> Any:
    return plain(first, count).map(dict, batched=True, batch_size=4).with_format("numpy")


def interleaved(first: int, count: int) -> Any:
    parts = [shuffled(first, count // 2), plain(first + count // 2, count - count // 2)]
    return datasets.interleave_datasets(
        parts, stopping_strategy="all_exhausted_without_replacement"
    )


def concatenated(first: int, count: int) -> Any:
    return datasets.concatenate_datasets([shuffled(first, count // 2), plain(first, count)])


def both(first: int, count: int) -> Any:
    return datasets.interleave_datasets(
        [plain(first, count // 2), plain(first + 100, count)], [0.6, 0.4], seed=2
    )


def files(first: int, count: int) -> Any:
    found = []
    for i in range(3):
        file = FOLDER / f"{first}-{count}-{i}.jsonl"
        file.write_text("".join(f'{{"row": {n}}}\n' for n in range(first + i, first + count, 3)))
        found.append(str(file))
    return HuggingFaceShards("json", found, seed=first)


STREAMS: list[Callable[[int, int], Any]] = [
    plain,
    shuffled,
    mapped,
    interleaved,
    concatenated,
    both,
    files,
]


def above(rng: random.Random) -> Any:
    """A dataset over two streams, one of which is seldom read."""
    make = rng.choice(STREAMS)
    sources = {"often": make(0, 50), "seldom": rng.choice(STREAMS)(1000, 12)}
    mixed = minato.mix(sources, {"often": 9, "seldom": 1}, passes=rng.choice([1, 2]))
    over = [mixed, make(0, 50), minato.shuffle(mixed, 5), minato.shuffle(make(0, 50), 5)]
    return rng.choice(over)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.sources.test_hugging_face.FOLDER", tmp_path)


def numbers(samples: list[Any]) -> list[int]:
    return [int(sample["row"]) for sample in samples]


def check_history(seed: int) -> None:
    def make() -> Any:
        rng = random.Random(seed)
        readers = rng.choice([None, 2])
        workers = rng.choice([0, 0, 0, 2])
        return DataLoader(above(rng), 3, readers=readers, num_workers=workers, collate_fn=numbers)

    def made() -> Iterator[Any]:
        while True:
            loaders.append(make())
            yield loaders[-1]

    rng = random.Random(-seed)
    expected, loaders = flat(make()), list[Any]()
    stops = [*(rng.randrange(6) for _ in range(rng.randrange(1, 5))), None]
    assert in_runs(made(), stops, flat) == expected, seed
    assert flat(loaders[-1]) == expected, seed  # the next epoch begins at its beginning


def test_each_worker_is_in_an_epoch_of_its_own() -> None:
    stream, other = shuffled(0, 12), shuffled(100, 12)
    mixed = minato.mix({"a": stream, "b": minato.shuffle(other, 2)}, passes=2)
    assert len(flat(DataLoader(mixed, 3, num_workers=1, collate_fn=numbers))) == 48
    # The second pass of each has another epoch, in the worker alone.
    assert (stream.epoch, other.epoch) == (0, 0)


@pytest.mark.parametrize("name", ["*.txt", "[a].txt", "a?.txt", "https://example.org/b/[a].txt"])
def test_patterns_are_no_names_of_files(name: str, tmp_path: Path) -> None:
    """They would read others: ``[a].txt`` would read ``a.txt``."""
    file = name if "://" in name else str(tmp_path / name)
    with pytest.raises(ValueError, match="in files is a pattern to datasets: give names of files"):
        HuggingFaceShards("text", [file])
    (tmp_path / "a.txt").write_text("1")
    assert list(HuggingFaceShards("text", [tmp_path / "a.txt"])) == [{"text": "1"}]


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    for name, text in {"a": '{"row": 1}', "b": "", "c": '{"row": 2}'}.items():
        (tmp_path / name).write_text(text)
    shards = HuggingFaceShards("json", [tmp_path / name for name in "abc"])
    assert [row["row"] for row in shards] == [1, 2]
    assert list(HuggingFaceShards("json", [tmp_path / "b"])) == []


@mostly_slow("first", range(0, 81, 3))
def test_stops_lose_and_repeat_nothing(first: int) -> None:
    for seed in range(first, first + 3):
        check_history(seed)


@pytest.mark.stress
def test_any_stops_lose_and_repeat_nothing(stress_s: float) -> None:
    for seed in numbers_for(stress_s, 80):
        check_history(seed)
