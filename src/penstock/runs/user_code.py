# SPDX-License-Identifier: Apache-2.0
"""The user's modules of a run: which the config names, where their files are, and their digests.

Owns finding them without running them. Modules of penstock itself, and what the user's modules
import from installed packages, are left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from modulefinder import ModuleFinder
from pathlib import Path
from typing import cast

import msgspec
from blake3 import blake3

from penstock.config import RunConfig
from penstock.fleet.run_folder import RunFolder, RunNote

_FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
TASK_KEY = "task"
"""The key whose value is a module without a function, or a file of tasks."""
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
NOT_USERS = ("penstock", "builtin")
"""What stands before the first dot or colon of names that are ours."""
_TAIL_BYTES = 65_536


def named_modules(config: RunConfig) -> tuple[str, ...]:
    """The user's modules that the config names: of tasks, rewards, workflows, rules, stages."""
    found = _modules_in(config.model_dump(mode="json"))
    return tuple(sorted({name for name in found if name.split(".")[0] not in NOT_USERS}))


def _modules_in(value: object, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in cast("Mapping[str, object]", value).items():
            yield from _modules_in(item, name)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _modules_in(item, key)
    elif isinstance(value, str):
        if match := _FUNCTION.fullmatch(value):
            yield match[1]
        elif key == TASK_KEY and _MODULE.fullmatch(value) and not value.endswith(DATA_SUFFIXES):
            yield value


def find_file(module: str, python_path: Sequence[str]) -> Path | None:
    """The file of a module in these folders or an installed package; imports nothing."""
    folders: Sequence[str] | None = python_path
    spec = None
    for name in _parents(module):
        spec = PathFinder.find_spec(name, folders)
        if spec is None and "." not in name:
            spec = PathFinder.find_spec(name)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    origin = None if spec is None else spec.origin
    return Path(origin) if origin and Path(origin).is_file() else None


def _parents(module: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c`, for `a.b.c`."""
    parts = module.split(".")
    return (".".join(parts[: number + 1]) for number in range(len(parts)))


def code_digests(modules: Iterable[str], python_path: Sequence[str]) -> dict[str, str]:
    """Digest by module: these modules, and those in `python_path` that they import."""
    files: dict[str, Path] = {}
    for module in modules:
        if (file := find_file(module, python_path)) is not None:
            files[module] = file
        files |= _imported_files(module, python_path)
    return {name: blake3(file.read_bytes()).hexdigest() for name, file in sorted(files.items())}


def _imported_files(module: str, python_path: Sequence[str]) -> dict[str, Path]:
    """Modules in `python_path` that this one imports, found in its source."""
    finder = ModuleFinder(path=[*python_path])
    try:
        finder.import_hook(module)
    except (ImportError, SyntaxError):
        return {}  # an installed package, or a mistake that its import reports
    files = {name: str(vars(found)["__file__"] or "") for name, found in finder.modules.items()}
    return {name: Path(file) for name, file in files.items() if file}


def record_code(config: RunConfig, folder: RunFolder, python_path: Sequence[str]) -> str:
    """Record the digests of the user's code at a start of the run. Returns a note if it differs
    from the last start; the note is also kept in the run folder."""
    known, found = folder.code(), code_digests(named_modules(config), python_path)
    folder.write_code(found)
    changes = "" if known is None else describe_changes(known, found)
    if not changes:
        return ""
    step = _last_step(folder.metrics)
    note = f"your code changed since the last start: {changes}; it applies after step {step}"
    folder.add_note(RunNote(time=time.time(), step=step, note=note))
    return note


def _last_step(metrics: Path) -> int:
    """The last step in the run's metrics; 0 if there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return msgspec.json.decode(line, type=_Step).number
        except (msgspec.MsgspecError, RecursionError):
            continue  # cut off, or half written
    return 0


class _Step(msgspec.Struct):
    number: int


def missing_modules(config: RunConfig, python_path: Sequence[str]) -> list[str]:
    """The user's modules that are neither in these folders nor installed."""
    return [name for name in named_modules(config) if find_file(name, python_path) is None]


def describe_changes(known: Mapping[str, str], found: Mapping[str, str]) -> str:
    """`task (edited), judge (new)`; empty if nothing changed."""
    words = {
        **{name: "edited" for name in known.keys() & found.keys() if known[name] != found[name]},
        **dict.fromkeys(found.keys() - known.keys(), "new"),
        **dict.fromkeys(known.keys() - found.keys(), "no longer used"),
    }
    return ", ".join(f"{name} ({word})" for name, word in sorted(words.items()))
