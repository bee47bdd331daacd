from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato.sampling.epoch import Seeds

TWIN = "seeding"
WORDS, GUARD = 624, 0x5A


integers = st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**64 - 1), st.integers())
widths = st.sampled_from([4, 8])


def filled(
    twin: ModuleType, index: int, stream: int = 0, words: int = WORDS, width: int = 4
) -> Any:
    """The state that a sample's key gives."""
    memory = np.full(words * width + 8, GUARD, np.uint8)
    block = memory.ctypes.data, words, stream, width
    twin.StateWriter(twin.spread_seed(1), [block], []).write(2, index)
    assert (memory[words * width :] == GUARD).all()
    return memory[: words * width].view(f"u{width}")


def bits(words: Any) -> Any:
    """The 32 bits of each word, one row a word."""
    return np.unpackbits(words.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1)


@given(seed=integers, epoch=integers, index=integers)
def test_twins_mix_alike(
    twins: tuple[ModuleType, ModuleType], seed: int, epoch: int, index: int
) -> None:
    pure, compiled = twins
    key = pure.mix_seed(seed, epoch, index)
    assert 0 <= key < 2**64
    assert compiled.mix_seed(seed, epoch, index) == key
    assert pure.spread_seed(seed) == compiled.spread_seed(seed)
    for twin in twins:
        assert twin.sample_key(twin.spread_seed(seed), epoch, index) == key


@given(index=integers, stream=integers, words=st.integers(0, 700), width=widths)
def test_twins_fill_alike(
    twins: tuple[ModuleType, ModuleType], index: int, stream: int, words: int, width: int
) -> None:
    pure, compiled = (filled(twin, index, stream, words, width) for twin in twins)
    assert np.array_equal(pure, compiled)


def test_results_are_the_same_in_every_release(twin: ModuleType) -> None:
    """A seed that was written down must give the same samples with the next version."""
    assert twin.mix_seed(1, 2, 3) == 0xD0734750FDE362B3
    assert filled(twin, 3, 2)[[0, 1, 623]].tolist() == [3359959490, 3010290880, 2970112022]


def test_one_index_has_one_key_in_an_epoch(twin: ModuleType) -> None:
    keys = {twin.mix_seed(7, 0, index) for index in range(20_000)}
    assert len(keys) == 20_000


def test_every_input_bit_reaches_every_key_bit(twin: ModuleType) -> None:
    rng = np.random.default_rng(1)
    inputs = [tuple(int(x) for x in row) for row in rng.integers(0, 2**63, (40, 3))]
    for which in range(3):
        for bit in range(64):
            flips = np.zeros(64)
            for values in inputs:
                flipped = list(values)
                flipped[which] ^= 1 << bit
                changed = twin.mix_seed(*values) ^ twin.mix_seed(*flipped)
                flips += [(changed >> i) & 1 for i in range(64)]
            # 40 fair coins: fewer than 4 or more than 36 heads is one case in 10^8 or rarer.
            assert flips.min() >= 4
            assert flips.max() <= 36


@given(index=integers, stream=integers, words=st.integers(1, WORDS), width=widths)
def test_a_word_depends_on_its_place_not_on_length_or_width_and_the_first_is_never_0(
    twin: ModuleType, index: int, stream: int, words: int, width: int
) -> None:
    found = filled(twin, index, stream, words, width)
    assert np.array_equal(found, filled(twin, index, stream)[:words])
    assert found[0] >= 0x80000000


def look_random(ones: Any) -> bool:
    """Within six standard deviations, for each bit by itself and for each pair of neighbours in place."""
    most = 3 / len(ones) ** 0.5
    shares = ones.mean(axis=0), (ones[1:] == ones[:-1]).mean(axis=0)
    return all(abs(share - 0.5).max() < most for share in shares)


def test_the_words_of_one_key_look_random(twin: ModuleType) -> None:
    assert look_random(np.concatenate([bits(filled(twin, index)[1:]) for index in range(60)]))


@pytest.mark.parametrize("place", [1, 2, 300, 623])
def test_one_place_looks_random_over_consecutive_samples(twin: ModuleType, place: int) -> None:
    words = np.array([filled(twin, index)[place] for index in range(2000)])
    assert look_random(bits(words))
    counts = np.bincount(words >> 27, minlength=32)
    chi_square = ((counts - 62.5) ** 2 / 62.5).sum()
    assert chi_square < 80  # 31 degrees of freedom: exceeded once in 300,000


@given(index=integers)
def test_streams_and_keys_are_unrelated(twin: ModuleType, index: int) -> None:
    words = filled(twin, index, 0)
    for other in (filled(twin, index, 1), filled(twin, index, 2), filled(twin, index + 1, 0)):
        # 624 words of 32 fair coins: 71 differ from the mean by one standard deviation.
        assert abs((bits(words) == bits(other)).sum() - 9984) < 6 * 71
        assert len(np.intersect1d(words, other)) <= 3


@pytest.mark.parametrize(
    ("named", "words", "width"),
    [*(("width", 1, width) for width in (0, 2, 16, -4)), ("words", -1, 4), ("words", 2**31, 4)],
)
def test_other_widths_and_impossible_lengths_are_refused(
    twin: ModuleType, named: str, words: int, width: int
) -> None:
    memory = np.zeros(8, np.uint64)
    with pytest.raises(ValueError, match=named):
        twin.StateWriter(twin.spread_seed(1), [(memory.ctypes.data, words, 1, width)], [])


@pytest.mark.parametrize("value", [1.0, "1", None])
def test_keys_are_integers(twin: ModuleType, value: object) -> None:
    with pytest.raises(TypeError):
        twin.mix_seed(value, 0, 0)
    with pytest.raises(TypeError):
        twin.StateWriter(value, [], [])
    with pytest.raises(TypeError):
        twin.StateWriter(1, [], []).write(0, value)


@given(seed=integers, epoch=integers, index=integers, data=st.data())
def test_a_state_writer_fills_every_block_and_cell(
    twin: ModuleType, seed: int, epoch: int, index: int, data: st.DataObject
) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 650), integers, widths), max_size=4))
    values = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3))
    memories = [np.zeros(words + 1, f"u{width}") for words, _, width in shapes]
    cells = np.full(4, 99, np.int32)
    writer = twin.StateWriter(
        seed,
        [(m.ctypes.data, *shape) for m, shape in zip(memories, shapes, strict=True)],
        [(cells.ctypes.data + 4 * i, value) for i, value in enumerate(values)],
    )
    writer.write(epoch, index)
    for memory, (words, stream, width) in zip(memories, shapes, strict=True):
        alone = np.zeros(words + 1, f"u{width}")
        one = twin.StateWriter(seed, [(alone.ctypes.data, words, stream, width)], [])
        one.write(epoch, index)
        assert np.array_equal(memory, alone)
        assert memory[words] == 0
    assert cells.tolist() == [*values, *[99] * (4 - len(values))]


@given(
    parts=st.lists(st.binary(max_size=20), max_size=4),
    changed=st.integers(0, 79),
    bit=st.integers(0, 7),
)
def test_a_snapshot_sees_each_change(
    twin: ModuleType, parts: list[bytes], changed: int, bit: int
) -> None:
    memory = np.frombuffer(b"".join(part.ljust(20, b"-") for part in parts) + b"-", np.uint8).copy()
    snapshot = twin.StateSnapshot(
        [(memory.ctypes.data + 20 * i, len(part)) for i, part in enumerate(parts)]
    )
    memory[changed % len(memory)] ^= 1 << bit
    part, place = divmod(changed % len(memory), 20)
    watched = part < len(parts) and place < len(parts[part])
    assert snapshot.holds() is not watched
    assert snapshot.copies() == parts
    memory[:] = 7
    snapshot.take()
    assert snapshot.holds()


def test_a_snapshot_has_parts_without_an_address(twin: ModuleType) -> None:
    parts = [float("nan"), None]
    first = [*parts]
    snapshot = twin.StateSnapshot([], [lambda: parts[0], lambda: parts[1]])
    assert snapshot.holds()
    parts[1] = 2.0
    assert not snapshot.holds()
    assert snapshot.rests == first
    snapshot.take()
    assert snapshot.holds()
    assert snapshot.rests == parts


@given(st.integers(-(2**63), 2**63 - 1), *3 * [st.integers(-(2**40), 2**40)])
def test_an_epoch_has_two_numbers(
    twin: ModuleType, seed: int, drawn_epoch: int, epoch: int, index: int
) -> None:
    """Its randomness is drawn by one, and the user knows it by the other."""
    other = Seeds(seed, drawn_epoch - epoch).of(epoch)
    assert -(2**63) <= other < 2**63
    assert twin.sample_key(other, epoch, index) == twin.mix_seed(seed, drawn_epoch, index)
