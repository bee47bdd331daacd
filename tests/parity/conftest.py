"""Each case goes through torch's loader and through minato's, and everything that a program can see is compared."""

from __future__ import annotations

import multiprocessing

import pytest

# Failures in the shared helpers show both sides.
pytest.register_assert_rewrite("tests.parity.harness")

# Workers of a fork server are forked with everything imported: a second less for each.
multiprocessing.set_forkserver_preload(["minato", "tests.parity.material"])
