# SPDX-License-Identifier: Apache-2.0
"""Which folders a program in a sandbox must see to run: of this interpreter, its modules and the
program itself. Never the home folder or a folder above it."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_SYSTEM = frozenset(map(Path, ("/etc", "/tmp", "/var", "/run", "/proc", "/sys", "/dev", "/boot")))
_OF_THE_HOST = frozenset(("etc", "run", "proc", "sys", "dev", "boot"))
"""Nothing below these is shown because a command names it."""
_BINARIES = ("bin", "shims")
"""Names of folders of programs; what they need lies beside."""
_USR = Path("/usr")


def interpreter_folders() -> tuple[Path, ...]:
    """This interpreter and its installed packages. For code that a model wrote: the folder of a
    project, which may hold the answers, is not among them."""
    found = (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).parent))
    return (*map(Path, found), Path(sys.executable).resolve().parent.parent)


def python_folders() -> tuple[Path, ...]:
    """This interpreter, its packages, and every folder that it imports from."""
    return (*interpreter_folders(), *(Path(entry or os.getcwd()) for entry in sys.path))


def module_files(function: str) -> tuple[Path, ...]:
    """The file or folder of the module in `module:function`, where it is found on the path."""
    top = function.partition(":")[0].partition(".")[0]
    places = (Path(entry or os.getcwd()) for entry in sys.path)
    found = (place / name for place in places for name in (f"{top}.py", top))
    return tuple(path for path in found if top and path.exists())


def program_folders(argv: Sequence[str]) -> tuple[Path, ...]:
    """The working directory, the installation of the program, and the files among its arguments,
    without what lies beside them: a model may have written an argument."""
    found = [Path.cwd()]
    program = shutil.which(argv[0])
    if program is not None:
        for path in (Path(program).absolute(), Path(program).resolve()):
            prefix = path.parent.parent if path.parent.name in _BINARIES else path.parent
            found += [prefix, path]
    for argument in argv[1:]:
        path = Path(argument)
        if path.is_absolute() and path.is_file() and path.parts[1] not in _OF_THE_HOST:
            found += [] if _is_secret(path) else [path]
    return tuple(found)


def _is_secret(path: Path) -> bool:
    """A file that is hidden in the home folder, and that other users cannot read."""
    real, home = path.resolve(), Path.home().resolve()
    if not real.is_relative_to(home) or not real.relative_to(home).parts[0].startswith("."):
        return False
    return not real.stat().st_mode & stat.S_IROTH


def narrowed(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Those that exist, without system folders, folders that are too wide, and whatever lies below
    another."""
    both = ((path.absolute(), path.resolve()) for path in paths if path.exists())  # links need both
    found = dict.fromkeys(itertools.chain.from_iterable(both))
    fitting = [path for path in found if not _is_too_wide(path) and not path.is_relative_to(_USR)]
    return tuple(
        path
        for path in fitting
        if not any(path != other and path.is_relative_to(other) for other in fitting)
    )


def unreadable(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Those that other users cannot read."""
    need = {True: stat.S_IROTH | stat.S_IXOTH, False: stat.S_IROTH}
    return tuple(p for p in paths if p.stat().st_mode & need[p.is_dir()] != need[p.is_dir()])


def unreachable(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Folders above these that other users cannot enter: without namespaces they are in the way."""
    above = dict.fromkeys(parent for path in paths for parent in path.parents)
    return tuple(folder for folder in above if not folder.stat().st_mode & stat.S_IXOTH)


def _is_too_wide(path: Path) -> bool:
    real = path.resolve()
    return path.is_dir() and (Path.home().is_relative_to(real) or real in _SYSTEM)
