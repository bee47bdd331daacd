"""The ledger's protocol in threads, under the compilers' sanitizers; and who may touch a shared word."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.selection import mostly_slow

ROOT = Path(__file__).parents[2]
CORE = ROOT / "minato" / "_core"
PROGRAM = Path(__file__).with_name("ledger_threads.c")
BATCHES = 1000
"""In each of four ways; a run takes a second or two on an idle machine."""
STORE = "mn_store_seq_cst_u64(&mn_at(ledger, place)->place, MN_FILLED | (position + 1));\n        mn_settle"
"""The store by which a sample counts, in ``mn_fill``."""


def build(sanitizer: str, headers: Path, directory: Path) -> Path:
    """The program, compiled with a sanitizer and with the assertions of the checked build."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = directory / "ledger_threads"
    warnings = [f"-W{name}" for name in ("all", "extra", "conversion", "error")]
    flags = ["-std=c11", "-g", "-O1", "-DMINATO_CHECKED", *warnings, "-lpthread"]
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{headers}"]
    command = [compiler, str(PROGRAM), "-o", str(program), *flags, *sanitize]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in done.stderr:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, seed: int) -> subprocess.CompletedProcess[str]:
    # ThreadSanitizer wants its addresses where they are without randomisation.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*fixed, str(program), str(BATCHES), str(seed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@mostly_slow("sanitizer", ["thread", "address,undefined"])
def test_the_protocol_has_no_finding(sanitizer: str, tmp_path: Path) -> None:
    program = build(sanitizer, CORE, tmp_path)
    for seed in (1, 2):
        done = run(program, seed)
        assert (done.returncode, done.stderr) == (0, ""), f"seed {seed}: {done.stderr}"


@pytest.mark.slow
def test_a_store_that_orders_nothing_is_found(tmp_path: Path) -> None:
    for header in CORE.glob("*.h"):
        shutil.copy(header, tmp_path)
    source = (tmp_path / "ledger.h").read_text()
    assert STORE in source
    # Other threads get the core before the next store, which orders both.
    weak = STORE.replace("seq_cst", "relaxed").replace("\n", "\n        sched_yield();\n")
    changed = "int sched_yield(void);\n" + source.replace(STORE, weak)
    (tmp_path / "ledger.h").write_text(changed)
    program = build("thread", tmp_path, tmp_path)
    assert any("ThreadSanitizer: data race" in run(program, seed).stderr for seed in range(1, 9))


def test_shared_words_are_touched_by_accessors_only() -> None:
    """Their type keeps the compiler from it; this keeps the source from reaching into the type."""
    reaches = [
        f"{path.name}: {line.strip()}"
        for path in sorted(CORE.iterdir())
        if path.suffix in (".h", ".pyx", ".pxd") and path.name != "atomics.h"
        for line in path.read_text().splitlines()
        if re.search(r"(\.|->)bits\b|__atomic_|\bvolatile\b", line)
    ]
    allowed = [line for line in reaches if "SYS_futex" in line or line.startswith("histogram.h")]
    assert reaches == allowed
