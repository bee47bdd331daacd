"""The position of a loader: its epoch, and the state that it resumes."""

from __future__ import annotations

import copy
from typing import Any

from minato._core.epochs import seed_of_epoch
from minato.observe.stats.lateness import Lateness
from minato.sampling.completed import Completed
from minato.sampling.coverage import Coverage, Progress
from minato.sampling.distributed import at_epoch, epoch_of, nested, set_sampler_epoch
from minato.sampling.epoch import Epoch
from minato.sampling.rng_state import SamplerState
from minato.sampling.samplers import SEEDED
from minato.sampling.spec import SamplingSpec
from minato.sampling.state import (
    checked,
    completed_from_plain,
    completed_to_plain,
    is_stateful,
    sampler_epoch_in,
    signature,
)

__all__ = ["Position"]


class Position:
    """The epoch of a loader, and the state that its next iterator resumes.

    Attributes:
        last: The last epoch; None before the first, and after ``load``.
    """

    def __init__(self) -> None:
        self.last: Epoch | None = None
        self._number = -1  # of the last epoch
        self._chosen: int | None = None  # number of the next epoch, if set_epoch was called
        self._predicts = True
        self._sampler_epoch: int | None = 0  # what it was when the last epoch began
        self._last_seed: int | None = None
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The last epoch belongs to its iterator, which no copy shares.
        last = self.last
        kept = {**self.__dict__, "_predicts": self._may_predict(), "_loaded": self._pending()}
        if last is not None:
            kept["_last_seed"] = last.seed
            kept["_number"] = last.number if last.has_started else last.number - 1
        return {**kept, "last": None}

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch."""
        self._chosen = epoch

    @property
    def epoch(self) -> int:
        """Number of the present or last epoch, that of a loaded state if there is one; -1 before the first."""
        loaded = self._pending()
        return self._number if loaded is None else loaded["epoch"]

    def seed_of(self, epoch: int) -> int | None:
        """The seed of another epoch of the last epoch's iterator, where torch drew it; None if it is unknown."""
        last, loaded = self.last, self._pending()
        if loaded is not None:
            if loaded["finished"]:
                return None
            number = loaded["epoch"]
            drawn_epoch = loaded.get("drawn_epoch", number) + epoch - number
            return seed_of_epoch(loaded["base_seed"], drawn_epoch, epoch)
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
            The epoch, and the states that the datasets of new workers start with, or None.
        """
        sampler, loaded, last = spec.index_sampler, self._pending(), self.last
        dataset_states = loaded and loaded["dataset_states"]
        predicts = self._may_predict()
        if loaded is not None and not loaded["finished"]:
            if done is not None:
                loaded = {**loaded, "done": completed_to_plain(done)}
            number, state, restored = loaded["epoch"], loaded, False
            drawn_epoch = loaded.get("drawn_epoch", number)
            if loaded["draw"].get("epoch") is not None:
                set_sampler_epoch(sampler, loaded["draw"]["epoch"])
        else:
            chosen = self._choice(sampler)
            if chosen is not None:
                number = drawn_epoch = chosen
            elif last is not None and not last.has_started:  # its iter() was interrupted, or failed
                number, drawn_epoch = last.number, last.drawn_epoch
            else:
                number = self.epoch + 1
                drawn_epoch = last.drawn_epoch + 1 if persists and last is not None else 0
            state, restored = None, False
            if loaded is not None:
                self._loaded = {**loaded, "epoch": number - 1}
                draw = SamplerState(spec.generator, sampler)
                draw.load(loaded["draw"])
                restored = draw.sources[1] > 0
            _set_seeded(sampler, number)
        epoch = Epoch(
            spec,
            number,
            drawn_epoch=drawn_epoch,
            state=state,
            restored=restored,
            prefetches_next=predicts,
        )
        if persists and last is not None:
            epoch.dataset_states = last.dataset_states  # its workers keep theirs
        self._begin(epoch, sampler)
        return epoch, dataset_states

    def _begin(self, epoch: Epoch, sampler: object) -> None:
        """Go on to an epoch: all at once, as the handler of a signal may raise at any line."""
        of_sampler = epoch_of(sampler)
        vars(self).update(last=epoch, _number=epoch.number, _sampler_epoch=of_sampler, _chosen=None)

    def begin_again(self, spec: SamplingSpec, epoch: Epoch) -> Epoch | None:
        """Begin an epoch again, if ``set_epoch`` has chosen another one since; None if it has not.

        A resumed epoch stays what the state says. The order is drawn again as it was the first time.

        Args:
            epoch: The iterator's. If it is not the last one, another iterator has begun since.
        """
        again, sampler = self.last, spec.index_sampler
        last = again and (again.replaces or again)
        if again is None or last is None or last.is_resumed or epoch not in (last, again):
            return None
        of_sampler = epoch_of(sampler)
        is_moved = of_sampler != last.sampler_epoch
        chosen = of_sampler if is_moved and of_sampler is not None else self._chosen
        if again is not last:  # which was interrupted
            chosen = again.number if chosen is None else chosen
        elif chosen is None or (chosen == self._number and not is_moved):
            self._chosen = None
            return None
        assert chosen is not None
        state = {
            "base_seed": last.base_seed,
            "done": completed_to_plain(Completed()),
            "draw": last.draw.to_plain(),
        }
        _set_seeded(sampler, chosen)
        other = Epoch(
            spec, chosen, drawn_epoch=chosen, state=state, prefetches_next=last.prefetches_next
        )
        other.dataset_states, other.replaces = last.dataset_states, last
        self._begin(other, sampler)
        return other

    def _choice(self, sampler: object) -> int | None:
        """The epoch that ``set_epoch`` of sampler or loader has chosen since the last one began; None if none has."""
        of_sampler = epoch_of(sampler)
        return self._chosen if of_sampler in (None, self._sampler_epoch) else of_sampler

    def state(self, spec: SamplingSpec) -> dict[str, Any]:
        """The present state as plain data, apart from the ``state_dict()`` of samplers and datasets."""
        loaded = self._pending()
        chosen = self._choice(spec.index_sampler)
        if loaded is not None:
            epoch = chosen - 1 if loaded["finished"] and chosen is not None else loaded["epoch"]
            return copy.deepcopy({**loaded, "epoch": epoch})
        last, draw = self.last, SamplerState(spec.generator, spec.index_sampler)
        progress = None if last is None else last.progress.part or last.progress
        # Its length may depend on the epoch that it has now.
        loader = {
            **signature(spec, draw.sources),
            "sampler_epoch": epoch_of(spec.index_sampler),
        }
        state = {
            "loader": loader,
            "epoch": self._number,
            "finished": progress is None or progress.finished,
        }
        if last is None or progress is None or progress.finished:
            if chosen is not None:
                state["epoch"] = chosen - 1
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
        sampler = spec.index_sampler
        draw = SamplerState(spec.generator, sampler)
        with at_epoch(sampler, sampler_epoch_in(state)):
            mine = signature(spec, draw.sources)
        loaded = checked(state, mine, copies)
        draw.check(loaded["draw"])
        self._may_predict()
        self._loaded = loaded
        self._chosen = self.last = self._last_seed = None
        # So that a later set_epoch() of the sampler is noticed whatever its number.
        if _set_seeded(sampler, loaded["epoch"]):
            self._sampler_epoch = epoch_of(sampler)

    def lateness(self) -> Lateness:
        """By how many batches the samples of the last epoch differ from the sampler's order."""
        return self.last.progress.lateness if self.last else Lateness()

    def coverage(self) -> Coverage:
        """The coverage of the last epoch's indices."""
        if self.last is not None:
            return self.last.progress.coverage()
        resumes = self.resumes
        progress = Progress(self.epoch) if resumes is None else Progress(*resumes)
        return progress.coverage()


def _set_seeded(sampler: object, epoch: int) -> bool:
    """Set the epoch of the samplers whose order is a function of it; False if there is none."""
    seeded = [one for one in nested(sampler) if issubclass(type(one), SEEDED)]
    for one in seeded:
        one.set_epoch(epoch)
    return bool(seeded)
