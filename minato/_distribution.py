"""This distribution: its version, which the build reads from here, and a refusal to run among another one's files.

PyPI's ``minato`` (access to files) has the same package directory. Both have ``__init__.py``, ``__main__.py`` and the
command ``minato``, and the one that is installed later overwrites them. One ``stat`` finds a module that only the
other one has.
"""

from __future__ import annotations

import os

__all__ = ["__version__"]

__version__ = "0.1.0"

_THEIRS = "minato.py"
"""A module of PyPI's minato at the top of the package; this project has none of this name."""

_package = os.path.dirname(__file__)
if os.path.exists(os.path.join(_package, _THEIRS)):
    raise ImportError(
        f"{_package} holds the files of two projects: the distributions 'minatoloader' (this data loader) and "
        "'minato' (access to files) are both installed, and one has overwritten files of the other. Uninstall both "
        "(pip uninstall minato minatoloader), then install the one that you want (pip install minatoloader)"
    )
