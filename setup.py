"""Build of the compiled core. Everything else about the package stands in pyproject.toml."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("minato/_core")

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
                *(["-O1", "-g", *SANITIZE] if checked else ["-O3"]),
                *["-std=c11", "-Wall", "-Wno-unused-function"],
            ],
            extra_link_args=SANITIZE if checked else [],
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


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildCore},
        options={"build_ext": {"parallel": os.cpu_count()}},
    )
