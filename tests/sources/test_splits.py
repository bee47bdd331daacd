"""Splits: every key once, shares and classes as asked for, nobody in two of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato.sources.splits import folds, load_splits, save_splits, split

KEYS = [f"key-{i}" for i in range(1000)]
LABELS = ["rare" if i % 10 == 0 else "usual" for i in range(1000)]
SHARES = {"train": 8, "val": 1, "test": 1}


def weighted(weights: dict[str, float], **arguments: Any) -> Any:
    return split(KEYS, SHARES, seed=1, labels=LABELS, weights=weights, **arguments)


def class_of(key: str) -> str:
    return LABELS[KEYS.index(key)]


def test_each_key_is_in_one_split_and_the_shares_are_right() -> None:
    parts = split(KEYS, SHARES, seed=1)
    assert sorted(key for part in parts.values() for key in part) == sorted(KEYS)
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 800,
        "val": 100,
        "test": 100,
    }
    assert parts["test"] == sorted(parts["test"], key=KEYS.index)
    assert parts["test"] != KEYS[-100:]


def test_the_seed_decides() -> None:
    assert split(KEYS, SHARES, seed=1) == split(KEYS, SHARES, seed=1)
    assert split(KEYS, SHARES, seed=1) != split(KEYS, SHARES, seed=2)


def test_each_split_has_its_share_of_each_class() -> None:
    parts = split(KEYS, SHARES, seed=1, labels=LABELS)
    assert Counter(map(class_of, parts["test"])) == {"rare": 10, "usual": 90}
    assert Counter(map(class_of, parts["train"])) == {"rare": 80, "usual": 720}


def test_classes_can_be_made_equally_large() -> None:
    parts = split(KEYS, SHARES, seed=1, labels=LABELS, uniform=True)
    assert Counter(map(class_of, parts["train"])) == {"rare": 80, "usual": 80}
    assert Counter(map(class_of, parts["test"])) == {"rare": 10, "usual": 10}


def test_classes_can_be_weighted() -> None:
    parts = split(KEYS, SHARES, seed=1, labels=LABELS, weights={"rare": 1, "usual": 3})
    assert Counter(map(class_of, parts["train"])) == {"rare": 80, "usual": 240}
    assert Counter(map(class_of, parts["val"])) == {"rare": 10, "usual": 30}
    assert not set(parts["train"]) & set(parts["test"])
    more = split(KEYS, SHARES, seed=1, labels=LABELS, weights={"rare": 0.5, "usual": 0.01})
    assert Counter(map(class_of, more["train"])) == {"rare": 80, "usual": 2}
    alone = split(KEYS, SHARES, seed=1, labels=LABELS, weights={"rare": 1})
    assert Counter(map(class_of, alone["train"])) == {"rare": 80}


@settings(max_examples=60)
@given(
    entities=st.lists(st.integers(0, 12), min_size=1, max_size=120),
    classes=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_nobody_is_in_two_splits(entities: list[int], classes: int, seed: int) -> None:
    keys = range(len(entities))
    labels = [(7 * i + entity) % classes for i, entity in enumerate(entities)]
    parts = split(keys, {"a": 0.6, "b": 0.4}, seed=seed, labels=labels, entities=entities)
    assert sorted(parts["a"] + parts["b"]) == list(keys)
    assert not {entities[i] for i in parts["a"]} & {entities[i] for i in parts["b"]}


def test_folds_test_each_key_once() -> None:
    patients = [i // 7 for i in range(1000)]
    found = folds(KEYS, 5, seed=3, labels=LABELS, entities=patients)
    assert sorted(key for fold in found for key in fold["test"]) == sorted(KEYS)
    for fold in found:
        assert sorted(fold["train"] + fold["test"]) == sorted(KEYS)
        sides = [{patients[KEYS.index(key)] for key in fold[side]} for side in ("train", "test")]
        assert not sides[0] & sides[1]
        assert 180 <= len(fold["test"]) <= 220
        assert 15 <= Counter(map(class_of, fold["test"]))["rare"] <= 25


def test_splits_can_be_kept(tmp_path: Path) -> None:
    kept = [b"\0key", UUID(int=7), ("shard.tar", 512, 1024), (b"a", (1, "b"))]
    parts: dict[str, list[Any]] = {"train": [1, 2], "test": ["a/ü"], "val": kept, "none": []}
    save_splits(tmp_path / "splits.json", parts)
    assert load_splits(tmp_path / "splits.json") == parts
    assert [path.name for path in tmp_path.iterdir()] == ["splits.json"]
    with pytest.raises(TypeError, match=r"the key 1.5 of type float cannot be saved"):
        save_splits(tmp_path / "splits.json", {"test": [1.5]})
    assert load_splits(tmp_path / "splits.json") == parts
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no splits"):
        load_splits(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split(KEYS, {"a": 0}, seed=1), "shares={'a': 0} are not possible"),
        (lambda: split(KEYS, {}, seed=1), "shares={} are not possible"),
        (lambda: split(KEYS, SHARES, seed=1, labels=[1]), "1 labels do not fit 1000 keys"),
        (lambda: split(KEYS, SHARES, seed=1, uniform=True), "give labels"),
        (lambda: split(KEYS, SHARES, seed=1, weights={"rare": 1}), "give labels"),
        (lambda: weighted({"rare": 1}, uniform=True), "leave uniform out"),
        (lambda: weighted({"rare": 1, "odd": 1}), "classes that no label names: {'odd'}"),
        (lambda: weighted({"rare": -1, "usual": 1}), "give 0 or more"),
        (lambda: weighted({"rare": 0}), "not all 0"),
        (lambda: folds(KEYS, 1, seed=1), "count=1 is too small"),
    ],
)
def test_what_is_not_possible_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
