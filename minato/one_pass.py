"""One run of a loader over its sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

from minato.source.passes import batches_of, next_sampler, sizes_of

if TYPE_CHECKING:
    from minato.loader import DataLoader

__all__ = ["OnePass"]


class OnePass:
    """One run of a loader over its sampler.

    Attributes:
        epoch: Its number.
        seed: What the randomness of its samples starts from.
    """

    def __init__(self, loader: DataLoader[Any], base_seed: int) -> None:
        self._loader = loader
        self.epoch = loader._epoch
        self.seed = base_seed if loader._options.seed is None else loader._options.seed

    def batches(self, indices: Iterator[Any]) -> Iterator[list[Any]]:
        """The keys of each batch, from what the index sampler yields."""
        if self._loader._dataset_kind == _DatasetKind.Iterable:
            return sizes_of(indices, self._loader._auto_collation)
        loader = self._loader
        whole = bool(getattr(loader.dataset, "__getitems__", None))
        return batches_of(indices, loader._auto_collation, whole)

    def size(self) -> int | None:
        """How many samples the sampler says it has, where there is no other than torch's batch sampler above it."""
        if self._loader._auto_collation and type(self._loader._index_sampler) is not BatchSampler:
            return None
        try:
            return len(cast(Sized, self._loader.sampler))
        except TypeError:
            return None

    def expected(self) -> tuple[Iterator[list[Any]], int, int] | None:
        """``(batches, epoch, seed)`` of the pass after this one, where it is known and can be prepared."""
        loader = self._loader
        if not (
            loader.persistent_workers and loader._foretells and loader._options.rng == "sample"
        ):
            return None
        later = next_sampler(loader._index_sampler)
        if later is None:
            return None
        # Persistent workers keep their base seed, as with torch, so it is the same in the next pass.
        return batches_of(later, loader._auto_collation), self.epoch + 1, self.seed

    def foretold_wrongly(self) -> None:
        """Load nothing ahead for the next passes of this loader."""
        self._loader._foretells = False
