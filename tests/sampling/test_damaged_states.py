"""States that somebody else has made or damaged: taken up, or refused in words that name the part; never a hang."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minato import DataLoader, merge_states
from tests.datasets import Numbers, indices


def loader(order: str = "strict") -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Numbers(20), 3, shuffle=True, generator=generator, order=order)


@functools.cache
def states() -> list[dict[str, Any]]:
    """One of the middle of an epoch, one of its end, one of the beginning, and one that was merged."""
    found = []
    for batches in (3, 7, 0):
        each = loader()
        assert len(list(itertools.islice(each, batches))) == batches
        found.append(each.state_dict())
    return [*found, merge_states(found[:1])]


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all parts of a state, other than the signature, which names itself."""
    found = [way] if way else []
    parts = enumerate(value) if isinstance(value, list) else getattr(value, "items", list)()
    for name, part in parts:
        found += places(part, (*way, name))
    return found


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.sampled_from([1 << 63, -(1 << 64), 1 << 100, 0.5, float("nan"), "", "AAAA", b"", (), {}]),
    st.text(max_size=4),
    st.lists(st.integers(-2, 30), max_size=3),
    st.lists(st.lists(st.integers(0, 25), min_size=2, max_size=2), max_size=3),
    st.dictionaries(
        st.sampled_from(["turn", "each", "ranges", "batches"]), st.integers(), max_size=3
    ),
)


def changed(state: dict[str, Any], way: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    part: Any = state
    for step in way[:-1]:
        part = part[step]
    if junk is DROPPED:
        del part[way[-1]]
    else:
        part[way[-1]] = junk
    return state


DROPPED = object()


def check(state: Any) -> None:
    """Load a state and run an epoch of it: what was refused is named, what was taken gives keys of the dataset."""
    each = loader()
    before = [indices(batch) for batch in loader()]
    try:
        each.load_state_dict(state)
    except (ValueError, TypeError) as error:
        message = str(error)
        if not any(words in message for words in ("the state", "state of", "a loader's state")):
            raise
        assert [indices(batch) for batch in each] == before, (
            "a refused state has changed the loader"
        )
        return
    try:
        batches = [indices(batch) for batch in itertools.islice(each, 30)]
    except ValueError as error:
        if "sampler yields other indices" not in str(error) and "damaged" not in str(error):
            raise
        return
    assert set(itertools.chain.from_iterable(batches)) <= set(range(20))
    assert each.state_dict()["finished"]


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_is_named(data: st.DataObject) -> None:
    damage(data)


def damage(data: st.DataObject) -> None:
    state = states()[data.draw(st.integers(0, 3))]
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(places(state)))
        state = changed(state, way, data.draw(JUNK | st.just(DROPPED)))
        if not places(state):
            break
    check(state)


@pytest.mark.parametrize(
    "state", [None, 5, [], {"loader": {}}, {"loader": {"kind": "minato.DataLoader"}}]
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    check(state)


@pytest.mark.parametrize(
    ("way", "junk", "message"),
    [
        (("epoch",), 1 << 70, "damaged: 'epoch' is"),
        (("finished",), DROPPED, "damaged: it has no 'finished'"),
        (("done", "ranges"), [[5, 3]], "damaged: 'done' is"),
        (("done", "delivered"), [-1, 0], "damaged: 'done' is"),
        (
            ("draw", "before_first"),
            ["AAAA", "AAAA"],
            "damaged: 'before_first' of its 'draw' is 'AAAA'",
        ),
        (("draw", "samplers"), None, "damaged: 'samplers' of its 'draw' is None"),
        (("dataset_states",), {"each": 5}, "damaged: 'dataset_states' is"),
    ],
)
def test_what_is_damaged_is_named(way: tuple[str, ...], junk: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader().load_state_dict(changed(states()[0], way, junk))
