"""Surroundings: threads, loaders within loaders, torch's defaults, start methods, and ways to run a program."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import minato
from minato._support import pickling
from minato.sampling.samplers import SeededSampler
from tests.datasets import Numbers
from tests.parity import material
from tests.parity.harness import TORCH_IS_UNTIDY, each, same_for_both
from tests.parity.material import Drawing, Mixed
from tests.subprocesses import ROOT, SCRIPTS, python
from tests.threads import run_together


def in_a_thread(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


# ---- threads --------------------------------------------------------------------------------


@each
def test_iterated_over_in_another_thread(workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        loader = make(Mixed(7), 2, shuffle=True, **workers)
        begun = iter(loader)
        seen = [next(begun), in_a_thread(lambda: next(begun)), next(begun)]
        return [*seen, in_a_thread(lambda: [*begun]), in_a_thread(lambda: [*loader]), [*loader]]

    same_for_both(case, **own)


@each
def test_several_threads_at_once(workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        seen: list[Any] = [None] * 3

        def iterate(number: int) -> None:
            seen[number] = [*make(Mixed(7 + number), 2, **workers)]

        run_together(*(functools.partial(iterate, number) for number in range(3)), limit_s=60)
        return seen

    # Which thread draws its base seed first is chance, but not what has been drawn in the end.
    same_for_both(case, **own)


class Interrupted(Drawing):
    """In the midst of each sample, the main thread has its turn."""

    def __init__(self, size: int, turns: threading.Barrier) -> None:
        super().__init__(size)
        self.turns = turns

    def __getitem__(self, index: int) -> Any:
        self.turns.wait(60)
        self.turns.wait(60)
        return super().__getitem__(index)


def test_what_the_main_thread_draws_stays_drawn() -> None:
    """A loader without workers in another thread must not give it the same numbers again."""

    def case(make: Any) -> Any:
        turns = threading.Barrier(2)
        loader = make(Interrupted(6, turns), 2)
        thread = threading.Thread(target=lambda: [*loader])
        thread.start()
        drawn = []
        for _ in range(6):
            turns.wait(60)
            drawn.append((random.random(), float(np.random.rand()), torch.rand(2)))
            turns.wait(60)
        thread.join()
        return drawn

    same_for_both(case)


class Waiting(Numbers):
    """In the midst of each sample, the main thread may have its turn."""

    turns: threading.Barrier | None = None

    def __getitem__(self, index: int) -> float:
        if self.turns is not None:
            self.turns.wait(60)
            self.turns.wait(60)
        return random.random()


@pytest.mark.parametrize("begun", ["nothing", "iterator", "batch", "epoch"])
def test_a_loop_that_goes_on_in_another_thread_leaves_the_main_threads_draws(begun: str) -> None:
    dataset = Waiting(8)
    loader = minato.DataLoader(dataset, 2, seed=3)
    random.seed(1)
    if begun == "epoch":
        list(loader)
    iterator = in_a_thread(lambda: iter(loader)) if begun == "nothing" else iter(loader)
    if begun == "batch":
        next(iterator)
    dataset.turns = threading.Barrier(2)
    thread = threading.Thread(target=list, args=(iterator,))
    thread.start()
    drawn = []
    for _ in range(6 if begun == "batch" else 8):
        dataset.turns.wait(60)
        drawn.append(random.random())
        dataset.turns.wait(60)
    thread.join()
    drawn.append(random.random())
    programs = random.Random(1)
    stream = [programs.random() for _ in range(20)]
    places = [stream.index(each) for each in drawn]
    assert places == sorted({*places})


@pytest.mark.parametrize("begun", ["nothing", "iterator", "batch", "epoch"])
def test_a_loop_that_goes_on_in_the_main_thread_is_seeded_there(begun: str) -> None:
    def batches(loader: Any) -> Any:
        return [batch.tolist() for batch in loader]

    loaders = [minato.DataLoader(Waiting(8), 2, seed=3) for _ in range(2)]
    if begun == "epoch":
        batches(loaders[0])
        other = iter(loaders[1])
        in_a_thread(lambda: [*other])
    iterator = iter(loaders[1]) if begun == "nothing" else in_a_thread(lambda: iter(loaders[1]))
    skipped = 0
    if begun == "batch":
        in_a_thread(lambda: next(iterator))
        skipped = 1
    assert batches(iterator) == batches(loaders[0])[skipped:]


# ---- loaders within loaders -----------------------------------------------------------------


class Nested(Numbers):
    def __init__(self, size: int, make: Any, workers: int) -> None:
        super().__init__(size)
        self.make = make
        self.workers = workers

    def __getitem__(self, index: int) -> Any:
        return [*self.make(Drawing(4), 3, shuffle=True, num_workers=self.workers)]


@pytest.mark.parametrize("outer", [0, 1])
def test_loader_within_a_sample(outer: int) -> None:
    same_for_both(
        lambda make: [*make(Nested(3, make, 0), 2, num_workers=outer, collate_fn=list)],
        compat="torch",
    )


@TORCH_IS_UNTIDY
def test_workers_cannot_have_workers() -> None:
    def case(make: Any) -> Any:
        next(iter(make(Nested(2, make, 1), num_workers=1)))

    kind, name, text = same_for_both(case)
    assert (kind, name) == ("raised", "AssertionError")
    assert "daemonic processes are not allowed to have children" in text


@each
def test_interleaved_iterators(workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        loader, other = (make(Mixed(size), 2, shuffle=True, **workers) for size in (7, 4))
        iterators = [iter(loader), iter(other), iter(loader)]
        seen = [next(iterators[number]) for number in (2, 0, 1, 2, 1, 0, 0)]
        return [*seen, *([*iterator] for iterator in iterators)]

    same_for_both(case, **own)


# ---- what torch and Python take for granted -------------------------------------------------


class Floats(Numbers):
    """Numbers and tensors whose dtype or device is not said."""

    def __getitem__(self, index: int) -> Any:
        return index / 2, torch.tensor(0.5), torch.ones(2), np.float32(index), [index]


@pytest.fixture
def torch_defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_default_dtype(dtype: Any, workers: Any, own: Any, torch_defaults: None) -> None:
    torch.set_default_dtype(dtype)
    same_for_both(lambda make: [*make(Floats(5), 2, shuffle=True, **workers)], **own)


@TORCH_IS_UNTIDY
@each
@pytest.mark.parametrize("batch_size", [None, 2])
def test_default_device(batch_size: Any, workers: Any, own: Any, torch_defaults: None) -> None:
    torch.set_default_device("meta")
    generator = torch.Generator("cpu")
    same_for_both(
        lambda make: [*make(Floats(5), batch_size, shuffle=True, generator=generator, **workers)],
        **own,
    )
    torch.set_default_device("cpu")
    same_for_both(lambda make: [*make(Floats(5), batch_size, shuffle=True, **workers)], **own)


@TORCH_IS_UNTIDY
@each
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_device_of_a_with_statement(device: str, workers: Any, own: Any) -> None:
    def batches(make: Any) -> list[Any]:
        generator = torch.Generator("cpu").manual_seed(3)
        with torch.device(device):
            return [*make(Floats(5), 2, shuffle=True, generator=generator, **workers)]

    same_for_both(batches, **own)


class Doubled(TorchFunctionMode):
    """Changes what an operation of torch returns."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.stack else result


class DoubledBelow(TorchDispatchMode):
    """Changes it where all operations end."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.stack.default else result


@pytest.mark.parametrize("mode", [Doubled, DoubledBelow, FakeTensorMode])
def test_modes_of_the_program(mode: Any) -> None:
    def case(make: Any) -> Any:
        numbers, tensors = make([1.0, 2.0, 3.0], 2), make([torch.ones(3), torch.zeros(3)], 2)
        loaders = [numbers, tensors][: 1 if mode is FakeTensorMode else 2]  # no real tensors
        before, iterators = [*numbers], [*map(iter, loaders)]
        with mode():
            within = [str(batch) for iterator in iterators for batch in iterator]
        return before, within, [*numbers]

    same_for_both(case)


class Unusable(TorchFunctionMode):
    """A default device that only this process can use, as CUDA after a fork."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        makes = function in (torch.empty, torch.tensor, torch.as_tensor)
        if makes and "device" not in (kwargs or {}) and os.getpid() != self.process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return function(*args, **(kwargs or {}))


def test_a_default_device_that_workers_cannot_use(torch_defaults: None) -> None:
    def batches(make: Any) -> list[Any]:
        with Unusable():
            return [*make(Numbers(5), 2, num_workers=1)]

    assert "Cannot re-initialize CUDA" in str(same_for_both(batches))


def test_what_minato_makes_for_itself_is_on_the_cpu(torch_defaults: None) -> None:
    """Whatever the default device is: what a batch consists of, shuffling, and generators of samples."""
    held = torch.arange(6.0).view(2, 3)
    torch.set_default_device("meta")
    pieces, buffers = pickling.dumps([held.t(), held[:0], held])
    copies = pickle.loads(b"".join(pieces), buffers=buffers)
    assert [copy.tolist() for copy in copies] == [held.t().tolist(), [], held.tolist()]
    assert sorted(SeededSampler(range(5), 3)) == [*range(5)]
    assert minato.torch_rng().device.type == "cpu"
    assert minato.DataLoader(Numbers(3), 2, num_workers=2).num_workers == 2


@pytest.fixture
def start_method() -> Iterator[Callable[[str], None]]:
    before = multiprocessing.get_start_method(allow_none=True)
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


class Started(Numbers):
    def __getitem__(self, index: int) -> str:
        return multiprocessing.get_start_method()


@pytest.mark.slow
def test_default_start_method_is_that_of_the_moment(start_method: Callable[[str], None]) -> None:
    """What holds is the default when iteration starts, not when the loader was made."""

    def case(make: Any) -> Any:
        start_method("fork")
        loader = make(Started(4), 2, num_workers=1)
        seen = [[*loader]]
        start_method("forkserver")
        return [*seen, type(loader.multiprocessing_context), [*loader]]

    same_for_both(case)


# ---- ways to run a program ------------------------------------------------------------------

GOT = "0 2\n4 6\n8\n"


def outcome(*arguments: str, cwd: Path = ROOT) -> tuple[str, str]:
    strict = ("-W", "error", "-W", "ignore:This DataLoader will:UserWarning")
    ended = python(*strict, *arguments, cwd=cwd)
    return ended.stdout, ended.stderr


@pytest.mark.slow
def test_classes_of_a_module_that_is_run(tmp_path: Path) -> None:
    copied(tmp_path, "module.py")
    assert outcome("-m", "package.module", "forkserver", cwd=tmp_path) == (GOT, "")


def copied(folder: Path, name: str) -> str:
    """Make a package of the script; returns its text."""
    (folder / "package").mkdir()
    shutil.copy(SCRIPTS / "main_module.py", folder / "package" / name)
    return (SCRIPTS / "main_module.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("cloudpickle"), reason="needs cloudpickle")
def test_classes_of_a_package_that_is_run(tmp_path: Path) -> None:
    """No worker imports its ``__main__``, so it must be told what stands there."""
    copied(tmp_path, "__main__.py")
    assert outcome("-m", "package", "forkserver", cwd=tmp_path) == (GOT, "")


@pytest.mark.slow
def test_classes_of_an_interactive_session_without_cloudpickle(tmp_path: Path) -> None:
    said, _ = outcome("-c", copied(tmp_path, "module.py"), "spawn", "without-cloudpickle")
    assert said == (
        "NotPicklableError Samples is local, a lambda, or defined in the __main__ of an interactive session or of a "
        "package, which workers that are not forked cannot import: install cloudpickle, move it to the top level of a "
        "module, or use multiprocessing_context='fork'\n"
    )


def test_class_that_only_this_process_has(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one that a script defines below ``if __name__ == "__main__"``."""
    hidden = type("Hidden", (Numbers,), {"__module__": material.__name__})
    monkeypatch.setattr(material, "Hidden", hidden, raising=False)
    loader = minato.DataLoader(hidden(3), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iter(loader))
    assert "without the code under if __name__ == '__main__'. Define it" in capfd.readouterr().err
