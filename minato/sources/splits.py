"""Lists of keys for training, validation and test, divided by scikit-learn (extra ``splits``) by metadata alone."""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any
from uuid import UUID

from minato._support.files import write_atomically
from minato._support.values import items_of, number_of, plain, text_of, type_name
from minato.checks import given_whole

__all__ = ["folds", "load_splits", "save_splits", "split"]

_FORMAT = 1
_BEGINS = f'{{"format": {_FORMAT}, "splits": '.encode()


def split(
    keys: Sequence[object],
    shares: Mapping[str, int],
    *,
    seed: int,
    labels: Sequence[Hashable] | None = None,
    entities: Sequence[Hashable] | None = None,
) -> dict[str, list[Any]]:
    """Divide keys at random into as many folds as the shares add up to; each split gets its share of the folds.

    Args:
        keys: The keys of all samples. These, labels and entities may be lists, arrays, tensors or columns of pandas:
            their values count, by position. Missing values (None, NaN, NA) are one class, or one entity.
        shares: The size of each split relative to the others, in whole numbers: ``{"train": 8, "test": 2}``.
        seed: The same seed, keys and metadata give the same splits, with the same scikit-learn.
        labels: The class of each key: each split then gets its share of each class, as far as entities allow.
        entities: The entity of each key, for instance a patient; no entity is in two splits.

    Returns:
        The keys of each split, in the order in which they were given.

    Raises:
        ValueError: A share is no whole number, lists differ in length, or there are more folds than keys, entities, or
            keys of the largest class.
        TypeError: ``shares`` has no names; keys, labels or entities have no order, or one of them cannot be compared.
        ModuleNotFoundError: scikit-learn is not installed.
    """
    if not isinstance(shares, Mapping):
        raise TypeError(
            f"shares={text_of(shares)} have no names: give a dictionary, as {{'train': 8, 'test': 2}}"
        )
    sizes = [number_of(share) or 0 for share in shares.values()]
    if not sizes or not all(1 <= size < math.inf and size == int(size) for size in sizes):
        raise ValueError(
            f"shares={dict(shares)} are not possible: give whole numbers from 1 on, such as 4 and 1 for 80 % and 20 %"
        )
    keys = items_of("keys", keys)
    counts = [int(size) // math.gcd(*map(int, sizes)) for size in sizes]
    found = iter(_folds(len(keys), sum(counts), seed, labels, entities))
    parts = [itertools.chain(*itertools.islice(found, count)) for count in counts]
    return {name: [keys[i] for i in sorted(part)] for name, part in zip(shares, parts, strict=True)}


def folds(
    keys: Sequence[object],
    count: int,
    *,
    seed: int,
    labels: Sequence[Hashable] | None = None,
    entities: Sequence[Hashable] | None = None,
) -> list[dict[str, list[Any]]]:
    """Divide keys for a cross-validation: each is in ``"test"`` of one fold, and in ``"train"`` of the others.

    Args:
        count: Number of folds.
        keys, seed, labels, entities: As for :func:`split`, and so are the errors.
    """
    count = given_whole("count", count, 2)
    keys = items_of("keys", keys)
    found = []
    for test in map(set, _folds(len(keys), count, seed, labels, entities)):
        sides: dict[str, list[Any]] = {"train": [], "test": []}
        for i, key in enumerate(keys):
            sides["test" if i in test else "train"].append(key)
        found.append(sides)
    return found


def save_splits(path: str | os.PathLike[str], splits: Mapping[str, Sequence[object]]) -> None:
    """Write splits to a JSON file, whole or not at all; a new file has mode 0600.

    Raises:
        ValueError: The file exists and contains no splits; it stays unchanged.
        TypeError: The name of a split is no string; or a key is neither a string, an integer, bytes nor a UUID, nor a
            tuple of these.
    """
    for name in splits:
        # JSON would make a string of it, which another split may have.
        if not isinstance(name, str):
            raise TypeError(f"the name {text_of(name)} of a split is no string: give a string")
    content = {name: [_plain(key) for key in items_of(name, keys)] for name, keys in splits.items()}
    text = json.dumps({"format": _FORMAT, "splits": content})
    write_atomically(path, text, sync=True, recognised=lambda head: head.startswith(_BEGINS))


def load_splits(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Read a file of :func:`save_splits`; a :class:`~minato.sources.objects.Part` becomes a plain tuple.

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


def _folds(size: int, count: int, seed: int, labels: object, entities: object) -> list[list[int]]:
    """Divide the numbers below ``size`` into folds."""
    seed = given_whole("seed", seed, 0)
    classes = [0] * size if labels is None else _codes("labels", labels, size)
    groups = range(size) if entities is None else _codes("entities", entities, size)
    available = {
        "keys": size,
        "entities": len(set(groups)),
        "keys in the largest class": max(Counter(classes).values(), default=0),
    }
    for of, most in available.items():
        if most < count:
            raise ValueError(
                f"{most} {of} are too few for {count} folds: give more, or ask for fewer folds"
            )
    if count == 1:
        return [list(range(size))]
    try:
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "splits need the package scikit-learn: pip install 'minatoloader[splits]'",
            name="sklearn",
        ) from None
    kind = StratifiedKFold if entities is None else StratifiedGroupKFold
    with warnings.catch_warnings():
        # A class may have fewer keys than there are folds, and any number of classes is meant.
        warnings.simplefilter("ignore", UserWarning)
        divided = kind(count, shuffle=True, random_state=seed).split(classes, classes, groups)
        return [test.tolist() for _, test in divided]


def _codes(name: str, values: object, count: int) -> list[int]:
    """A number for each of ``count`` values, the same one for equal values; TypeError: one has no hash."""
    found = list(map(plain, items_of(name, values)))
    if len(found) != count:
        raise ValueError(f"{len(found)} {name} do not fit {count} keys: give one for each")
    numbers: dict[Hashable, int] = {}
    codes: list[int] = []
    try:
        for value in found:
            hash(value)
            differs = value != value  # is true for NaN and NaT, and NA itself for pandas' NA
            known = None if differs is True or differs is value else value
            codes.append(numbers.setdefault(known, len(numbers)))
    except Exception:  # of __hash__ or __eq__, which may be the user's
        i = len(codes)
        raise TypeError(
            f"{name}[{i}] is {text_of(found[i])} of type {type_name(found[i])}, which cannot be compared with others: "
            "give numbers, strings or tuples of these"
        ) from None
    return codes


def _plain(key: object) -> Any:
    """A key as JSON; types that JSON lacks become an object that names the type."""
    key = plain(key)
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, UUID):
        return {"uuid": key.hex}
    if isinstance(key, tuple):
        return {"tuple": list(map(_plain, key))}
    if isinstance(key, (str, Integral)):
        return key if isinstance(key, str) else int(key)
    raise TypeError(
        f"the key {text_of(key)} of type {type_name(key)} cannot be saved: strings, integers, bytes, UUIDs and tuples "
        "can"
    )


def _key(plain: object) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "tuple":
        return tuple(map(_key, value))
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind == "uuid":
        return UUID(hex=value)
    raise ValueError(f"a key of kind {kind!r}")
