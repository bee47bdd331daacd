"""Arguments and attributes: their names, defaults, checks, messages, and what may be done with a loader."""

from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import os
import pickle
import typing
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import BatchSampler, Dataset, SequentialSampler

import minato
from tests.datasets import Numbers, Parts, Stream, flat
from tests.parity.harness import (
    ARGUMENTS,
    AS_TORCH_IS_NOW,
    TORCH_IS_UNTIDY,
    TorchLoader,
    attempt,
    drain,
    same_for_both,
    seen_attributes,
)
from tests.parity.material import OnlyIter, identity, no_op
from tests.selection import mostly_slow

# ---- the signature --------------------------------------------------------------------------


def test_the_signature_begins_with_torchs() -> None:
    theirs = list(inspect.signature(TorchLoader.__init__).parameters.values())
    ours = list(inspect.signature(minato.DataLoader.__init__).parameters.values())
    for our, their in zip(ours, theirs, strict=False):
        assert (our.name, our.kind, our.default) == (their.name, their.kind, their.default)
    own = ours[len(theirs) :]
    assert own
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in own)


POSSIBLE = {
    "dataset": [*range(7)],
    "batch_size": 2,
    "shuffle": True,
    "sampler": [3, 1],
    "batch_sampler": [[2, 1], [0]],
    "num_workers": 1,
    "collate_fn": identity,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 9.5,
    "worker_init_fn": no_op,
    "multiprocessing_context": "spawn",
    "generator": torch.Generator(),
    "prefetch_factor": 4,
    "persistent_workers": True,
    "pin_memory_device": "cuda",
    "in_order": False,
}
KEYWORD_ONLY = {"prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"}


def test_every_argument_is_known_here() -> None:
    assert [*POSSIBLE] == ARGUMENTS


@pytest.mark.parametrize("name", POSSIBLE)
def test_each_argument_alone_and_all_before_it_by_position(name: str) -> None:
    needs = {"multiprocessing_context", "prefetch_factor", "persistent_workers"}
    more = {"num_workers": 1} if name in needs else {}
    arguments = {"dataset": POSSIBLE["dataset"], **more, name: POSSIBLE[name]}

    def by_keyword(make: Any) -> Any:
        return seen_attributes(make(**arguments))

    def by_position(make: Any) -> Any:
        defaults = inspect.signature(TorchLoader.__init__).parameters
        names = [*POSSIBLE][: [*POSSIBLE].index(name) + 1]
        return seen_attributes(
            make(*[arguments.get(other, defaults[other].default) for other in names])
        )

    expected = same_for_both(by_keyword)
    given = same_for_both(by_position)
    if name in KEYWORD_ONLY:
        assert given[1] == "TypeError"
    elif name != "multiprocessing_context":
        assert given == expected


def test_attributes_are_those_of_torch() -> None:
    theirs, ours = TorchLoader(Numbers(5)), minato.DataLoader(Numbers(5))
    assert {*vars(theirs)} <= {*vars(ours)}
    assert {*dir(theirs)} <= {*dir(ours)}
    assert isinstance(ours, TorchLoader)


# ---- checks and messages --------------------------------------------------------------------

FOUR: Any = [*range(4)]
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "unknown": ((FOUR,), {"batchsize": 3}),
    "twice": ((FOUR, 2), {"batch_size": 3}),
    "too-many": ((FOUR, *[None] * 14), {}),
    "workers-negative": ((FOUR,), {"num_workers": -1}),
    "workers-text": ((FOUR,), {"num_workers": "2"}),
    "workers-none": ((FOUR,), {"num_workers": None}),
    "timeout-negative": ((FOUR,), {"timeout": -0.5}),
    "timeout-text": ((FOUR,), {"timeout": "1"}),
    "prefetch-without-workers": ((FOUR,), {"prefetch_factor": 2}),
    "prefetch-negative": ((FOUR,), {"prefetch_factor": -2, "num_workers": 1}),
    "prefetch-text": ((FOUR,), {"prefetch_factor": "2", "num_workers": 1}),
    "persistent-without-workers": ((FOUR,), {"persistent_workers": True}),
    "shuffle-and-sampler": ((FOUR,), {"shuffle": True, "sampler": [1]}),
    "shuffle-and-batches": ((FOUR,), {"shuffle": True, "batch_sampler": [[1]]}),
    "sampler-and-batches": ((FOUR,), {"sampler": [1], "batch_sampler": [[1]]}),
    "size-and-batches": ((FOUR, 2), {"batch_sampler": [[1]]}),
    "none-and-batches": ((FOUR, None), {"batch_sampler": [[1]]}),
    "drop-and-batches": ((FOUR,), {"drop_last": True, "batch_sampler": [[1]]}),
    "drop-without-batching": ((FOUR, None), {"drop_last": True}),
    "size-zero": ((FOUR, 0), {}),
    "size-negative": ((FOUR, -1), {}),
    "size-float": ((FOUR, 2.0), {}),
    "size-bool": ((FOUR, True), {}),
    "size-text": ((FOUR, "2"), {}),
    "drop-number": ((FOUR, 2), {"drop_last": 1}),
    "drop-none": ((FOUR, 2), {"drop_last": None}),
    "shuffle-empty": (([],), {"shuffle": True}),
    "shuffle-unsized": ((OnlyIter([1]),), {"shuffle": True}),
    "context-without-workers": ((FOUR,), {"multiprocessing_context": "fork"}),
    "context-unknown": ((FOUR,), {"multiprocessing_context": "none", "num_workers": 1}),
    "context-type": ((FOUR,), {"multiprocessing_context": 3, "num_workers": 1}),
    "context-module": ((FOUR,), {"multiprocessing_context": multiprocessing, "num_workers": 1}),
    "stream-shuffle": ((Stream(5),), {"shuffle": True}),
    "stream-sampler": ((Stream(5),), {"sampler": [1]}),
    "stream-batches": ((Stream(5),), {"batch_sampler": [[1]]}),
    "stream-drop-without-batching": ((Stream(5), None), {"drop_last": True}),
}
BEGUN: dict[str, dict[str, Any]] = {
    "timeout-without-workers": {"timeout": 3},
    "prefetch-zero": {"prefetch_factor": 0, "num_workers": 1},
    "prefetch-float": {"prefetch_factor": 2.5, "num_workers": 1},
    "timeout-tensor": {"timeout": torch.tensor(60), "num_workers": 1, "sampler": [4]},
    "sampler-of-nothing": {"sampler": [None, 1]},
    "sampler-type": {"sampler": SequentialSampler},
    "generator": {"generator": 3},
    "generator-shuffled": {"generator": 3, "shuffle": True},
    "collate-of-two": {"collate_fn": lambda one, two: one},
    "dataset-set": {"dataset": {1, 2}, "sampler": [0]},
    "dataset-abstract": {"dataset": Dataset(), "sampler": [0]},
    "unhashable": {"dataset": {0: 1}, "sampler": [[0]]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name: str) -> None:
    arguments, named = REFUSED[name]
    outcome = same_for_both(lambda make: make(*arguments, **named))
    assert outcome[0] == "raised"


@AS_TORCH_IS_NOW
@TORCH_IS_UNTIDY
@pytest.mark.parametrize("name", BEGUN)
def test_refused_when_iteration_begins(name: str) -> None:
    def case(make: Any) -> Any:
        iterator = iter(make(**{"dataset": FOUR, **BEGUN[name]}))
        return [attempt(lambda: next(iterator)), attempt(lambda: next(iterator))]

    outcome = same_for_both(case)
    assert outcome[0] == "raised" or outcome[1][0][0] == "tuple", outcome


def test_own_arguments_are_checked_before_torchs() -> None:
    with pytest.raises(ValueError, match="workers='fiber' is not possible"):
        minato.DataLoader(FOUR, num_workers=-1, workers="fiber")


@pytest.mark.parametrize("more", [0, 1, 30])
def test_warning_about_too_many_workers(more: int) -> None:
    """It comes with the loader, and again with each iterator."""
    cores = len(os.sched_getaffinity(0))

    def case(make: Any) -> Any:
        loader = make(FOUR, num_workers=cores + more)
        iterated = [drain(iter(loader)) for _ in range(2 if more == 1 else 0)]
        return loader.check_worker_number_rationality(), iterated

    same_for_both(case)


# ---- attributes -----------------------------------------------------------------------------

FROZEN = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_attributes(name: str) -> None:
    own = [type("Own", (kind,), {}) for kind in (TorchLoader, minato.DataLoader)]
    for theirs, ours in ((TorchLoader, minato.DataLoader), own):
        their = attempt(lambda kind=theirs: setattr(kind(FOUR), name, 3))
        our = attempt(lambda kind=ours: setattr(kind(FOUR), name, 3))
        assert our == their
        assert our[1] == "ValueError"


CHANGES: dict[str, Any] = {
    "collate_fn": lambda samples: [sum(samples)],
    "num_workers": 1,
    "timeout": 90,
    "worker_init_fn": no_op,
    "generator": torch.Generator().manual_seed(3),
    "pin_memory": True,
    "pin_memory_device": "cuda",
    "prefetch_factor": 1,
    "in_order": True,
    "multiprocessing_context": None,
    "label": "a new attribute",
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_attributes_may_be_changed_between_passes(name: str) -> None:
    before = {
        "in_order": {"num_workers": 2, "in_order": False},
        "num_workers": {"num_workers": 2},
        "pin_memory": {},
        "pin_memory_device": {"pin_memory": True},
    }.get(name, {"num_workers": 1})

    def case(make: Any) -> Any:
        loader = make([*range(12)], 2, shuffle=True, **before)
        if name != "in_order":
            assert len([*loader]) == 6
        if name == "generator":
            CHANGES[name].manual_seed(3)
        setattr(loader, name, CHANGES[name])
        return seen_attributes(loader), drain(iter(loader))

    same_for_both(case)


@pytest.mark.parametrize("number", [3, 1, 0])
def test_persistent_workers_stay_whatever_their_number_becomes(number: int) -> None:
    def case(make: Any) -> Any:
        loader = make(Parts(12), 2, num_workers=2, persistent_workers=True)
        found = [drain(iter(loader))]
        loader.num_workers = number
        found += [drain(iter(loader)), drain(iter(loader))]
        loader._iterator = None
        return found, drain(iter(loader))

    same_for_both(case)


@pytest.mark.parametrize("own", [{}, {"transforms": [str]}], ids=["plain", "transforms"])
def test_a_collate_fn_that_a_subclass_keeps_elsewhere_may_be_changed(own: Any) -> None:
    def case(make: Any) -> Any:
        class Keeping(make):  # type: ignore[misc]
            @property
            def collate_fn(self) -> Any:
                return self.kept

            @collate_fn.setter
            def collate_fn(self, value: Any) -> None:
                self.kept = value

        given = own if make is minato.DataLoader else {}
        loader = Keeping(FOUR if given else [*map(str, FOUR)], 2, **given)
        found = [*loader]
        loader.collate_fn = "".join
        assert "collate_fn" not in vars(loader)
        return found, [*loader]

    same_for_both(case)


@AS_TORCH_IS_NOW
@TORCH_IS_UNTIDY
@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"num_workers": 1, "prefetch_factor": 2}, None),
        ({"num_workers": 1}, "TypeError"),
        ({"num_workers": -2}, "AssertionError"),
    ],
)
def test_number_of_workers_may_be_changed_from_zero(changes: Any, outcome: str | None) -> None:
    def case(make: Any) -> Any:
        loader = make(FOUR, 2)
        for name, value in changes.items():
            setattr(loader, name, value)
        return drain(iter(loader))

    assert outcome in (None, same_for_both(case)[1])


# ---- the multiprocessing context ------------------------------------------------------------


class StartMethod(Dataset[str]):
    """How the worker was started."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return type(multiprocessing.current_process()).__name__


@mostly_slow("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_context_by_name_and_by_object(method: str) -> None:
    objects = [each.get_context(method) for each in (multiprocessing, torch.multiprocessing)]
    for context in (method, *objects):
        same_for_both(
            lambda make: [*make(StartMethod(), num_workers=1, multiprocessing_context=context)]  # noqa: B023
        )
        loader = minato.DataLoader(FOUR, num_workers=1, multiprocessing_context=context)
        assert loader.multiprocessing_context is context or context is method


def test_multiprocessing_context_may_be_set_again() -> None:
    def case(make: Any) -> Any:
        loader = make(StartMethod(), num_workers=1, multiprocessing_context="spawn")
        seen = [type(loader.multiprocessing_context)]
        for other in ("forkserver", "sideways", 7, None, "fork"):
            seen.append(
                attempt(lambda other=other: setattr(loader, "multiprocessing_context", other))
            )
            seen.append(type(loader.multiprocessing_context))
        return seen, [*loader]

    same_for_both(case)
    same_for_both(lambda make: setattr(make(FOUR), "multiprocessing_context", "fork"))
    same_for_both(lambda make: setattr(make(FOUR), "multiprocessing_context", None))


# ---- the class ------------------------------------------------------------------------------


def test_generic() -> None:
    for kind in (TorchLoader, minato.DataLoader):
        alias = kind[int]
        assert typing.get_origin(alias) is kind
        assert typing.get_args(alias) == (int,)
        loader = alias(Numbers(3), batch_size=2)
        assert type(loader) is kind
        assert loader.__orig_class__ == alias

        class Integers(kind[int]):  # type: ignore[valid-type, misc]
            pass

        assert flat(Integers(Numbers(3), batch_size=2)) == [0, 1, 2]
        assert type("Made", (kind,), {}).__module__ == __name__  # by which pickle finds it


# ---- copies ---------------------------------------------------------------------------------


def rebuilt(loader: Any, **changed: Any) -> Any:
    """A new loader from the attributes of another one, as trainers do."""
    names = inspect.signature(type(loader).__init__).parameters
    arguments = {name: getattr(loader, name) for name in names if name not in ("self", "shuffle")}
    if isinstance(loader.batch_sampler, BatchSampler):
        del arguments["batch_sampler"]
    else:
        for name in ("batch_size", "sampler", "drop_last"):
            del arguments[name]
    return type(loader)(**{**arguments, **changed})


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 3},
    "shuffled": {"batch_size": 3, "shuffle": True, "drop_last": True},
    "sampler": {"sampler": [1, 2, 4], "collate_fn": identity},
    "batches": {"batch_sampler": [[1, 2], [3]]},
    "alone": {"batch_size": None},
    "workers": {"num_workers": 2, "batch_size": 2, "timeout": 90, "worker_init_fn": no_op},
    "prefetching": {"num_workers": 1, "prefetch_factor": 1, "multiprocessing_context": "fork"},
    "persistent": {"num_workers": 1, "persistent_workers": True, "in_order": False},
}


@pytest.mark.parametrize("name", LOADERS)
def test_loader_made_from_the_attributes_of_another(name: str) -> None:
    options = LOADERS[name]
    changed = {"batch_sampler": None} if options.get("batch_size", 1) is None else {}

    def case(make: Any) -> Any:
        loader = rebuilt(make(Numbers(7), **options), **changed)
        return seen_attributes(loader), drain(iter(loader))

    same_for_both(case)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy"])
def test_loader_that_was_not_iterated_can_be_copied(name: str, how: str) -> None:
    twin = {
        "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
    }[how]

    def case(make: Any) -> Any:
        other = twin(make(Numbers(7), **LOADERS[name]))
        changed = attempt(lambda: setattr(other, "dataset", 1))
        return seen_attributes(other), drain(iter(other)), changed

    same_for_both(case)


def test_loader_with_an_iterator_cannot_be_pickled_as_with_torch() -> None:
    for kind in (TorchLoader, minato.DataLoader):
        loader = kind(Numbers(4), num_workers=1, persistent_workers=True)
        iterator = iter(loader)
        with pytest.raises(NotImplementedError) as caught:
            pickle.dumps(loader)
        assert caught.value.args == ("{} cannot be pickled", type(iterator).__name__)
        del iterator, loader
        gc.collect()


# ---- length ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": None}], ids=str)
def test_length_follows_the_dataset_and_the_sampler(options: dict[str, Any]) -> None:
    def case(make: Any) -> Any:
        data = [*range(7)]
        loader = make(data, **{"batch_size": 3, **options})
        seen = [len(loader)]
        data += [7, 8]
        iterator = iter(loader)
        seen += [len(loader), len(iterator)]
        data.append(9)
        return [*seen, len(iterator), drain(iterator), len(loader)]

    same_for_both(case)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "dataset"])
def test_length_of_what_has_none(name: str) -> None:
    arguments = {"dataset": FOUR, name: OnlyIter([[0], [1]])}

    def case(make: Any) -> Any:
        loader = make(**arguments)
        lengths = attempt(lambda: len(loader)), attempt(lambda: len(iter(loader)))
        return lengths, hasattr(loader, "__len__")

    same_for_both(case)
    same_for_both(lambda make: make(**arguments) and None)  # bool(loader) asks for the length
