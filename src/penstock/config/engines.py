# SPDX-License-Identifier: Apache-2.0
"""Names and properties of engines, read from the modules of `penstock.rollout.engines`.

Names are listed without an import; reading a property imports only the module of that engine.
Custom engines (`module:Class`) are user code and never imported here.
"""

from typing import Annotated, Protocol

from pydantic import BeforeValidator

from penstock.config.base import FUNCTION
from penstock.plugins import builtin_names, load_object, unknown

PACKAGE = "penstock.rollout.engines"


def _check_name(value: object) -> object:
    names = builtin_names(PACKAGE)
    if isinstance(value, str) and (value in names or FUNCTION.fullmatch(value)):
        return value
    raise ValueError(unknown("engine", value, names, also="module:Class"))


class _EngineType(Protocol):
    @property
    def serves_adapters(self) -> bool: ...
    @property
    def is_reproducible(self) -> bool: ...


EngineName = Annotated[str, BeforeValidator(_check_name)]
"""A built-in engine, or `module:Class`."""


def serves_adapters(engine: str) -> bool:
    """Whether it can serve LoRA adapters; a custom engine reports an error itself if not."""
    return engine not in builtin_names(PACKAGE) or _declared(engine).serves_adapters


def is_reproducible(engine: str) -> bool:
    """Whether it can generate the same bits again; unknown for a custom engine, so False."""
    return engine in builtin_names(PACKAGE) and _declared(engine).is_reproducible


def _declared(engine: str) -> _EngineType:
    return load_object(f"{PACKAGE}.{engine}:ENGINE")
