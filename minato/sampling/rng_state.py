"""States of generators and samplers that decide the order of an epoch, kept to draw its indices again."""

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
from minato._support.objects import attribute, is_exactly
from minato.sampling.distributed import InterleavedRanks, epoch_of, nested
from minato.sampling.samplers import SEEDED
from minato.sampling.state import is_stateful

__all__ = ["IsolatedIterator", "SamplerState"]

_DRAWS_NOTHING = (
    BatchSampler,
    DistributedSampler,
    *SEEDED,
    SequentialSampler,
    EndlessSampler,
    InterleavedRanks,
)
"""Samplers without a generator that outlives an epoch."""
_DRAWS_AT_FIRST = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that use torch's default generator before their first index, and not afterwards."""


class IsolatedIterator:
    """Iterates with a state of torch's default generator of its own.

    Args:
        state: State of the generator for the first ``next()``.
        once: Only the first ``next()`` uses the generator.
    """

    def __init__(self, iterator: Iterator[Any], state: torch.Tensor, once: bool) -> None:
        self._iterator = iterator
        self._state: torch.Tensor | None = state
        self._once = once

    def __iter__(self) -> IsolatedIterator:
        return self

    def __next__(self) -> Any:
        if self._state is None:
            return next(self._iterator)
        outside = torch.default_generator.get_state()
        torch.default_generator.set_state(self._state)
        try:
            return next(self._iterator)
        finally:
            inside = torch.default_generator.get_state()
            torch.default_generator.set_state(outside)
            self._state = None if self._once else inside


class SamplerState:
    """States of generators and samplers before the first index of an epoch was drawn.

    They are taken twice, as some samplers draw in ``iter(sampler)``, and others in the first ``next()`` of its result.
    If ``iter()`` cannot have drawn, the first states are dropped.

    Args:
        generator: The loader's generator, or None.
        index_sampler: Yields indices, or batches of them.
    """

    def __init__(self, generator: torch.Generator | None, index_sampler: Any) -> None:
        samplers = list(nested(index_sampler))
        own = [generator, *(attribute(sampler, "generator") for sampler in samplers)]
        self._generators = list(
            {
                id(one): one
                for one in own
                if isinstance(one, torch.Generator) and one is not torch.default_generator
            }.values()
        )
        self._needs_default = not all(is_exactly(sampler, _DRAWS_NOTHING) for sampler in samplers)
        self._sampler = index_sampler
        self._stateful = [sampler for sampler in samplers if is_stateful(sampler)]
        self._state: dict[str, Any] = {"before_iter": None, "before_first": None, "iterator": None}
        self._error: ExceptionWrapper | None = None

    def before_iter(self) -> None:
        """Take the states before ``iter(sampler)``."""
        self._state["epoch"] = epoch_of(self._sampler)
        self._state["before_iter"] = self._generator_states()
        self._error = None
        with self._keeping_errors():
            self._state["samplers"] = self._sampler_states()

    def before_first(self, iterator: Any) -> None:
        """Take the states before the first ``next()`` of the result of ``iter(sampler)``."""
        if isinstance(iterator, GeneratorType):
            self._state["before_iter"] = (
                None  # the body of a generator runs from the first next() on
            )
        self._state["before_first"] = self._generator_states()
        if is_stateful(iterator):
            with self._keeping_errors():
                self._state["iterator"] = copy.deepcopy(iterator.state_dict())

    def redraw(self, state: dict[str, Any], samplers: bool = True) -> Iterator[Any]:
        """Return ``iter(sampler)`` with all states as they were; its next index is the first of the epoch.

        torch's default generator has its earlier state for the draws of the sampler, and its present one otherwise.

        Args:
            state: Result of :meth:`to_plain`.
            samplers: Whether stateful samplers get their states.
        """
        self._state = _loaded(state)
        outside = torch.default_generator.get_state()
        try:
            iterator: Iterator[Any] = self._entered(samplers)
            if not self._needs_default:
                return iterator
            known = (*_DRAWS_NOTHING, *_DRAWS_AT_FIRST)
            once = all(is_exactly(sampler, known) for sampler in nested(self._sampler))
            inside = torch.default_generator.get_state()
            return IsolatedIterator(iterator, inside, once=once)
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
        """Check that a state fits these generators and samplers.

        Raises:
            ValueError: It does not; the message names the part.
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

    def load(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`idle_state` into generators and samplers."""
        self._state = _loaded(state)
        self._load_samplers()
        self._load_generators("before_iter")

    def idle_state(self) -> dict[str, Any]:
        """Return the present states as plain data. Between epochs, they decide the order of the next one."""
        own = [
            None,
            *self._generator_states()[1:],
        ]  # torch's default generator belongs to the program
        return _plain({"before_iter": own, "samplers": self._sampler_states()})

    def to_plain(self) -> dict[str, Any]:
        """Return the states as plain data.

        Raises:
            Exception: ``state_dict()`` of a sampler or its iterator raised it.
        """
        if self._error is not None:
            self._error.reraise()
        state = dict(self._state)
        if state["before_first"] is None and state["before_iter"] is not None:
            state["before_first"] = self._generator_states()
        return _plain(state)

    @property
    def sources(self) -> tuple[int, int]:
        """Number of generators besides torch's default one, and of stateful samplers."""
        return len(self._generators), len(self._stateful)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Keep an exception of ``state_dict()`` until a program asks for the loader's state."""
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
    """Return a copy of a state, with the bytes of generators as strings."""
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
    """Return the state that ``_plain`` encoded."""
    state = dict(plain)
    for name, value in plain.items():
        if name.startswith("before") and value is not None:
            state[name] = [None if one is None else _bytes_of(one) for one in value]
    return {"before_iter": None, "before_first": None, "iterator": None, **state}


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _damaged(name: str, value: Any) -> ValueError:
    return ValueError(f"the state is damaged: {name!r} of its 'draw' is {reprlib.repr(value)}")
