"""Lightning, which builds loaders anew from the names of their arguments; that works with ours as it is.

Only in ``Trainer.predict`` it also relies on the sequence of the batches.
"""

from __future__ import annotations

from typing import Any

from minato._compat import LIGHTNING_PREDICT_SAMPLER

__all__ = ["counts_batches"]


def counts_batches(batch_sampler: Any) -> bool:
    """Tell whether the k-th batch delivered is taken for the k-th that this batch sampler made."""
    return type(batch_sampler).__name__ == LIGHTNING_PREDICT_SAMPLER
