"""Ray Data: samples mapped by tasks, on a cluster of this machine alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.macro.loaders import Contender
from bench.peers.adapters import Epochs, order_of

REQUIREMENTS = ("ray[data]==2.60.0", "pydantic==2.12.3")
IMPORTS = ("ray.data",)
ROWS = ("stragglers",)
"""It starts a process per worker that imports torch and pyarrow anew: minutes a row, on two cores."""


def _build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    import ray

    workers = arguments["num_workers"]
    # Tasks that sleep need no core of their own, so there may be as many as the others have workers.
    ray.init(
        num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    shared = ray.put(work)

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        payload, label = ray.get(shared)[int(row["item"])]
        return {"payload": np.asarray(payload), "label": label}

    def begin(epoch: int) -> Any:
        order = order_of(work, arguments["shuffle"], seed, epoch)
        rows = ray.data.from_items(order, override_num_blocks=4 * workers)
        batches = rows.map(sample).iter_torch_batches(batch_size=arguments["batch_size"])
        return ([batch["payload"], batch["label"]] for batch in batches)

    return Epochs(begin)


CONTENDERS = (Contender("ray", "Ray Data", _build, keeps_order=False),)
