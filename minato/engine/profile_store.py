"""What one run of a program leaves for the next: the costs of samples."""

from __future__ import annotations

import warnings

from minato._core.histogram import Histogram
from minato.engine.plan import Plan
from minato.errors import MinatoWarning
from minato.observe.stats.costs import CostStats, fingerprint

__all__ = ["Memory"]


class Memory:
    """A folder with a profile for each dataset, list of transforms and machine.

    Args:
        folder: Made when the first profile is kept.
        plan: Whose dataset and transforms the profile is about.
    """

    def __init__(self, folder: str, plan: Plan) -> None:
        self._folder = folder
        self._key = fingerprint(plan.dataset, plan.chain.steps)

    def costs(self) -> Histogram | None:
        """What samples cost in the latest run, None if nobody knows."""
        kept = CostStats.load(self._folder, self._key)
        return None if kept is None else kept[1]

    def keep(self, profile: CostStats, recent: Histogram) -> None:
        """Keep what samples have cost, and what they cost of late; a folder that cannot be written is no error."""
        costs = recent if recent.count else profile.run["total"]
        try:
            profile.save(self._folder, self._key, costs)
        except OSError as error:
            warnings.warn(
                f"profile={self._folder!r} cannot be written, so the next run begins without it: {error}",
                MinatoWarning,
                stacklevel=2,
            )
