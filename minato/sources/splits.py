"""Lists of keys for training, validation and test, made from metadata without reading samples."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any
from uuid import UUID

from minato._support.files import write_atomically
from minato._support.text import text_of, type_name
from minato._support.values import items_of, number_of, plain
from minato.checks import check_whole

__all__ = ["folds", "load_splits", "save_splits", "split"]

_FORMAT = 1
_BEGINS = f'{{"format": {_FORMAT}, "splits": '.encode()


def split(
    keys: Sequence[Any],
    shares: Mapping[str, float],
    *,
    seed: int,
    labels: Sequence[Hashable] | None = None,
    entities: Sequence[Hashable] | None = None,
    uniform: bool = False,
    weights: Mapping[Any, float] | None = None,
) -> dict[str, list[Any]]:
    """Divide keys at random.

    Args:
        keys: The keys of all samples. These, labels and entities may be lists, arrays, tensors or columns of pandas:
            their values count, by position. Missing values (None, NaN) are one class, or one entity.
        shares: The size of each split relative to the others: ``{"train": 8, "test": 2}``.
        seed: The same seed, keys and metadata give the same splits.
        labels: The class of each key: each split then gets its share of each class, as far as entities allow.
        entities: The entity of each key, for instance a patient; no entity is in two splits.
        uniform: Leave out keys at random until all classes of a split have the same size.
        weights: Leave out keys at random until the classes have the proportions of these weights, by label. A class
            with weight 0 or without a weight is left out: ``{"tumour": 1, "healthy": 3}``.

    Returns:
        The keys of each split, in the order in which they were given.

    Raises:
        ValueError: A share is not positive, lists differ in length, weights are negative or all 0, or ``uniform`` or
            ``weights`` is given without labels, or both are.
        TypeError: Keys, labels or entities have no order, or one of them cannot be compared.
    """
    sizes = {name: number_of(share) for name, share in shares.items()}
    if not sizes or not all(size is not None and 0 < size < math.inf for size in sizes.values()):
        raise ValueError(f"shares={dict(shares)} are not possible: give positive numbers")
    keys = items_of("keys", keys)
    labels = None if labels is None else _alike("labels", labels, len(keys))
    entities = None if entities is None else _alike("entities", entities, len(keys))
    if uniform and labels is None:
        raise ValueError("uniform=True makes classes equally large: give labels")
    rng = random.Random(_seed(seed))
    classes: Sequence[Hashable] = [None] * len(keys) if labels is None else labels
    if weights is not None:
        weights = _checked_weights(weights, labels, uniform)
    parts = _divide([float(size or 0) for size in sizes.values()], classes, entities, rng)
    if uniform:
        weights = dict.fromkeys(classes, 1.0)
    if weights is not None:
        parts = [_balanced(part, classes, weights, rng) for part in parts]
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
        TypeError: As for :func:`split`, or ``count`` is no integer.
    """
    count = check_whole("count", count, 2) or 2
    keys = items_of("keys", keys)
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
    """Write splits to a JSON file, whole or not at all; a new file has mode 0600.

    Raises:
        ValueError: The file exists and contains no splits; it stays unchanged.
        TypeError: A key is neither a string, an integer, bytes nor a UUID, nor a tuple of these.
    """
    content = {name: [_plain(key) for key in items_of(name, keys)] for name, keys in splits.items()}
    text = json.dumps({"format": _FORMAT, "splits": content})
    write_atomically(path, text, sync=True, recognised=lambda head: head.startswith(_BEGINS))


def load_splits(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Read a file of :func:`save_splits`; a :class:`~minato.sources.objects.Part` becomes a plain tuple.

    Raises:
        ValueError: The file contains no splits; the message names it.
    """
    text = Path(path).read_bytes()
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError
        return {name: [_key(plain) for plain in keys] for name, keys in content["splits"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{os.fspath(path)!r} holds no splits of format {_FORMAT}") from None


def _plain(key: object) -> Any:
    """A key as JSON; types that JSON lacks become an object that names the type."""
    key = plain(key)
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, UUID):
        return {"uuid": key.hex}
    if isinstance(key, tuple):
        return {"tuple": [_plain(part) for part in key]}
    if isinstance(key, str):
        return key
    if isinstance(key, Integral):
        return int(key)
    raise TypeError(
        f"the key {text_of(key)} of type {type_name(key)} cannot be saved: strings, integers, bytes, UUIDs and tuples "
        "can"
    )


def _key(plain: object) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "tuple":
        return tuple(_key(part) for part in value)
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind == "uuid":
        return UUID(hex=value)
    raise ValueError(f"a key of kind {kind!r}")


def _alike(name: str, values: Any, count: int) -> list[Hashable]:
    """The values of a sequence so that equal ones are one key of a dictionary.

    Raises:
        ValueError: They are not ``count``.
        TypeError: A value has no hash.
    """
    found = list(map(plain, items_of(name, values)))
    if len(found) != count:
        raise ValueError(f"{len(found)} {name} do not fit {count} keys: give one for each")
    for i, value in enumerate(found):
        try:
            hash(value)
        except Exception:
            raise TypeError(
                f"{name}[{i}] is {text_of(value)} of type {type_name(value)}, which cannot be compared with others: "
                "give numbers, strings or tuples of these"
            ) from None
    return found


def _seed(seed: object) -> int | str | bytes | float:
    """A seed that Python's generator takes; NumPy's integers are the integers that they equal."""
    found = plain(seed)
    if isinstance(found, (int, str, bytes, float)):
        return found
    raise TypeError(f"seed={text_of(seed)} is a {type_name(seed)}: give an integer")


def _checked_weights(
    given: Any, labels: Sequence[Hashable] | None, uniform: bool
) -> dict[Any, float]:
    weights = {plain(name): number_of(weight) for name, weight in given.items()}
    if labels is None or uniform:
        instead = "leave uniform out" if uniform else "give labels"
        raise ValueError(f"weights={dict(given)} say how large classes are: {instead}")
    unknown = weights.keys() - set(labels)
    if unknown:
        raise ValueError(f"weights={dict(given)} are for classes that no label names: {unknown}")
    values = [-1.0 if weight is None else float(weight) for weight in weights.values()]
    if not all(0 <= value < math.inf for value in values) or not any(values):
        raise ValueError(f"weights={dict(given)} are not possible: give 0 or more, not all 0")
    return dict(zip(weights, values, strict=True))


def _divide(
    shares: list[float],
    classes: Sequence[Hashable],
    entities: Sequence[Hashable] | None,
    rng: random.Random,
) -> list[list[int]]:
    """Assign each entity, the largest first, to the part that lacks most of its classes."""
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


def _balanced(
    part: list[int],
    classes: Sequence[Hashable],
    weights: Mapping[Any, float],
    rng: random.Random,
) -> list[int]:
    """The largest random subset of a part whose classes have the proportions of the weights."""
    by_class: dict[Hashable, list[int]] = defaultdict(list)
    for i in sorted(part):
        by_class[classes[i]].append(i)
    wanted = {name: weights.get(name, 0) for name in by_class}
    scale = min(
        (len(by_class[name]) / weight for name, weight in wanted.items() if weight), default=0
    )
    return [
        i
        for name, indices in by_class.items()
        for i in rng.sample(indices, min(round(scale * wanted[name]), len(indices)))
    ]
