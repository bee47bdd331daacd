"""``minato run``: an unchanged training script, with minato in place of torch's loader and a report at its end."""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

from minato.observe.at_exit import print_at_exit
from minato.patching import patch


def add_to(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the parser of all."""
    parser = add_parser(
        "run",
        usage="minato run [--full] [--compat] SCRIPT [ARGUMENT ...]\n"
        "       minato run [--full] [--compat] -m MODULE [ARGUMENT ...]",
        help="run a training script with minato in place of torch's loader, and report at its end",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument(
        "--full", action="store_true", help="report all figures of each loader at the end"
    )
    parser.add_argument(
        "--compat", action="store_const", const="torch", help="let random numbers be torch's, too"
    )
    parser.add_argument(
        "script", metavar="SCRIPT", help="a file, a directory or a zip file, or with -m a module"
    )
    parser.set_defaults(run=_run, is_script=True)


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the command line of ``minato run``: its own part, and what the script gets, unchanged."""
    own = list(arguments)
    for i, each in enumerate(own[1:], 1):
        if each[:2] == "-m" and len(each) > 2:  # python -mMODULE
            own[i : i + 1] = "-m", each[2:]
            return own[: i + 2], own[i + 2 :]
        if each[:1] != "-":
            return own[: i + 1], own[i + 1 :]
    return own, []


def _run(options: argparse.Namespace) -> None:
    """Run the script as ``python`` would; raises whatever it raises, SystemExit included."""
    script = options.script
    if not options.is_module and not os.path.exists(script):
        _refuse(f"there is no file {script!r}: check the path", 2)
    # Runs after the functions that the script registers with atexit.
    print_at_exit(full=options.full)
    patch(options.compat)
    sys.argv = [script, *options.arguments]
    try:
        module, code = _module(script) if options.is_module else _file(script)
        vars(module)["__builtins__"] = builtins
        if sys.version_info < (3, 14):
            vars(module)["__annotations__"] = {}
        # It stays: threads and functions at exit look up their classes there, as children do their code.
        sys.modules["__main__"] = module
        exec(code, vars(module))
    except BaseException as error:
        # The script's own error is what the user looks for: only a report follows it.
        if not isinstance(error, SystemExit) or error.code:
            print_at_exit(full=options.full, says_none=False)
        _hide_own_frames(error)
        raise


def _hide_own_frames(error: BaseException) -> None:
    """Have Python show the traceback of an error from the script's frames on, by whatever hook the script has set."""
    begin, show = error.__traceback__, sys.excepthook
    while begin is not None and begin.tb_frame.f_globals is globals():
        begin = begin.tb_next

    def hook(kind: type[BaseException], raised: BaseException, _: object) -> None:
        sys.excepthook = show
        show(kind, raised.with_traceback(begin), begin)

    sys.excepthook = hook


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """The main module that ``python -m`` makes."""
    _set_first_path(os.getcwd())
    try:
        spec = None if name[:1] in ("", ".") else importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not is_missing(name, error):
            raise
        spec = None
    made = None if spec is None else _of(spec, spec.parent)
    if made is None or made[1] is None:  # extension modules have no code
        _refuse(f"there is no module {name!r} that can be run: check its name and the directory", 1)
    sys.argv[0] = made[0].__file__ or name
    return made


def is_missing(name: str, error: BaseException) -> bool:
    """Whether an import failed because there is no such module, or no package of it; else it lacks another module."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")


def _file(script: str) -> tuple[ModuleType, CodeType]:
    """The main module that ``python SCRIPT`` makes, of a file, or of a directory or zip file with a ``__main__``."""
    path = os.path.join(os.getcwd(), script)
    finder: Any = pkgutil.get_importer(path)
    if finder is not None:
        _set_first_path(path, always=True)
        spec = finder.find_spec("__main__")
        if spec is None:
            _refuse(f"{script!r} has no __main__: name the script in it", 1)
        return _of(spec, "")
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as file:
        content = file.read()  # once: it may be a pipe
    code = pkgutil.read_code(io.BytesIO(content))  # of a compiled file
    if code is None:
        code = compile(content, path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader)
    return module, code


def _of(spec: ModuleSpec, package: str | None) -> tuple[ModuleType, CodeType]:
    loader: Any = spec.loader
    module = ModuleType("__main__")
    vars(module).update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __package__=package,
        __spec__=spec,
    )
    return module, loader.get_code(spec.name)


def _set_first_path(path: str, *, always: bool = False) -> None:
    """Put the script's directory first, in place of the console script's, or of that of ``python -m minato``.

    ``always``: with ``python -P``, too, which leaves directories of scripts out but not those that are scripts.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path
    elif always:
        sys.path.insert(0, path)
    else:
        return
    forget_namesakes(path)


def forget_namesakes(path: str) -> None:
    """Have the script import modules of its directory, also where minato has imported others of the same names."""
    finder: Any = pkgutil.get_importer(path)
    imported = [*sys.modules]
    # A module comes behind all that it has imported: what torch imports, or Python when it starts, the script shares.
    for name in imported[imported.index("torch") + 1 :] if finder else ():
        found = None if "." in name or name == "minato" else finder.find_spec(name)
        if found and found.origin not in (None, getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def _refuse(words: str, status: int) -> NoReturn:
    print(f"minato: {words}", file=sys.stderr)
    raise SystemExit(status)
