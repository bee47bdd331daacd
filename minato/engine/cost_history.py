"""Costs of samples, kept on disk for the next run of the program."""

from __future__ import annotations

import warnings

from minato._core.histogram import Histogram
from minato.engine.plan import Pipeline
from minato.errors import MinatoWarning
from minato.observe.stats.costs import CostStats, fingerprint

__all__ = ["CostHistoryStore"]


class CostHistoryStore:
    """A directory with a file of costs for each dataset, list of transforms and machine.

    Args:
        directory: Created when the first costs are saved.
        pipeline: Its dataset and transforms name the file.
    """

    def __init__(self, directory: str, pipeline: Pipeline) -> None:
        self._directory = directory
        self._key = fingerprint(pipeline.dataset, pipeline.transforms.steps)

    def costs(self) -> Histogram | None:
        """Costs of samples in the last run; None if none are saved."""
        kept = CostStats.load(self._directory, self._key)
        return None if kept is None else kept[1]

    def save(self, costs: CostStats, recent: Histogram) -> None:
        """Save the costs of all samples and of recent ones; warns if the directory cannot be written."""
        latest = recent if recent.count else costs.run["total"]
        try:
            costs.save(self._directory, self._key, latest)
        except OSError as error:
            warnings.warn(
                f"cost_history={self._directory!r} cannot be written, so the next run starts without it: {error}",
                MinatoWarning,
                stacklevel=2,
            )
