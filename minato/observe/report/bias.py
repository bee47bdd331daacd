"""Whether late or skipped samples differ from the rest, in cost, bytes and labels."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from minato._core import Histogram
from minato._support.text import text_of
from minato._support.values import plain
from minato.observe.report.figures import Bias
from minato.observe.stats.lateness import DeliveredSample

__all__ = ["Labels", "bias_of", "rank_correlation", "rank_spread"]

Labels: TypeAlias = Callable[[Any], Any] | Mapping[Any, Any] | Sequence[Any]
"""Returns the label of an index: a function, or a sequence or mapping."""

_NOTICEABLE = 0.2
_DEVIATIONS = 4.0
"""A correlation is reported from 0.2 on, if random data would give it less often than once in ten thousand runs."""
_MOST_LABELS = 1 << 16
"""Of more labels, a random subset of this size is used."""


def bias_of(
    rows: Sequence[DeliveredSample],
    late: Histogram,
    labels: Labels | None,
    skipped: Collection[Any] = (),
) -> tuple[Bias, tuple[str, ...]]:
    """The figures, and a sentence about each that is noticeable.

    Args:
        rows: A random subset of the samples.
        late: Share of samples that are late, of each batch, in thousandths.
        skipped: Indices of the skipped samples.
    """
    lags = [row.lag for row in rows]
    sized = [row for row in rows if row.nbytes]
    cost, cost_matters = _correlation(lags, [row.cost_ns for row in rows])
    size, size_matters = _correlation([row.lag for row in sized], [row.nbytes for row in sized])
    label, label_matters = None, False
    skipped_label, skips_matter = None, False
    if labels is not None:
        label_of = _lookup(labels)
        label, label_matters = _by_label(lags, [label_of(row.key) for row in rows])
        skipped_label, skips_matter = _by_omission(labels, rows, skipped)
    bias = Bias(
        samples=len(rows),
        late_share=sum(lag > 0 for lag in lags) / max(len(lags), 1),
        batch_p50=late.percentile(0.5) / 1000,
        batch_p99=late.percentile(0.99) / 1000,
        cost=cost,
        size=size if sized else None,
        label=label,
        skipped_label=skipped_label,
    )
    warnings = []
    if label_matters:
        warnings.append(
            f"Late samples have other labels than the rest (rank correlation {label:+.2f}), so the model sees a biased "
            "part of the data first: use a smaller max_lag, or order='strict'."
        )
    if skips_matter:
        warnings.append(
            f"Skipped samples have other labels than the rest (rank correlation {skipped_label:+.2f}), so some labels "
            "are underrepresented: repair these samples, or replace them by on_error."
        )
    if size_matters:
        warnings.append(
            f"Larger samples come {'later' if size > 0 else 'earlier'} (rank correlation {size:+.2f}): "
            "if size matters to the model, use a smaller max_lag, or order='strict'."
        )
    if cost_matters and labels is None:
        warnings.append(
            f"Expensive samples come {'late' if cost > 0 else 'early'} (rank correlation {cost:+.2f}). That is "
            "harmless unless their cost is related to their content: report(labels=...) shows whether labels differ."
        )
    return bias, tuple(warnings)


def _correlation(lags: Sequence[int], values: Sequence[float]) -> tuple[float, bool]:
    """Spearman's rank correlation, and whether it is noticeable."""
    found = rank_correlation(lags, values)
    return found, abs(found) >= _NOTICEABLE and abs(found) * len(lags) ** 0.5 >= _DEVIATIONS


def _by_label(lags: Sequence[int], labels: Sequence[Any]) -> tuple[float, bool]:
    """The same for labels: floats have an order, all others are classes."""
    if all(isinstance(label, float) for label in labels):
        return _correlation(lags, labels)
    found, deviations = rank_spread(lags, labels)
    return found, found >= _NOTICEABLE and deviations >= _DEVIATIONS


def _by_omission(
    labels: Labels, rows: Sequence[DeliveredSample], skipped: Collection[Any]
) -> tuple[float | None, bool]:
    """The same for skipped samples, against all that have labels; with a function, against the returned ones."""
    indices: Sequence[Any] = range(0)
    if callable(labels):
        indices = [row.key for row in rows]
    elif isinstance(labels, Mapping):
        indices = list(labels)
    elif skipped:
        indices = range(len(labels))
    if not skipped or not indices:
        return None, False
    share, draw = min(_MOST_LABELS / len(indices), 1.0), random.Random(0)
    kept = draw.sample(indices, round(share * len(indices)))
    missing = draw.sample(sorted(skipped, key=text_of), round(share * len(skipped)))
    marks = [0] * len(kept) + [1] * len(missing)
    return _by_label(marks, list(map(_lookup(labels), (*kept, *missing))))


def _lookup(labels: Labels) -> Callable[[Any], Any]:
    """A function that returns the label of an index as a plain value.

    A sequence is asked by position, whatever labels it has itself (pandas); a mapping by key.
    """
    by_text: dict[str, Any] = {}

    def found(index: Any) -> Any:
        if callable(labels):
            return labels(index)
        if isinstance(index, int) and hasattr(labels, "iloc"):
            return labels.iloc[index]
        try:
            return labels[index]
        except LookupError:
            if not isinstance(labels, Mapping):
                raise
        if (
            not by_text
        ):  # the keys may equal the index in another type, and the log has texts of objects
            for key, label in labels.items():
                by_text[text_of(key)] = label
        return by_text[index if index in by_text else text_of(index)]

    def label_of(index: Any) -> Any:
        try:
            return plain(found(index))
        except LookupError:
            raise ValueError(
                f"labels= has no label for the sample {text_of(index)}: give one for each"
            ) from None

    return label_of


def _hashable(label: Any) -> Any:
    try:
        hash(label)
    except Exception:
        return text_of(label)
    return label


def rank_correlation(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Spearman's rank correlation of two sequences of equal length; equal values share their mean rank.

    Returns:
        From -1 to 1; 0 where one of them is constant or has fewer than two values.
    """
    ranks = [_ranks_of(np.asarray(values, np.float64)) for values in (first, second)]
    if len(ranks[0]) < 2 or any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def rank_spread(values: npt.ArrayLike, groups: Sequence[object]) -> tuple[float, float]:
    """How strongly the ranks of values depend on the group (the test of Kruskal and Wallis).

    Returns:
        The correlation ratio, from 0 to 1, less its expectation for random groups; for two groups it is the absolute
        value of Spearman's correlation. Then the standard deviations by which the statistic exceeds its expectation.
    """
    ranks = _ranks_of(np.asarray(values, np.float64))
    numbers: dict[Any, int] = {}
    place = np.array([numbers.setdefault(_hashable(each), len(numbers)) for each in groups], int)
    counts = np.bincount(place)
    count, num_groups = len(ranks), len(counts)
    whole = float(np.sum((ranks - (count + 1) / 2) ** 2))
    if num_groups < 2 or num_groups >= count or whole == 0:
        return 0.0, 0.0
    means = np.bincount(place, ranks) / counts
    between = float(np.sum(counts * (means - (count + 1) / 2) ** 2))
    statistic, expected = (count - 1) * between / whole, num_groups - 1
    share = max((statistic - expected) / (count - num_groups), 0.0)
    return min(share, 1.0) ** 0.5, (statistic - expected) / (2 * expected) ** 0.5


def _ranks_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rank of each value, from 1 on."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: npt.NDArray[np.float64] = last - (counts - 1) / 2.0
    return middle[place]
