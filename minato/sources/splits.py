"""Lists of keys for training, validation and test, made from metadata; no data is moved."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["folds", "load_splits", "save_splits", "split"]

_FORMAT = 1


def split(
    keys: Sequence[Any],
    shares: Mapping[str, float],
    *,
    seed: int,
    labels: Sequence[Hashable] | None = None,
    entities: Sequence[Hashable] | None = None,
    uniform: bool = False,
) -> dict[str, list[Any]]:
    """Divide keys at random.

    Args:
        keys: Of all samples.
        shares: How many of them each split gets, relative to the other splits: ``{"train": 8, "test": 2}``.
        seed: The same seed, keys and metadata give the same splits.
        labels: The class of each key: each split then gets its share of each class, as far as entities allow.
        entities: Whom each key belongs to, a patient for instance; nobody is in two splits.
        uniform: Leave out keys at random until each split has equally many of each class.

    Returns:
        The keys of each split, in the order in which they were given.

    Raises:
        ValueError: A share is not positive, lists differ in length, or ``uniform`` is given without labels.
    """
    bad = {name: share for name, share in shares.items() if not share > 0}
    if not shares or bad:
        raise ValueError(f"shares={dict(shares)} are not possible: give positive numbers")
    for name, values in (("labels", labels), ("entities", entities)):
        if values is not None and len(values) != len(keys):
            raise ValueError(f"{len(values)} {name} do not fit {len(keys)} keys: give one for each")
    if uniform and labels is None:
        raise ValueError("uniform=True makes classes equally large: give labels")
    rng = random.Random(seed)
    classes: Sequence[Hashable] = [None] * len(keys) if labels is None else labels
    parts = _divide(list(shares.values()), classes, entities, rng)
    if uniform:
        parts = [_evened(part, classes, rng) for part in parts]
    return {name: [keys[i] for i in sorted(part)] for name, part in zip(shares, parts, strict=True)}


def folds(
    keys: Sequence[Any],
    count: int,
    *,
    seed: int,
    labels: Sequence[Hashable] | None = None,
    entities: Sequence[Hashable] | None = None,
) -> list[dict[str, list[Any]]]:
    """Divide keys for a cross-validation: each is in ``"test"`` of one fold, and in ``"train"`` of the others.

    Args:
        count: Number of folds.
        keys, seed, labels, entities: As for :func:`split`.

    Raises:
        ValueError: There are fewer than two folds, or lists differ in length.
    """
    if count < 2:
        raise ValueError(f"count={count} is too small: give at least 2")
    shares = {str(number): 1.0 for number in range(count)}
    parts = split(range(len(keys)), shares, seed=seed, labels=labels, entities=entities)
    found = []
    for part in parts.values():
        test = set(part)
        found.append(
            {
                "train": [key for i, key in enumerate(keys) if i not in test],
                "test": [keys[i] for i in part],
            }
        )
    return found


def save_splits(path: str | os.PathLike[str], splits: Mapping[str, Sequence[Any]]) -> None:
    """Write splits to a JSON file, at once or not at all.

    Raises:
        TypeError: A key is neither a text nor an integer.
    """
    for name, keys in splits.items():
        odd = next((key for key in keys if type(key) not in (str, int)), None)
        if odd is not None:
            raise TypeError(f"key {odd!r} of split {name!r} is neither a text nor an integer")
    target = Path(path)
    written = target.with_name(f".{target.name}.{os.getpid()}")
    content = {name: list(keys) for name, keys in splits.items()}
    written.write_text(json.dumps({"format": _FORMAT, "splits": content}))
    written.replace(target)


def load_splits(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Read what :func:`save_splits` wrote.

    Raises:
        ValueError: It is something else.
    """
    content = json.loads(Path(path).read_text())
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{os.fspath(path)!r} holds no splits of format {_FORMAT}")
    found: dict[str, list[Any]] = content["splits"]
    return found


def _divide(
    shares: list[float],
    classes: Sequence[Hashable],
    entities: Sequence[Hashable] | None,
    rng: random.Random,
) -> list[list[int]]:
    """Give each entity, the largest first, to the part that lacks most of what it has."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i in range(len(classes)):
        members[i if entities is None else entities[i]].append(i)
    groups = list(members.values())
    rng.shuffle(groups)
    groups.sort(key=len, reverse=True)
    sizes, total = Counter(classes), sum(shares)
    wanted = [{name: size * share / total for name, size in sizes.items()} for share in shares]
    lacking = [dict(part) for part in wanted]
    parts: list[list[int]] = [[] for _ in shares]
    for group in groups:
        has = Counter(classes[i] for i in group)
        need = [
            sum(count * lacks[name] / wants[name] for name, count in has.items())
            for lacks, wants in zip(lacking, wanted, strict=True)
        ]
        best = need.index(max(need))
        parts[best] += group
        for name, count in has.items():
            lacking[best][name] -= count
    return parts


def _evened(part: list[int], classes: Sequence[Hashable], rng: random.Random) -> list[int]:
    by_class: dict[Hashable, list[int]] = defaultdict(list)
    for i in sorted(part):
        by_class[classes[i]].append(i)
    least = min(map(len, by_class.values()), default=0)
    return [i for indices in by_class.values() for i in rng.sample(indices, least)]
