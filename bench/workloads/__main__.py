"""``python -m bench.workloads``: fetch the data of all workloads into ``build/data``, and prepare the volumes."""

from __future__ import annotations

import sys

from bench.workloads.packages import FOLDER, PACKAGES, CannotFetchError, fetch, prepare


def main() -> int:
    """Fetch what is missing; returns 1 if something is not to be had."""
    failed = False
    for package in PACKAGES:
        try:
            print(f"{package.kind}: {fetch(package)} ({package.licence})", flush=True)
        except CannotFetchError as error:
            failed = True
            print(f"not to be had: {error}", file=sys.stderr)
    print(f"prepared volumes: {prepare()}, in {FOLDER}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
