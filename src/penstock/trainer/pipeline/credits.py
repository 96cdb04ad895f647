# SPDX-License-Identifier: Apache-2.0
"""The names of the built-in stage functions, as run files write them: `…pipeline.credits:NAME`.

Holds no function; each is a module of `penstock.trainer.stage_functions`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.builtin_stages import BUILTIN_PACKAGE
from penstock.plugins import builtin_plugins
from penstock.trainer.pipeline.layout import Columns


def __getattr__(name: str) -> Callable[..., Columns]:
    functions = builtin_plugins(BUILTIN_PACKAGE, "STAGE")
    if name not in functions:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functions[name]


def __dir__() -> list[str]:
    return sorted(builtin_plugins(BUILTIN_PACKAGE, "STAGE"))
