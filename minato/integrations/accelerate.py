"""Hugging Face Accelerate, which rebuilds loaders as torch's from a fixed list of attributes.

``Accelerator.prepare`` and ``skip_first_batches`` construct a new loader from parts of the given one. With this adapter
they call the given loader's ``_rebuilt`` instead, if it has one, so that ``accelerator.prepare(loader)`` works.
``use_stateful_dataloader=True`` asks for a loader with ``state_dict()``, which minato's is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minato._support.loader_class import rebind
from minato.errors import warn
from minato.integrations.rebuilding import building, make_loader, rebuilding_alike

__all__ = ["install"]

_REBUILDERS = ("prepare_data_loader", "skip_first_batches")
_WRAPPERS = ("DataLoaderShard", "DataLoaderDispatcher")


def install(module: Any) -> None:
    """Adapt ``accelerate.data_loader``; warn if it lacks an expected name."""
    expected = (*_REBUILDERS, *_WRAPPERS, "DataLoaderAdapter", "PartialState", "DataLoader")
    missing = [name for name in expected if not hasattr(module, name)]
    if missing:
        warn(
            f"minato does not know this version of accelerate ({module.__name__} has no {', '.join(missing)}): "
            "accelerator.prepare() turns a minato.DataLoader into a loader with torch's engine",
            stacklevel=2,
        )
        return
    if module.DataLoader is make_loader:
        return
    module.DataLoader = make_loader
    for name in _REBUILDERS:
        original = getattr(module, name)
        adapted = rebuilding_alike(original, lost=functools.partial(_tell, name))
        setattr(module, name, adapted)
        rebind(original, adapted)
    for name in _WRAPPERS:
        wrapper = getattr(module, name)
        wrapper.set_epoch = _forwarding_to_minato(wrapper.set_epoch)
    base = module.DataLoaderAdapter
    base.__init__ = _stateful_by_itself(base.__init__, module)
    base.load_state_dict = _counting_epochs(base.load_state_dict)


def _tell(name: str) -> None:
    warn(
        f"accelerate's {name} made another loader from a minato.DataLoader, so it loads without minato's engine; "
        "omit use_stateful_dataloader to keep it",
        stacklevel=3,
    )


def _forwarding_to_minato(set_epoch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_epoch)
    def adapted(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        if hasattr(self.base_dataloader, "_rebuilt"):
            self.base_dataloader.set_epoch(epoch)

    return adapted


def _stateful_by_itself(init: Callable[..., None], module: Any) -> Callable[..., None]:
    @functools.wraps(init)
    def adapted(
        self: Any, dataset: object, use_stateful_dataloader: bool = False, **keywords: Any
    ) -> None:
        # A process that reads for others is ahead of them, which accelerate subtracts from torchdata's states alone.
        reads_ahead = (
            isinstance(self, module.DataLoaderDispatcher)
            and module.PartialState().num_processes > 1
        )
        ours = building() is not None and not reads_ahead
        init(
            self,
            dataset,
            use_stateful_dataloader=use_stateful_dataloader and not ours,
            **keywords,
        )
        self.use_stateful_dataloader = use_stateful_dataloader

    return adapted


def _counting_epochs(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Accelerate numbers the epochs of a new process from 0, whatever was loaded."""

    @functools.wraps(load_state_dict)
    def adapted(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        if "iteration" in vars(self) and hasattr(self.base_dataloader, "_rebuilt") and state_dict:
            self.iteration = max(state_dict["epoch"] + bool(state_dict["finished"]), 0)

    return adapted
