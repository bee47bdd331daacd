"""What decides the order of a pass, kept so that its keys can be drawn again."""

from __future__ import annotations

import base64
import copy
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato._compat import EndlessSampler, ExceptionWrapper
from minato.sampling.distributed import InTurn
from minato.sampling.sampler_epoch import epoch_of, nested
from minato.sampling.samplers import SEEDED
from minato.sampling.state import is_stateful

__all__ = ["Draw"]

_DRAWS_NOTHING = (
    BatchSampler,
    DistributedSampler,
    *SEEDED,
    SequentialSampler,
    EndlessSampler,
    InTurn,
)
"""Samplers that use no generator that outlives a pass."""
_DRAWS_AT_FIRST = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that use torch's default generator before their first key, and not afterwards."""


class _Apart:
    """Draws from an iterator that finds torch's default generator as it left it.

    Args:
        state: Of the generator, for the first draw.
        once: Only the first draw uses the generator.
    """

    def __init__(self, iterator: Iterator[Any], state: torch.Tensor, once: bool) -> None:
        self._iterator = iterator
        self._state: torch.Tensor | None = state
        self._once = once

    def __iter__(self) -> _Apart:
        return self

    def __next__(self) -> Any:
        if self._state is None:
            return next(self._iterator)
        outside = torch.default_generator.get_state()
        torch.default_generator.set_state(self._state)
        try:
            return next(self._iterator)
        finally:
            self._state = None if self._once else torch.default_generator.get_state()
            torch.default_generator.set_state(outside)


class Draw:
    """The states of generators and samplers before the first key of a pass was drawn.

    They are noted twice, since samplers differ in when they draw: before ``iter(sampler)``, and before the first
    ``next()`` of what that gave. Once it is known that ``iter()`` drew nothing, the first note is dropped.

    Args:
        generator: The loader's, or None.
        index_sampler: Gives keys, or batches of them.
    """

    def __init__(self, generator: torch.Generator | None, index_sampler: Any) -> None:
        samplers = list(nested(index_sampler))
        own = [generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
        self._generators = list(
            {
                id(one): one
                for one in own
                if isinstance(one, torch.Generator) and one is not torch.default_generator
            }.values()
        )
        self._needs_default = any(type(sampler) not in _DRAWS_NOTHING for sampler in samplers)
        self._sampler = index_sampler
        self._stateful = [sampler for sampler in samplers if is_stateful(sampler)]
        self._state: dict[str, Any] = {"before_iter": None, "before_first": None, "iterator": None}
        self._error: ExceptionWrapper | None = None

    def entering(self) -> None:
        """Note what counts before ``iter(sampler)``."""
        self._state["epoch"] = epoch_of(self._sampler)
        self._state["before_iter"] = self._generator_states()
        self._error = None
        with self._keeping_errors():
            self._state["samplers"] = self._sampler_states()

    def first(self, iterator: Any) -> None:
        """Note what counts before the first key is drawn from what ``iter(sampler)`` gave."""
        if isinstance(iterator, GeneratorType):
            self._state["before_iter"] = None  # the body of a generator has not begun before
        self._state["before_first"] = self._generator_states()
        if is_stateful(iterator):
            with self._keeping_errors():
                self._state["iterator"] = copy.deepcopy(iterator.state_dict())

    def again(self, state: dict[str, Any], samplers: bool = True) -> Iterator[Any]:
        """``iter(sampler)``, with everything as a state tells that it was; the next key is the first.

        Args:
            samplers: Whether samplers with a state get theirs.

        For the draws of the sampler, torch's default generator is as it was; for all others, it is as it is.
        """
        self._state = _loaded(state)
        outside = torch.default_generator.get_state()
        try:
            iterator: Iterator[Any] = self._entered(samplers)
            if not self._needs_default:
                return iterator
            kinds = {type(sampler) for sampler in nested(self._sampler)}
            inside = torch.default_generator.get_state()
            return _Apart(iterator, inside, once=kinds <= {*_DRAWS_NOTHING, *_DRAWS_AT_FIRST})
        finally:
            torch.default_generator.set_state(outside)

    def _entered(self, samplers: bool) -> Any:
        if samplers:
            self._load_samplers()
        self._load_generators("before_iter")
        iterator = iter(self._sampler)
        if self._state["iterator"] is not None:
            if not is_stateful(iterator):
                raise _damaged("iterator", self._state["iterator"])
            iterator.load_state_dict(copy.deepcopy(self._state["iterator"]))
        self._load_generators("before_first")
        return iterator

    def check(self, plain: dict[str, Any]) -> None:
        """Check that a state can be taken up by these generators and samplers.

        Raises:
            ValueError: It is damaged; the message names the part.
        """
        epoch, samplers = plain.get("epoch"), plain.get("samplers")
        if not (epoch is None or isinstance(epoch, int)):
            raise _damaged("epoch", epoch)
        if not isinstance(samplers, list) or len(samplers) != len(self._stateful):
            raise _damaged("samplers", samplers)
        for name in ("before_iter", "before_first"):
            states = plain.get(name)
            if states is None:
                continue
            if not isinstance(states, list) or len(states) != 1 + len(self._generators):
                raise _damaged(name, states)
            for generator, state in zip(
                (torch.default_generator, *self._generators), states, strict=True
            ):
                try:
                    if state is not None:
                        torch.Generator(generator.device).set_state(_bytes_of(state))
                except (ValueError, TypeError, RuntimeError):
                    raise _damaged(name, state) from None

    def settle(self, state: dict[str, Any]) -> None:
        """Bring generators and samplers to a state that ``between`` gave."""
        self._state = _loaded(state)
        self._load_samplers()
        self._load_generators("before_iter")

    def between(self) -> dict[str, Any]:
        """What decides the order of the next pass, while there is none: the present states, as plain data."""
        own = [None, *self._generator_states()[1:]]  # torch's default generator is the program's
        return _plain({"before_iter": own, "samplers": self._sampler_states()})

    def plain(self) -> dict[str, Any]:
        """What was noted, as plain data.

        Raises:
            Exception: What the ``state_dict()`` of a sampler or its iterator raised when it was to be noted.
        """
        if self._error is not None:
            self._error.reraise()
        state = dict(self._state)
        if state["before_first"] is None and state["before_iter"] is not None:
            state["before_first"] = self._generator_states()
        return _plain(state)

    @property
    def sources(self) -> tuple[int, int]:
        """How many generators there are besides torch's default one, and how many samplers that keep a state."""
        return len(self._generators), len(self._stateful)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Keep what ``state_dict()`` raises: nobody may ask for the loader's state."""
        try:
            yield
        except Exception:
            self._error = ExceptionWrapper(sys.exc_info(), "in state_dict() before the first key")

    def _generator_states(self) -> list[torch.Tensor | None]:
        default = torch.default_generator.get_state() if self._needs_default else None
        return [default, *(generator.get_state() for generator in self._generators)]

    def _sampler_states(self) -> list[Any]:
        return [copy.deepcopy(sampler.state_dict()) for sampler in self._stateful]

    def _load_generators(self, when: str) -> None:
        generators = (torch.default_generator, *self._generators)
        for generator, state in zip(generators, self._state[when] or (), strict=False):
            if state is not None:
                generator.set_state(state)

    def _load_samplers(self) -> None:
        for sampler, state in zip(self._stateful, self._state["samplers"], strict=True):
            sampler.load_state_dict(copy.deepcopy(state))


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Bytes of generators as text, everything else copied."""
    plain = {}
    for name, value in state.items():
        if name.startswith("before") and value is not None:
            value = [
                None if one is None else base64.b64encode(one.numpy().tobytes()).decode()
                for one in value
            ]
        plain[name] = copy.deepcopy(value)
    return plain


def _loaded(plain: dict[str, Any]) -> dict[str, Any]:
    """The other way round."""
    state = dict(plain)
    for name, value in plain.items():
        if name.startswith("before") and value is not None:
            state[name] = [None if one is None else _bytes_of(one) for one in value]
    return {"before_iter": None, "before_first": None, "iterator": None, **state}


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _damaged(name: str, value: Any) -> ValueError:
    return ValueError(f"the state is damaged: {name!r} of its 'draw' is {reprlib.repr(value)}")
