# SPDX-License-Identifier: Apache-2.0
"""Engines, one module or subpackage each. The module name is the engine's name in configs.

To add an engine, add one module here that defines `ENGINE`, an `EngineType`; it needs no other
registration. A custom engine outside penstock is named `module:Class` (or `module:function`), or as
an installed package offers it: a callable that takes `EngineSettings` and returns an `Engine`, or
an `EngineType`.

`find_engine` imports only the module it needs; torch is imported by the decoding thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.plugins import ENGINE_GROUP, builtin_names, load_object, plugin_names, unknown

if TYPE_CHECKING:
    from penstock.rollout.engine import EngineType


def find_engine(name: str) -> EngineType:
    """The engine type for a built-in name, `module:name` or the name of an installed plug-in."""
    from penstock.rollout.engine import EngineType  # not at the top: config lists names only

    builtin = builtin_names(__name__)
    if name in builtin:
        return load_object(f"{__name__}.{name}:ENGINE")
    if ":" not in name and name not in (offered := plugin_names(ENGINE_GROUP)):
        raise ConfigError(unknown("engine", name, (*builtin, *offered), also="module:Class"))
    found: Any = load_object(name, ENGINE_GROUP)
    if isinstance(found, EngineType):
        return found
    if not callable(found):
        raise ConfigError(
            f"engine {name} is not callable; name a class or function that takes EngineSettings"
        )
    build: Callable[..., Any] = found
    return EngineType(build=build)
