"""Whether what comes late differs from what comes in time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from minato import DataLoader, StragglerPolicy
from minato._core import Histogram
from minato.observe.report.bias import bias_of
from minato.observe.stats.lateness import DeliveredSample
from tests.datasets import Numbers, Sleepy

SLOW = dict.fromkeys(range(0, 240, 12), 0.05)


def rows(count: int, **what: Any) -> list[DeliveredSample]:
    """Of samples of which every fifth is late."""
    fixed = {"cost_ns": lambda late, chance: chance, "nbytes": lambda late, chance: 0} | what
    draw = random.Random(1)
    found = []
    for key in range(count):
        late = key % 5 == 0
        cost_ns, nbytes = (int(fixed[name](late, draw.randrange(100))) for name in fixed)
        found.append(DeliveredSample(key, 3 * late, cost_ns, nbytes))
    return found


@pytest.mark.parametrize(
    ("what", "labels", "words"),
    [
        ({}, None, None),
        ({}, lambda key: key % 3, None),
        ({}, lambda key: key % 5, "other labels than the rest"),
        ({}, lambda key: "cat" if key % 5 else "dog", "other labels than the rest"),
        ({}, lambda key: float(key % 5 == 0), "other labels than the rest"),
        ({}, lambda key: torch.tensor(key % 5), "other labels than the rest"),
        (
            {"nbytes": lambda late, chance: 1 + chance + 90 * late},
            None,
            "Larger samples come later",
        ),
        ({"nbytes": lambda late, chance: 200 + chance - 90 * late}, None, "come earlier"),
        ({"cost_ns": lambda late, chance: chance + 90 * late}, None, "report(labels=...)"),
        ({"cost_ns": lambda late, chance: chance + 90 * late}, lambda key: key % 3, None),
    ],
)
def test_what_differs_is_told(what: dict[str, Any], labels: Any, words: str | None) -> None:
    bias, warnings = bias_of(rows(1000, **what), Histogram(), labels)
    assert (bias.samples, bias.late_share) == (1000, 0.2)
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


@pytest.mark.parametrize(
    ("skipped", "told"), [([], None), (range(0, 100, 2), False), (range(0, 300, 10), True)]
)
@pytest.mark.parametrize("kind", ["sequence", "mapping", "function", "tensor"])
def test_labels_that_are_left_out_are_told(skipped: Any, told: bool | None, kind: str) -> None:
    rare = [int(key % 10 == 0) for key in range(1000)]
    labels: Any = {
        "sequence": rare,
        "mapping": dict(enumerate(rare)),
        "function": rare.__getitem__,
        "tensor": torch.tensor(rare),
    }[kind]
    bias, warnings = bias_of(rows(1000), Histogram(), labels, set(skipped))
    assert (bias.skipped_label is None) == (told is None)
    assert any("Skipped samples" in words for words in warnings) == bool(told)


def test_a_loader_that_skips_one_class() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index in SLOW:
                raise ValueError
            return index

    loader = DataLoader(Broken(240), 4, errors="skip")
    with pytest.warns(RuntimeWarning, match="20 samples of this epoch were skipped"):
        list(loader)
    report = loader.report(labels=[int(index in SLOW) for index in range(240)])
    assert report.bias.skipped_label is not None
    assert report.bias.skipped_label > 0.2
    assert any("Skipped samples" in words for words in report.warnings)
    assert "skipped label" in str(report)


def test_a_few_samples_prove_nothing() -> None:
    assert bias_of(rows(15), Histogram(), lambda key: key % 5)[1] == ()
    assert bias_of([], Histogram(), lambda key: key)[1] == ()


def test_sizes_are_unknown_where_all_samples_have_one_layout() -> None:
    assert bias_of(rows(100), Histogram(), None)[0].size is None


@pytest.mark.parametrize("order", ["arrival", "fast_first"])
def test_a_loader_whose_slow_samples_are_of_one_class(order: str) -> None:
    loader = DataLoader(
        Sleepy(240, 0.001, SLOW),
        4,
        num_workers=2,
        order=order,
        max_lag=16,
        stragglers=StragglerPolicy(after_s=0.03),
    )
    list(loader)
    report = loader.report(labels=[int(index in SLOW) for index in range(240)])
    bias = report.bias
    assert bias.samples == 4 * 60
    assert bias.label is not None
    assert bias.label > 0.2
    assert bias.cost > 0
    assert bias.size is None
    assert 0 < bias.late_share < 0.5
    assert 0 <= bias.batch_p50 <= bias.batch_p99 <= 1
    assert "other labels than the rest" in str(report)
    assert "other labels than the rest" in report.to_html()
    assert "Bias" in str(report)
    assert report.to_dict()["bias"]["samples"] == bias.samples
    assert "other labels" not in str(loader.report(labels=lambda index: index // 12 % 2))


class Ragged(Sleepy):
    """Slow samples are larger."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return np.zeros(2000 if index in SLOW else 20 + index % 7, np.uint8)


def test_a_loader_whose_slow_samples_are_large() -> None:
    loader = DataLoader(
        Ragged(240, 0.001, SLOW),
        4,
        num_workers=2,
        order="arrival",
        stragglers=StragglerPolicy(after_s=0.03),
        collate_fn=list,
    )
    list(loader)
    report = loader.report()
    assert report.bias.size is not None
    assert report.bias.size > 0.2
    assert any("Larger samples" in words for words in report.warnings)


@pytest.mark.parametrize("options", [{}, {"order": "batch"}, {"compat": "torch"}])
def test_nothing_is_looked_at_where_samples_keep_their_batches(options: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(40), 4, num_workers=1, **options)
    list(loader)
    report = loader.report(labels=lambda index: 1 / 0)
    assert report.bias.samples == 0
    assert "Bias" not in str(report)
    assert report.warnings == ()


def test_a_sample_without_a_label_is_named() -> None:
    loader = DataLoader(
        Sleepy(8, 0.002), 4, order="arrival", num_workers=1, workers="thread"
    )  # what costs next to nothing is not noted
    list(loader)
    with pytest.raises(ValueError, match=r"no label for the sample [4-7]: give one for each"):
        loader.report(labels=[1, 2, 3, 4])
