# SPDX-License-Identifier: Apache-2.0
"""Engines, one module or subpackage each. The module name is the engine's name in configs.

To add an engine, add one module here that defines `ENGINE`, an `EngineType`; it needs no other
registration. A custom engine outside penstock is named `module:Class` (or `module:function`): a
callable that takes `EngineSettings` and returns an `Engine`, or an `EngineType`.

`find_engine` imports only the module it needs; torch is imported by the decoding thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.plugins import builtin_names, load_object

if TYPE_CHECKING:
    from penstock.rollout.engine import EngineType


def find_engine(name: str) -> EngineType:
    """The engine type for a built-in name or `module:name`."""
    from penstock.rollout.engine import EngineType  # not at the top: config lists names only

    names = builtin_names(__name__)
    if name not in names and ":" not in name:
        raise ConfigError(
            f"unknown engine {name!r}; built in: {', '.join(names)}. Name a custom one as "
            "module:Class"
        )
    found: Any = load_object(f"{__name__}.{name}:ENGINE" if name in names else name)
    if isinstance(found, EngineType):
        return found
    if not callable(found):
        raise ConfigError(
            f"engine {name} is not callable; name a class or function that takes EngineSettings"
        )
    build: Callable[..., Any] = found
    return EngineType(build=build)
