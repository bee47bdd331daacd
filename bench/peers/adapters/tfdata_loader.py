"""tf.data: a parallel map that calls Python."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch.utils.dlpack import from_dlpack

from bench.macro.loaders import Contender
from bench.peers.adapters import Epochs, order_of

REQUIREMENTS = ("tensorflow-cpu==2.21.0",)
IMPORTS = ("tensorflow",)


def _build(work: Any, arguments: dict[str, Any], seed: int, *, in_order: bool) -> Any:
    import tensorflow as tf

    example = [np.asarray(part) for part in work.content(0)]
    types = [tf.as_dtype(part.dtype) for part in example]

    def sample(index: Any) -> list[Any]:
        return [np.asarray(part) for part in work[int(index)]]

    def mapped(index: Any) -> Any:
        parts = tf.numpy_function(sample, [index], types)
        return [
            tf.ensure_shape(part, like.shape) for part, like in zip(parts, example, strict=True)
        ]

    def begin(epoch: int) -> Any:
        order = order_of(work, arguments["shuffle"], seed, epoch)
        batches = (
            tf.data.Dataset.from_tensor_slices(np.array(order))
            .map(mapped, num_parallel_calls=arguments["num_workers"], deterministic=in_order)
            .batch(arguments["batch_size"])
            .prefetch(tf.data.AUTOTUNE)
        )
        return ([from_dlpack(part) for part in batch] for batch in batches)

    return Epochs(begin)


CONTENDERS = (
    Contender("tfdata", "tf.data", partial(_build, in_order=True), keeps_order=True),
    Contender(
        "tfdata-any-order",
        "tf.data, deterministic=False",
        partial(_build, in_order=False),
        keeps_order=False,
    ),
)
