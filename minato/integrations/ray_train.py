"""Ray Train, whose ``prepare_data_loader`` makes torch's loader from eleven attributes of the given one."""

from __future__ import annotations

from typing import Any

from minato._compat import RAY_ACCELERATOR
from minato._support.loader_class import rebind
from minato.errors import warn
from minato.integrations.rebuilding import make_loader, rebuilding_alike

__all__ = ["install"]


def install(module: Any) -> None:
    """Adapt ``ray.train.torch.train_loop_utils``, or that of Ray Train's second version; warn if it is unknown."""
    owner = getattr(module, RAY_ACCELERATOR, module)
    if not hasattr(module, "DataLoader") or not hasattr(owner, "prepare_data_loader"):
        warn(
            f"minato does not know this version of Ray Train ({module.__name__}): prepare_data_loader() turns a "
            "minato.DataLoader into a loader with torch's engine",
            stacklevel=2,
        )
        return
    if module.DataLoader is make_loader:
        return
    module.DataLoader = make_loader
    original = owner.prepare_data_loader
    owner.prepare_data_loader = rebuilding_alike(original, 0 if owner is module else 1)
    rebind(original, owner.prepare_data_loader)
