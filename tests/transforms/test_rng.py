from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import importlib
import itertools
import json
import pickle
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import gauss as early_gauss
from random import random as early_random
from typing import Any

import numpy as np
import pytest
import torch

from minato._core import _seeding_py
from minato._support.hashes import index_hash
from minato.transforms import rng, rng_memory
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness, current, numpy_rng, python_rng, torch_rng

early_numpy = np.random.random_sample
Point = collections.namedtuple("Point", "x y")
OFFSETS = "_python_position_offset", "_numpy_gauss_offset", "_torch_state_offset"


def global_states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_global_states(held: tuple[Any, Any, Any]) -> None:
    random.setstate(held[0])
    np.random.set_state(held[1])
    torch.set_rng_state(held[2])


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    held = global_states()
    bit_generator = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bit_generator)
    set_global_states(held)
    rng._this_thread.binding = None


@pytest.fixture(params=["memory", "calls"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How states are written: where the generators keep them, or through their methods."""
    if request.param == "calls":
        for name in OFFSETS:
            monkeypatch.setattr(rng_memory, name, lambda: None)
    return str(request.param)


def compiled_seeding() -> Any:
    """Imported where it is needed: a pure build has none."""
    return importlib.import_module("minato._core._seeding_c")


@pytest.fixture(params=["pure", "compiled"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    module = _seeding_py if request.param == "pure" else compiled_seeding()
    for name in ("StateWriter", "mix_seed", "StateSnapshot"):
        monkeypatch.setattr(rng, name, getattr(module, name))
    return str(request.param)


def draws() -> list[Any]:
    """Draws along every path: objects, names bound early, scalars, arrays, cached normals."""
    return [
        random.random(),
        early_random(),
        random.gauss(0, 1),
        random.sample(range(1000), 5),
        early_gauss(0, 1),
        random.gauss(0, 1),  # an odd number of normals leaves one in the cache
        np.random.rand(),
        early_numpy(),
        np.random.normal(size=3).tolist(),
        np.random.randint(0, 256, 7, dtype=np.uint8).tolist(),
        np.random.permutation(10).tolist(),
        np.random.mtrand._rand.binomial(10, 0.3),
        torch.rand(2).tolist(),
        torch.randn(1).tolist(),
        torch.randn(3, dtype=torch.float64).tolist(),
        torch.randperm(10).tolist(),
        torch.empty(17).normal_().tolist(),
        torch.randint(0, 2**40, (2,)).tolist(),
    ]


def many_draws() -> list[Any]:
    """More than one Mersenne Twister state of each generator."""
    return [
        [random.getrandbits(32) for _ in range(1500)],
        np.random.randint(0, 2**32, 1500, dtype=np.uint32).tolist(),
        torch.empty(1500, dtype=torch.int64).random_(0, 2**20).tolist(),
    ]


def bound_draws(randomness: SampleRandomness, epoch: int, key: object) -> list[Any]:
    randomness.bind(epoch, key)
    return draws()


SAMPLES = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (7, 0), (0, -1), (0, "a"), (0, ("a", 1))]


def test_draws_depend_on_the_sample_alone(twin: str, access: str) -> None:
    expected = {sample: bound_draws(SampleRandomness(5), *sample) for sample in SAMPLES}
    randomness = SampleRandomness(5)
    for sample in [*SAMPLES[::-1], *SAMPLES[::2], *SAMPLES[3:]]:
        assert bound_draws(randomness, *sample) == expected[sample]
        many_draws()
        seed_all(3)
        random.gauss(0, 1)
        np.random.normal()
        torch.randn(1)
    flat = [str(value) for result in expected.values() for value in result[:2]]
    assert len(set(flat)) == len(flat)
    assert bound_draws(SampleRandomness(6), 0, 0) != expected[0, 0]


@pytest.mark.parametrize("_forms", ["pure-compiled"])
def test_twins_and_ways_of_access_draw_the_same(
    _forms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for writer in (_seeding_py.StateWriter, compiled_seeding().StateWriter):
        for offsets in ((), OFFSETS[:2]):
            with monkeypatch.context() as patch:
                patch.setattr(rng, "StateWriter", writer)
                for name in offsets:
                    patch.setattr(rng_memory, name, lambda: None)
                randomness = SampleRandomness(11)
                found = bound_draws(randomness, 2, 3)
                randomness.bind(2, 4)
                results.append((found, many_draws()))
    assert results == results[:1] * 4


def twister(words: Any, position: int, count: int) -> Any:
    reference = np.random.MT19937(0)
    reference.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": position}}
    return reference.random_raw(count)


def test_the_streams_are_mersenne_twisters_over_the_filled_words(access: str) -> None:
    SampleRandomness(21).bind(3, 4)
    found = many_draws()
    states = np.zeros((3, 624), np.uint32)
    for stream, words in enumerate(states):
        _seeding_py.StateWriter(21, [(words.ctypes.data, 624, stream, 4)], []).write(3, 4)
    assert found[0] == twister(states[0], 0, 1500).tolist()
    assert found[1] == twister(states[1], 0, 1500).tolist()
    # torch counts a first word as drawn.
    assert found[2] == (twister(states[2], 1, 1500) % 2**20).tolist()


def test_first_draws_are_uniform_and_uncorrelated_over_samples() -> None:
    own, other = np.random.default_rng(0), np.random.default_rng(0)
    randomness = SampleRandomness(1, owned=OwnedGenerators({"dataset": [own, other]}))
    table = np.empty((4000, 8))
    for index in range(len(table)):
        randomness.bind(0, index)
        table[index] = (
            random.random(),
            random.random(),
            np.random.rand(),
            torch.rand(()).item(),
            torch.rand(()).item(),
            own.random(),
            own.random(),
            other.random(),
        )
    for column in table.T:
        counts = np.histogram(column, 20, (0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 60  # 19 degrees of freedom: once in 300,000
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < 0.09
    correlations = np.corrcoef(table.T) - np.eye(8)
    assert abs(correlations).max() < 0.09  # over five standard deviations


def test_the_generators_of_this_interpreter_are_written_in_memory() -> None:
    """A new release that moves them must be noticed, not just be slower."""
    assert type(rng_memory.python_generator()) is rng_memory.PythonInMemory
    assert type(rng_memory.numpy_generator()) is rng_memory.NumpyInMemory
    assert type(rng_memory.torch_generator()) is rng_memory.TorchByState
    assert rng_memory.torch_generator().spans


@pytest.fixture
def probing_again() -> Iterator[None]:
    forget_probes()
    yield
    forget_probes()


def forget_probes() -> None:
    for name in (*OFFSETS, "_pcg64_order", "_torch_layout_is_known"):
        getattr(rng_memory, name).cache_clear()


@pytest.mark.usefixtures("probing_again")
@pytest.mark.parametrize("failure", ["not found", "not writable", "not CPython"])
def test_memory_that_does_not_verify_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    expected = bound_draws(SampleRandomness(5), 1, 2)
    forget_probes()
    with monkeypatch.context() as patch:
        if failure == "not found":
            patch.setattr(ctypes, "string_at", lambda address, size: bytes(size))
        elif failure == "not writable":
            patch.setattr(ctypes, "memmove", lambda to, source, count: to)
        else:
            patch.setattr(sys.implementation, "name", "other")
        randomness = SampleRandomness(5)
    assert type(randomness._all[0]) is rng_memory.PythonByCall
    assert type(randomness._all[1]) is rng_memory.NumpyByCall
    assert bool(randomness._all[2].spans) is (failure != "not found")
    assert bound_draws(randomness, 1, 2) == expected


@pytest.mark.usefixtures("probing_again")
def test_a_torch_with_another_state_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng_memory, "_TORCH_STATE_BYTES", 5064)
    randomness = SampleRandomness(5)
    assert type(randomness._all[2]) is rng_memory.TorchBySeed
    first = bound_draws(randomness, 0, 1)
    assert bound_draws(randomness, 0, 2)[-1] != first[-1]
    with randomness.saved():
        assert bound_draws(randomness, 0, 1) == first


@pytest.mark.usefixtures("probing_again")
def test_verifying_leaves_the_global_generators_alone() -> None:
    before = global_states()
    SampleRandomness(5)
    assert_state_is(before)


def assert_state_is(before: tuple[Any, Any, Any]) -> None:
    assert random.getstate() == before[0]
    for now, then in zip(np.random.get_state(), before[1], strict=True):
        assert np.array_equal(now, then)
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_publicly_visible_state_is_the_bound_one(access: str) -> None:
    np.random.normal()  # another one is kept, and shown even when it no longer counts
    randomness = SampleRandomness(5)
    randomness.bind(0, 1)
    states = global_states()
    expected = draws()
    set_global_states(states)
    assert draws() == expected
    assert states[0][2] is None
    assert states[1][2:] == (0, 0, 0.0)


def test_torch_answers_the_workers_seed() -> None:
    torch.manual_seed(123)
    randomness = SampleRandomness(5)
    randomness.bind(0, 1)
    assert torch.initial_seed() == 123
    torch.manual_seed(5)
    assert torch.initial_seed() == 5
    randomness.bind(0, 2)
    assert torch.initial_seed() == 123
    torch.manual_seed(77)
    with randomness.saved():
        randomness.bind(0, 3)
        assert torch.initial_seed() == 77
    torch.manual_seed(-3)
    expected = torch.initial_seed()
    SampleRandomness(5).bind(0, 1)
    assert torch.initial_seed() == expected


@pytest.mark.parametrize("fails", [False, True])
def test_saved_restores_everything(access: str, fails: bool) -> None:
    torch.manual_seed(41)
    randomness, before = SampleRandomness(5), global_states()
    with contextlib.suppress(KeyError), randomness.saved():
        for index in range(3):
            bound_draws(randomness, 0, index)
        assert current() == (5, 0, 2, 0)
        if fails:
            raise KeyError
    assert_state_is(before)
    assert torch.initial_seed() == 41
    assert current() is None


def test_saved_may_be_nested() -> None:
    outer, inner = SampleRandomness(1), SampleRandomness(2)
    expected = bound_draws(outer, 0, 0), bound_draws(inner, 0, 0)
    with outer.saved():
        outer.bind(0, 0)
        with inner.saved():
            assert bound_draws(inner, 0, 0) == expected[1]
        assert current() == (1, 0, 0, 0)
        assert draws() == expected[0]


def test_a_sample_can_be_continued_elsewhere(access: str) -> None:
    randomness = SampleRandomness(5)
    randomness.bind(3, "key")
    first = draws(), python_rng().random()
    rest = draws(), python_rng().random()
    randomness.bind(3, "key")
    assert (draws(), python_rng().random()) == first
    captured = pickle.dumps(randomness.capture())
    many_draws()
    elsewhere = SampleRandomness(5)
    bound_draws(elsewhere, 0, 0)
    elsewhere.restore(pickle.loads(captured))
    assert current() == (5, 3, "key", 0)
    assert (draws(), python_rng().random()) == rest


def test_another_bit_generator_of_numpy_is_bound_too() -> None:
    randomness = SampleRandomness(5)
    randomness.bind(0, 1)
    np.random.set_bit_generator(np.random.PCG64(3))
    first = bound_draws(randomness, 0, 1)
    np.random.normal()
    other = bound_draws(randomness, 0, 2)
    assert first[6:12] != other[6:12]
    np.random.set_bit_generator(np.random.PCG64(4))
    assert bound_draws(SampleRandomness(5), 0, 1) == first
    assert bound_draws(randomness, 0, 1) == first
    state = np.random.get_bit_generator().state
    with randomness.saved():
        bound_draws(randomness, 0, 2)
    assert np.random.get_bit_generator().state == state


def test_a_bit_generator_that_changes_inside_saved_is_followed() -> None:
    randomness = SampleRandomness(5)
    with randomness.saved():
        np.random.set_bit_generator(np.random.PCG64(3))
        first = bound_draws(randomness, 0, 1)
    np.random.random_sample(7)
    state = np.random.get_bit_generator().state
    with randomness.saved():
        assert bound_draws(randomness, 0, 1) == first
    assert np.random.get_bit_generator().state == state


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_global_states_as_plain_data(bits: Any) -> None:
    """Another bit generator of NumPy's is left out."""
    np.random.set_bit_generator(bits(3))
    np.random.normal()
    random.gauss(0, 1)
    torch.randn(1)
    with warnings.catch_warnings(action="error"):
        plain = json.loads(json.dumps(rng_memory.GlobalGenerators.to_plain()))
    first = draws()
    rng_memory.GlobalGenerators.load_plain(plain)
    again = draws()
    assert (first[:6], first[12:]) == (again[:6], again[12:])
    assert (first[6:12] == again[6:12]) == (bits is np.random.MT19937)


def test_threads_that_draw_meanwhile_do_no_harm() -> None:
    """numpy draws arrays without the GIL, while the state is written under it."""
    randomness = SampleRandomness(5)
    expected = bound_draws(randomness, 0, 1)
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            np.random.random_sample(100_000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        until = time.monotonic() + 1.0  # each look waits for the other thread's turn
        for index in itertools.takewhile(lambda _: time.monotonic() < until, range(10_000)):
            randomness.bind(0, index)
            assert np.random.get_state()[2] <= 624
    finally:
        stop.set()
        thread.join()
    assert bound_draws(randomness, 0, 1) == expected


# --- keys -----------------------------------------------------------------------------------


def test_integers_stand_for_themselves_and_wrap_at_64_bits() -> None:
    randomness = SampleRandomness(5)
    assert bound_draws(randomness, 0, torch.tensor(3)) == bound_draws(randomness, 0, 3)
    assert bound_draws(randomness, 0, 2**64 + 3) == bound_draws(randomness, 0, 3)
    assert bound_draws(randomness, -1, 3) == bound_draws(randomness, 2**64 - 1, 3)


OTHER_KEYS = """[
    "a", "b", "", b"a", ("a", "b"), ("ab",), ("a", ("b",)), (), None, 1.5, -1.5, (1, 2), (2, 1),
    frozenset({"u", "v", "w", "x", "y", "z"}), {"p": 1}, {"p": {"u", "v", "w", "x"}}, Point(1, "y"), Point, "\\udc80",
    ("a", "a"), 2 + 1j,
]"""


def test_other_keys_are_told_apart() -> None:
    keys = eval(OTHER_KEYS)
    words = [index_hash(key) for key in keys]
    assert len(set(words)) == len(keys)
    assert all(0 <= word < 2**64 for word in words)


def test_equal_keys_have_equal_words_whatever_they_share() -> None:
    text, other = ("".join(["some", "thing"]) for _ in range(2))
    assert text is not other
    for build in (lambda a, b: (a, b), lambda a, b: {"k": [a, b]}, lambda a, b: Point(a, b)):
        assert index_hash(build(text, text)) == index_hash(build(text, other))


@dataclasses.dataclass
class Crop:
    box: object


@pytest.mark.parametrize("hold", [lambda box: {"box": box}, lambda box: ("a", [{1: box}]), Crop])
def test_keys_with_tensors_count_by_content(hold: Callable[[object], object]) -> None:
    keys = [
        hold(torch.tensor(box)) for box in ([1, 2], [1, 2], [1, 3])
    ]  # all at once: no address comes again
    first, again, other = map(index_hash, keys)
    assert first == again != other


def test_equal_dictionaries_have_equal_words() -> None:
    assert index_hash({"x": 1, "y": np.int64(2)}) == index_hash({"y": 2, "x": 1})
    assert index_hash({"x": 1, "y": 2}) != index_hash({"x": 2, "y": 1})


def test_a_key_that_cannot_be_pickled_is_known_by_its_repr() -> None:
    class Key:
        def __init__(self, name: str) -> None:
            self.name = name
            self.lock = threading.Lock()

        def __repr__(self) -> str:
            return f"Key({self.name!r})"

    assert index_hash(Key("a")) == index_hash(Key("a"))
    assert index_hash(Key("a")) != index_hash(Key("b"))


# --- threads --------------------------------------------------------------------------------


def helper_draws() -> list[Any]:
    return [
        python_rng().random(),
        numpy_rng().random(),
        torch.rand(2, generator=torch_rng()).tolist(),
        python_rng().random(),
        numpy_rng().random(),
    ]


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def test_a_worker_thread_leaves_the_global_generators_alone() -> None:
    before = global_states()
    shared = SampleRandomness(5, bind_globals=False)
    shared.bind(0, 1)
    with shared.saved():
        shared.bind(0, 2)
        helper_draws()
    assert_state_is(before)
    assert current() == (5, 0, 1, 0)


def test_each_thread_has_its_own_sample() -> None:
    randomness = SampleRandomness(5, bind_globals=False)
    randomness.bind(2, "mine")
    assert in_a_thread(current) is None

    def other() -> Any:
        randomness.bind(3, "other")
        return current()

    assert in_a_thread(other) == (5, 3, "other", 0)
    assert current() == (5, 2, "mine", 0)


def test_outside_of_samples_helpers_follow_the_global_seeds() -> None:
    def seeded() -> list[Any]:
        seed_all(1)
        return helper_draws()

    first = in_a_thread(seeded)
    assert in_a_thread(seeded) == first
    assert first[0] != first[3]
    assert first[1] != first[4]


def with_kept_normals() -> None:
    random.gauss(0, 1)
    np.random.normal()
    torch.empty(1, dtype=torch.float64).log_normal_()
    # Bytes without a meaning change when it is called for the first time.
    torch.set_rng_state(torch.get_rng_state())


CHANGES: list[Callable[[], Any]] = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.seed(3),
    np.random.rand,
    np.random.normal,
    lambda: np.random.seed(3),
    lambda: torch.rand(1),
    lambda: torch.empty(1, dtype=torch.float64).log_normal_(),
    lambda: torch.manual_seed(torch.initial_seed()),
    python_rng,
    numpy_rng,
    torch_rng,
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_draw_is_seen_and_undone(twin: str, access: str, change: Callable[[], Any]) -> None:
    """Normals that are kept from an earlier call are drawn without a step of the generator."""
    with_kept_normals()
    randomness = SampleRandomness(5)
    randomness.mark()
    assert not randomness.drawn()
    change()
    assert randomness.drawn()
    randomness.rewind()
    assert not randomness.drawn()
    found = draws()
    randomness.rewind()
    assert draws() == found


@pytest.mark.parametrize("change", CHANGES)
def test_saved_follows_the_program(access: str, change: Callable[[], Any]) -> None:
    """What was kept for an earlier block is kept again only while the program changes nothing."""
    with_kept_normals()
    randomness = SampleRandomness(5)
    for _ in range(3):
        before = global_states()
        for index in range(2):
            with randomness.saved():
                bound_draws(randomness, 0, index)
            assert_state_is(before)
        change()


@pytest.mark.parametrize("left", [0, 1, 300, 624])
@pytest.mark.parametrize("position", [0, 1, 325, 624])
def test_a_state_seen_in_the_middle_of_a_draw_is_a_state(left: int, position: int) -> None:
    """Another thread may be drawing without the GIL: torch must neither refuse nor read behind the words."""
    kept = 7, left, True, position, bytes(4 * rng_memory.WORDS), 0, False, 0.0, False
    rng_memory.torch_generator().load([], rng_memory._torch_state(kept))
    state = torch.get_rng_state().numpy()
    new_left, new_position = state[8:12].view(np.int32)[0], state[16:24].view(np.uint64)[0]
    assert 0 < new_left <= 624
    assert new_left + new_position <= 625
    if left > 0 and left + position <= 625:
        assert (new_left, new_position) == (left, position)
    torch.rand(1000)
