"""The position of a loader: its epoch, and the state that it resumes."""

from __future__ import annotations

import copy
from typing import Any

from minato.observe.stats.lateness import Lateness
from minato.sampling.completed import Completed
from minato.sampling.coverage import Coverage, Progress
from minato.sampling.distributed import epoch_of, nested, set_sampler_epoch
from minato.sampling.epoch import Epoch
from minato.sampling.rng_state import SamplerState
from minato.sampling.samplers import SEEDED
from minato.sampling.spec import SamplingSpec
from minato.sampling.state import (
    checked,
    completed_from_plain,
    completed_to_plain,
    is_stateful,
    signature,
)

__all__ = ["Position"]


class Position:
    """The epoch of a loader, and the state that its next iterator resumes.

    Attributes:
        epoch: Number of the last epoch, -1 before the first.
        last: The last epoch; None before the first, and after ``load``.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.last: Epoch | None = None
        self._predicts = True
        self._sampler_epoch: int | None = 0
        self._is_set = False
        self._last_seed: int | None = None
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The last epoch belongs to its iterator, which no copy shares.
        kept = {"last": None, "_last_seed": self.seed, "_predicts": self._may_predict()}
        return {**self.__dict__, **kept, "_loaded": self._pending()}

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch."""
        self.epoch, self._is_set = epoch - 1, True

    @property
    def seed(self) -> int | None:
        """The seed of the last epoch's samples; None before the first."""
        return self._last_seed if self.last is None else self.last.seed

    def seed_of(self, epoch: int) -> int | None:
        """The seed of another epoch of the last epoch's iterator, where torch drew it."""
        last = self.last
        if last is None:
            return self._last_seed
        drawn = last.seed == last.drawn_seed_in(last.number)
        return last.drawn_seed_in(epoch) if drawn else last.seed

    def without_state(self) -> Position:
        """A copy at the same epoch, without a state to resume."""
        other = copy.copy(self)
        other._loaded = None
        return other

    def _pending(self) -> dict[str, Any] | None:
        """The loaded state, until an epoch has started with it."""
        if self.last is not None and self.last.has_started:
            self._loaded = None
        return self._loaded

    def _may_predict(self) -> bool:
        if self.last is not None and not self.last.prefetches_next:
            self._predicts = False
        return self._predicts

    @property
    def resumes(self) -> tuple[int, Completed] | None:
        """The epoch that the next iterator resumes, and its complete part; None: it starts at the beginning."""
        loaded = self._pending()
        if loaded is None or loaded["finished"]:
            return None
        return loaded["epoch"], completed_from_plain(loaded["done"])

    def open(
        self, spec: SamplingSpec, *, done: Completed | None = None, persists: bool = False
    ) -> tuple[Epoch, Any]:
        """Begin the next epoch.

        Args:
            done: The complete part of the resumed epoch, if the loaded state does not know it.
            persists: The iterator of the last epoch continues.

        Returns:
            The epoch, and the states that the workers' datasets start with, or None.
        """
        sampler, loaded = spec.index_sampler, self._pending()
        dataset_states = loaded and loaded["dataset_states"]
        predicts = self._may_predict()
        if loaded is not None and not loaded["finished"]:
            if done is not None:
                loaded = {**loaded, "done": completed_to_plain(done)}
            self.epoch = loaded["epoch"]
            if loaded["draw"].get("epoch") is not None:
                set_sampler_epoch(sampler, loaded["draw"]["epoch"])
            self._sampler_epoch = epoch_of(sampler)
            self.last = Epoch(
                spec,
                self.epoch,
                drawn_epoch=loaded.get("drawn_epoch", self.epoch),
                state=loaded,
                prefetches_next=predicts,
            )
            return self.last, dataset_states
        if loaded is not None:
            self.epoch = loaded["epoch"]
            SamplerState(spec.generator, sampler).load(loaded["draw"])
        drawn_epoch = self._advance(sampler, persists)
        for one in nested(sampler):
            if isinstance(one, SEEDED):
                one.set_epoch(self.epoch)
        self._sampler_epoch = epoch_of(sampler)
        self._loaded = None
        self.last = Epoch(
            spec,
            self.epoch,
            drawn_epoch=drawn_epoch,
            restored=loaded is not None and SamplerState(spec.generator, sampler).sources[1] > 0,
            prefetches_next=predicts,
        )
        return self.last, dataset_states

    def _advance(self, sampler: object, persists: bool) -> int:
        """Go to the next epoch, by ``set_epoch`` of sampler or loader if it was called; returns its ``drawn_epoch``."""
        of_sampler, is_set = epoch_of(sampler), self._is_set
        self._is_set = False
        if of_sampler is None or of_sampler == self._sampler_epoch:
            self.epoch += 1
        else:
            self.epoch, is_set = of_sampler, True
        if is_set:
            return self.epoch
        return self.last.drawn_epoch + 1 if persists and self.last is not None else 0

    def state(self, spec: SamplingSpec) -> dict[str, Any]:
        """The present state as plain data, apart from the ``state_dict()`` of samplers and datasets."""
        loaded = self._pending()
        if loaded is not None:
            return copy.deepcopy(loaded)
        last, draw = self.last, SamplerState(spec.generator, spec.index_sampler)
        progress = None if last is None else last.progress.part or last.progress
        state = {
            "loader": signature(spec, draw.sources),
            "epoch": self.epoch,
            "finished": progress is None or progress.finished,
        }
        if last is None or progress is None or progress.finished:
            if not spec.has_workers and is_stateful(spec.dataset):
                own = copy.deepcopy(spec.dataset.state_dict())
                each = {"dataset": own, "iterator": None, "batches": 0, "ended": False}
                dataset_states: Any = {"turn": 0, "each": [each]}
            else:
                dataset_states = (
                    None
                    if last is None or last.dataset_states is None
                    else last.dataset_states.between_epochs()
                )
            return {**state, "draw": draw.idle_state(), "dataset_states": dataset_states}
        return {
            **state,
            "base_seed": last.base_seed,
            "drawn_epoch": last.drawn_epoch,
            "done": completed_to_plain(progress.done()),
            "draw": last.draw.to_plain(),
            "dataset_states": None
            if last.dataset_states is None
            else last.dataset_states.to_plain(),
        }

    def load(self, spec: SamplingSpec, state: object, copies: int) -> None:
        """Set the state that the next iterator resumes.

        Args:
            copies: Number of copies of the dataset that the loader's workers have.

        Raises:
            TypeError, ValueError: It is no state, or belongs to another loader.
        """
        draw = SamplerState(spec.generator, spec.index_sampler)
        loaded = checked(state, signature(spec, draw.sources), copies)
        draw.check(loaded["draw"])
        self._may_predict()
        self._loaded = loaded
        self._last_seed, self.last = self.seed, None

    def lateness(self) -> Lateness:
        """By how many batches the samples of the last epoch differ from the sampler's order."""
        return self.last.progress.lateness if self.last else Lateness()

    def coverage(self) -> Coverage:
        """The coverage of the last epoch's indices."""
        return (self.last.progress if self.last else Progress(self.epoch)).coverage()
