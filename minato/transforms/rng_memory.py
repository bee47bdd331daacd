"""Writes the states of random generators for a sample: the three global ones, and those that objects own.

Nearly all are Mersenne Twisters: 624 words and a position. A call of ``seed`` for every sample costs microseconds, so a
new state is written instead: torch's with ``set_state``, those of ``random`` and NumPy into their memory. A probe on
private instances finds the addresses once per process, and verifies them by reading and writing. If it fails, or with
``MINATO_DIRECT_MEMORY=0``, ``setstate`` writes the same states, more slowly. The same memory shows whether code has
drawn.

A state is written with its position at the *start* of the new words: the first 624 draws are these words, tempered,
without a twist. A position inside the words is also safe for a thread that draws from NumPy without the GIL meanwhile.
"""

from __future__ import annotations

import _random
import base64
import ctypes
import functools
import pickle
import random
import struct
import sys
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from minato._compat import bit_generator_of, may_access_memory, numpy_state, python_state
from minato._core import StateSnapshot

WORDS = 624
PYTHON_STREAM, NUMPY_STREAM, TORCH_STREAM = 0, 1, 2

Rest = TypeVar("Rest")


class MemoryGenerator(Generic[Rest]):
    """Memory of a generator, to fill for a sample: here it is the state itself.

    ``Rest`` is the part of the state outside the spans; it supports pickling and ``==``.

    Attributes:
        blocks: ``(address, words, stream, width)`` for ``StateWriter``.
        cells: Further words for it, each an address and a value.
        spans: ``(address, nbytes)`` of the memory that holds the state, for ``StateSnapshot``.
        is_whole: Whether the spans hold the whole state.
        is_writable: Whether the spans may be written.
    """

    blocks: list[tuple[int, int, int, int]]
    cells: Sequence[tuple[int, int]] = ()
    spans: Sequence[tuple[int, int]] = ()
    is_whole = False
    is_writable = True

    @property
    def takes_effect_at_once(self) -> bool:
        """Whether the filled memory is the state, so that ``apply`` and ``set_rest`` do nothing."""
        return self.is_whole and self.is_writable

    def apply(self) -> object:
        """Make the filled memory the generator's state."""

    def rest(self) -> Rest | None:
        """Return a copy of the part of the state outside the spans."""
        return None

    def keep(self) -> Rest | None:
        """Return a copy of the part outside the spans that may be written."""
        return self.rest()

    def set_rest(self, rest: Rest) -> None:
        """Set the part that :meth:`rest` or :meth:`keep` returned."""

    def save(self) -> tuple[list[bytes], Rest | None]:
        """Return a copy of the whole state: of its spans, and its rest."""
        return list(starmap(ctypes.string_at, self.spans)), self.rest()

    def load(self, copies: Iterable[bytes], rest: Rest) -> None:
        """Load a state from copies of its spans and its rest, taken in a process of the same kind."""
        for (address, nbytes), copy in zip(self.spans, copies, strict=True):
            ctypes.memmove(address, copy, nbytes)
        self.set_rest(rest)

    def is_at(self, copies: list[bytes], rest: Rest | None) -> bool:
        """Whether the state is that which ``load`` would load."""
        return self.save() == (copies, rest)


def _may_probe() -> bool:
    return sys.implementation.name == "cpython" and may_access_memory()


class _ByCall(MemoryGenerator[Rest]):
    """Words to fill, which ``apply`` makes a state by methods of the generator."""

    def __init__(self, words: int, stream: int) -> None:
        self._words = np.zeros(words, np.uint32)
        self.blocks = [(self._words.ctypes.data, words, stream, 4)]


# --- random ---------------------------------------------------------------------------------


@functools.cache
def _python_position_offset() -> int | None:
    """Return the offset of the position in a ``random.Random``; its 624 words follow. None if unknown."""
    if not _may_probe():
        return None
    probe = random.Random()
    states = [np.arange(n, n + WORDS + 1, dtype=np.uint32) for n in (0x1234567, 0x2345678)]
    states[0][0], states[1][0] = 77, 78
    memory = _set_python_state(probe, states[0])
    offset = memory.find(states[0].tobytes())
    if offset < 0:
        return None
    ctypes.memmove(id(probe) + offset, states[1].tobytes(), states[1].nbytes)
    expected = (*states[1][1:].tolist(), int(states[1][0]))
    return offset if probe.getstate() == (3, expected, None) else None


def _set_python_state(generator: random.Random, state: np.ndarray) -> bytes:
    generator.setstate((3, (*state[1:].tolist(), int(state[0])), None))
    return ctypes.string_at(id(generator), _random.Random.__basicsize__)


def _python_state_is_at(offset: int, generator: random.Random) -> bool:
    if type(generator) is random.Random:
        return True
    _, words, _ = generator.getstate()
    state = np.array([words[-1], *words[:-1]], np.uint32).tobytes()
    return ctypes.string_at(id(generator) + offset, len(state)) == state


class PythonInMemory(MemoryGenerator[float | None]):
    """The state of a ``random.Random``, in the memory of CPython's object."""

    def __init__(self, generator: random.Random, position_offset: int, stream: int) -> None:
        self._generator: Any = generator  # typeshed lacks gauss_next
        address = id(generator) + position_offset
        self.blocks = [(address + 4, WORDS, stream, 4)]
        self.cells = [(address, 0)]
        self.spans = [(address, 4 + 4 * WORDS)]
        # Called for each batch or sample: without a frame of Python.
        self.rest = functools.partial(getattr, generator, "gauss_next")  # type: ignore[method-assign]
        self.apply = functools.partial(setattr, generator, "gauss_next", None)  # type: ignore[method-assign]

    def set_rest(self, rest: float | None) -> None:
        self._generator.gauss_next = rest


class PythonByCall(_ByCall[tuple[object, ...]]):
    """The same by ``setstate``."""

    def __init__(self, generator: random.Random, stream: int) -> None:
        super().__init__(WORDS, stream)
        self._generator = generator

    def apply(self) -> None:
        self._generator.setstate((3, (*self._words.tolist(), 0), None))

    def rest(self) -> tuple[object, ...]:
        return self._generator.getstate()

    def set_rest(self, rest: tuple[object, ...]) -> None:
        self._generator.setstate(rest)


def python_generator(
    generator: random.Random | None = None, stream: int = PYTHON_STREAM
) -> PythonInMemory | PythonByCall:
    """Return the memory of a ``random.Random``, by default the one behind the module's functions."""
    generator = python_state() if generator is None else generator
    offset = _python_position_offset()
    if offset is None or not _python_state_is_at(offset, generator):
        return PythonByCall(generator, stream)
    return PythonInMemory(generator, offset, stream)


# --- numpy ----------------------------------------------------------------------------------

_SAVED_GAUSS = struct.Struct("=i4xd")


@functools.cache
def _numpy_gauss_offset() -> int | None:
    """Return the offset of ``has_gauss`` in a ``RandomState``; its value follows 8 bytes later. None if unknown."""
    if not _may_probe():
        return None
    probe: Any = np.random.RandomState()
    first, second = (np.arange(n, n + WORDS, dtype=np.uint32) for n in (0x1234567, 0x2345678))
    gauss = 0.8190348
    probe.set_state(("MT19937", first, 7, 1, gauss))
    address = probe._bit_generator.ctypes.state_address
    if ctypes.string_at(address, 4 * WORDS + 4) != first.tobytes() + struct.pack("=i", 7):
        return None
    memory = ctypes.string_at(id(probe), type(probe).__basicsize__)
    offset = memory.find(_SAVED_GAUSS.pack(1, gauss)[8:]) - 8
    if offset < object.__basicsize__ or memory[offset : offset + 4] != struct.pack("=i", 1):
        return None
    ctypes.memmove(address, second.tobytes() + struct.pack("=i", 9), 4 * WORDS + 4)
    ctypes.c_int32.from_address(id(probe) + offset).value = 0
    _, words, position, has_gauss, kept = probe.get_state()
    verified = np.array_equal(words, second) and (position, has_gauss, kept) == (9, 0, gauss)
    return offset if verified else None


class NumpyByCall(_ByCall[bytes]):
    """The same by ``set_state``, of any bit generator."""

    def __init__(self, generator: np.random.RandomState, stream: int) -> None:
        self._generator = generator
        self._kind = type(bit_generator_of(generator))
        self._twister = self._kind is np.random.MT19937
        super().__init__(WORDS if self._twister else 8, stream)

    def apply(self) -> None:
        if self._twister:
            self._generator.set_state(("MT19937", self._words, 0, 0, 0.0))
        else:
            self._generator.set_state(self._kind(self._words.tolist()).state)

    def rest(self) -> bytes:
        return pickle.dumps(self._generator.get_state(legacy=False))  # arrays do not support ==

    def set_rest(self, rest: bytes) -> None:
        self._generator.set_state(pickle.loads(rest))


def numpy_generator(
    generator: np.random.RandomState | None = None, stream: int = NUMPY_STREAM
) -> NumpyInMemory | NumpyByCall:
    """Return the memory of a ``RandomState``, by default the one behind the functions of ``numpy.random``."""
    generator = numpy_state() if generator is None else generator
    offset = _numpy_gauss_offset()
    if (
        offset is None
        or type(generator) is not np.random.RandomState
        or type(bit_generator_of(generator)) is not np.random.MT19937
    ):
        return NumpyByCall(generator, stream)
    return NumpyInMemory(generator, offset, stream)


@functools.cache
def _pcg64_order() -> str | None:
    """Return the order of 64-bit halves in a PCG64's memory: ``<`` low first, ``>`` high first; None if unknown.

    The memory holds a pointer to state and increment, a flag, and a cached half of a word.
    """
    if not _may_probe() or sys.byteorder != "little":
        return None
    probe: Any = np.random.PCG64(0)
    numbers = [(n << 96 | n << 40 | n, n << 70 | 2 * n + 1, n) for n in (0x1234567, 0x2345678)]
    (state, increment, kept), second = numbers
    _set_pcg64(probe, state, increment, kept)
    address: int = probe.ctypes.state_address
    if ctypes.string_at(address + 8, 8) != struct.pack("=iI", 1, kept):
        return None
    words = ctypes.c_uint64.from_address(address).value
    for order in "<>":
        if ctypes.string_at(words, 32) == _pcg64_words(order, state, increment):
            ctypes.memmove(words, _pcg64_words(order, *second[:2]), 32)
            ctypes.memmove(address + 8, struct.pack("=iI", 1, second[2]), 8)
            found = probe.state
            seen = (*found["state"].values(), found["uinteger"])
            return order if seen == second else None
    return None


def _set_pcg64(generator: np.random.PCG64, state: int, increment: int, kept: int) -> None:
    generator.state = {
        "bit_generator": type(generator).__name__,
        "state": {"state": state, "inc": increment},
        "has_uint32": 1,
        "uinteger": kept,
    }


def _pcg64_words(order: str, *numbers: int) -> bytes:
    words = [number >> shift & _LOW_64 for number in numbers for shift in _HALVES[order]]
    return struct.pack("=4Q", *words)


def _pcg64_increment(stream: int) -> int:
    """Return the increment of a stream, which must be odd; streams have different states by it."""
    return stream << 64 | stream | 1


_LOW_64 = (1 << 64) - 1
_HALVES = {"<": (0, 64), ">": (64, 0)}


class BitsInMemory(MemoryGenerator[None]):
    """The state of NumPy's MT19937, PCG64 or PCG64DXSM, in the memory of the bit generator."""

    is_whole = True

    def __init__(self, bits: np.random.BitGenerator, order: str, stream: int) -> None:
        self._kept_alive = bits
        address: int = bits.ctypes.state_address
        if type(bits) is np.random.MT19937:
            self.blocks = [(address, WORDS, stream, 4)]
            self.cells = [(address + 4 * WORDS, 0)]
            self.spans = [(address, 4 * WORDS + 4)]
            return
        words = ctypes.c_uint64.from_address(address).value
        self.blocks = [(words, 4, stream, 4)]
        halves = struct.unpack("=8i", _pcg64_words(order, 0, _pcg64_increment(stream)))
        self.cells = [(words + 4 * i, halves[i]) for i in range(4, 8)]
        self.cells += [(address + 8, 0), (address + 12, 0)]
        self.spans = [(words, 32), (address + 8, 8)]


class NumpyInMemory(BitsInMemory):
    """The legacy state of numpy: an MT19937 at its documented address, and a cached normal."""

    def __init__(self, generator: np.random.RandomState, gauss_offset: int, stream: int) -> None:
        super().__init__(bit_generator_of(generator), "", stream)
        gauss = id(generator) + gauss_offset
        # The flag of the cached normal and both halves of its value, which get_state() returns even if the flag is 0.
        self.cells = [*self.cells, (gauss, 0), (gauss + 8, 0), (gauss + 12, 0)]
        self.spans = [*self.spans, (gauss, _SAVED_GAUSS.size)]
        self._generator = generator  # it is kept alive


class BitsByCall(_ByCall[bytes]):
    """The state of any bit generator, by its attribute."""

    def __init__(self, bits: object, stream: int) -> None:
        super().__init__(WORDS if type(bits) is np.random.MT19937 else 8, stream)
        self._bits: Any = bits
        self._increment = _pcg64_increment(stream)

    def apply(self) -> None:
        kind = type(self._bits)
        low, high, third, *_ = self._words.view(np.uint64).tolist()
        if kind is np.random.MT19937:
            key = self._words.copy()
            fresh: Any = {"bit_generator": "MT19937", "state": {"key": key, "pos": 0}}
        elif kind in (np.random.PCG64, np.random.PCG64DXSM):
            state = {"state": high << 64 | low, "inc": self._increment}
            fresh = {"bit_generator": kind.__name__, "state": state, **_NOTHING_KEPT}
        elif kind is np.random.Philox:  # a function of its key
            key = np.array([low, high], np.uint64)
            fresh = _PHILOX | {"state": {"counter": np.zeros(4, np.uint64), "key": key}}
        elif kind is np.random.SFC64:
            words = np.array([low, high, third, 1], np.uint64)
            fresh = _SFC64 | {"state": {"state": words}}
        else:
            fresh = kind(self._words.tolist()).state
        self._bits.state = fresh

    def rest(self) -> bytes:
        return pickle.dumps(self._bits.state)  # arrays do not support ==

    def set_rest(self, rest: bytes) -> None:
        self._bits.state = pickle.loads(rest)


_NOTHING_KEPT = {"has_uint32": 0, "uinteger": 0}
_PHILOX: dict[str, Any] = {
    "bit_generator": "Philox",
    "buffer": np.zeros(4, np.uint64),
    "buffer_pos": 4,
    **_NOTHING_KEPT,
}
_SFC64: dict[str, Any] = {"bit_generator": "SFC64", **_NOTHING_KEPT}


def _bits_generator(bits: np.random.BitGenerator, stream: int) -> BitsInMemory | BitsByCall:
    order = _pcg64_order()
    known = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM)
    if order is None or _numpy_gauss_offset() is None or type(bits) not in known:
        return BitsByCall(bits, stream)
    return BitsInMemory(bits, order, stream)


# --- torch ----------------------------------------------------------------------------------

# Of get_state(): the_initial_seed, left, seeded, next; then the words; then cached normals.
_TORCH_HEADER = struct.Struct("=QiiQ")
_TORCH_NORMALS = struct.Struct("=8xd8xi4xf?3x")
_TORCH_STATE_BYTES = 5056
# The same in the first bytes of an object: spans, between which bytes have no meaning, and their content.
_TORCH_HEAD_BYTES = 512
_TORCH_SPANS = (0, 13), (16, 4 + 4 * WORDS), (2520, 5), (2528, 9)
_Kept = tuple[int, int, bool, int, bytes, float, bool, float, bool]
_TORCH_KEPT = struct.Struct(f"=Qi?I{4 * WORDS}sf?d?")


@functools.cache
def _torch_layout_is_known() -> bool:
    """Return whether a seeded generator has the expected state, byte by byte."""
    seed = 0x123456787654321
    state = torch.Generator().manual_seed(seed).get_state().numpy().tobytes()
    reference: Any = np.random.RandomState(seed & 0xFFFFFFFF)
    words: bytes = reference.get_state()[1].astype(np.uint64).tobytes()
    expected = _TORCH_HEADER.pack(seed, 1, 1, 0) + words
    return state == expected.ljust(_TORCH_STATE_BYTES, b"\0")


@functools.cache
def _torch_state_offset() -> int | None:
    """Return the offset from a generator's ``_cdata`` to the state of ``get_state``; None if unknown."""
    if not (
        may_access_memory() and _torch_layout_is_known() and hasattr(torch.Generator, "_cdata")
    ):
        return None
    probe: Any = torch.Generator()
    offsets = []
    for n in (0x1234567, 0x2345678):
        header, normals = (n << 33 | n, n % 89 + 1, True, n % 97), (n % 99, True, n / 4, True)
        kept = *header, np.arange(n, n + WORDS, dtype=np.uint32).tobytes(), *normals
        probe.set_state(torch.frombuffer(bytearray(_torch_state(kept)), dtype=torch.uint8))
        offsets.append(_find_torch_state(probe._cdata, kept))
    return offsets[0] if offsets[0] == offsets[1] else None


def _torch_state(kept: _Kept) -> bytes:
    """Return the result of ``get_state`` for a state with this content in memory."""
    seed, left, seeded, position, words, normal_float, has_float, normal, has_normal = kept
    # The memory may be from the middle of a draw in another thread, which draws without the GIL.
    left = max(left, 1)
    position = min(position, WORDS + 1 - left)
    return (
        _TORCH_HEADER.pack(seed, left, seeded, position)
        + np.frombuffer(words, np.uint32).astype(np.uint64).tobytes()
        # torch itself leaves what is no normal undefined.
        + _TORCH_NORMALS.pack(
            normal if has_normal else 0.0, has_normal, normal_float if has_float else 0.0, has_float
        )
    )


def _torch_spans(address: int) -> list[tuple[int, int]]:
    return [(address + start, nbytes) for start, nbytes in _TORCH_SPANS]


def _find_torch_state(address: int, kept: _Kept) -> int | None:
    seed = struct.pack("=Q", kept[0])
    for offset in range(0, _TORCH_HEAD_BYTES, 8):
        if ctypes.string_at(address + offset, 8) == seed:
            memory = b"".join(starmap(ctypes.string_at, _torch_spans(address + offset)))
            return offset if _TORCH_KEPT.unpack(memory) == kept else None
    return None


class TorchByState(MemoryGenerator["torch.Tensor | bytes"]):
    """The state of a CPU generator of torch, by ``set_state``; ``initial_seed()`` stays the same."""

    is_writable = False

    def __init__(self, generator: torch.Generator, stream: int) -> None:
        self._generator = generator
        self._memory = np.zeros(_TORCH_STATE_BYTES // 8, np.uint64)
        state = torch.from_numpy(self._memory.view(np.uint8))
        self.apply = functools.partial(generator.set_state, state)  # type: ignore[method-assign]
        self._initial_seed: int | None = None
        self.adopt_initial_seed()
        self.blocks = [(self._memory.ctypes.data + _TORCH_HEADER.size, WORDS, stream, 8)]
        offset = _torch_state_offset()
        if offset is not None:
            address = generator._cdata + offset  # type: ignore[attr-defined]  # not in torch's stubs
            self.spans, self.is_whole = _torch_spans(address), True

    def adopt_initial_seed(self) -> None:
        """Write the generator's present ``initial_seed()`` into later states."""
        # Position 1, as if one word was drawn: torch accepts no state between the twist and the first draw.
        seed = self._generator.initial_seed()
        if seed != self._initial_seed:
            header = _TORCH_HEADER.pack(seed, WORDS, 1, 1)
            self._memory[:3] = np.frombuffer(header, np.uint64)
            self._initial_seed = seed

    def rest(self) -> bytes | None:
        return None if self.is_whole else self._state_bytes()

    def save(self) -> tuple[list[bytes], bytes]:
        return [], self._state_bytes()

    def _state_bytes(self) -> bytes:
        return self.keep().numpy().tobytes()

    def keep(self) -> torch.Tensor:
        return self._generator.get_state()

    def set_rest(self, rest: torch.Tensor | bytes) -> None:
        if isinstance(rest, bytes):
            rest = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        self._generator.set_state(rest)

    def load(self, copies: Iterable[bytes], rest: torch.Tensor | bytes) -> None:
        memory = b"".join(copies)
        self.set_rest(_torch_state(_TORCH_KEPT.unpack(memory)) if memory else rest)

    def is_at(self, copies: list[bytes], rest: torch.Tensor | bytes | None) -> bool:
        memory = b"".join(copies)
        state = _torch_state(_TORCH_KEPT.unpack(memory)) if memory else rest
        return self._state_bytes() == state


class TorchBySeed(TorchByState):
    """A CPU generator of a torch with another state format, by ``manual_seed``: it draws other numbers."""

    def __init__(self, generator: torch.Generator, stream: int) -> None:
        self._generator = generator
        self._words = np.zeros(1, np.uint64)
        self.blocks = [(self._words.ctypes.data, 2, stream, 4)]

    def adopt_initial_seed(self) -> None:
        """Do nothing: the initial seed is that of the sample."""

    def apply(self) -> None:
        self._generator.manual_seed(int(self._words[0]))


def torch_generator(
    generator: torch.Generator = torch.default_generator, stream: int = TORCH_STREAM
) -> TorchByState:
    """Return the memory of a CPU generator of torch, by default the global one."""
    make = TorchByState if _torch_layout_is_known() else TorchBySeed
    return make(generator, stream)


def own_generator(generator: object, stream: int) -> MemoryGenerator[Any] | None:
    """Return the memory of a generator of ``random``, NumPy or torch; None if its state cannot be written.

    Different streams are independent.
    """
    if isinstance(generator, random.Random):
        kind, base = type(generator), random.Random
        own = (getattr(kind, name) is getattr(base, name) for name in _PYTHON_METHODS)
        return python_generator(generator, stream) if all(own) else None
    if isinstance(generator, np.random.RandomState):
        return numpy_generator(generator, stream)
    if isinstance(generator, np.random.Generator):
        return _bits_generator(generator.bit_generator, stream)
    if isinstance(generator, np.random.BitGenerator):
        return _bits_generator(generator, stream)
    if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
        return torch_generator(generator, stream)
    return None


_PYTHON_METHODS = ("random", "getrandbits", "getstate", "setstate")


def found_in_memory() -> dict[str, bool]:
    """Return for each kind of generator whether its memory is accessed directly, and not by its methods.

    All probes run, once in a process: a worker that is forked afterwards runs none.
    """
    return {
        "random": _python_position_offset() is not None,
        "numpy.random": _numpy_gauss_offset() is not None,
        "numpy.random.Generator": _pcg64_order() is not None and _numpy_gauss_offset() is not None,
        "torch": _torch_state_offset() is not None,
    }


_Generators = Iterable[MemoryGenerator[Any]]


def snapshot(generators: _Generators) -> StateSnapshot:
    """A snapshot of generators: the states of those that are whole, and of others spans and rest."""
    generators = [*generators]
    return StateSnapshot(
        [span for each in generators for span in each.spans],
        # Nearly always one: a cached normal of ``random``.
        [each.rest for each in generators if not each.is_whole],
    )


class GlobalGenerators:
    """The three global generators of this process, and others, which belong to no plain state."""

    def __init__(self, others: _Generators = ()) -> None:
        self._all: list[Any] = [python_generator(), numpy_generator(), torch_generator(), *others]
        self._snapshot = snapshot(self._all)

    def keep(self) -> None:
        """Keep their states, which costs little."""
        self._snapshot.take()

    def are_kept(self) -> bool:
        """Whether their states are those that were kept last."""
        if self._snapshot.holds():
            return True
        # The memory of equal states may differ.
        return all(each.is_at(*state) for each, state in zip(self._all, self.kept(), strict=True))

    def kept(self) -> list[Any]:
        """The states that were kept last."""
        copies, rests = iter(self._snapshot.copies()), iter(self._snapshot.rests)
        return [
            ([next(copies) for _ in each.spans], None if each.is_whole else next(rests))
            for each in self._all
        ]

    def load(self, states: list[Any]) -> None:
        """Set their states."""
        for generator, state in zip(self._all, states, strict=True):
            generator.load(*state)

    @staticmethod
    def to_plain() -> dict[str, Any]:
        """The states of the three as plain data, which any process can load."""
        version, words, gauss = random.getstate()
        plain = {"python": [version, _encoded(np.array(words, np.uint32)), gauss]}
        state: Any = np.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            words, position = state["state"]["key"], state["state"]["pos"]
            kept = state["has_gauss"], state["gauss"]
            plain["numpy"] = [_encoded(np.asarray(words, np.uint32)), position, *kept]
        plain["torch"] = [_encoded(torch.default_generator.get_state().numpy())]
        return plain

    @staticmethod
    def load_plain(plain: dict[str, Any]) -> None:
        """Set their states to those of ``to_plain``."""
        version, words, gauss = plain["python"]
        random.setstate((version, tuple(_decoded(words, np.uint32).tolist()), gauss))
        if "numpy" in plain:
            words, *rest = plain["numpy"]
            np.random.set_state(("MT19937", _decoded(words, np.uint32), *rest))
        (state,) = plain["torch"]
        torch.default_generator.set_state(torch.from_numpy(_decoded(state, np.uint8).copy()))


def _encoded(words: np.ndarray) -> str:
    return base64.b64encode(words.tobytes()).decode()


def _decoded(text: str, kind: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), kind)
