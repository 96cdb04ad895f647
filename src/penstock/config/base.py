# SPDX-License-Identifier: Apache-2.0
"""What the schemas share: the base class of sections, patterns for names, and small validators.

Owns the patterns. The strict base and the wording of refusals are in `penstock.options`."""

import re
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from penstock.options import Options
from penstock.plugins import quoted

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of policies and sources; they become parts of ids, paths and labels."""

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""`module:name`, the only way to name a Python object in a config."""

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
"""A dotted module path."""

COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_.@-]{0,63}")
"""Names of columns; the part after @ in `step_scores@7` is the version of the writer."""

OBJECT_STORES = ("s3", "gs", "az")
"""URL schemes of object storage."""

T = TypeVar("T")


class Section(Options):
    """One mapping of the run file."""


def is_url(value: str, *schemes: str) -> bool:
    """Whether this is a URL with one of these schemes and a host or path."""
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/"))


def only_supported(supported: object, fix: str) -> BeforeValidator:
    """Accept one value: the key is planned, and this release supports nothing else."""

    def check(value: T) -> T:
        if value != supported:
            raise ValueError(f"{quoted(value)} is not supported yet; {fix}")
        return value

    return BeforeValidator(check)


def matching(pattern: re.Pattern[str], fix: str) -> Callable[[str], str]:
    """Accept text that matches the full pattern."""

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{quoted(value)} is not valid here; {fix}")
        return value

    return check


def non_blank(value: str) -> str:
    """Reject empty text."""
    if not value.strip():
        raise ValueError("is empty; give a value")
    return value
