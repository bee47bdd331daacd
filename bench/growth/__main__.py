"""Command line; see ``python -m bench.growth --help``."""

from __future__ import annotations

import json
import sys

from bench import record
from bench.growth import report
from bench.growth.curves import CURVES, LOADERS, measure
from bench.growth.fresh import ask
from bench.macro.suite import Spread

WORKERS = (2, 12, 32)
METHODS = ("fork", "forkserver", "spawn")
SAMPLE_BYTES = (4096, 602112)


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Show how cost grows with the work, how long a cold start takes, and what memory is used."
    )
    options = record.options_of("bench.growth", about, 3).parse_args(arguments)
    repeats = 1 if options.short else options.repeats
    conditions = record.environment()
    results = report.Results()
    for curve in CURVES:
        sizes = curve.sizes[:3] if options.short else curve.sizes
        for loader in LOADERS:
            runs = [measure(curve, loader, sizes) for _ in range(repeats)]
            results.curves[curve.name, loader] = [
                (points[0][0], Spread.of([value for _, value in points]))
                for points in zip(*runs, strict=True)
            ]
            print(f"{curve.name}, {loader}: measured", flush=True)
    for method in METHODS[: 1 if options.short else None]:
        for workers in WORKERS[: 1 if options.short else None]:
            for loader in LOADERS:
                values = [ask("first_batch", loader, str(workers), method) for _ in range(repeats)]
                results.starts[method, workers, loader] = Spread.of(values)
        print(f"first batch, {method}: measured", flush=True)
    for nbytes in SAMPLE_BYTES:
        for loader in LOADERS:
            values = [ask("memory", loader, "4", str(nbytes)) for _ in range(repeats)]
            results.memory[nbytes, loader] = Spread.of(values)
    conditions["load average after"] = record.load_average()
    text = report.markdown(results, conditions, repeats)
    print(text)
    out = options.out or (None if options.short else record.ROOT / "docs" / "benchmarks")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "growth.md").write_text(text)
        (out / "growth.json").write_text(json.dumps(results.plain(conditions), indent=1) + "\n")
        report.draw(results, out / "growth.png")
        print(f"written: {out}/growth.md, growth.json, growth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
