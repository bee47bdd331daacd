"""Histograms: ``record`` runs for every sample, the others a few times a second."""

from __future__ import annotations

from types import ModuleType

from bench.micro._twins import Operations, main


def operations(histogram: ModuleType) -> Operations:
    full, older = histogram.Histogram(), histogram.Histogram()
    for value in range(2000):
        full.record(value**2)
    names = {"full": full, "older": older, "total": histogram.Histogram()}
    return {
        "record": ("total.record(123_456)", names),
        "percentile": ("full.percentile(0.75)", names),
        "merge": ("total.merge(full)", names),
        "snapshot": ("full.snapshot()", names),
        "subtract": ("full.subtract(older)", names),
    }


if __name__ == "__main__":
    main("histogram", operations)
