"""Whether what comes late, or not at all, differs from the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from minato._core.histogram import Histogram
from minato.observe.report.figures import Bias
from minato.observe.stats.rank_correlation import rank_correlation, rank_spread
from minato.observe.stats.reservoir import Arrived

__all__ = ["Labels", "bias_of"]

Labels = Callable[[Any], Any] | Mapping[Any, Any] | Sequence[Any]
"""What tells the label of a key: a function, or something to index with it."""

_NOTICED = 0.2
_DEVIATIONS = 4.0
"""A correlation is told of from 0.2 on, if chance does not give it once in ten thousand times."""
_MOST_LABELS = 1 << 16
"""Of more, as many are drawn."""


def bias_of(
    rows: Sequence[Arrived],
    late: Histogram,
    labels: Labels | None,
    skipped: Collection[Any] = (),
) -> tuple[Bias, tuple[str, ...]]:
    """The figures, and what to say about them.

    Args:
        rows: Samples drawn at random.
        late: Of each batch, the share of late samples in thousandths.
        skipped: Keys of samples that were left out.
    """
    lags = [row.lag for row in rows]
    sized = [row for row in rows if row.nbytes]
    cost, costs_matter = _correlation(lags, [row.cost_ns for row in rows])
    size, sizes_matter = _correlation([row.lag for row in sized], [row.nbytes for row in sized])
    label, labels_matter = None, False
    skipped_label, skips_matter = None, False
    if labels is not None:
        label, labels_matter = _by_label(lags, [_label(labels, row.key) for row in rows])
        skipped_label, skips_matter = _by_omission(labels, rows, skipped)
    bias = Bias(
        len(rows),
        sum(lag > 0 for lag in lags) / max(len(lags), 1),
        late.percentile(0.5) / 1000,
        late.percentile(0.99) / 1000,
        cost,
        size if sized else None,
        label,
        skipped_label,
    )
    words = []
    if labels_matter:
        words.append(
            f"Samples that come late have other labels than the rest (rank correlation {label:+.2f}), so what the "
            "model sees early is not a fair part of the data: use a smaller max_lag, or order='strict'."
        )
    if skips_matter:
        words.append(
            f"Samples that were skipped have other labels than the rest (rank correlation {skipped_label:+.2f}), so "
            "the model sees too little of some: mend these samples, or let on_error replace them."
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


def _by_omission(
    labels: Labels, rows: Sequence[Arrived], skipped: Collection[Any]
) -> tuple[float | None, bool]:
    """The same for being left out, of all keys that have labels; with a function, of those that were delivered."""
    keys: Sequence[Any] = range(0)
    if callable(labels):
        keys = [row.key for row in rows]
    elif isinstance(labels, Mapping):
        keys = list(labels)
    elif skipped:
        keys = range(len(labels))
    if not skipped or not keys:
        return None, False
    share, draw = min(_MOST_LABELS / len(keys), 1.0), random.Random(0)
    kept = draw.sample(keys, round(share * len(keys)))
    gone = draw.sample(sorted(skipped, key=repr), round(share * len(skipped)))
    marks = [0] * len(kept) + [1] * len(gone)
    return _by_label(marks, [_label(labels, key) for key in (*kept, *gone)])


def _label(labels: Labels, key: Any) -> Any:
    try:
        label = labels(key) if callable(labels) else labels[key]
    except LookupError:
        raise ValueError(
            f"labels= has no label for the sample {key!r}: give one for each"
        ) from None
    item = getattr(label, "item", None)  # a number of numpy's or torch's
    return label if item is None else item()
