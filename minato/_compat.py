"""Private names of torch, CPython, NumPy, Ray and others that minato uses: each one here, with a reason and a probe.

No other module of the package reaches for a private name of another package, except that the loader and its iterator
override methods of torch's classes that are probed here. Two files are quarantined exceptions:
``transforms/rng_memory.py`` writes to the memory of random generators, and ``_core/tensor_memory.py`` finds fields of
tensors. Both verify what they find, have a fallback of public calls, and obey :func:`may_access_memory`.

A missing name either has a fallback, or importing minato raises an ImportError that names it. ``minato doctor`` runs
the probes. Importing this module imports torch, NumPy and the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import thread as executor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from multiprocessing import context, forkserver, resource_sharer, spawn, util
from multiprocessing import process as process_module
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter, methodcaller
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import default_convert

try:
    from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # not in typeshed

    from torch import _utils
    from torch._utils import ExceptionWrapper
    from torch.utils.data import dataloader
    from torch.utils.data._utils import collate, fetch, pin_memory, worker
    from torch.utils.data._utils.worker import WorkerInfo, _generate_state
    from torch.utils.data.dataloader import _BaseDataLoaderIter as TorchIterator
    from torch.utils.data.dataloader import _DatasetKind
    from torch.utils.data.dataloader import _InfiniteConstantSampler as EndlessSampler
except ImportError as error:
    raise ImportError(
        f"minato does not support this version of torch ({torch.__version__}) or Python: {error}. Install a newer "
        "minato, or a version of torch that it names in its requirements"
    ) from error


__all__ = [
    "EndlessSampler",
    "ExceptionWithTraceback",
    "ExceptionWrapper",
    "TorchIterator",
    "WorkerInfo",
]
"""Names of others that go on under these; all functions below are public, too."""


def may_access_memory() -> bool:
    """Whether minato may access the memory of other packages' objects directly: not if ``MINATO_DIRECT_MEMORY=0``."""
    return os.environ.get("MINATO_DIRECT_MEMORY") != "0"


# --- torch's loader and its iterator --------------------------------------------------------


def is_iterable(loader: TorchDataLoader[object] | TorchIterator) -> bool:
    """Whether the dataset of a loader, or of an iterator of torch's, is iterable."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


def length_was_asked(iterator: TorchIterator) -> bool:
    """Whether ``len(loader)`` of an iterable dataset was asked for before the iterator began."""
    return iterator._IterableDataset_len_called is not None


INDEX_SAMPLER = "_index_sampler"  # the name of the attribute that index_sampler() returns


def index_sampler(loader: TorchDataLoader[object]) -> Any:
    """The sampler of a loader's batches, or of its samples if it does not batch."""
    return loader._index_sampler


def is_batched(loader: TorchDataLoader[object]) -> bool:
    """Whether a loader puts samples together to batches."""
    return bool(loader._auto_collation)


def is_constructed(loader: object) -> bool:
    """Whether the constructor of torch's class has run; from then on some attributes are fixed.

    Programs set the attribute to change such a loader by force.
    """
    return bool(getattr(loader, "_DataLoader__initialized", True))


def pin_batch(batch: object, device: object) -> Any:
    """A batch in pinned memory, by torch's rules for containers."""
    return pin_memory.pin_memory(batch, device=device)


# --- parts of torch's loader that programs replace ------------------------------------------


def _is_torchs(value: object, module: ModuleType) -> bool:
    """Whether a function, or a class with all its methods, is what torch's module has defined."""
    if not isinstance(value, type):
        return getattr(value, "__globals__", None) is vars(module)
    held = [getattr(each, "__func__", each) for each in vars(value).values()]
    own = all(each.__globals__ is vars(module) for each in held if isinstance(each, FunctionType))
    return own and value.__module__ == module.__name__


def _parts() -> list[object]:
    """What torch's engine without workers uses, and all members of its classes."""
    kinds = (
        *(dataloader._SingleProcessDataLoaderIter, dataloader._DatasetKind, _DatasetKind),
        *(fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher, fetch._BaseDatasetFetcher),
    )
    found = [*kinds, TorchDataLoader._get_iterator, TorchIterator._next_index]
    for kind in kinds:
        if isinstance(kind, type):
            found += vars(kind).values()
    return found


_TORCHS: list[object] = []  # these parts when they were found to be torch's; empty: they were not


def parts_stay() -> bool:
    """Whether no part of torch's engine without workers is replaced, which each epoch asks; False: look closer."""
    return _parts() == _TORCHS


def fetcher_is_replaced() -> bool:
    """Whether the program has put another class or method in the place of torch's fetcher of map-style datasets."""
    if parts_stay():
        return False
    parts = fetch._MapDatasetFetcher, fetch._BaseDatasetFetcher
    own = _is_torchs(_DatasetKind, dataloader) and all(_is_torchs(part, fetch) for part in parts)
    return not own


def make_fetcher(dataset: object, batched: bool, collate_fn: object, drop_last: bool) -> Any:
    """The fetcher that torch's worker would make in this process; ``fetch(indices)`` returns a collated batch."""
    return _DatasetKind.create_fetcher(_DatasetKind.Map, dataset, batched, collate_fn, drop_last)


_NEXT = TorchIterator.__next__ if _is_torchs(TorchIterator.__next__, dataloader) else None


def torch_looks_on() -> bool:
    """Whether batches must pass through ``__next__`` of the iterators' base: a profiler records, or it is replaced."""
    return TorchIterator.__next__ is not _NEXT or getattr(profiler, "_is_profiler_enabled", True)


def replaced_parts(*, streams: bool, worker_processes: bool, workers: int, pins: bool) -> list[str]:
    """The parts of torch's engine that the program has replaced, and that a loader would use with torch.

    ``__init__`` and ``_reset`` of the iterators' base, ``default_collate`` and what it calls, and ``pin_memory`` are
    not among them: minato uses what is in their place.
    """
    if not workers and parts_stay():
        return []
    found = []

    def look(module: ModuleType, owner: type | ModuleType, name: str) -> None:
        value = vars(owner).get(name)
        if not _is_torchs(getattr(value, "__func__", value), module):
            found.append(f"{getattr(owner, '__qualname__', owner.__name__)}.{name}")

    look(dataloader, TorchDataLoader, "_get_iterator")
    look(dataloader, TorchIterator, "_next_index")
    if worker_processes:
        look(dataloader, dataloader, "_MultiProcessingDataLoaderIter")
        look(worker, worker, "_worker_loop")
    elif not workers:
        look(dataloader, dataloader, "_SingleProcessDataLoaderIter")
    if workers and pins:
        look(pin_memory, pin_memory, "_pin_memory_loop")
    if streams:
        look(fetch, fetch, "_IterableDatasetFetcher")
        look(fetch, fetch, "_BaseDatasetFetcher")
        look(dataloader, dataloader, "_DatasetKind")
    return found


if not (
    replaced_parts(streams=True, worker_processes=False, workers=0, pins=False)
    or fetcher_is_replaced()
):
    _TORCHS += _parts()


# --- torch's workers ------------------------------------------------------------------------


class _OfThread(threading.local):
    info: WorkerInfo | None = None


_of_thread = _OfThread()
_GET_WORKER_INFO = worker.get_worker_info


def worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> WorkerInfo:
    """What ``get_worker_info()`` returns in a worker."""
    return WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=dataset)


def be_worker(info: WorkerInfo) -> None:
    """Have ``get_worker_info()`` describe a worker whose process this is."""
    worker._worker_info = info
    _of_thread.info = None  # of a worker thread that has forked it


def in_worker_process() -> bool:
    """Whether this process is a worker's, of minato's or of torch's."""
    return worker._worker_info is not None


def worker_of_thread() -> WorkerInfo | None:
    """The worker that this thread is, in a process that may be none."""
    return _of_thread.info


def be_worker_of_thread(info: WorkerInfo | None) -> None:
    """Have ``get_worker_info()`` describe a worker in this thread alone; None: what it describes in the process.

    Torch keeps one record for all threads. From the first call on, its function asks for that of the thread first. It
    runs other code, as programs have imported the function itself.
    """
    if info is not None and _GET_WORKER_INFO.__code__ is not _get_worker_info.__code__:
        vars(worker)["_minato_of_thread"] = _of_thread
        _GET_WORKER_INFO.__code__ = _get_worker_info.__code__
    _of_thread.info = info


class AsWorker:
    """Be a worker in this thread, for torch's ``get_worker_info()``; None: be none, unless the process is one.

    Not a generator: each batch enters one or two.
    """

    __slots__ = ("_before", "_info")

    def __init__(self, info: WorkerInfo | None) -> None:
        self._info = info

    def __enter__(self) -> None:
        self._before = _of_thread.info
        be_worker_of_thread(self._info)

    def __exit__(self, *_: object) -> None:
        _of_thread.info = self._before


def _get_worker_info() -> WorkerInfo | None:
    # It runs as torch's function, among the names of its module.
    return _minato_of_thread.info or _worker_info  # type: ignore[name-defined,no-any-return]  # noqa: F821


def forget_dataset() -> None:
    """Have ``get_worker_info()`` describe this worker without its dataset."""
    info = worker._worker_info
    if info is not None:
        be_worker(worker_info(info.id, info.num_workers, info.seed, None))


def numpy_seed(base_seed: int, number: int) -> list[int]:
    """The words with which torch seeds NumPy in a worker."""
    return cast("list[int]", _generate_state(base_seed, number))


def set_signal_handlers() -> None:
    """Have this worker report SIGBUS and SIGSEGV in torch's words; without torch's function it ends without them."""
    getattr(torch._C, "_set_worker_signal_handlers", lambda: None)()


def name_process_thread(name: str) -> None:
    """Name this thread for tools such as ``top``; without torch's function it keeps its name."""
    getattr(torch.multiprocessing, "_set_thread_name", lambda name: None)(name)


# --- torch's collation, profiler and devices ------------------------------------------------


def _default_rules() -> dict[Any, Any] | None:
    try:
        return {
            torch.Tensor: collate.collate_tensor_fn,
            np.ndarray: collate.collate_numpy_array_fn,
            (np.bool_, np.number, np.object_): collate.collate_numpy_scalar_fn,
            float: collate.collate_float_fn,
            int: collate.collate_int_fn,
            str: collate.collate_str_fn,
            bytes: collate.collate_str_fn,
        }
    except AttributeError:
        return None


_COLLATE = vars(collate)
_DEFAULT_RULES = _default_rules()
_OF_TEXTS = getattr(collate, "collate_str_fn", NotImplemented)
_CALLED_BY_RULES = torch.stack, torch.as_tensor, torch.tensor


def collates_by_default() -> bool:
    """Whether ``default_collate`` has the rules that minato builds batches by.

    False where a program has added a rule or replaced a function that the rules call, or a version of torch has others:
    torch itself then builds the batches.
    """
    return (
        _COLLATE.get("default_collate_fn_map", ()) == _DEFAULT_RULES
        and (torch.stack, torch.as_tensor, torch.tensor) == _CALLED_BY_RULES
        and getattr(_COLLATE.get("collate"), "__globals__", None) is _COLLATE
    )


def collates_texts() -> bool:
    """Whether ``default_collate`` returns a list of texts as it is."""
    rules = _COLLATE.get("default_collate_fn_map") or {}
    return (
        rules.get(str) is _OF_TEXTS
        and rules.get(bytes) is _OF_TEXTS
        and getattr(_COLLATE.get("collate"), "__globals__", None) is _COLLATE
    )


def converts_by_default() -> bool:
    """Whether ``default_convert`` calls itself for what a container holds, and not a program's function."""
    return _COLLATE.get("default_convert") is default_convert


def collate_in_own_memory(samples: object) -> Any:
    """Collate as ``default_collate`` does, but in a worker into ordinary memory.

    ``default_collate`` stacks a worker's tensors in shared memory whose file has a name for a moment; a worker that is
    killed then leaves it in ``/dev/shm``. minato copies the batch once more anyway.
    """
    rules = getattr(collate, "default_collate_fn_map", {})
    known = hasattr(collate, "collate") and hasattr(_utils, "_element_size")
    if not known or rules.get(torch.Tensor) is not collate.collate_tensor_fn:
        return collate.default_collate(samples)
    return collate.collate(samples, collate_fn_map={**rules, torch.Tensor: _stack_in_own_memory})


def _stack_in_own_memory(
    tensors: list[torch.Tensor] | tuple[torch.Tensor, ...],
    *,
    collate_fn_map: dict[type | tuple[type, ...], Callable[..., object]] | None = None,
) -> torch.Tensor:
    first = tensors[0]
    plain = first.device.type == "cpu" and first.layout is torch.strided and not first.is_nested
    inside = in_worker_process()
    if not plain or not (inside or collates_by_default()):
        stack: Callable[..., torch.Tensor] = collate.collate_tensor_fn
        return stack(tensors, collate_fn_map=collate_fn_map)
    out = None  # torch's function would ask for the worker of this thread
    if inside:
        # Not element_size(): this raises what torch raises, for dtypes of less than a byte.
        nbytes = sum(tensor.numel() for tensor in tensors) * _utils._element_size(first.dtype)
        # Memory of NumPy's cannot be resized, like shared memory: tensors of different shapes raise the same errors.
        memory = torch.from_numpy(np.empty(nbytes, np.uint8)).untyped_storage()
        storage = typed_storage(memory, first.dtype)
        # As torch does in a worker: dtype and class of the batch are those of the first tensor.
        out = first.new(storage).resize_(len(tensors), *first.size())
    return torch.stack(tensors, 0, out=out)


def torch_modes() -> int:
    """How many modes such as ``with torch.device(...)`` are active; 1 where torch does not say."""
    functions = getattr(torch._C, "_len_torch_function_stack", None)
    operations = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return 1 if functions is None or operations is None else int(functions() + operations())


def modes_are_devices() -> bool:
    """Whether all active modes are default devices, and change no value; True where torch does not say."""
    operations = getattr(torch._C, "_len_torch_dispatch_stack", None)
    modes = getattr(torch.overrides, "_get_current_function_mode_stack", list)
    are_devices = all(type(mode).__name__ == "DeviceContext" for mode in modes())
    return are_devices and not (operations and operations())


is_owned: Callable[[Any], bool] = methodcaller("_is_owned")
"""Whether the calling thread holds a ``threading.RLock``."""
is_profiling: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled", True)
"""Whether torch's profiler records; True where torch does not say, which costs microseconds a batch."""


def has_cuda_context(index: int) -> bool:
    """Whether this process uses a device, without beginning to; where torch does not say, whether it uses any."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return torch.cuda.is_initialized() if has_context is None else bool(has_context(index))


# --- torch's tensors and storages -----------------------------------------------------------


def shared_file_storage(descriptor: int, nbytes: int) -> torch.UntypedStorage | None:
    """A storage that maps a file and has a descriptor of its own; None where torch cannot make one."""
    make = getattr(torch.UntypedStorage, "_new_shared_fd_cpu", None)
    return None if make is None else cast("torch.UntypedStorage", make(descriptor, nbytes))


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """A typed storage, without the warning that the class is deprecated."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def untyped_storage(typed: torch.storage.TypedStorage) -> torch.UntypedStorage:
    """The storage of a typed one, without that warning."""
    return typed._untyped_storage


def quantized_per_tensor() -> Callable[..., torch.Tensor] | None:
    """Builds a tensor from integers, scale and zero point; None: torch pickles such tensors its own way."""
    return getattr(torch, "_make_per_tensor_quantized_tensor", None)


def quantized_per_channel() -> Callable[..., torch.Tensor] | None:
    """The same for scales and zero points of each channel."""
    return getattr(torch, "_make_per_channel_quantized_tensor", None)


# --- random generators ----------------------------------------------------------------------

_python_state: random.Random = getattr(random, "_inst", None) or cast(Any, random.random).__self__


def python_state() -> random.Random:
    """The generator behind the functions of ``random``, whatever a test has put in the place of these functions."""
    return _python_state


def numpy_state() -> Any:
    """The ``RandomState`` behind the functions of ``numpy.random``."""
    return np.random.mtrand._rand


bit_generator_of: Callable[[Any], Any] = attrgetter("_bit_generator")
"""The bit generator of a ``RandomState``; ``np.random.set_bit_generator`` changes it."""


# --- CPython --------------------------------------------------------------------------------


def forget_executor_threads() -> None:
    """Have the end of this forked process not join the parent's executor threads, which it does not have."""
    getattr(executor, "_threads_queues", {}).clear()


def forget_child_processes(processes: Iterable[object]) -> None:
    """Have the end of this forked process not end the parent's workers, which are no children of it."""
    getattr(process_module, "_children", set()).difference_update(processes)


def close_ends_of_parent(process: object) -> None:
    """Close a forked child's copies of the pipes by which its parent and another child of that know each other."""
    finalizer = getattr(getattr(process, "_popen", None), "finalizer", None)
    if isinstance(finalizer, util.Finalize) and finalizer.still_active():
        for descriptor in getattr(finalizer, "_args", ()):
            with suppress(OSError):
                os.close(descriptor)


def process_reducers() -> Mapping[type, Callable[[Any], Any]]:
    """The functions that reduce objects for another process, by type; ``ForkingPickler.register`` has added them."""
    reducers: dict[type, Callable[[Any], Any]] = getattr(ForkingPickler, "_extra_reducers", {})
    return reducers


def serves_other_processes() -> bool:
    """Whether this process may have sent what others must fetch from it: descriptors, or memory of a device."""
    sharer = getattr(resource_sharer, "_resource_sharer", None)
    return getattr(sharer, "_listener", None) is not None or torch.cuda.is_initialized()


class _Spawning:
    """Stands for a child that is being started.

    Args:
        give: Gives the child a descriptor, and returns its number there.
        wrap: Makes an object of a descriptor that arrives as another one; None: as ``give``.
    """

    def __init__(self, give: Callable[[int], int], wrap: Callable[[int], object] | None) -> None:
        self.duplicate_for_child = give
        self.DupFd = wrap or give


@contextmanager
def _spawning(
    give: Callable[[int], int], wrap: Callable[[int], object] | None = None
) -> Iterator[None]:
    before = context.get_spawning_popen()
    context.set_spawning_popen(cast(Any, _Spawning(give, wrap)))
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def _refused(descriptor: int) -> int:
    raise RuntimeError("each child needs a descriptor of its own")


def pickling_for_a_child(several: bool = False) -> AbstractContextManager[None]:
    """Allow locks and queues to be pickled, as while a child is being started.

    Args:
        several: For more than one child. What needs a descriptor in the child raises RuntimeError.
    """
    return _spawning(_refused if several else lambda descriptor: descriptor)


def duplicates_for_child(held: list[int]) -> AbstractContextManager[None]:
    """Give the child that is being started copies of descriptors, which are added to ``held``.

    Those of a temporary tensor are closed before the child has them, and ``spawn`` takes none twice.
    """
    popen: Any = context.get_spawning_popen()

    def give(descriptor: int) -> int:
        held.append(os.dup(descriptor))
        number: int = popen.duplicate_for_child(held[-1])
        return number

    return _spawning(give, popen.DupFd)


_exit_codes: list[object] = []


def exit_code() -> object:
    """The exit code of this process of multiprocessing; None: it is not known yet.

    It is known when the exception that ends the process is let go, with what its frames hold. Python calls finalizers
    after that from 3.13 on, and before it in earlier versions.
    """
    bootstrap = cast(Any, process_module.BaseProcess)._bootstrap.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is bootstrap:
            return frame.f_locals.get("exitcode")
        frame = frame.f_back
    return _exit_codes[-1] if _exit_codes else None


@cache
def watch_exit_code() -> None:
    """Have :func:`exit_code` know it, too, once the function is over that runs a process of multiprocessing."""
    with suppress(RuntimeError):  # this process ends already
        # Threading calls it at the end of _bootstrap().
        getattr(threading, "_register_atexit", id)(lambda: _exit_codes.append(exit_code()))


def in_starting_child() -> bool:
    """Whether multiprocessing starts this process at present, without a fork: it imports what the process needs."""
    return hasattr(process_module.current_process(), "_inheriting")


def preload_in_server(module: str) -> None:
    """Have the fork server of multiprocessing import a module too, if it has not started yet."""
    named = getattr(getattr(forkserver, "_forkserver", None), "_preload_modules", ["__main__"])
    if module not in named:
        forkserver.set_forkserver_preload([*named, module])


# --- optional packages ----------------------------------------------------------------------

ACCELERATE_SEEDABLE_SAMPLER = "SeedableRandomSampler"
LIGHTNING_PROTOCOL = "_Stateful"
LIGHTNING_STATES = "_state_dicts"
LIGHTNING_PREDICT_SAMPLER = "_IndexBatchSamplerWrapper"
LIGHTNING_TRAINING_LOOP = "_TrainingEpochLoop"
RAY_ACCELERATOR = "_TorchAccelerator"
"""Lightning's batch sampler in ``Trainer.predict``, by name: Lightning may be installed under two names."""


def kill_actor(ray: ModuleType, actor: object) -> None:
    """End an actor over the present connection; ``ray.kill`` itself opens another where there is none any more."""
    inspect.unwrap(ray.kill)(actor)


def active_progress_bars(tqdm: object) -> Any:
    """Tqdm's bars on the terminal; empty where it keeps none, or keeps them elsewhere."""
    return getattr(tqdm, "_instances", None) or ()


# --- the table ------------------------------------------------------------------------------


class PrivateName(NamedTuple):
    """A private name that minato uses.

    Attributes:
        name: Where it stands, as a dotted name; or several names.
        without: What happens where it is missing.
        probe: Returns whether it is as expected; None: whether all names exist.
        package: The optional package that defines it; None for torch, NumPy and Python.
    """

    name: str
    without: str
    probe: Callable[[], bool] | None = None
    package: str | None = None

    def is_installed(self) -> bool:
        """Whether the package that defines it is there."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def is_present(self) -> bool:
        """Run the probe; whatever it raises means that the name is not as expected."""
        try:
            if self.probe is not None:
                return self.probe()
            return None not in map(pkgutil.resolve_name, self.name.split(", "))
        except Exception:
            return False


def _defines(package: str, path: str, *words: str) -> Callable[[], bool]:
    """Look into the source of an optional package, which would take seconds to import."""

    def probe() -> bool:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        (folder,) = list(spec.submodule_search_locations or ())[:1]
        text = (Path(folder) / path).read_text(encoding="utf-8")
        return all(word in text for word in words)

    return probe


_ITERATOR_MEMBERS = (
    *("_dataset_kind", "_num_workers", "_timeout", "_pin_memory", "_pin_memory_device"),
    *("_sampler_iter", "_base_seed", "_persistent_workers", "_num_yielded", "_reset", "_next_data"),
)
_LOADER_MEMBERS = (
    *("_index_sampler", "_auto_collation", "_get_iterator", "_iterator", "_dataset_kind"),
    "_DataLoader__initialized",
)


def _private_loader() -> TorchDataLoader[int]:
    # With a generator of its own: an iterator draws a seed, which must not come from the program's.
    numbers = cast("torch.utils.data.Dataset[int]", [0])
    return TorchDataLoader(numbers, generator=torch.Generator())


def _has_all(thing: object, names: Iterable[str]) -> bool:
    return all(hasattr(thing, name) for name in names)


def _worker_info_is_known() -> bool:
    before = worker_of_thread()
    be_worker_of_thread(worker_info(3, 4, 5, None))
    try:
        info = torch.utils.data.get_worker_info()
        return info is not None and (info.id, info.num_workers, info.seed) == (3, 4, 5)
    finally:
        be_worker_of_thread(before)


def _storages_are_known() -> bool:
    storage = torch.UntypedStorage(8)
    typed = typed_storage(storage, torch.float32)
    return untyped_storage(typed).data_ptr() == storage.data_ptr()


def _numpy_state_is_known() -> bool:
    return isinstance(numpy_state(), np.random.RandomState) and isinstance(
        bit_generator_of(np.random.RandomState(0)), np.random.MT19937
    )


def _child_can_be_faked() -> bool:
    with pickling_for_a_child():
        known = isinstance(context.get_spawning_popen(), _Spawning)
    return known and context.get_spawning_popen() is None


_IMPORT_FAILS = "importing minato raises an ImportError that names it"
_TORCH_BUILDS = "torch's default_collate builds the batches, and they are pickled: right, but several times as slow"

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName("torch._utils.ExceptionWrapper", _IMPORT_FAILS),
    PrivateName(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        f"{_IMPORT_FAILS}; a missing field raises an AttributeError at iter(loader)",
        lambda: _has_all(iter(_private_loader()), _ITERATOR_MEMBERS),
    ),
    PrivateName(
        "torch.utils.data.DataLoader's _index_sampler, _auto_collation, _iterator, _get_iterator, __initialized",
        "an AttributeError at iter(loader); without __initialized a loader's attributes stay fixed",
        lambda: _has_all(_private_loader(), _LOADER_MEMBERS),
    ),
    PrivateName("torch.utils.data.dataloader._DatasetKind", _IMPORT_FAILS),
    PrivateName(
        "torch.utils.data._utils.fetch._MapDatasetFetcher, _BaseDatasetFetcher, _DatasetKind.create_fetcher",
        _IMPORT_FAILS,
        lambda: (
            not fetcher_is_replaced() and hasattr(make_fetcher([0], True, list, False), "fetch")
        ),
    ),
    PrivateName(
        "torch.utils.data.dataloader._SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter, "
        "DataLoader._get_iterator, _BaseDataLoaderIter._next_index, torch.utils.data._utils.worker._worker_loop, "
        "torch.utils.data._utils.pin_memory._pin_memory_loop, torch.utils.data._utils.fetch._IterableDatasetFetcher",
        "a warning names the missing part, and torch's engine loads",
        lambda: (
            not replaced_parts(streams=True, worker_processes=False, workers=0, pins=True)
            and not replaced_parts(streams=True, worker_processes=True, workers=1, pins=True)
        ),
    ),
    PrivateName("torch.utils.data.dataloader._InfiniteConstantSampler", _IMPORT_FAILS),
    PrivateName(
        "torch.utils.data._utils.worker._worker_info, WorkerInfo, get_worker_info's __code__",
        _IMPORT_FAILS,
        _worker_info_is_known,
    ),
    PrivateName(
        "torch.utils.data._utils.worker._generate_state",
        _IMPORT_FAILS,
        lambda: numpy_seed(7, 3) == numpy_seed(7, 3) != numpy_seed(7, 4),
    ),
    PrivateName("torch.utils.data._utils.pin_memory.pin_memory", _IMPORT_FAILS),
    PrivateName(
        "torch.utils.data._utils.collate.default_collate_fn_map", _TORCH_BUILDS, collates_by_default
    ),
    PrivateName(
        "torch.utils.data._utils.collate.collate, torch._utils._element_size",
        "a worker killed at that moment may leave a file in /dev/shm, as with torch",
    ),
    PrivateName(
        "torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack",
        "each sample makes an empty tensor to find out: a microsecond",
    ),
    PrivateName(
        "torch.overrides._get_current_function_mode_stack",
        "modes of a program have no part in building batches of plain samples",
    ),
    PrivateName(
        "torch._C._set_worker_signal_handlers",
        "the words are missing; the worker is replaced all the same",
    ),
    PrivateName("torch.multiprocessing._set_thread_name", "workers keep the name of the program"),
    PrivateName(
        "torch._C._cuda_hasPrimaryContext",
        "devices that the process does not use are asked, too, which takes memory there",
        # Torch without CUDA lacks it, and needs it for nothing.
        lambda: not torch.version.cuda or hasattr(torch._C, "_cuda_hasPrimaryContext"),
    ),
    PrivateName(
        "torch.autograd.profiler._is_profiler_enabled",
        "every batch opens them: some microseconds",
        lambda: isinstance(profiler._is_profiler_enabled, bool),
    ),
    PrivateName(
        "torch.UntypedStorage._new_shared_fd_cpu", "torch's share_memory_() makes them, with a name"
    ),
    PrivateName(
        "torch.storage.TypedStorage(_internal=), _untyped_storage",
        "a sample that holds one raises a TypeError or AttributeError",
        _storages_are_known,
    ),
    PrivateName(
        "torch._make_per_tensor_quantized_tensor, torch._make_per_channel_quantized_tensor",
        "torch pickles them its own way, with a warning",
    ),
    PrivateName(
        "torch.Tensor._cdata, torch._efficientzerotensor",
        "four attributes of each tensor are asked for: 0.15 µs a tensor",
    ),
    PrivateName(
        "random._inst",
        "the generator of random.random, as it is when minato is imported",
        lambda: isinstance(cast(Any, random)._inst, random.Random),
    ),
    PrivateName(
        "numpy.random.mtrand._rand, RandomState._bit_generator",
        "a loader with seed= raises an AttributeError",
        _numpy_state_is_known,
    ),
    PrivateName(
        "concurrent.futures.thread._threads_queues",
        "such a worker is ended by a signal after some seconds",
        lambda: hasattr(cast(Any, executor)._threads_queues, "clear"),
    ),
    PrivateName(
        "multiprocessing.process._children",
        "multiprocessing asserts in that child's end that they are its own, and prints an error",
        lambda: isinstance(cast(Any, process_module)._children, set),
    ),
    PrivateName(
        "multiprocessing.popen_fork.Popen.finalizer, multiprocessing.util.Finalize._args",
        "such a child keeps workers that are stuck in a sample until it ends",
        lambda: (
            "self.finalizer = util.Finalize("
            in inspect.getsource(importlib.import_module("multiprocessing.popen_fork"))
            and "self._args = args" in inspect.getsource(util.Finalize)
        ),
    ),
    PrivateName(
        "multiprocessing.reduction.ForkingPickler._extra_reducers",
        "pipes, sockets and objects of packages that register a function cannot be sent",
        lambda: torch.Tensor in process_reducers(),
    ),
    PrivateName(
        "multiprocessing.resource_sharer._resource_sharer",
        "the worker may have ended before, and the loop raises an OSError",
    ),
    PrivateName(
        "multiprocessing.context.set_spawning_popen",
        "that error becomes an AttributeError",
        _child_can_be_faked,
    ),
    PrivateName(
        "multiprocessing.process.BaseProcess._inheriting",
        "a script without a guard ends its workers by another error",
        lambda: "_inheriting" in inspect.getsource(spawn),
    ),
    PrivateName(
        "threading._register_atexit, multiprocessing.process.BaseProcess._bootstrap's exitcode",
        "from Python 3.13 on, the ranks of a shared pool wait for one that multiprocessing has started and that failed",
        lambda: (
            hasattr(threading, "_register_atexit")
            and "exitcode" in cast(Any, process_module.BaseProcess)._bootstrap.__code__.co_varnames
        ),
    ),
    PrivateName(
        "multiprocessing.forkserver._forkserver._preload_modules",
        "the server imports none of the modules that the program has named",
        lambda: isinstance(getattr(forkserver._forkserver, "_preload_modules", None), list),
    ),
    PrivateName("multiprocessing.pool.ExceptionWithTraceback", _IMPORT_FAILS),
    PrivateName(
        "ray.kill.__wrapped__",
        "ray.kill itself is called, and may connect again at the end of a loader",
        _defines("ray", "_private/worker.py", "@client_mode_hook\ndef kill("),
        "ray",
    ),
    PrivateName(
        "accelerate.data_loader: DataLoader, prepare_data_loader, skip_first_batches, DataLoaderShard, "
        "DataLoaderDispatcher, DataLoaderAdapter",
        "a warning; the prepared loader loads with torch's engine",
        _defines(
            "accelerate",
            "data_loader.py",
            "def prepare_data_loader(",
            "def skip_first_batches(",
            "class DataLoaderShard(",
            "class DataLoaderDispatcher(",
            "class DataLoaderAdapter:",
        ),
        "accelerate",
    ),
    PrivateName(
        f"lightning.pytorch.loops.training_epoch_loop: {LIGHTNING_TRAINING_LOOP}.on_run_start, advance, "
        f"{LIGHTNING_PROTOCOL}",
        "a warning; Lightning may skip an epoch or a batch, and a checkpoint fails if torch's engine loads",
        _defines(
            "lightning",
            "pytorch/loops/training_epoch_loop.py",
            f"import {LIGHTNING_PROTOCOL}",
            f"class {LIGHTNING_TRAINING_LOOP}(",
            "def on_run_start(",
            "def advance(",
        ),
        "lightning",
    ),
    PrivateName(
        f"lightning.pytorch.utilities.combined_loader.CombinedLoader.{LIGHTNING_STATES}",
        "a batch of a stream of unknown length may be lost when Lightning resumes",
        _defines("lightning", "pytorch/utilities/combined_loader.py", f"def {LIGHTNING_STATES}("),
        "lightning",
    ),
    PrivateName(
        f"ray.train.torch.train_loop_utils: DataLoader, {RAY_ACCELERATOR}",
        "a warning; the prepared loader loads with torch's engine",
        _defines(
            "ray", "train/torch/train_loop_utils.py", "    DataLoader,", f"class {RAY_ACCELERATOR}("
        ),
        "ray",
    ),
    PrivateName(
        f"lightning.pytorch.overrides.distributed.{LIGHTNING_PREDICT_SAMPLER}",
        "predictions of a loader with another order than strict are assigned to the wrong indices",
        _defines(
            "lightning", "pytorch/overrides/distributed.py", f"class {LIGHTNING_PREDICT_SAMPLER}"
        ),
        "lightning",
    ),
    PrivateName(
        "tqdm.tqdm._instances",
        "a line may stand in the middle of a bar",
        _defines("tqdm", "std.py", "_instances"),
        "tqdm",
    ),
)
"""All of them; those of ``transforms/rng_memory.py`` are private memory, which it verifies itself."""


_MISSING = object()


def _held(dataset: object, name: str, default: object = None) -> Any:
    """An attribute of an instance; ``vars`` would make it a dictionary, with which attributes take longer."""
    try:
        return object.__getattribute__(dataset, name)
    except Exception:
        return default


def state_is_inexact(dataset: object) -> bool:
    """Whether the state of an iterable dataset loses items: that of Hugging Face's shuffle leaves out its buffer."""
    stages: list[Any] = [_held(dataset, "_ex_iterable")]
    while stages:
        stage = stages.pop()
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            return True
        stages += [stage.ex_iterable] if hasattr(stage, "ex_iterable") else []
        stages += getattr(stage, "ex_iterables", ())
    return False


def applies_state_later(dataset: object) -> bool:
    """Whether a stream of Hugging Face: a loaded state counts from its next first item on, in each later epoch, too."""
    return _held(dataset, "_starting_state_dict", _MISSING) is not _MISSING


def take_own_epoch(dataset: object) -> None:
    """Give a stream of Hugging Face an epoch of this process: that of its forked copies is one in shared memory."""
    if applies_state_later(dataset) and torch.is_tensor(epoch := _held(dataset, "_epoch")):
        vars(dataset)["_epoch"] = epoch.clone()


def forget_loaded_state(dataset: object) -> None:
    """Have the next epoch of a stream begin at its beginning, if a state was loaded for an earlier one."""
    if applies_state_later(dataset):
        vars(dataset)["_starting_state_dict"] = None


def is_split_by_rank(dataset: object) -> bool:
    """Whether a stream is one rank's share already: by Hugging Face's ``split_dataset_by_node``, or by a trainer."""
    return (
        _held(dataset, "_distributed") is not None
        or type(dataset).__name__ == "IterableDatasetShard"
    )
