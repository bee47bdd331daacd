"""Build of the compiled core. Everything else about the package stands in pyproject.toml."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

CORE = Path("minato/_core")
COMMIT = Path("minato/_commit.txt")

# The only place where compiler directives stand.
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "embedsignature": True,
    "freethreading_compatible": True,
    "show_performance_hints": True,
}
CHECKED = {"boundscheck": True, "wraparound": True, "initializedcheck": True}
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
"""The checked build runs under ``LD_PRELOAD`` of the sanitizers' libraries: ``make test-checked``."""


def is_set(variable: str) -> bool:
    """Tell whether an environment variable asks for something (``0`` and empty do not)."""
    return os.environ.get(variable, "") not in ("", "0")


def extensions(build_dir: str = "build/cython", force: bool = False) -> list[Extension]:
    """One extension per ``_X_c.pyx``; none when ``MINATO_NO_EXTENSIONS`` asks for a pure build."""
    if is_set("MINATO_NO_EXTENSIONS"):
        print("minato: pure-Python build (MINATO_NO_EXTENSIONS is set)", file=sys.stderr)
        return []
    import numpy
    from Cython.Build import cythonize

    checked = is_set("MINATO_CHECKED")
    if checked:
        build_dir += "-checked"  # else the ordinary build would take these files for its own
    print(f"minato: {'checked' if checked else 'compiled'} build", file=sys.stderr)
    headers = sorted(str(path) for pattern in ("*.h", "*.pxd") for path in CORE.glob(pattern))
    modules = [
        Extension(
            f"minato._core.{path.stem}",
            [str(path)],
            include_dirs=[str(CORE), numpy.get_include()],
            define_macros=[
                ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
                *([("MINATO_CHECKED", "1")] if checked else []),
            ],
            extra_compile_args=[
                *(["-O1", "-g", *SANITIZE] if checked else ["-O3", "-g0"]),
                *["-std=c11", "-Wall", "-Wno-unused-function"],
            ],
            extra_link_args=SANITIZE
            if checked
            else ["-Wl,-s"],  # without symbols: a fifth of the size
            depends=headers,
        )
        for path in sorted(CORE.glob("_*_c.pyx"))
    ]
    return cythonize(
        modules,
        build_dir=build_dir,
        force=force,
        compiler_directives={**DIRECTIVES, **(CHECKED if checked else {})},
    )


class BuildCore(build_ext):
    """Compile, and when that fails say what to do about it."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            raise SystemExit(
                f"minato: the compiled core could not be built ({error}). Install a C compiler and "
                "the Python headers, or set MINATO_NO_EXTENSIONS=1 to install without it."
            ) from error


def write_commit(folder: str) -> None:
    """Leave the commit in a wheel or an sdist, where ``minato --version`` reads it."""
    commit = runpy.run_path("minato/_distribution.py")["commit"]()
    if commit != "unknown":
        (Path(folder) / COMMIT).write_text(f"{commit}\n", encoding="ascii")


class BuildModules(build_py):
    """Copy the modules, and name the commit."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class MakeSource(sdist):
    """Copy the sources, and name the commit, for a wheel that is built from them."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


def home() -> dict[str, str]:
    """The project's addresses: the workflows know the repository that they release."""
    urls = {"Homepage": "https://pypi.org/project/minatoloader/"}
    server, repository = (
        os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY")
    )
    if server and repository:
        source, owner_and_name = f"{server}/{repository}", repository.split("/")
        urls["Documentation"] = "https://{}.github.io/{}/".format(*owner_and_name)
        urls["Source"] = source
        urls["Issues"] = f"{source}/issues"
        urls["Changelog"] = f"{source}/blob/main/CHANGELOG.md"
    return urls


def readme(source: str | None) -> str:
    """The page for PyPI, which knows no files of the repository: links that start there are made whole."""
    text = Path("README.md").read_text(encoding="utf-8")
    if source is None:
        return text
    text = re.sub(r'((?:src|srcset)=")(?![a-z]+:)', rf"\1{source}/raw/main/", text)
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\1{source}/blob/main/", text)


if __name__ == "__main__":
    urls = home()
    setup(
        project_urls=urls,
        long_description=readme(urls.get("Source")),
        long_description_content_type="text/markdown",
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildCore, "build_py": BuildModules, "sdist": MakeSource},
        options={"build_ext": {"parallel": os.cpu_count()}},
    )
