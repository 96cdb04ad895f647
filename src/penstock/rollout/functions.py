# SPDX-License-Identifier: Apache-2.0
"""Other people's functions: found by `module:function`, their errors told from ours."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

MAX_DETAIL_CHARS = 2000
_OURS = (str(Path(__file__).parent), str(Path(__file__).parent.parent / "gateway"))


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


def user_traceback(error: BaseException) -> str:
    """The error as its author wants to read it: only frames of their own code, at most 2,000
    characters."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    lines = traceback.format_list(theirs[-8:])
    lines += traceback.format_exception_only(type(error), error)
    return shorten("".join(lines).strip())


def shorten(text: str) -> str:
    """At most 2,000 encodable characters, keeping the end, where the error itself stands."""
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_DETAIL_CHARS:
        return text
    return text[:300] + " … " + text[-(MAX_DETAIL_CHARS - 303) :]
