"""minato's own options: defaults that depend on others, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato import (
    Arrival,
    DataLoader,
    DeviceCopies,
    ErrorPolicy,
    FastFirst,
    Observe,
    Readers,
    Record,
    Replay,
    SharedPool,
    StragglerPolicy,
)
from minato._support.loader_class import TorchDataLoader
from minato.options import DEFAULT_MAX_LAG, GROUPS, OPTION_NAMES, OWN_NAMES, Options, TorchArguments
from tests.datasets import Numbers

SIGNATURE = inspect.signature(DataLoader).parameters


def loaded(path: Path) -> Any:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


write_options = loaded(Path(__file__).parents[1] / "docs" / "write_options.py")


def options(**given: Any) -> Options:
    """The options of a loader; ``given`` also holds the fields of :class:`TorchArguments`."""
    defaults = {name: each.default for name, each in SIGNATURE.items() if name in OPTION_NAMES}
    usual = {"in_order": True, "has_batch_sampler": False, "is_stream": False}
    torchs = TorchArguments(**{name: given.pop(name, value) for name, value in usual.items()})
    return Options.of({**defaults, "num_workers": 2, **given}, torchs)


def test_an_option_is_a_field_and_a_parameter_with_the_same_default() -> None:
    torchs = inspect.signature(TorchDataLoader).parameters
    assert [name for name in SIGNATURE if name not in torchs] == [*OWN_NAMES]
    for each in dataclasses.fields(Options):
        assert not each.metadata or SIGNATURE[each.name].default == each.default, each.name


def test_the_reference_is_generated_from_the_fields() -> None:
    text = write_options.PAGE.read_text(encoding="utf-8")
    assert write_options.rewritten(text) == text, "run python docs/write_options.py"


@pytest.mark.parametrize("group", [*GROUPS, Options], ids=lambda group: group.__name__)
def test_every_field_is_documented_with_its_default(group: type) -> None:
    documented = write_options.documented(group)
    own = [each for each in dataclasses.fields(group) if each.metadata]
    assert list(documented) == [each.name for each in own] or group.__name__ == "PaperController"
    for each in own:
        said = documented[each.name]
        assert said.meaning.endswith("."), each.name
        assert said.default, each.name
        if isinstance(each.default, str | int | float):
            literal = each.default if not isinstance(each.default, str) else f'"{each.default}"'
            assert said.default == f"`{literal}`", each.name


def test_the_help_of_the_class_documents_every_option() -> None:
    fields = {
        group: [one.name for one in dataclasses.fields(group) if one.init] for group in GROUPS
    }
    for group, names in {DataLoader: OPTION_NAMES, **fields}.items():
        text = inspect.getdoc(group) or ""
        assert [name for name in names if f"\n    {name}: " not in text] == []


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ({}, "strict"),
        ({"has_batch_sampler": True}, "strict"),
        ({"in_order": False}, "arrival"),
        ({"in_order": False, "has_batch_sampler": True}, "batch"),
        ({"in_order": False, "is_stream": True}, "batch"),
        ({"in_order": False, "compat": "torch"}, "batch"),
        ({"order": "batch", "has_batch_sampler": True}, "batch"),
        ({"order": "arrival", "is_stream": True}, "arrival"),
        ({"order": "fast_first", "in_order": False}, "fast_first"),
    ],
)
def test_order_follows_from_the_other_arguments(given: dict[str, Any], order: str) -> None:
    assert options(**given).order == order


def test_defaults() -> None:
    default = options()
    assert default.max_lag == DEFAULT_MAX_LAG > 0
    assert default.seed is default.memory_budget is None
    assert (default.workers, default.seeds_samples, default.shared_pool) == ("process", True, None)
    assert not options(compat="torch").seeds_samples
    assert options(order=Arrival(0)).max_lag == 0
    fast_first = options(order=FastFirst(3))
    assert (fast_first.order, fast_first.max_lag) == ("fast_first", 3)


def test_an_amount_of_memory() -> None:
    amounts = {500: 500, "500": 500, "8GB": 8 * 10**9, "1.5 GiB": 3 << 29, "512mib": 512 << 20}
    for given, nbytes in {**amounts, "2k": 2000}.items():
        assert options(memory_budget=given).memory_budget == nbytes


def test_a_path_stays_where_the_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = (
        *(Record(b"file").path, Replay(Path("file")).path, Observe(trace=b"file").trace),  # type: ignore[arg-type]
        *(ErrorPolicy(log="file").log, StragglerPolicy(history=Path("file")).history),
    )
    assert paths == (str(tmp_path / "file"),) * 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("raise", ("raise", 0, False)),
        ("skip", ("skip", 0, True)),
        ("retry", ("raise", 2, True)),
        (ErrorPolicy("retry", retries=5), ("raise", 5, True)),
        (ErrorPolicy(log="failures"), ("raise", 0, True)),
        (ErrorPolicy(on_worker_death="raise"), ("raise", 0, False)),
    ],
)
def test_a_plain_value_stands_for_an_error_policy(given: Any, expected: Any) -> None:
    errors = options(errors=given).errors
    assert (errors.outcome, errors.tries_again, errors.handles_samples) == expected


@pytest.mark.parametrize(
    ("seed", "kept"),
    [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64, 0)],
)
def test_seed_counts_modulo_two_to_the_64(seed: int, kept: int) -> None:
    assert options(seed=seed).seed == kept


@pytest.mark.parametrize("order", ["arrival", "fast_first"])
@pytest.mark.parametrize(
    "with_whole_batches",
    [{"has_batch_sampler": True}, {"compat": "torch"}, {"compat": "torch", "is_stream": True}],
)
def test_whole_batches_cannot_be_mixed(order: str, with_whole_batches: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"order='{order}' mixes.*use order='batch'"):
        options(order=order, **with_whole_batches)


def test_readers_are_a_number_or_their_settings() -> None:
    given = (None, 1, np.int64(3), Readers(resume="read"))
    found = [options(readers=each, is_stream=True).readers for each in given]
    assert found == [None, Readers(1), Readers(3), Readers(None, resume="read")]


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "4"])
@pytest.mark.parametrize(
    "give", [Readers, lambda wrong: options(readers=wrong, is_stream=True)], ids=["field", "option"]
)
def test_numbers_of_readers_that_are_not_possible(give: Any, wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"(count|readers)={wrong!r}"):
        give(wrong)


def test_readers_that_are_not_possible() -> None:
    with pytest.raises(ValueError, match="resume='never' is not possible: choose one of"):
        Readers(resume="never")
    with pytest.raises(ValueError, match="readers=2 is for iterable datasets, .*: leave it out"):
        options(readers=2)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="order='strict' contradicts in_order=False"):
        options(order="strict", in_order=False)
    words = r"recording=Replay\(path='/file'\) gives the batches as they are recorded"
    with pytest.raises(ValueError, match=words):
        options(order="batch", recording=Replay("/file"))


@pytest.mark.parametrize("make", [Arrival, FastFirst])
def test_a_lag_is_a_number_of_batches(make: Any) -> None:
    with pytest.raises(ValueError, match="max_lag=-1 is too small: give at least 0"):
        make(-1)
    with pytest.raises(TypeError, match=r"max_lag=1\.5 is a float"):
        make(1.5)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu", r"device='gpu' is no device of torch's"),
        ("cuda:77", r"device='cuda:77' is not there: torch sees \d+ CUDA devices"),
        (torch.device("cuda", 77), r"is not there"),
        ("mtia", r"device='mtia' is not there"),
    ],
)
def test_a_device_that_is_not_there_is_refused_at_once(device: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataLoader(Numbers(3), device=device)


def test_a_device_is_a_string_or_torchs() -> None:
    with pytest.raises(TypeError, match=r"device=1\.5 is a float"):
        options(device=1.5)
    assert options(device="meta").target == torch.device("meta")
    assert options(device="cpu").target is None
    assert (options(device="meta").to_device, options().to_device) == (2, 0)
    with pytest.raises(ValueError, match="ahead=-1 is too small"):
        DeviceCopies("meta", -1)
    with pytest.raises(TypeError, match="name the device"):
        DeviceCopies(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"is_stream": True}, "an iterable dataset, whose samples have no indices"),
        ({"num_workers": 0}, "num_workers=0, with which there are no workers to share: use 1"),
        ({"compat": "torch"}, "compat='torch', where each batch is one worker's"),
        ({"errors": "skip"}, "on_error='skip', with which ranks might get different numbers"),
        *(
            ({"recording": one}, rf"recording={re.escape(repr(one))}, as each rank has only a part")
            for one in (Record("file"), Replay("file"))
        ),
    ],
)
def test_what_a_shared_pool_does_not_go_with(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"workers=SharedPool\(\.\.\.\) does not go with {words}"):
        options(workers=SharedPool(), **{"num_workers": 2, **given})


def test_a_shared_pool_is_a_kind_of_workers() -> None:
    with pytest.raises(ValueError, match="on_rank_death='never' is not possible: choose one of"):
        SharedPool("never")
    given = options(workers=SharedPool())
    assert (given.shared_pool, given.worker_kind) == (SharedPool("raise"), "process")
    assert options(workers=SharedPool("wait")).shared_pool == SharedPool("wait")


@pytest.mark.parametrize("name", ["order", "workers", "errors", "compat", "observe"])
@pytest.mark.parametrize("value", [np.arange(2), torch.arange(2)])
def test_an_array_is_none_of_several_choices(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*\(\[0, 1\]\) is not possible: choose one of"):
        options(**{name: value})


def test_metrics_need_stats() -> None:
    with pytest.raises(ValueError, match="metrics=9000 contradicts stats=False"):
        Observe(metrics=9000, stats=False)
    for given in ("[::1]:9000", ("::1", 9000)):
        assert Observe(metrics=given).metrics == ("::1", 9000)
    assert not options(observe=False).observe.stats
