"""This distribution: its version, which the build reads from here, its commit, and a check for another one's files.

PyPI's ``minato`` (access to files) has the same package directory. Both have ``__init__.py``, ``__main__.py`` and the
command ``minato``, and the one that is installed later overwrites them. One ``stat`` finds a module that only the
other one has.
"""

from __future__ import annotations

import os
import subprocess
from importlib import metadata

__version__ = "0.1.0.dev0"

_THEIRS = "minato.py"
"""A module of PyPI's minato at the top of the package; this project has none of this name."""

_package = os.path.dirname(__file__)
if os.path.exists(os.path.join(_package, _THEIRS)):
    raise ImportError(
        f"{_package} holds the files of two projects: the distributions 'minatoloader' (this data loader) and "
        "'minato' (access to files) are both installed, and one has overwritten files of the other. Uninstall both "
        "(pip uninstall minato minatoloader), then install the one that you want (pip install minatoloader)"
    )


def documentation(page: str) -> str:
    """Where the reader of a message finds a page, such as ``how-to/photos``.

    Returns:
        Its address, by the URLs of the installed distribution. A build outside the workflows of a release knows none:
        there the page's file in the repository.
    """
    try:
        urls = metadata.metadata("minatoloader").get_all("Project-URL", [])
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        urls = []
    known = dict(url.split(", ", 1) for url in urls)
    if home := known.get("Documentation"):
        return f"{home}{page}.html"
    return f"docs/{page}.md in minato's repository"


def commit() -> str:
    """The commit of this code: of a built package the one it was built from, of a checkout the present one.

    Returns:
        The first twelve digits of the hash, with ``-dirty`` where tracked files differ; or ``"unknown"``.
    """
    try:
        with open(os.path.join(_package, "_commit.txt"), encoding="ascii") as file:  # by setup.py
            return file.read().strip()
    except OSError:
        pass
    root = os.path.dirname(_package)
    if not os.path.exists(os.path.join(root, ".git")):  # else git would look in the folders above
        return "unknown"
    command = ("git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
