# SPDX-License-Identifier: Apache-2.0
"""What the schemas share: the base class of sections, patterns for names, and small validators.

Owns the patterns. The strict base and the wording of refusals are in `penstock.options`."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator

from penstock.options import Contradiction, KeyPath, Options
from penstock.plugins import REWARD_GROUP, plugin_names, quoted, suggest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of policies and sources; they become parts of ids, paths and labels."""

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""`module:name`, which names a Python object in a config."""

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


def matching(pattern: re.Pattern[str], fix: str) -> Callable[[str], str]:
    """Accept text that matches the full pattern."""

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{quoted(value)} is not valid here; {fix}")
        return value

    return check


Name = Annotated[
    str,
    AfterValidator(
        matching(NAME, "use up to 64 letters, digits, _ or -, starting with a letter or digit")
    ),
]
"""Name of a policy, source, stage, space or tag."""


def is_custom(name: str, group: str) -> bool:
    """Whether this names a custom object: `module:name`, or what an installed package offers in
    this group of entry points. Imports nothing."""
    return bool(FUNCTION.fullmatch(name)) or name in plugin_names(group)


def check_function_name(value: str, group: str) -> str:
    """Accept `module:function` and the names that installed packages offer in this group."""
    if is_custom(value, group):
        return value
    offered = plugin_names(group)
    choices = "".join(f", or {name}" for name in offered)
    fix = suggest(value, offered, f"write module:function, like my_task:reward{choices}")
    raise ValueError(f"{quoted(value)} is not valid here; {fix}")


FunctionName = Annotated[
    str, AfterValidator(lambda value: check_function_name(value, REWARD_GROUP))
]
"""A reward: `module:function`, or the name under which an installed package offers it."""


def repeated_names(kind: str, names: Sequence[str], at: str) -> Iterator[Contradiction]:
    """Names that an earlier entry of the list at this key has."""
    for index, name in enumerate(names):
        if name in names[:index]:
            text = f"duplicate {kind} name {quoted(name)}; names must be unique"
            yield Contradiction(text=text, keys=((at, index, "name"),))


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is not a mapping or list, or is an empty one, with its path."""
    if isinstance(value, dict) and value:
        for key, child in cast(dict[str, Any], value).items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list) and value:
        for index, child in enumerate(cast(list[Any], value)):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same tree with each text changed; keys stay."""
    if isinstance(value, dict):
        entries = cast(dict[str, Any], value).items()
        return {key: map_texts(child, change) for key, child in entries}
    if isinstance(value, list):
        return [map_texts(child, change) for child in cast(list[Any], value)]
    return change(value) if isinstance(value, str) else value


def non_blank(value: str) -> str:
    """Reject empty text."""
    if not value.strip():
        raise ValueError("is empty; give a value")
    return value
