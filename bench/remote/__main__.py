"""Command line of the remote benchmark; see ``python -m bench.remote --help``."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

from bench import record
from bench.remote import report
from bench.remote.proxy import Link, Proxy
from bench.remote.store import Store
from bench.remote.trials import LOADERS, UNEVEN, compare, epochs_with_cache, ramp

CAP = 25e6
OWN = {"20 ms": 0.5e6, "150 ms": 2e6}
"""Bandwidth of a connection of the middle."""
UNEQUAL = {"spread": 4.0, "swing": 0.5}
LATENCIES_S = {"< 1 ms": 0.0005, "20 ms": 0.02, "150 ms": 0.15}


def main() -> int:
    """Run everything; returns the exit status."""
    given = record.options_of("bench.remote", __doc__ or "", 3).parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    repeats, longest_s = (1, 1.0) if given.short else (given.repeats, 4.0)
    sections = report.Sections()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "redis").mkdir()
        with Store(folder / "redis") as store:
            for label, rtt_s in LATENCIES_S.items():
                with Proxy(Link(rtt_s), store.socket) as proxy:
                    sections.add_latency(label, compare(proxy.port, repeats, longest_s))
            for label in ("20 ms", "150 ms"):
                link = Link(LATENCIES_S[label], CAP, **UNEQUAL)
                with Proxy(link, store.socket) as proxy:
                    some = {name: make for name, make in LOADERS.items() if "one read" not in name}
                    sections.add_capped(
                        label, CAP, compare(proxy.port, repeats, 1.5 * longest_s, some)
                    )
            for label, own in OWN.items():
                link = Link(LATENCIES_S[label], own_bandwidth=own, **UNEQUAL)
                with Proxy(link, store.socket) as proxy:
                    sections.add_uneven(label, compare(proxy.port, repeats, longest_s, UNEVEN))
            with Proxy(Link(LATENCIES_S["20 ms"]), store.socket) as proxy:
                for slow_start in (None, 1, 4):
                    found = ramp(proxy.port, lambda: proxy.requests, slow_start)
                    sections.add_ramp(slow_start, found)
            for label, reads in (("20 ms", 1), ("150 ms", 16)):
                with Proxy(Link(LATENCIES_S[label]), store.socket) as proxy:
                    place = folder / f"cache-{reads}"
                    sections.add_cache(label, reads, *epochs_with_cache(proxy.port, place, reads))
    text = sections.text(" ".join(["python -m bench.remote", *sys.argv[1:]]))
    out = given.out or (None if given.short else record.ROOT / "docs" / "benchmarks")
    if out is None:
        print(text)
    else:
        out.joinpath("remote.md").write_text(text)
        print(f"wrote {out / 'remote.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
