"""WebDataset: workers that each read whole tar files from front to back."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate

from bench.macro.loaders import Contender

REQUIREMENTS = ("webdataset==1.0.2",)
IMPORTS = ("webdataset",)
ROWS = ("shards",)
"""It has no use for a dataset that is asked for single samples."""


def _build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    import webdataset as wds

    batches = (
        wds.WebDataset([str(path) for path in work.paths], shardshuffle=False)
        .decode()
        .to_tuple("npy", "cls")
        .batched(arguments["batch_size"], collation_fn=default_collate)
    )
    return wds.WebLoader(
        batches,
        batch_size=None,
        num_workers=arguments["num_workers"],
        persistent_workers=arguments["persistent_workers"],
    )


CONTENDERS = (Contender("webdataset", "WebDataset", _build, keeps_order=False),)
