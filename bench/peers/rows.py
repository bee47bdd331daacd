"""The rows that peers are compared on: some of the engine benchmark's, and one on tar files."""

from __future__ import annotations

from dataclasses import replace

from bench.macro.rows import ALL_ROWS, PATCH, Row
from bench.peers.shards import Shards

SHARDS = replace(
    PATCH,
    name="shards",
    title="float32 (3, 64, 64) as .npy in 16 tar files, in the page cache; batch 16, 2 workers",
    make=Shards,
    samples=2048,
    short_samples=256,
    batch_size=16,
    unit="s/epoch",
    goals=(),
)
_SHARED = ("stragglers", "lognormal", "bimodal-35", "image", "vector")
PEER_ROWS: dict[str, Row] = {
    **{row.name: row for row in ALL_ROWS if row.name in _SHARED},
    SHARDS.name: SHARDS,
}
