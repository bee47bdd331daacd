"""``python -m demo``: load and augment a real brain volume with torch's loader and with minato, and compare."""

from __future__ import annotations

import argparse
import importlib.util
import sys

PACKAGES = ("nilearn", "nibabel", "scipy", "rich")  # nilearn ships the volume


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--epochs", type=_positive, default=5, help="per loader (default 5)")
    parser.add_argument("--workers", type=_positive, default=2, help="per loader (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of samples and model (default 0)")
    parser.add_argument(
        "--train",
        action="store_true",
        help="train a 3D U-Net on the CPU in each step, instead of a sleep that stands for an accelerator",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _options(arguments)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        print(f"demo: not installed: {names}; remedy: pip install {names}", file=sys.stderr)
        return 2
    # Imported here, so that a missing package gives the line above and not a traceback.
    from demo.compare import compare
    from demo.data import MissingData

    try:
        runs = compare(options.epochs, options.workers, options.seed, options.train)
    except MissingData as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    return 0 if all(run.is_complete for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
