"""Each case goes through torch's loader and through minato's, and everything that a program can see is compared."""

from __future__ import annotations

import pytest

# Failures in the shared helpers show both sides.
pytest.register_assert_rewrite("tests.parity.harness")
