"""Costs of samples, kept on disk for the next run of the program."""

from __future__ import annotations

import warnings

from minato._core.histogram import Histogram
from minato.engine.plan import Pipeline
from minato.errors import MinatoWarning
from minato.observe.stats.costs import CostStats, fingerprint

__all__ = ["CostHistoryStore"]


class CostHistoryStore:
    """A folder with a profile for each dataset, list of transforms and machine.

    Args:
        folder: Created when the first profile is saved.
        pipeline: Its dataset and transforms name the profile.
    """

    def __init__(self, folder: str, pipeline: Pipeline) -> None:
        self._folder = folder
        self._key = fingerprint(pipeline.dataset, pipeline.transforms.steps)

    def costs(self) -> Histogram | None:
        """Costs of samples in the latest run; None if there is no profile of it."""
        kept = CostStats.load(self._folder, self._key)
        return None if kept is None else kept[1]

    def keep(self, profile: CostStats, recent: Histogram) -> None:
        """Save the costs of all samples and of recent ones; a folder that cannot be written gives a warning."""
        costs = recent if recent.count else profile.run["total"]
        try:
            profile.save(self._folder, self._key, costs)
        except OSError as error:
            warnings.warn(
                f"profile={self._folder!r} cannot be written, so the next run begins without it: {error}",
                MinatoWarning,
                stacklevel=2,
            )
