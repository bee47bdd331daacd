"""What a loader leaves behind: nothing, however long it runs and however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import Any

import pytest

from tests.subprocesses import TIMEOUT_S, at_work, run, session, started, wait_for_end

MEGABYTE = 1 << 20
SOME_BYTES = 12 * MEGABYTE
"""What an allocator may keep: far less than the leak of a kilobyte for each of the batches."""
GROWTH_LIMIT_S = 300.0
"""Ten seconds of computing on both cores, which a busy machine does not give at once."""


@pytest.mark.slow
@pytest.mark.timeout(GROWTH_LIMIT_S + 10)
@pytest.mark.parametrize(
    ("cases", "pure"),
    [
        ("batches-inline loaders-inline batches-threads epochs-threads epochs-arrival loaders-threads", False),
        ("batches-processes batches-collated batches-arrival epochs-processes loaders-processes", False),
        ("batches-processes epochs-threads loaders-processes", True),
    ],
    ids=["threads", "processes", "pure"],
)  # fmt: skip
def test_nothing_grows(cases: str, pure: bool) -> None:
    out = run("growth.py", *cases.split(), pure=pure, timeout_s=GROWTH_LIMIT_S)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [case for case, _ in lines] == cases.split()
    for case, found in lines:
        memory = found.pop("bytes"), found.pop("bytes of workers")
        assert max(memory) < SOME_BYTES, (case, memory)
        assert found.pop("mappings") <= 8, case  # the allocator's
        assert found.pop("native threads") <= 1, case  # torch starts its own when it likes
        none = dict.fromkeys(("descriptors", "threads", "children", "shared memory"), 0)
        assert (case, found) == (case, none)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "code"),
    [
        ("inline", "end", 0),
        ("processes", "end", 0),
        ("processes", "sys.exit", 3),
        ("processes", "_exit", 4),
        ("spawn", "_exit", 4),
        ("persistent", "reference cycle", 0),
        ("large", "end", 0),
        ("threads", "end", 0),
        ("threads", "reference cycle", 0),
        ("timeout", "after an error", 0),
    ],
)
def test_interpreter_ends_in_the_middle_of_an_epoch(kind: str, how: str, code: int) -> None:
    error = "DataLoader timed out after 6.0 seconds\n" if kind == "timeout" else ""
    assert run("ending.py", kind, how, code=code) == f"[[0, 1], [2, 3], [4, 5]]\n{error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("inline", "waiting"),
        ("processes", "waiting"),
        ("processes", "computing"),
        ("persistent", "busy"),
        ("threads", "waiting"),
    ],
)
def test_interrupt_ends_everything_with_one_traceback(kind: str, where: str) -> None:
    with started("running.py", kind, where) as process:
        workers = at_work(process)
        assert len(workers) == (2 if kind in ("processes", "persistent") else 0)
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback (most recent call last)") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_second_interrupt_leaves_nothing_either(kind: str) -> None:
    with started("running.py", kind, "waiting") as process:
        at_work(process)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    # While Python tells of the first one, the second makes it dump the object instead, or exit with 1. What comes
    # while a file is being opened leaves that to be closed with a warning.
    assert process.returncode in (-signal.SIGINT, 1)
    assert "KeyboardInterrupt" in err
    told = set(re.findall(r"^([\w.]+)(?:$|:)", err, re.MULTILINE))
    assert told <= {"KeyboardInterrupt", "ResourceWarning"}, err


@pytest.mark.slow
def test_training_in_a_thread_outlives_the_main_one() -> None:
    assert run("outliving.py") == "780\n"


WAYS = [
    "break",
    "exception",
    "sample's exception",
    "del",
    "two iterators",
    "in a thread",
    "os.fork",
    "Ctrl-C",
    "consumer's exception",
    "sampler's exception",
]
NESTED = ["nested", "inside workers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("inline", WAYS),
        ("processes", WAYS + NESTED),
        ("persistent", WAYS),
        ("threads", WAYS + NESTED),
    ],
    ids=["inline", "processes", "persistent", "threads"],
)
def test_nothing_is_left_and_no_garbage_is_collected(kind: str, ways: list[str]) -> None:
    lines = [json.loads(line) for line in run("residue.py", kind, *ways).splitlines()]
    assert [way for way, _ in lines] == ways
    for way, left in lines:
        assert left == dict.fromkeys(left, 0), way


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "how"),
    [
        *(
            (("running.py", "processes", where), signal.SIGKILL)
            for where in ("waiting", "computing", "busy", "far ahead")
        ),
        (("running.py", "processes", "computing"), signal.SIGTERM),
        # Stuck, the second also in compiled code that lets no Python run.
        *((("faulted.py", "stuck", kind), signal.SIGKILL) for kind in ("sleep", "compiled")),
    ],
    ids=str,
)
def test_workers_end_with_a_killed_parent(script: tuple[str, ...], how: int) -> None:
    with started(*script) as process:
        workers = at_work(process)
        if "stuck" in script:
            os.kill(workers[0], signal.SIGSTOP)
        assert set(session(process.pid)) == {process.pid, *workers}
        os.kill(process.pid, how)
        assert process.wait(TIMEOUT_S) == -how
        assert wait_for_end(process.pid) == []
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize("pure", [False, True], ids=["compiled-core", "pure-core"])
@pytest.mark.parametrize("limit", ["descriptors", "address-space"])
def test_narrow_limits(limit: str, pure: bool) -> None:
    assert run("limits.py", limit, pure=pure) == "held 240 batches\n" * 3


# ---- the pure twin --------------------------------------------------------------------------


@pytest.mark.slow
def test_pure_core_delivers_what_the_compiled_one_does() -> None:
    runs: list[list[Any]] = []
    for pure in (False, True):
        kind, *lines = map(json.loads, run("contents.py", pure=pure).splitlines())
        assert kind == ("pure" if pure or "MINATO_NO_EXTENSIONS" in os.environ else "compiled")
        runs.append(lines)
    compiled, pure_lines = runs
    assert len(compiled) == len(pure_lines) == 4 * 2 * 2 * 2
    for ours, theirs in zip(compiled, pure_lines, strict=True):
        if ours[0] == "strict":
            assert ours == theirs
        else:  # which samples come together, and when, is a matter of time
            assert ours[:3] == theirs[:3]
            assert len(ours[3]) == len(theirs[3]) == 11

    # Neither the workers nor the core make a difference, but in the text of an error: torch's own
    # collation words it otherwise in a worker process.
    def without_text(batches: list[Any]) -> list[Any]:
        return [
            batch.partition(":")[0] if isinstance(batch, str) and "Error" in batch else batch
            for batch in batches
        ]

    for collated in (True, False):
        for epoch in (0, 1):
            same = [
                without_text(line[3])
                for line in compiled
                if line[:3] == ["strict", collated, epoch]
            ]
            assert len(same) == 2
            assert same[0] == same[1]
