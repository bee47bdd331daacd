"""Every change of a dataset or a transform that a cache can know of gives another key, and no change gives the same."""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.metadata
import importlib.util
import linecache
import os
import shutil
import sys
import types
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, mmap
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import minato
from minato._support import hashes
from minato._support.hashes import fingerprint, index_hash
from minato.caching import MemoryCache
from minato.sharing import SharedDict, SharedList
from tests.datasets import flat, indices
from tests.subprocesses import output
from tests.transforms.test_rng import OTHER_KEYS, Point

HEAD = """
import abc, builtins, collections, dataclasses, enum, functools, operator
import numpy as np
import torch
K = builtins.minato_k
"""
"""The programs read K from outside of their text, as from a configuration."""

BODIES: dict[str, str] = {
    "a method": "class T:\n    def __call__(self, x): return x * 2\nmake = T",
    "a method under no_grad": "class T:\n    @torch.no_grad()\n    def __call__(self, x): return x * 2\nmake = T",
    "a method under wraps": "def deco(f):\n    @functools.wraps(f)\n    def w(*a): return f(*a)\n    return w\n"
    "class T:\n    @deco\n    def __call__(self, x): return x * 2\nmake = T",
    "a method under a decorator without wraps": "def deco(f): return lambda *a: f(*a)\n"
    "class T:\n    @deco\n    def __call__(self, x): return x * 2\nmake = T",
    "a cached method": "class T:\n    @functools.lru_cache\n    def f(self): return 2\nmake = T",
    "a static method": "class T:\n    @staticmethod\n    def f(): return 2\nmake = T",
    "a class method": "class T:\n    @classmethod\n    def f(cls): return 2\nmake = T",
    "a property": "class T:\n    @property\n    def f(self): return 2\nmake = T",
    "a cached property": "class T:\n    @functools.cached_property\n    def f(self): return 2\nmake = T",
    "a partial method": "def g(self, x): return x * 2\nclass T:\n    f = functools.partialmethod(g, 1)\nmake = T",
    "a default": "class T:\n    def __call__(self, x, k=2): return x * k\nmake = T",
    "a class attribute": "class T:\n    SIZE = 2\n    def __call__(self, x): return x\nmake = T",
    "a global constant": "SIZE = 2\nclass T:\n    def __call__(self, x): return x * SIZE\nmake = T",
    "a function that is called": "def g(x): return x * 2\nclass T:\n    def __call__(self, x): return g(x)\nmake = T",
    "a base class": "class A:\n    def f(self): return 2\nclass T(A): pass\nmake = T",
    "a metaclass": "class M(type):\n    def f(cls): return 2\nclass T(metaclass=M): pass\nmake = T",
    "a function": "def g(x): return x * 2\ndef make(): return g",
    "a lambda": "def make(): return lambda x: x * 2",
    "a nested function": "def make():\n    def g(x): return x * 2\n    return g",
    "a cached function": "@functools.lru_cache\ndef g(x): return x * 2\ndef make(): return g",
    "a single dispatch": "@functools.singledispatch\ndef g(x): return x * 2\ndef make(): return g",
    "a partial": "def g(x, y): return x * 2\ndef make(): return functools.partial(g, 1)",
    "a bound method": "class T:\n    def f(self, x): return x * 2\ndef make(): return T().f",
    "a class as a transform": "class T:\n    def __init__(self, x): self.x = x * 2\ndef make(): return T",
    "a dataclass": "@dataclasses.dataclass\nclass T:\n    a: int = 2\nmake = T",
    "a named tuple": "class T(collections.namedtuple('T', 'a')):\n    def f(self): return 2\ndef make(): return T(1)",
    "an enumeration": "class E(enum.Enum):\n    A = 2\ndef make(): return [E.A]",
    "a torch module": "class T(torch.nn.Module):\n    def forward(self, x): return x * 2\nmake = T",
    "an abstract class": "class A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n"
    "class T(A):\n    def f(self): return 2\nmake = T",
    "a dataset": "class D(torch.utils.data.Dataset):\n    def __len__(self): return 2\n"
    "    def __getitem__(self, i): return i\nmake = D",
}
"""Programs in which a 2 becomes a 3."""

STATES: dict[str, str] = {
    "an attribute": "class T: pass\ndef make():\n    t = T(); t.k = K; return t",
    "an attribute of an attribute": "class T: pass\ndef make():\n"
    "    t = T(); t.t = T(); t.t.k = [{'a': (1, K)}]; return t",
    "a parameter of a transform": "class T:\n    def __init__(self, k): self.k = k\ndef make(): return [T(K)]",
    "a default": "def make():\n    def g(x, k=K): return x\n    return g",
    "a default by name": "def make():\n    def g(x, *, k=K): return x\n    return g",
    "a closure": "def make():\n    k = K\n    return lambda x: x * k",
    "a closure of a decorator": "def deco(k):\n    def of(f):\n        @functools.wraps(f)\n"
    "        def w(*a): return f(*a) * k\n        return w\n    return of\n"
    "class T:\n    @deco(K)\n    def __call__(self, x): return x\nmake = T",
    "a default of a method": "class T:\n    def __call__(self, x, k=K): return x\nmake = T",
    "a class attribute": "class T: SIZE = K\nmake = T",
    "a class attribute of its own class": "class T:\n    def __init__(self): self.k = K\n"
    "def make():\n    T.usual = T(); return T()",
    "an attribute of a base class": "class A: SIZES = (1, K)\nclass T(A): pass\nmake = T",
    "a class attribute with a state": "class A: pass\nclass T: a = A()\nT.a.k = K\nmake = T",
    "a class attribute that calls": "def g(x, k): return x\nclass T: f = functools.partial(g, k=K)\nmake = T",
    "a method with an argument": "def g(self, k): return k\nclass T: f = functools.partialmethod(g, K)\nmake = T",
    "a static method with a state": "def g(k): return k\nclass T: f = staticmethod(functools.partial(g, K))\nmake = T",
    "a class attribute with a function": "class F:\n    def __init__(self, func, k): self.func, self.k = func, k\n"
    "    def __call__(self): return self.func(self.k)\nclass T: f = F(lambda k: k, K)\nmake = T",
    "a descriptor with a state": "class F:\n    def __init__(self, func): self.func, self.k = func, K\n"
    "    def __get__(self, of, kind=None): return self.func(of) * self.k\n"
    "class T:\n    @F\n    def f(self): return 1\nmake = T",
    "an attribute of a metaclass": "class M(type): SIZE = K\nclass T(metaclass=M): pass\nmake = T",
    "an attribute of a function": "def g(x): return x\ng.k = K\ndef make(): return g",
    "a field of a dataclass": "@dataclasses.dataclass(frozen=True)\nclass T: a: int\ndef make(): return T(K)",
    "a field with slots": "@dataclasses.dataclass(slots=True)\nclass T: a: int\ndef make(): return T(K)",
    "a slot": "class T: __slots__ = ('a',)\ndef make():\n    t = T(); t.a = K; return t",
    "a slot of a base class": "class A: __slots__ = ('a',)\nclass T(A): pass\n"
    "def make():\n    t = T(); t.a = K; t.b = 1; return t",
    "an item of a list": "def make(): return [1, 'a', K]",
    "an item of a list of a class": "class L(list): pass\ndef make():\n    d = L([1, K]); d.root = 'x'; return d",
    "an item of a dict of a class": "class L(dict): pass\ndef make():\n    d = L(a=K); d.root = 'x'; return d",
    "an attribute of a list of a class": "class L(list): pass\ndef make():\n    d = L([1]); d.root = K; return d",
    "a set": "def make(): return {1, 2, K}",
    "a set of a class": "class L(set): pass\ndef make(): return L({1, 2, K})",
    "an int of a class": "class L(int): pass\ndef make(): return L(K)",
    "a text of a class": "class L(str): pass\ndef make(): return L(K)",
    "a named tuple": "T = collections.namedtuple('T', 'a')\ndef make(): return T(K)",
    "an ordered dict": "def make(): return collections.OrderedDict(a=K)",
    "a deque": "def make(): return collections.deque([K])",
    "an array": "def make(): return np.array([1, K])",
    "an array of a class": "class A(np.ndarray): pass\ndef make(): return np.array([1, K]).view(A)",
    "an attribute of an array": "class A(np.ndarray): pass\ndef make():\n    a = np.ones(2).view(A); a.k = K; return a",
    "a mask": "def make(): return np.ma.masked_array([1, 2], [False, K == 2])",
    "an array of objects": "def make(): return np.array([None, {'a': K}], object)",
    "a record": "def make(): return np.array([(1, K)], [('a', 'i2'), ('b', 'f4')])",
    "a view of an array": "def make(): return np.arange(10)[::-K]",
    "a NumPy scalar": "def make(): return np.float32(K)",
    "a tensor": "def make(): return torch.tensor([1, K])",
    "a tensor of half precision": "def make(): return torch.tensor([1, K], dtype=torch.bfloat16)",
    "a tensor of a byte's precision": "def make(): return torch.tensor([1, K]).to(torch.float8_e4m3fn)",
    "a conjugate": "def make(): return torch.tensor([1, 1j * K]).conj()",
    "an attribute of a tensor": "def make():\n    t = torch.ones(1); t.k = K; return t",
    "weights": "def make():\n    m = torch.nn.Linear(2, 1); torch.nn.init.constant_(m.weight, K)\n"
    "    torch.nn.init.zeros_(m.bias); return m",
    "a buffer": "def make():\n    m = torch.nn.Module(); m.register_buffer('b', torch.tensor(K)); return m",
    "a partial": "def make(): return functools.partial(int.__add__, K)",
    "a partial by name": "def make(): return functools.partial(dict, a=K)",
    "a method of a value": "def make(): return {'a': K}.get",
    "a bound method": "class T:\n    def f(self): pass\ndef make():\n    t = T(); t.k = K; return t.f",
    "an item getter": "def make(): return operator.itemgetter(K)",
    "a callable of NumPy": "def make(): return np.vectorize(lambda x, k=K: x)",
    "a subset": "def make(): return torch.utils.data.Subset([1, 2, 3], [0, K - 2])",
    "tensors of a dataset": "def make(): return torch.utils.data.TensorDataset(torch.tensor([1, K]))",
    "what __getstate__ says": "class T:\n    def __getstate__(self): return {'k': K}\nmake = T",
    "what __reduce__ says": "class T:\n    def __reduce__(self): return T, (), K\nmake = T",
    "what __fingerprint__ says": "class T:\n    def __fingerprint__(self): return K\nmake = T",
    "the choice of a function": "def make(): return [lambda x: x, lambda x: x][K - 2]",
    "the choice of a function in one line": "def make(): return (lambda x: x + 1, lambda x: x + 2)[K - 2]",
    "the choice of a class": "class A: pass\nclass B: pass\ndef make(): return [A, B][K - 2]()",
    "the length of an integer": "def make(): return 10 ** (5000 + K)",
}
"""Programs whose text stays, while K is 2 and then 3."""

OTHERS: dict[str, str] = {
    "a base class": "import other\nclass T(other.Thing): pass\nmake = T",
    "a mixin": "import other\nclass T(dict, other.Thing): pass\nmake = T",
    "a metaclass": "import other\nclass T(metaclass=other.Meta): pass\nmake = T",
    "a decorator": "import other\nclass T:\n    @other.deco\n    def f(self): pass\nmake = T",
    "a decorator of a property": "import other\nclass T:\n"
    "    @property\n    @other.deco\n    def f(self): pass\nmake = T",
    "an attribute": "import other\nclass T: pass\ndef make():\n    t = T(); t.thing = other.Thing(); return t",
    "a class attribute": "import other\nclass T: thing = other.Thing()\nmake = T",
    "a function": "import other\ndef make(): return [other.function]",
    "a partial": "import other\ndef make(): return functools.partial(other.function, 1)",
    "a closure": "import other\ndef make():\n    f = other.function\n    return lambda: f()",
    "a method that was put into a class": "import other\nclass T: pass\nT.f = other.function\nmake = T",
    "a module": "import other\nclass T: pass\ndef make():\n    t = T(); t.m = other; return t",
}
"""Programs whose text stays, while that of another module changes."""

OTHER = """
import functools
class Thing:
    def f(self): return 2
class Meta(type):
    def f(cls): return 2
def deco(f):
    @functools.wraps(f)
    def w(*a): return f(*a) * 2
    return w
def function(*a): return 2
"""


def run(folder: Path, text: str, k: int = 2, other: str | None = None) -> bytes:
    """The fingerprint of what a program makes in a run of its own, as far as that concerns its modules."""
    builtins.minato_k = k  # type: ignore[attr-defined]
    if other is not None:
        loaded(folder / "other.py", other)
    try:
        return fingerprint(loaded(folder / "program.py", HEAD + text).make())
    finally:
        sys.modules.pop("program")
        sys.modules.pop("other", None)


def loaded(path: Path, text: str) -> Any:
    """A module of a file that is written now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "dont_write_bytecode", True):
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", BODIES)
def test_another_text_is_another_key(name: str, tmp_path: Path) -> None:
    text = BODIES[name]
    first = run(tmp_path / "a", text)
    assert run(tmp_path / "a", text) == run(tmp_path / "elsewhere", text) == first
    assert "2" in text
    assert run(tmp_path / "a", text.replace("2", "3")) != first
    assert run(tmp_path / "a", text) == first


@pytest.mark.parametrize("name", STATES)
def test_another_state_is_another_key(name: str, tmp_path: Path) -> None:
    text = STATES[name]
    first = run(tmp_path, text, 2)
    assert run(tmp_path, text, 2) == first != run(tmp_path, text, 3)


@pytest.mark.parametrize("name", OTHERS)
def test_another_module_is_another_key(name: str, tmp_path: Path) -> None:
    text = OTHERS[name]
    first = run(tmp_path, text, other=OTHER)
    assert run(tmp_path, text, other=OTHER) == first
    assert run(tmp_path, text, other=OTHER.replace("2", "3")) != first


SAME = """
import builtins, collections, multiprocessing, sys
sys.path.insert(0, sys.argv[1])
builtins.minato_k = 2
from minato._support.hashes import fingerprint, index_hash

class Samples:
    scale = 2

    def __getitem__(self, index):
        return plus(index)

def plus(value):
    return value + Samples.scale

def tell():
    print(fingerprint(Samples(), plus).hex(), index_hash(Samples()), index_hash((plus, 1)), flush=True)

if __name__ == "__main__":
    tell()
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
    Point = collections.namedtuple("Point", "x y")
    print([index_hash(key) for key in KEYS if key is not Point])
    import programs
    for name, make in programs.MAKERS.items():
        print(name, fingerprint(make()).hex())
"""


def test_another_process_has_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is defined in a script, of which a spawned child has a copy."""
    parts = [HEAD, "MAKERS = {}\n"]
    for name, text in [*BODIES.items(), *STATES.items()]:
        # Each in a scope of its own: the names repeat.
        inner = "\n".join(f"    {line}" for line in f"{text}\nreturn make".splitlines())
        parts.append(f"def scope():\n{inner}\nMAKERS[{name!r}] = scope()\n")
    (tmp_path / "programs.py").write_text("".join(parts))
    (tmp_path / "script.py").write_text(SAME.replace("KEYS", OTHER_KEYS))
    # This process has another seed of str hashes, too: only one more is needed.
    told = output(tmp_path / "script.py", tmp_path, cwd=tmp_path, PYTHONHASHSEED="1")
    script, spawned, words, *there = told.splitlines()
    assert script == spawned
    assert words == str([index_hash(key) for key in eval(OTHER_KEYS) if key is not Point])
    builtins.minato_k = 2  # type: ignore[attr-defined]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    makers = importlib.import_module("programs").MAKERS
    here = [f"{name} {fingerprint(make()).hex()}" for name, make in makers.items()]
    del sys.modules["programs"]
    assert len(here) == len({**BODIES, **STATES})
    assert here == there


def test_another_version_of_a_package_is_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    package = packages / "scaling"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class Scale:\n    def __call__(self, x): return x\n")
    monkeypatch.syspath_prepend(str(packages))
    found = []
    for name in ("scaling", "Scaling-Things"):  # a distribution need not be called like its package
        info = packages / f"{name}-1.dist-info"
        info.mkdir()
        (info / "top_level.txt").write_text("scaling\n")
        for version in ("1.0", "1.1", "1.0"):
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(metadata)
            hashes._distributions.cache_clear()
            importlib.invalidate_caches()
            sys.modules.pop("scaling", None)
            found.append(fingerprint(__import__("scaling").Scale()))
        shutil.rmtree(info)
    sys.modules.pop("scaling", None)
    assert found[0] == found[2] != found[1]
    assert found[3] == found[5] != found[4]


def interactive(text: str, registered: bool) -> Any:
    """What a program made that was typed in: a shell keeps its text in ``linecache``, ``exec`` does not."""
    name = "<cell>" if registered else "<string>"
    module = types.ModuleType("typed")
    sys.modules["typed"] = module
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), module.__dict__)
    return module.make()  # type: ignore[attr-defined]


def test_what_is_typed_in_counts_by_its_text() -> None:
    for text in (
        "class T:\n    def f(self): return {}\nmake = T",
        "def g(x): return {}\ndef make(): return g",
    ):
        keys = [fingerprint(interactive(text.format(k), True)) for k in (2, 3, 2)]
        assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize(
    "text",
    [
        "class T:\n    def f(self): return 2\nmake = T",
        "class T:\n    f = property(lambda self: 2)\nmake = T",
        "class A:\n    def f(self): return 2\nclass T(A): pass\nmake = T",
        "def make(): return lambda x: x",
        "import functools\ndef g(x, y): return 2\ndef make(): return functools.partial(g, 1)",
    ],
)
def test_what_has_no_text_is_refused(text: str) -> None:
    with pytest.raises(TypeError, match="the source of .* cannot be read .*: define it in a file"):
        fingerprint(interactive(text, False))


def test_a_class_of_values_alone_needs_no_text() -> None:
    text = "class L(list):\n    size = {}\n    table = {{'a': {}}}\ndef make(): return L([1])"
    keys = [
        fingerprint(interactive(text.format(*k), False)) for k in ((2, 2), (3, 2), (2, 3), (2, 2))
    ]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


def test_a_file_that_is_edited_counts_as_it_ran(tmp_path: Path) -> None:
    text = BODIES["a method"]
    module = loaded(tmp_path / "edited.py", text)
    before = fingerprint(module.T())
    (tmp_path / "edited.py").write_text(text.replace("2", "3"))
    assert fingerprint(module.T()) == before
    sys.modules.pop("edited")


class Held:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, sample: Any) -> Any:
        return sample


class Locked:
    def __reduce__(self) -> Any:
        raise RuntimeError("it is open")


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found, 1, {}]
    return found


@pytest.mark.parametrize(
    "held",
    [
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        Locked(),
        (i for i in range(3)),
        open(os.devnull),  # noqa: SIM115
        np.frombuffer(mmap(-1, 5 << 30, MAP_PRIVATE | MAP_ANONYMOUS, PROT_READ), np.uint8),
    ],
    ids=lambda held: type(held).__name__,
)
def test_what_has_no_fingerprint_is_refused_with_the_remedy(held: Any) -> None:
    unnamed, named = (
        minato.DataLoader([1, 2, 3], transforms=[Held(held)], cache=cache)
        for cache in (MemoryCache(1 << 20), MemoryCache(1 << 20, version="1"))
    )
    with pytest.raises(TypeError, match="give the cache a version="):
        list(unnamed)
    assert flat(indices(named)) == [1, 2, 3]
    if hasattr(held, "close"):
        held.close()


def test_values_of_other_types_are_other_keys() -> None:
    values: list[Any] = [
        None, False, 0, 0.0, -0.0, 0j, "0", b"0", "", b"", (), [], {}, set(), frozenset(), "None", "[]", [None],
        ["None"],
        [1, 2], (1, 2), [[1], 2], [[1, 2]], [1, [2]], [(1, 2)], [("1", 2)], [(1,), (2,)], "\ud800", float("nan"),
        np.int32(0), np.int64(0), np.zeros(1), np.zeros((1, 1)), np.zeros(1, np.float32), np.zeros(1, ">f8"),
        np.zeros(0), np.zeros(0, np.float32), torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, dtype=torch.float64),
        torch.zeros(0), torch.nn.Parameter(torch.zeros(1)), int, float, len, max, np.sin, np.cos, torch.sin, torch.cos,
        str.upper, str.lower, "a".join, "b".join, range(3), range(4), slice(1), torch.float32, np.dtype("f4"),
        {"a": 1, "b": 2}, {"b": 2, "a": 1}, functools.partial(max, 1), functools.partial(min, 1),
    ]  # fmt: skip
    keys = [fingerprint(value) for value in values]
    assert len(set(keys)) == len(keys)


def test_shared_columns_count_by_their_content() -> None:
    for make in (lambda k: SharedList(["a", ("b", k)]), lambda k: SharedDict({"a": 1, "b": k})):
        assert fingerprint(make(2)) == fingerprint(make(2)) != fingerprint(make(3))


def test_items_that_overlap_count_once() -> None:
    """All of them would be too large."""

    def windows(last: int, step: int = 1) -> list[Any]:
        numbers = np.append(np.arange(1 << 20), last)
        window = np.lib.stride_tricks.sliding_window_view(numbers[::step], 1 << 10)
        return [window, torch.from_numpy(numbers).unfold(0, 1 << 10, step)]

    for one, same, *others in zip(windows(1), windows(1), windows(2), windows(1, 2), strict=True):
        assert fingerprint(one) == fingerprint(same)
        assert len({*map(fingerprint, (one, *others))}) == 3


def test_equal_objects_and_one_object_are_the_same() -> None:
    one = ["a", {}]
    assert fingerprint([one, one]) == fingerprint([one, ["a", {}]])
    circle, other = [1], [2]
    circle.append(circle)  # type: ignore[arg-type]
    other.append(other)  # type: ignore[arg-type]
    assert fingerprint(circle) != fingerprint(other)


def test_a_deep_structure_has_a_fingerprint() -> None:
    assert fingerprint(deep(5000)) == fingerprint(deep(5000)) != fingerprint(deep(5001))


def without_columns(code: types.CodeType) -> types.CodeType:
    """The code as a Python that keeps no columns has it."""
    constants = (without_columns(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=tuple(constants))


def test_a_lambda_is_refused_where_nothing_tells_it_from_others_in_its_line() -> None:
    functions = (lambda: id(1), lambda: id(2), lambda: 1, lambda: 2)  # fmt: skip
    assert len(set(map(fingerprint, functions))) == 4
    for function in functions[:2]:
        function.__code__ = without_columns(function.__code__)
        with pytest.raises(TypeError, match="keeps no columns.*: make it a function with a name"):
            fingerprint(function)


def test_indices_that_are_equal_are_one_entry() -> None:
    cache = MemoryCache(1 << 20, version="1")
    for sampler in ([0, 1], [np.int64(0), np.int32(1)]):
        loader = minato.DataLoader([5, 6], sampler=sampler, cache=cache)
        assert flat(indices(loader)) == [5, 6]
    assert (cache.report().hits, cache.report().misses) == (2, 2)
