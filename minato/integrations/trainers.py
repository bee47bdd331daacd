"""Adapters of trainers that rebuild a loader as torch's, or count its epochs by themselves.

Each ``install_*`` function takes a module of a trainer after its import; it warns if it does not know that version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from minato._compat import (
    LIGHTNING_PROTOCOL,
    LIGHTNING_STATES,
    LIGHTNING_TRAINING_LOOP,
    RAY_ACCELERATOR,
)
from minato._support.loader_class import rebind
from minato.errors import warn

_REBUILDERS = ("prepare_data_loader", "skip_first_batches")
_WRAPPERS = ("DataLoaderShard", "DataLoaderDispatcher")

# ---- rebuilding: minato's loader is built again, in place of torch's ----


@dataclass
class _Build:
    """A rebuilding of a loader of minato's that is going on."""

    make: Callable[..., Any]
    deals: bool = False  # whether each rank reads its share by itself
    stateful: bool = False
    done: bool = False


_current: ContextVar[_Build | None] = ContextVar("minato_build", default=None)


def _make_loader(*arguments: Any, **keywords: Any) -> Any:
    """Takes the place of torch's class in the module of a trainer."""
    build = _current.get()
    if build is None:
        return torch.utils.data.DataLoader(*arguments, **keywords)
    build.done = True
    return build.make(*arguments, **keywords)


def _rebuilding_alike(
    rebuild: Callable[..., object], loader_at: int = 0, lost: str = ""
) -> Callable[..., Any]:
    """Wrap a function that rebuilds a loader; ``lost`` is the warning if it made another loader than minato's."""

    @functools.wraps(rebuild)
    def adapted(*arguments: Any, **keywords: Any) -> Any:
        given: Any = arguments[loader_at] if len(arguments) > loader_at else None
        given = keywords.get("dataloader", keywords.get("data_loader", given))
        make = getattr(given, "_minato_rebuilt", None)
        ranks = getattr(getattr(given, "readers", None), "ranks", None)
        stateful = hasattr(given, "state_dict")
        build = None if make is None else _Build(make, ranks is not None, stateful)
        token = _current.set(build)
        try:
            result = rebuild(*arguments, **keywords)
        finally:
            _current.reset(token)
        if lost and build is not None and not build.done and result is not given:
            warn(lost)
        return result

    return adapted


# ---- Hugging Face Accelerate ----


def install_accelerate(module: Any) -> None:
    """Adapt ``accelerate.data_loader``, which rebuilds loaders as torch's from a fixed list of attributes.

    ``Accelerator.prepare`` and ``skip_first_batches`` then call the given loader's ``_minato_rebuilt``, if it has one.
    ``use_stateful_dataloader=True`` asks for a loader with ``state_dict()``, which minato's is.
    """
    expected = (*_REBUILDERS, *_WRAPPERS, "DataLoaderAdapter", "PartialState", "DataLoader")
    missing = [name for name in expected if not hasattr(module, name)]
    if missing:
        warn(
            f"minato does not know this version of accelerate ({module.__name__} has no {', '.join(missing)}): "
            "accelerator.prepare() turns a minato.DataLoader into a loader with torch's engine"
        )
        return
    if module.DataLoader is _make_loader:
        return
    module.DataLoader = _make_loader
    for name in _REBUILDERS:
        original = getattr(module, name)
        adapted = _rebuilding_alike(
            original,
            lost=f"accelerate's {name} made another loader from a minato.DataLoader, so it loads without minato's "
            "engine; omit use_stateful_dataloader to keep it",
        )
        setattr(module, name, adapted)
        rebind(original, adapted)
    for name in _WRAPPERS:
        wrapper = getattr(module, name)
        wrapper.set_epoch = _forwarding_to_minato(wrapper.set_epoch)
        wrapper.set_sampler = _taking_the_state(wrapper.set_sampler)
    base = module.DataLoaderAdapter
    base.__init__ = _stateful_by_itself(base.__init__, module)
    base.state_dict = _saying_why(base.state_dict)
    base.load_state_dict = _taking_the_state(_counting_epochs(base.load_state_dict))


def _forwarding_to_minato(set_epoch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_epoch)
    def adapted(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        if hasattr(self.base_dataloader, "_minato_rebuilt"):
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
        build = _current.get()
        ours = build is not None and build.stateful and not reads_ahead
        if build is not None and reads_ahead and build.deals:
            raise ValueError(
                "Readers(ranks=...) has each rank read its share, and dispatch_batches=True has rank 0 read for all: "
                "give accelerate dispatch_batches=False, or leave ranks out"
            )
        another = use_stateful_dataloader and not ours
        init(self, dataset, use_stateful_dataloader=another, **keywords)
        self.use_stateful_dataloader = use_stateful_dataloader

    return adapted


def _taking_the_state(change: Callable[..., None]) -> Callable[..., None]:
    """Accelerate takes the state when it makes a loader, and then not before the first batch."""

    @functools.wraps(change)
    def adapted(self: object, *arguments: object, **keywords: object) -> None:
        change(self, *arguments, **keywords)
        loader = vars(self)["base_dataloader"]
        if hasattr(loader, "_minato_rebuilt") and "dl_state_dict" in vars(self):
            vars(self)["dl_state_dict"] = loader.state_dict()

    return adapted


def _saying_why(state_dict: Callable[..., object]) -> Callable[..., Any]:
    """Have a loader without a state say why, and not that Accelerate has kept none."""

    @functools.wraps(state_dict)
    def adapted(self: object) -> object:
        if "dl_state_dict" not in vars(self):
            vars(self)["base_dataloader"].state_dict  # noqa: B018  # raises AttributeError
        return state_dict(self)

    return adapted


def _counting_epochs(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Accelerate numbers the epochs of a new process from 0, whatever was loaded."""

    @functools.wraps(load_state_dict)
    def adapted(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        if (
            "iteration" in vars(self)
            and hasattr(self.base_dataloader, "_minato_rebuilt")
            and state_dict
        ):
            self.iteration = max(state_dict["epoch"] + bool(state_dict["finished"]), 0)

    return adapted


# ---- Ray Train ----


def install_ray_train(module: Any) -> None:
    """Adapt ``ray.train.torch.train_loop_utils``, or its second version: they rebuild loaders by eleven attributes."""
    owner = getattr(module, RAY_ACCELERATOR, module)
    if not hasattr(module, "DataLoader") or not hasattr(owner, "prepare_data_loader"):
        warn(
            f"minato does not know this version of Ray Train ({module.__name__}): prepare_data_loader() turns a "
            "minato.DataLoader into a loader with torch's engine"
        )
        return
    if module.DataLoader is _make_loader:
        return
    module.DataLoader = _make_loader
    original = owner.prepare_data_loader
    owner.prepare_data_loader = _rebuilding_alike(original, 0 if owner is module else 1)
    rebind(original, owner.prepare_data_loader)


# ---- Lightning ----


def install_lightning(module: Any) -> None:
    """Adapt ``training_epoch_loop``, which counts epochs by itself and loads the state of each loader that has one."""
    loop: Any = getattr(module, LIGHTNING_TRAINING_LOOP, None)
    protocol = getattr(module, LIGHTNING_PROTOCOL, None)
    if not hasattr(loop, "on_run_start") or not hasattr(loop, "advance") or protocol is None:
        warn(
            f"minato does not know this version of Lightning ({module.__name__} has no "
            f"{LIGHTNING_TRAINING_LOOP}.on_run_start, no advance or no {LIGHTNING_PROTOCOL}): after a checkpoint an "
            "epoch or a batch of a stream may be skipped, and a checkpoint fails if torch's engine loads"
        )
        return
    if not hasattr(loop.on_run_start, "__wrapped__"):
        loop.on_run_start = _leaving_ended_epochs(loop.on_run_start)
        loop.advance = _keeping_states(loop.advance)
        rebind(protocol, _asking_instances(protocol))


def _asking_instances(protocol: type) -> type:
    """A protocol for objects that have its methods; Lightning's own also takes one whose class alone has them."""

    class Asking(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, protocol) and hasattr(instance, "state_dict")

    return Asking(protocol.__name__, (), {})


def _leaving_ended_epochs(on_run_start: Callable[..., None]) -> Callable[..., None]:
    """Lightning takes the iterator of a resumed loader for that of its next epoch, though the state ends another one.

    Lightning may end an epoch before the loader does: it asks for no batch after the last one, and
    ``limit_train_batches`` leaves some out. What a loader has left then belongs to no epoch of Lightning's.
    """

    @functools.wraps(on_run_start)
    def adapted(self: Any, data_fetcher: Any) -> None:
        on_run_start(self, data_fetcher)
        if not self.restarting or self.batch_progress.current.ready:
            return
        loaders = data_fetcher.combined_loader.flattened
        if any(_batches_done(each) > data_fetcher.fetched for each in loaders):
            iter(data_fetcher)

    return adapted


def _keeping_states(advance: Callable[..., None]) -> Callable[..., None]:
    """Lightning asks for a batch ahead of its step where the length is unknown, which checkpoints must not count."""

    @functools.wraps(advance)
    def adapted(self: object, data_fetcher: object) -> None:
        fetcher: Any = data_fetcher
        combined = fetcher.combined_loader
        vars(combined).pop(LIGHTNING_STATES, None)
        ours = any(hasattr(each, "_minato_rebuilt") for each in combined.flattened)
        if ours and getattr(fetcher, "batches", None):
            ahead = getattr(combined, LIGHTNING_STATES)
            with suppress(Exception):  # raised again where a checkpoint asks
                before = ahead()
                vars(combined)[LIGHTNING_STATES] = lambda: before if fetcher.batches else ahead()
        advance(self, fetcher)

    return adapted


def _batches_done(loader: Any) -> int:
    """Batches of the newest iterator's epoch, with those before its state; 0 for loaders of others, or without one."""
    if not (hasattr(loader, "_minato_rebuilt") and hasattr(loader, "state_dict")):
        return 0
    return int(loader.state_dict()["done"]["batches"])
