# SPDX-License-Identifier: Apache-2.0
"""Other people's functions, found by `module:function`.

Owns the import and the words for what is wrong with a name. Calls nothing that it finds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError


def load_function(name: str) -> Callable[..., Any]:
    """The function called `module:function`; ConfigError says which half is wrong."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{name!r} names no function; write it as module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"cannot import {module_name!r} of {name!r}: {type(error).__name__}: {error}; "
            "install it here or put its folder on PYTHONPATH"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(
            f"module {module_name!r} has no function {attribute!r} ({module.__file__})"
        )
    return function
