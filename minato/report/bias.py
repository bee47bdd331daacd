"""Whether what comes late differs from what comes in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minato._core.histogram import Histogram
from minato.report.figures import Bias
from minato.stats.ranks import rank_correlation, rank_spread
from minato.stats.reservoir import Arrived

__all__ = ["Labels", "bias_of"]

Labels = Callable[[Any], Any] | Mapping[Any, Any] | Sequence[Any]
"""What tells the label of a key: a function, or something to index with it."""

_NOTICED = 0.2
_DEVIATIONS = 4.0
"""A correlation is told of from 0.2 on, if chance does not give it once in ten thousand times."""


def bias_of(
    rows: Sequence[Arrived], late: Histogram, labels: Labels | None
) -> tuple[Bias, tuple[str, ...]]:
    """The figures, and what to say about them.

    Args:
        rows: Samples drawn at random.
        late: Of each batch, the share of late samples in thousandths.
    """
    lags = [row.lag for row in rows]
    sized = [row for row in rows if row.nbytes]
    cost, costs_matter = _correlation(lags, [row.cost_ns for row in rows])
    size, sizes_matter = _correlation([row.lag for row in sized], [row.nbytes for row in sized])
    label, labels_matter = None, False
    if labels is not None:
        label, labels_matter = _by_label(lags, [_label(labels, row.key) for row in rows])
    bias = Bias(
        len(rows),
        sum(lag > 0 for lag in lags) / max(len(lags), 1),
        late.percentile(0.5) / 1000,
        late.percentile(0.99) / 1000,
        cost,
        size if sized else None,
        label,
    )
    words = []
    if labels_matter:
        words.append(
            f"Samples that come late have other labels than the rest (rank correlation {label:+.2f}), so what the "
            "model sees early is not a fair part of the data: use a smaller max_lag, or order='strict'."
        )
    if sizes_matter:
        words.append(
            f"The larger a sample, the {'later' if size > 0 else 'earlier'} it comes (rank correlation {size:+.2f}): "
            "if size matters to the model, use a smaller max_lag, or order='strict'."
        )
    if costs_matter and labels is None:
        words.append(
            f"Dear samples come {'late' if cost > 0 else 'early'} (rank correlation {cost:+.2f}). That is harmless if "
            "what makes them dear does not matter to the model: report(labels=...) tells whether labels differ."
        )
    return bias, tuple(words)


def _correlation(lags: Sequence[int], values: Sequence[float]) -> tuple[float, bool]:
    """Spearman's rank correlation, and whether it is worth telling."""
    found = rank_correlation(lags, values)
    return found, abs(found) >= _NOTICED and abs(found) * len(lags) ** 0.5 >= _DEVIATIONS


def _by_label(lags: Sequence[int], labels: Sequence[Any]) -> tuple[float, bool]:
    """The same for labels: numbers with a fraction have an order, all others are classes."""
    if all(isinstance(label, float) for label in labels):
        return _correlation(lags, labels)
    found, deviations = rank_spread(lags, labels)
    return found, found >= _NOTICED and deviations >= _DEVIATIONS


def _label(labels: Labels, key: Any) -> Any:
    try:
        label = labels(key) if callable(labels) else labels[key]
    except LookupError:
        raise ValueError(
            f"labels= has no label for the sample {key!r}: give one for each"
        ) from None
    item = getattr(label, "item", None)  # a number of numpy's or torch's
    return label if item is None else item()
