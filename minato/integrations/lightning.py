"""Lightning, which reconstructs loaders from the names of their arguments; minato's loader needs no adapter for that.

Only ``Trainer.predict`` also relies on the order of the batches.
"""

from __future__ import annotations

from typing import Any

from minato._compat import LIGHTNING_PREDICT_SAMPLER

__all__ = ["counts_batches"]


def counts_batches(batch_sampler: Any) -> bool:
    """Whether the trainer assumes that the k-th batch is the k-th of this batch sampler."""
    return type(batch_sampler).__name__ == LIGHTNING_PREDICT_SAMPLER
