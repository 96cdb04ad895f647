# SPDX-License-Identifier: Apache-2.0
"""Plug-ins: built-in ones are the modules of a package; custom ones are named `module:name`, or by
the name under which an installed package offers them.

Owns every import by name, and the messages for names that are unknown or cannot be imported. Calls
nothing that it loads. Imports only the standard library, so that a small worker starts fast.

To add a built-in, add one module to the package of its kind and define the attribute of that kind
in it. There is no list to extend:

    builtin_plugins("penstock.dataflow.rules", "RULE")   # {"dedup": Dedup, "edf": ..., ...}

Keys are module names. Every module is imported, so use this where modules are cheap to import.
Where they are not (engines), list the names and import only the chosen module:

    builtin_names("penstock.rollout.engines")            # ("hf", "scripted", ...), imports none
    load_object("penstock.rollout.engines.hf:ENGINE")

An installed package offers a plug-in as an entry point in one of the groups below, and a run file
then names it like a built-in. In the package's pyproject.toml:

    [project.entry-points."penstock.rules"]
    few-per-version = "my_package.rules:FewPerVersion"

Such names are looked up only when a name is neither built-in nor `module:name`.

Lower layers may call these with the name of a package above them: that is how config validates
options which the plug-in declares (`penstock.options`). Such a package must not import config."""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

from penstock.errors import ConfigError

ENGINE_GROUP = "penstock.engines"
"""Entry points of engines: a class or function that takes `EngineSettings`, or an `EngineType`."""
RULE_GROUP = "penstock.rules"
"""Entry points of data rules: classes."""
LOSS_GROUP = "penstock.losses"
"""Entry points of losses: functions of a train stage."""
STAGE_GROUP = "penstock.stages"
"""Entry points of stages: functions of a compute or infer stage."""
DIALECT_GROUP = "penstock.dialects"
"""Entry points of dialects. The gateway serves every one that is installed."""
WORKFLOW_GROUP = "penstock.workflows"
"""Entry points of workflows: async functions."""
REWARD_GROUP = "penstock.rewards"
"""Entry points of rewards: functions."""
TRACKER_GROUP = "penstock.trackers"
"""Entry points of trackers: classes that take a `TrackedRun`."""


def builtin_names(package: str) -> tuple[str, ...]:
    """Names of the package's public modules, sorted; imports only the package itself."""
    paths = importlib.import_module(package).__path__
    found = (module.name for module in pkgutil.iter_modules(paths))
    return tuple(sorted(name for name in found if not name.startswith("_")))


@cache
def builtin_plugins(package: str, attribute: str) -> Mapping[str, Any]:
    """By module name, the `attribute` of every module of the package that defines it."""
    found = {n: vars(importlib.import_module(f"{package}.{n}")) for n in builtin_names(package)}
    return MappingProxyType(
        {n: names[attribute] for n, names in found.items() if attribute in names}
    )


def plugin_names(group: str) -> tuple[str, ...]:
    """Names that installed packages offer in this group of entry points, sorted; imports none."""
    return tuple(sorted(_entry_points(group)))


def load_object(name: str, group: str = "") -> Any:
    """The object called `module:name`, or offered under this name in the group; ConfigError says
    which part is wrong."""
    return _load(name, group, "object", lambda found: True)


def load_function(name: str, group: str = "") -> Callable[..., Any]:
    """The function, or other callable, called `module:function`, or offered in the group."""
    return _load(name, group, "function", callable)


def load_class(name: str, group: str = "") -> type[object]:
    """The class called `module:Class`, or offered under this name in the group."""
    return _load(name, group, "class", lambda found: isinstance(found, type))


def _load(name: str, group: str, kind: str, fits: Callable[[object], bool]) -> Any:
    if group and ":" not in name:
        name = _target(name, group, kind)
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ConfigError(f"{name!r} does not name a {kind}; write it as module:{kind}")
    module = load_module(module_name)
    found: object = getattr(module, attribute, None)
    if found is None or not fits(found):
        fix = suggest(attribute, [n for n, v in vars(module).items() if fits(v)], "define it there")
        where = getattr(module, "__file__", None) or "built-in"
        raise ConfigError(f"module {module_name!r} has no {kind} {attribute!r} ({where}); {fix}")
    return found


def _target(name: str, group: str, kind: str) -> str:
    """The `module:name` behind the name of an entry point."""
    offered = _entry_points(group)
    if name not in offered:
        what = f"{kind} of the entry points {group}"
        raise ConfigError(unknown(what, name, offered, also=f"module:{kind}"))
    targets = sorted(offered[name])
    if len(targets) > 1:
        raise ConfigError(
            f"{name!r} is ambiguous: installed packages offer {' and '.join(targets)} under this "
            f"name in {group}; write one of these instead, or uninstall a package"
        )
    return targets[0]


def _entry_points(group: str) -> dict[str, set[str]]:
    """The `module:name` targets by the names of a group."""
    from importlib.metadata import entry_points  # here: it doubles the start-up time of a worker

    found: dict[str, set[str]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, set()).add(f"{point.module}:{point.attr}")
    return found


def load_module(name: str) -> ModuleType:
    """The module of this name; ConfigError if it is missing or raises on import."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"cannot import {name!r}: {type(error).__name__}: {error}; "
            "install it here or put its folder on PYTHONPATH"
        ) from error


def quoted(value: object) -> str:
    """A value as messages quote it: one line, short, text in double quotes."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one, if any is close."""
    folded = {name.lower().replace("-", "_"): name for name in known}
    closest = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[closest[0]] if closest else None


def suggest(word: object, known: Iterable[str], otherwise: str) -> str:
    """`did you mean "X"?` for the closest known name, or else the other advice."""
    closest = did_you_mean(word, known) if isinstance(word, str) else None
    return f'did you mean "{closest}"?' if closest else otherwise


def unknown(
    kind: str, name: object, known: Iterable[str], *, of: str = "", none: str = "", also: str = ""
) -> str:
    """`unknown KIND NAME; did you mean "X"?`, or the known names where none is close.

    `of` says whose name it is, `none` what to do where no name is known, and `also` which form is
    accepted in addition to the known names."""
    names = tuple(known)
    choices = [*names, *([also] if also else [])]
    fix = suggest(name, names, f"use {' | '.join(choices)}" if choices else none)
    return f"unknown {kind} {quoted(name)}{f' of {of}' if of else ''}; {fix}"
