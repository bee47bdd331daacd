"""What stands under ``if __name__ == "__main__"`` in the program's script, which child processes leave out."""

from __future__ import annotations

import linecache
import re
import sys
from types import FunctionType
from typing import NoReturn

__all__ = ["defined_under_guard", "is_guarded", "refuse_unguarded"]

_GUARD = re.compile(r"""if\s*\(?\s*__name__\s*==\s*["']__main__["']""")


def is_guarded(path: str, number: int) -> bool:
    """Whether line ``number`` of a file is in a block of the top level that begins with the guard."""
    for line in reversed(linecache.getlines(path)[:number]):
        if line.strip() and line[0] not in " \t#)]}":
            return _GUARD.match(line) is not None
    return False


def defined_under_guard(value: type | FunctionType) -> bool:
    """Whether a class or function of the main module is defined under the guard, so that no child has it."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return False
    if isinstance(value, FunctionType):
        code = value.__code__
        return code.co_filename == path and is_guarded(path, code.co_firstlineno)
    for part in vars(value).values():
        if isinstance(part, FunctionType) and part.__code__.co_filename == path:
            return is_guarded(path, part.__code__.co_firstlineno)
    # Without methods of its own: only the text tells.
    defines = re.compile(rf"\s+class\s+{value.__name__}\b")
    lines = enumerate(linecache.getlines(path), 1)
    return any(defines.match(line) and is_guarded(path, number) for number, line in lines)


def refuse_unguarded() -> NoReturn:
    """End this process, which imports the main module to become a worker, and is to start workers by that.

    Raises:
        SystemExit: Always. multiprocessing's own error is right, but has fifty lines for each worker.
    """
    path = getattr(sys.modules.get("__mp_main__") or sys.modules["__main__"], "__file__", None)
    words = (
        f"the main module ({path}) starts workers where it is imported, and workers that are not forked import it: put "
        "what the script does under if __name__ == '__main__'"
    )
    # In one piece: several workers may say so at the same moment.
    print(f"minato: {words}\n", end="", file=sys.stderr, flush=True)
    ending = SystemExit(1)
    ending.args = (words,)  # for the log of a fork server; the exit status stays 1
    raise ending
