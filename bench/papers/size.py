"""Whether a sample's size, or its past, tells its cost: figure 3a, and SpeedyLoader's table 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy import stats

from bench.macro.report import table
from bench.papers.costs import Measured, Times, measured
from bench.papers.decisions import decided_ms
from bench.papers.page import Section, Settings
from bench.papers.variability import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOW = 0.75
"""A sample is slow above this quantile of all costs, as in the paper."""
_TEXT = """\
*Rank* is Spearman's correlation of a sample's bytes on disk with its cost, *R²* that of a straight line. *Found by
size*: share of the slow samples, the dearest quarter, that are among the largest quarter; a guess finds 25 %. *Of
the sample*: share of the variance of costs that lies between samples rather than between several draws of one sample
(intraclass correlation). No prediction from what is known of a sample, be it its size or its past, can explain more.
The size heuristic of the paper's balancer is good where both the rank and this share are high.
"""
_DECIDED = """\
Where random decisions make the cost, prediction is blind. {samples} samples for {epochs} epochs with the costs of
SpeedyLoader's table 1 (crop 965 ms for the 0.4 that are balanced, else 0.2; each axis flipped for a third, 32 ms
together; noise 149 ms and brightness 6 ms for a tenth; cast 3 ms), drawn anew in each epoch, with 3 % of jitter;
nothing here is measured. Slow are those that cost more than the mean of {mean:.0f} ms: {share:.0f} %, which is more
than the quarter that a timeout at the 75th percentile takes for slow.
"""


def run(settings: Settings) -> Section:
    """Correlate sizes with costs, and compare prediction with a timeout."""
    found = {name: measured(name, settings) for name in NAMES}
    rows = [[name, *correlations(one)] for name, one in found.items()]
    head = ["workload", "rank", "R²", "found by size", "of the sample"]
    parts = [_TEXT, table(head, rows), decided(samples=210, epochs=50)]
    panels = tuple(_scatter(name, one) for name, one in found.items())
    return Section("Size as a predictor (figure 3a)", "\n".join(parts), panels)


def correlations(one: Measured) -> list[str]:
    """A row of the table."""
    costs_s = one.costs_s.mean(0)
    rank = stats.spearmanr(one.stored, costs_s).statistic
    straight = np.corrcoef(one.stored, costs_s)[0, 1] ** 2
    slow, large = (each >= np.quantile(each, SLOW) for each in (costs_s, one.stored))
    between = f"{100 * share_between(one.costs_s):.0f} %"
    return [f"{rank:.2f}", f"{straight:.2f}", f"{100 * large[slow].mean():.0f} %", between]


def share_between(costs_s: Times) -> float:
    """Intraclass correlation of ``(draws, samples)``: 1 where all draws of a sample cost the same."""
    draws, samples = costs_s.shape
    within = costs_s.var(0, ddof=1).sum() / samples
    between = draws * costs_s.mean(0).var(ddof=1)
    return max(0.0, float((between - within) / (between + (draws - 1) * within)))


def decided(samples: int, epochs: int) -> str:
    """The comparison on costs that decisions make."""
    costs_ms = decided_ms(samples, epochs, np.random.default_rng(0)).sum(2)
    slow = costs_ms[1:] > costs_ms.mean()
    past_ms = np.cumsum(costs_ms, 0)[:-1] / np.arange(1, epochs)[:, None]
    dearest = past_ms >= np.quantile(past_ms, 1 - slow.mean(), axis=1, keepdims=True)
    rows = [["dear in the past, as many as are slow", *_hits(dearest, slow), "0"]]
    for name, limit_ms in (("the mean", costs_ms.mean()), ("P75", np.quantile(costs_ms, SLOW))):
        flagged = costs_ms[1:] > limit_ms
        after = f"{limit_ms:.0f} of {costs_ms[1:][flagged].mean():.0f}"
        rows.append([f"beyond a timeout at {name}", *_hits(flagged, slow), after])
    about = _DECIDED.format(
        samples=samples, epochs=epochs, share=100 * slow.mean(), mean=costs_ms.mean()
    )
    head = ["flagged is what is", "slow samples flagged", "flagged ones slow", "flagged after, ms"]
    return f"{about}\n{table(head, rows)}"


def _hits(flagged: npt.NDArray[np.bool_], slow: npt.NDArray[np.bool_]) -> list[str]:
    return [f"{100 * flagged[slow].mean():.0f} %", f"{100 * slow[flagged].mean():.0f} %"]


def _scatter(name: str, one: Measured) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        stored = np.broadcast_to(one.stored / 1e6, one.costs_s.shape)
        axes.scatter(stored, 1e3 * one.costs_s, s=5, alpha=0.5, color="#1f6fb2", linewidths=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{name}: each draw of each sample")
        axes.set_xlabel("MB on disk")
        axes.set_ylabel("ms")

    return draw
