"""Checks of single values: each takes a name and a value, and returns the value or names the remedy."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

import torch

from minato._compat import is_split_by_rank
from minato._support.values import integer_of, message_of, number_of, plain, text_of, type_name
from minato.errors import add_note, warn

_RANK_ATTRIBUTES = (("rank", "world_size"), ("rank", "num_replicas"), ("rank", "ranks"))
"""What a dataset that divides itself by rank usually calls its rank and the number of ranks."""
_NO_DATASET = re.compile(r"has no len\(\)|is not subscriptable")
"""Python's words for an object without a method that datasets have."""
_BY_COLUMN = {"pandas.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch"}

_SAMPLE = re.compile(r"raised by the sample with index (\d+)")
"""The note on an error that names its sample."""


def refuse_class(name: str, value: type) -> NoReturn:
    """Raise TypeError: a class would be called or compared in place of its object."""
    raise TypeError(
        f"{name}={value.__name__} is a class: give an object of it, {value.__name__}(...)"
    )


def refuse_one(name: str, value: object) -> None:
    """TypeError: one text or path where several are expected; the letters of a text would be taken for them."""
    if isinstance(value, (str, bytes, os.PathLike)):
        text = repr(os.fspath(value))
        more = f", as sorted(glob.glob({text}))" if "*" in text else ""
        raise TypeError(f"{name}={text} is one: give a list{more}")


def refuse_single(batch: object, error: Exception) -> None:
    """Raise Python's error again, with the remedy, if a batch_sampler has given something else than a list."""
    if not (hasattr(type(batch), "__iter__") or hasattr(type(batch), "__getitem__")):
        given = text_of(batch)
        add_note(
            error,
            f"the batch_sampler gave {given}, which is no list of indices: did you mean sampler=?",
        )
        raise error.with_traceback(None)


def check_choice(name: str, value: object, choices: tuple[object, ...], others: str = "") -> None:
    """A value is one of ``choices``; ``others`` are further ones, in words for the message."""
    try:
        is_one = value in choices
    except Exception:  # an array compares its elements
        is_one = False
    if not is_one:
        allowed = ", ".join([*map(repr, choices), *filter(None, [others])])
        nearest = did_you_mean(value, choices)
        raise ValueError(
            f"{name}={text_of(value)} is not possible: choose one of {allowed}{nearest}"
        )


def did_you_mean(value: object, choices: Iterable[object]) -> str:
    """The choice that a text resembles, as the end of a message; empty if none does."""
    texts = [each for each in choices if isinstance(each, str)]
    found = difflib.get_close_matches(value, texts, 1) if isinstance(value, str) else ()
    return f"; did you mean {found[0]!r}?" if found else ""


def explain_dataset(dataset: object, error: BaseException) -> None:
    """Add a note to the error of an object that is no dataset, or has not the sample that a sampler asked for."""
    if isinstance(error, IndexError):
        _explain_index(dataset, error)
    lack = _NO_DATASET.search(message_of(error)) if isinstance(error, TypeError) else None
    if lack is None:
        return
    needed = "__len__" if lack[0] == "has no len()" else "__getitem__"
    with contextlib.suppress(Exception):  # of an object that is asked for its attributes
        note = _note_on(dataset, needed)
        if note is not None:
            add_note(error, note)


def _explain_index(dataset: object, error: IndexError) -> None:
    notes = getattr(error, "__notes__", ())
    with contextlib.suppress(Exception):  # of a dataset without a length
        length = len(dataset)  # type: ignore[arg-type]
        for index in [int(found[1]) for found in map(_SAMPLE.fullmatch, notes) if found]:
            if index >= length:
                add_note(
                    error,
                    f"the sampler asked for index {index}, and the dataset has {length} samples: make the sampler, "
                    "and what it is given for each sample, for this dataset",
                )


def _note_on(dataset: object, needed: str) -> str | None:
    """The words for an object without a method that datasets have; None if it has the method."""
    name = type_name(dataset)
    if isinstance(dataset, type):
        name = dataset.__name__
        return f"dataset={name} is a class: give an object of it, {name}(...)"
    if dataset is None:
        return "dataset=None: give a dataset"
    if hasattr(dataset, needed):
        return None
    if hasattr(dataset, "__next__"):
        return (
            f"the dataset is an iterator of type {name}, whose samples have no index: give list(...) of it, or an "
            "IterableDataset whose __iter__ begins it"
        )
    return (
        f"the dataset is of type {name}, which has no {needed}: define it, or make the class a "
        "torch.utils.data.IterableDataset with __iter__"
    )


def warn_of_parts(dataset: object) -> None:
    """Warn of an object in the place of a dataset whose items are other parts of it than samples."""
    if isinstance(dataset, str) and os.sep in dataset:
        warn(
            f"dataset={text_of(dataset)} is a text, whose samples are its letters: give a dataset that reads what is "
            "there"
        )
    name = type_name(dataset, module=True)
    name = f"{name.partition('.')[0]}.{name.rpartition('.')[2]}"
    if name in _BY_COLUMN:
        warn(
            f"dataset is a {name}, of which dataset[i] is a column: give a dataset that returns row i"
        )


def check_shard(shard: object) -> tuple[int, int]:
    """Return a rank and the number of ranks; ValueError, TypeError: it is no such pair."""
    if isinstance(shard, (tuple, list)) and len(shard) == 2:
        rank, ranks = (check_whole("shard", each, 0) for each in shard)
        if rank is not None and ranks is not None and rank < ranks:
            return rank, ranks
    raise ValueError(f"shard={text_of(shard)} is not possible: give (rank, number of ranks)")


def check_undivided(dataset: object) -> None:
    """A dataset whose readers are dealt among ranks must not divide itself by rank: ValueError; warn if it may."""
    if is_split_by_rank(dataset):
        raise ValueError(
            f"the dataset, a {type_name(dataset)}, is the share of one rank already, and Readers(ranks=...) would "
            "divide it once more: give the whole dataset, or leave ranks out"
        )
    for rank, ranks in _RANK_ATTRIBUTES:
        count = getattr(dataset, ranks, None)
        if isinstance(getattr(dataset, rank, None), int) and isinstance(count, int) and count > 1:
            warn(
                f"the dataset, a {type_name(dataset)}, has {ranks}={count}, and Readers(ranks=...) deals its readers "
                "among ranks: if it also divides itself by rank, leave ranks out, or items are missing"
            )
            return


def check_whole(name: str, value: object, least: int | None, most: int | None = None) -> int | None:
    """An integer, or None; NumPy's integers are the integers that they equal.

    With ``least`` it is a number of something: from there to ``most``, by default the largest of 64 bits.
    """
    return None if value is None else given_whole(name, value, least, most)


def given_whole(name: str, value: object, least: int | None, most: int | None = None) -> int:
    """As :func:`check_whole`, where None is no integer."""
    found = None if isinstance(plain(value), (bool, tuple)) else integer_of(value)
    if found is None:
        raise TypeError(f"{name}={text_of(value)} is a {type_name(value)}: give an integer")
    if least is not None and found < least:
        raise ValueError(f"{name}={found} is too small: give at least {least}")
    if most is None and least is not None:
        most = (1 << 63) - 1
    if most is not None and found > most:
        raise ValueError(f"{name}={found} is too large: give at most {most}")
    return found


def check_number(name: str, value: object, what: str = "a number") -> int | float | None:
    """An integer or a float, or None; NumPy's numbers are the numbers that they equal."""
    return None if value is None else given_number(name, value, what)


def given_number(name: str, value: object, what: str = "a number") -> int | float:
    """As :func:`check_number`, where None is no number."""
    found = number_of(value)
    if found is None:
        raise TypeError(f"{name}={text_of(value)} is a {type_name(value)}: give {what}")
    return found


def check_device(device: object) -> torch.device | None:
    """A device that torch knows and this machine has, or None."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device={device!r} is a {type(device).__name__}: give a string or a torch.device"
        )
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device of torch's: {error}") from None
    if found.type == "cuda":  # counted without starting CUDA: workers are still to be forked
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise ValueError(
                f"device={device!r} is not there: torch sees {count} CUDA devices; give another, or "
                "device=None to have batches in host memory"
            )
        return found
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # also of devices that this torch lacks
        raise ValueError(f"device={device!r} is not there: {str(error).splitlines()[0]}") from None
    return found


def check_platform(*, worker_processes: bool, handled_errors: bool) -> None:
    """This system has what a loader needs: only Linux lets processes share memory and sleep as minato's do."""
    if sys.platform != "linux" and worker_processes:
        raise RuntimeError(
            f"worker processes need Linux, and this is {sys.platform}: use workers='thread' or num_workers=0"
        )
    if sys.platform == "win32" and handled_errors:
        raise RuntimeError(
            f"errors=ErrorPolicy(...) needs Linux or macOS, and this is {sys.platform}: leave it out, and catch the "
            "exceptions in the dataset"
        )
