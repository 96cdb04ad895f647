# SPDX-License-Identifier: Apache-2.0
"""What the schemas share: the strict base class, and the words in which a value is refused.

Owns how a refusal is phrased (not served yet, not one of, contradiction). Knows no field, no file
and no line; the loader adds where the mistake stands."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

KeyPath = tuple[str | int, ...]
"""Where a value stands: mapping keys and list indices from the top of the file."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of policies and sources; they become parts of ids, paths and labels."""

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""`module:function`, the one way of naming a Python callable in a config."""

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
"""A dotted module path."""

COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_.@-]{0,63}")
"""Names of columns; `step_scores@7` names the version of what wrote it."""

OBJECT_STORES = ("s3", "gs", "az")
"""Schemes of URLs at which objects are kept."""

T = TypeVar("T")


class Section(BaseModel):
    """One mapping of the file: unknown keys, wrong types and later changes are all refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Two settings that are each allowed and cannot stand together."""

    text: str
    """What is wrong and the cure."""
    keys: tuple[KeyPath, ...]
    """The keys involved, relative to the section that checks; the likeliest culprit first."""


def raise_contradictions(found: Iterable[Contradiction]) -> None:
    """Raise one validation error that carries every contradiction; return if there is none."""
    problems = list(found)
    if problems:
        text = "; ".join(problem.text for problem in problems)
        raise PydanticCustomError("contradictions", "{text}", {"text": text, "problems": problems})


def nested_error(error: ValidationError) -> PydanticCustomError:
    """What a section inside found, to be raised so that each problem keeps its own key."""
    return PydanticCustomError("nested", "{text}", {"text": str(error), "error": error})


def quoted(value: object) -> str:
    """A value as a message quotes it: one line, short, text in double quotes."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_url(value: str, *schemes: str) -> bool:
    """A URL of one of these schemes that names something."""
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/"))


def did_you_mean(word: str, known: Sequence[str]) -> str | None:
    """The known word nearest to a mistyped one, if any is near."""
    folded = {name.lower().replace("-", "_"): name for name in known}
    closest = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[closest[0]] if closest else None


def unknown_choice(
    value: object, supported: Sequence[str], planned: Sequence[str] = ()
) -> ValueError:
    """The refusal of a word outside a closed list, telling "later" apart from "never"."""
    options = " | ".join(supported)
    if value in planned:
        return ValueError(f"{quoted(value)} is not served yet; use {options}")
    closest = did_you_mean(value, supported) if isinstance(value, str) else None
    fix = f'did you mean "{closest}"?' if closest else f"use {options}"
    return ValueError(f"{quoted(value)} is not one of {options}; {fix}")


def one_of(*supported: str, planned: Sequence[str] = ()) -> BeforeValidator:
    """Accept the served words only (null is left to the field's own type)."""

    def check(value: T) -> T:
        if value is None or (isinstance(value, str) and value in supported):
            return value
        raise unknown_choice(value, supported, planned)

    return BeforeValidator(check)


def only_supported(supported: object, fix: str) -> BeforeValidator:
    """Accept one value: the key is in the design, and this release serves nothing else of it."""

    def check(value: T) -> T:
        if value != supported:
            raise ValueError(f"{quoted(value)} is not served yet; {fix}")
        return value

    return BeforeValidator(check)


def non_empty() -> BeforeValidator:
    """Refuse an empty list or mapping (pydantic's own bound also counts items that are wrong)."""

    def check(value: object) -> object:
        if value in ([], (), {}):
            raise ValueError("is empty; give at least one entry")
        return value

    return BeforeValidator(check)


def matching(pattern: re.Pattern[str], fix: str) -> Callable[[str], str]:
    """Accept text that fits the pattern as a whole."""

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{quoted(value)} does not fit; {fix}")
        return value

    return check
