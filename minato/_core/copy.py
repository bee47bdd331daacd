"""Copies of samples to their place in a batch, and of whole arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._copy_py import Packer, copy_array
else:
    from minato._core._copy_c import Packer, copy_array

__all__ = ["Packer", "copy_array"]
