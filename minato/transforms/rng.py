"""Randomness of a sample: a function of (seed, epoch, index, occurrence), in any worker and order.

The occurrence counts earlier uses of the index in the epoch: 0, unless the sampler repeats indices.

Before a sample, :meth:`SampleRandomness.bind` gives ``random``, ``numpy.random`` and torch's
default CPU generator new states. These are real states: all code that draws uses them, compiled
code included, and ``seed``, ``getstate`` and ``setstate`` work inside a sample.

Worker threads share the three global generators, so there these cannot be bound to a sample. Code
that gets a generator from :func:`python_rng`, :func:`numpy_rng` or :func:`torch_rng` draws the same
numbers in threads, in processes and in the main process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from minato._compat import bit_generator_of, numpy_state
from minato._core import StateSnapshot, StateWriter, mix_seed, sample_key
from minato._support.hashes import index_hash
from minato.transforms import rng_memory
from minato.transforms.owned import OwnedGenerators

_Generators = tuple[rng_memory.MemoryGenerator[Any], ...]

_AGAIN = 0x616761696E  # separates the words of later occurrences from those of indices
_INSTEAD = 1 << 32
"""Added to an occurrence, which is less, for what is drawn in place of the sample."""


class Binding(NamedTuple):
    """The arguments of the current sample's randomness."""

    seed: int
    epoch: int
    key: object
    occurrence: int = 0


class Captured(NamedTuple):
    """The random state of a sample: its binding, the generators that it has made, and all states."""

    binding: tuple[int, int, object, int] | None
    generators_made: int
    states: list[Any]
    own: dict[str, Any]


_NONE_OWNED = OwnedGenerators({})


_Binding = tuple[int, int, object, int] | None


class _State:
    binding: _Binding = None
    generators_made: int = 0


class _ThreadState(threading.local, _State):
    pass


_this_thread = _ThreadState()
_this_task: ContextVar[_State | None] = ContextVar("minato_sample", default=None)
"""Also of the tasks that a task starts, and of what it runs in threads; None: that of the thread counts."""


def enter_task() -> None:
    """Bind samples, from now on, to the running task instead of to its thread, in which other tasks run, too."""
    _this_task.set(_State())


def exchange_binding(binding: _Binding) -> _Binding:
    """Have what runs from now on belong to this sample, None: to none; returns the one until now."""
    state = _this_task.get() or _this_thread
    before, state.binding = state.binding, binding
    return before


class SampleRandomness:
    """Binds a process's global generators, and the helpers of this module, to samples.

    Create it in the process (after its ``torch.manual_seed``, whose seed ``torch.initial_seed()`` keeps answering) and
    use it from one thread.

    Args:
        base_seed: First input of ``sample_key``; counts modulo 2**64.
        bind_globals: False in all threads but the main one, which share the global generators with it: then only
            :func:`current` and the helpers are bound.
        owned: Other generators, bound like the global ones.
    """

    def __init__(
        self, base_seed: int, *, bind_globals: bool = True, owned: OwnedGenerators | None = None
    ) -> None:
        self.base_seed = base_seed
        self._bind_globals = bind_globals
        self._owned = owned or _NONE_OWNED
        self.watches = bind_globals
        """Whether ``drawn`` can detect draws."""
        self._state = _this_task.get() or _this_thread
        self._all: _Generators = ()
        self._own: dict[str, rng_memory.MemoryGenerator[Any]] = {}
        self._snapshot = StateSnapshot([])
        self._by_state: list[rng_memory.TorchByState] = []
        self._outside: _Outside | None = None
        self._before: tuple[Any, int] | None = None
        self._be_program: Callable[[], None] | None = None
        if bind_globals:
            self._attach()

    def restart(self, base_seed: int) -> bool:
        """Go on with a seed, as a new object would; returns whether there are other generators now."""
        self.base_seed = base_seed
        if not self._bind_globals:
            return False
        if self._owned.look() or bit_generator_of(self._numpy_state) is not self._bits:
            self._attach()
            return True
        self._make_writer()
        for generator in self._by_state:
            generator.adopt_initial_seed()
        return False

    def _attach(self) -> None:
        self._numpy_state = numpy_state()
        self._bits = bit_generator_of(self._numpy_state)
        self._torch = rng_memory.torch_generator()
        self._own = self._owned.generators
        own = self._own.values()
        self._all = (rng_memory.python_generator(), rng_memory.numpy_generator(), self._torch, *own)
        self._blocks = [block for generator in self._all for block in generator.blocks]
        self._cells = [cell for generator in self._all for cell in generator.cells]
        self._make_writer()
        self._snapshot = rng_memory.snapshot(self._all)
        self._outside = None
        self._by_state = [each for each in self._all if isinstance(each, rng_memory.TorchByState)]
        self._applies = [each.apply for each in self._all if not each.takes_effect_at_once]

    def _make_writer(self) -> None:
        self._write = StateWriter(self.base_seed, self._blocks, self._cells).write

    def bind(self, epoch: int, key: object, occurrence: int = 0) -> None:
        """Start a sample: its draws become a function of (seed, epoch, key, occurrence).

        Args:
            epoch: Counts modulo 2**64.
            key: The sample's index in the dataset: anything that :func:`index_hash` can turn into an integer.
            occurrence: Number of earlier uses of the key in the epoch.
        """
        self._state.binding = (self.base_seed, epoch, key, occurrence)
        self._state.generators_made = 0
        if not self._bind_globals:
            return
        if bit_generator_of(self._numpy_state) is not self._bits:  # np.random.set_bit_generator
            self._attach()
        if self._own and self._owned.moved():
            self._owned.follow()
            self._attach()
        self._write(
            epoch, key if type(key) is int and not occurrence else sample_word(key, occurrence)
        )
        for apply in self._applies:
            apply()

    def look(self) -> bool:
        """Search for generators again; returns whether they have changed."""
        if not self._bind_globals or not self._owned.look():
            return False
        self._attach()
        return True

    @property
    def asked(self) -> int:
        """Number of generators that the current sample has created; set it to continue the sample in another thread."""
        return self._state.generators_made

    @asked.setter
    def asked(self, generators: int) -> None:
        self._state.generators_made = generators

    def mark(self, unbind: bool = True) -> None:
        """Start to watch for draws. With ``unbind``, code that runs from now on belongs to no sample."""
        if unbind:
            # A generator created outside of samples is seeded from a global one, so the snapshot shows it.
            self._state.binding = self._before = None
        else:
            self._before = self._state.binding, self._state.generators_made
        self._snapshot.take()
        if unbind:
            self._be_program = self.rewind

    def drawn(self) -> bool:
        """Return whether code drew from the bound generators, or created a generator, since ``mark``."""
        if self._own and self._owned.moved():
            return True
        before = self._before
        if before is not None and before[1] != self._state.generators_made:
            return True
        if not self._snapshot.holds():
            return True
        if before is None:
            self._be_program = None
        return False

    def rewind(self) -> None:
        """Undo all draws since ``mark``."""
        if self._before is not None:
            self._state.binding, self._state.generators_made = self._before
        copies, left = iter(self._snapshot.copies()), iter(self._snapshot.rests)
        for generator in self._all:
            rest = None if generator.is_whole else next(left)
            generator.load([next(copies) for _ in generator.spans], rest)
        if self._before is None:
            self._be_program = None

    def be_program(self) -> None:
        """Leave nothing of a sample in the generators, wherever a call was interrupted; it can be repeated."""
        if self._be_program is not None:
            self._be_program()

    def capture(self) -> Captured:
        """Return the random state of a deferred sample, to continue it later, in any process.

        It can be pickled for processes with the same versions of Python, NumPy and torch.
        """
        return Captured(
            self._state.binding,
            self._state.generators_made,
            [generator.save() for generator in self._all[:3]],
            {path: generator.save() for path, generator in self._own.items()},
        )

    def restore(self, captured: Captured) -> None:
        """Continue from the state that :meth:`capture` returned."""
        self._state.binding, self._state.generators_made, states, own = captured
        for generator, state in zip(self._all, states, strict=False):
            generator.load(*state)
        for path, state in own.items():
            if path in self._own:  # one that another process has made since is missing here
                self._own[path].load(*state)

    def saved(self) -> AbstractContextManager[None]:
        """Restore the generators and the binding after the ``with`` block."""
        return _Bound(self, None, True)

    def bound(
        self, epoch: int, key: object, occurrence: int, *, restores: bool
    ) -> AbstractContextManager[None]:
        """Start a sample, as ``bind`` does, for a ``with`` block; ``restores``: as ``saved`` after it."""
        return _Bound(self, (epoch, key, occurrence), restores)

    def instead(
        self, epoch: int, key: object, occurrence: int, *, restores: bool
    ) -> AbstractContextManager[None]:
        """As ``bound``, for what makes another sample in place of this one: it draws other numbers."""
        return _Bound(self, (epoch, key, occurrence + _INSTEAD), restores)

    def kept(self) -> Callable[[], None]:
        """Return a function that restores the generators and the binding as they are now, in this thread.

        It must be called before this one is again.
        """
        state = self._state
        binding, made = state.binding, state.generators_made
        outside = None
        if self._bind_globals:
            if bit_generator_of(self._numpy_state) is not self._bits:
                self._attach()
            outside = self._outside  # not that of later: ``bind`` may find other generators
            if outside is None:
                self._outside = outside = _Outside(self._all)
            if outside.keep():
                for generator in self._by_state:
                    generator.adopt_initial_seed()

        def restore() -> None:
            if outside is not None:
                outside.restore()
            state.binding, state.generators_made = binding, made
            self._be_program = None

        self._be_program = restore
        return restore


class _Outside:
    """The states of generators outside of samples. Most programs draw nothing between two batches: they stay kept."""

    def __init__(self, generators: _Generators) -> None:
        self._generators = generators  # whose memory snapshots do not keep alive
        self._memory = StateSnapshot(
            [span for one in generators if one.is_writable for span in one.spans]
        )
        others = [one for one in generators if not one.takes_effect_at_once]
        self._keepers = [one.keep for one in others]
        self._setters = [one.set_rest for one in others]
        self._others = rng_memory.snapshot(others)
        self._rests: list[Any] | None = None

    def keep(self) -> bool:
        """Keep them as they are now; returns whether any that is set by a call was another when it was kept last."""
        self._memory.take()
        if self._rests is not None and self._others.holds():
            return False
        # In this order: after an interruption they are kept again.
        self._rests = [keep() for keep in self._keepers]
        self._others.take()
        return True

    def restore(self) -> None:
        """Set them to those that were kept last."""
        self._memory.restore()
        for set_rest, rest in zip(self._setters, self._rests or (), strict=True):
            set_rest(rest)


class _Bound:
    __slots__ = ("_randomness", "_restore", "_restores", "_sample")

    def __init__(
        self, randomness: SampleRandomness, sample: tuple[int, object, int] | None, restores: bool
    ) -> None:
        self._randomness = randomness
        self._sample = sample
        self._restores = restores
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if self._restores:
            self._restore = self._randomness.kept()
        if self._sample is not None:
            try:
                self._randomness.bind(*self._sample)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *exception: object) -> None:
        if self._restore is not None:
            self._restore()


def sample_word(key: object, occurrence: int) -> int:
    """Return an integer for an index that was used ``occurrence`` times before in its epoch."""
    word = key if type(key) is int else index_hash(key)
    return mix_seed(word, occurrence, _AGAIN) if occurrence else word


def generators_created() -> int:
    """Return the number of generators created in this thread or task, in the current sample if there is one."""
    return (_this_task.get() or _this_thread).generators_made


def current() -> Binding | None:
    """Return the binding of the current sample of this thread or task; ``None`` outside of samples."""
    binding = (_this_task.get() or _this_thread).binding
    return None if binding is None else Binding(*binding)


_PYTHON, _NUMPY, _TORCH = 1, 2, 3


def _next_seed(kind: int) -> int | None:
    """Return a seed for the next generator of the current sample; ``None`` outside of samples."""
    state = _this_task.get() or _this_thread
    made = state.generators_made
    state.generators_made = made + 1
    if state.binding is None:
        return None
    seed, epoch, key, occurrence = state.binding
    return mix_seed(sample_key(seed, epoch, sample_word(key, occurrence)), kind, made)


def python_rng() -> random.Random:
    """Return a new ``random.Random`` for the current sample of this thread, or of this task on an event loop.

    Each call within a sample starts an independent stream, a function of (seed, epoch, index) and of the number of
    earlier calls in the sample. Outside of samples the generator is seeded from the global one.
    """
    seed = _next_seed(_PYTHON)
    return random.Random(random.getrandbits(64) if seed is None else seed)


def numpy_rng() -> np.random.Generator:
    """Return a new ``numpy.random.Generator``; as for :func:`python_rng`."""
    seed = _next_seed(_NUMPY)
    if seed is None:
        seed = int(np.random.randint(0, 2**63, dtype=np.int64))
    return np.random.Generator(np.random.PCG64(seed))


def torch_rng() -> torch.Generator:
    """Return a new ``torch.Generator`` on the CPU; as for :func:`python_rng`."""
    seed = _next_seed(_TORCH)
    if seed is None:
        seed = int(torch.randint(0, 2**63 - 1, (), device="cpu").item())
    return torch.Generator().manual_seed(seed)
