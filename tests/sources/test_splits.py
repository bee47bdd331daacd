"""Splits: every key once, shares and classes as asked for, nobody in two of them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minato.sources.splits import folds, load_splits, save_splits, split

KEYS = [f"key-{i}" for i in range(1000)]
LABELS = ["rare" if i % 10 == 0 else "usual" for i in range(1000)]
SHARES = {"train": 8, "val": 1, "test": 1}


def class_of(key: str) -> str:
    return LABELS[KEYS.index(key)]


def test_each_key_is_in_one_split_and_the_shares_are_right() -> None:
    parts = split(KEYS, SHARES, seed=1)
    assert sorted(key for part in parts.values() for key in part) == sorted(KEYS)
    lengths = {name: len(part) for name, part in parts.items()}
    assert lengths == {"train": 800, "val": 100, "test": 100}
    assert parts["test"] == sorted(parts["test"], key=KEYS.index)
    assert parts["test"] != KEYS[-100:]
    assert split(KEYS, SHARES, seed=1) == parts != split(KEYS, SHARES, seed=2)
    parts = split(KEYS, SHARES, seed=1, labels=LABELS)
    assert Counter(map(class_of, parts["test"])) == {"rare": 10, "usual": 90}
    assert Counter(map(class_of, parts["train"])) == {"rare": 80, "usual": 720}
    # Shares are reduced to the fewest folds.
    assert split(KEYS[:5], {"a": 80, "b": 20}, seed=1) == split(KEYS[:5], {"a": 4, "b": 1}, seed=1)
    assert split(KEYS[:1], {"all": 7}, seed=1) == {"all": KEYS[:1]}


@settings(max_examples=60)
@given(
    entities=st.lists(st.integers(0, 12), min_size=1, max_size=120),
    classes=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_nobody_is_in_two_splits(entities: list[int], classes: int, seed: int) -> None:
    keys = range(len(entities))
    labels = [(7 * i + entity) % classes for i, entity in enumerate(entities)]
    if min(len(set(entities)), max(Counter(labels).values())) < 5:
        with pytest.raises(ValueError, match="too few for 5 folds"):
            split(keys, {"a": 3, "b": 2}, seed=seed, labels=labels, entities=entities)
        return
    parts = split(keys, {"a": 3, "b": 2}, seed=seed, labels=labels, entities=entities)
    assert sorted(parts["a"] + parts["b"]) == list(keys)
    assert not {entities[i] for i in parts["a"]} & {entities[i] for i in parts["b"]}


def test_missing_values_of_any_kind_are_one_entity() -> None:
    pandas = pytest.importorskip(
        "pandas", reason="pandas is not installed: install the extra 'test'"
    )
    missing = [None, math.nan, np.float32("nan"), torch.tensor(math.nan), pandas.NaT, pandas.NA]
    for seed in range(8):
        keys = list(range(12))
        parts = split(keys, {"train": 1, "test": 1}, seed=seed, entities=[*missing, *range(6)])
        assert any(set(range(6)) <= set(part) for part in parts.values())


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
    with pytest.raises(TypeError, match=r"the name 1 of a split is no string: give a string"):
        save_splits(tmp_path / "splits.json", {1: ["x"], "1": ["y"]})  # type: ignore[dict-item]
    assert load_splits(tmp_path / "splits.json") == parts
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no splits"):
        load_splits(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split(KEYS, {"a": 0}, seed=1), "shares={'a': 0} are not possible"),
        (lambda: split(KEYS, {}, seed=1), "shares={} are not possible"),
        (lambda: split(KEYS, [8, 1], seed=1), r"shares=\[8, 1\] have no names: give a dictionary"),
        (lambda: split(KEYS, SHARES, seed=1, labels=[1]), "1 labels do not fit 1000 keys"),
        (lambda: split(KEYS, {"a": 0.8, "b": 0.2}, seed=1), "such as 4 and 1 for 80 % and 20 %"),
        (lambda: split(KEYS[:9], SHARES, seed=1), "9 keys are too few for 10 folds"),
        (lambda: folds(KEYS, 3, seed=1, entities=[0, 1] * 500), "2 entities are too few for 3"),
        (lambda: folds(KEYS, 3, seed=1, labels=range(1000)), "1 keys in the largest class are too"),
        (lambda: split(KEYS, SHARES, seed=-1), "seed=-1 is too small"),
        (lambda: folds(KEYS, 1, seed=1), "count=1 is too small"),
    ],
)
def test_what_is_not_possible_is_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
