# SPDX-License-Identifier: Apache-2.0
"""Takes secrets out of text for people: logs, error messages, outcomes of rollouts.

Knows the form of keys and tokens, ours and common ones of others, and the values of secrets that
this process was given. A second line of defence: no message should contain a secret in the first
place. Forms are never applied to data that is trained on, nor to what a model reads.
"""

from __future__ import annotations

import os
import re
from functools import cache, partial

HIDDEN = "<hidden>"
MIN_SECRET_CHARS = 8
"""Shorter values would hide ordinary words."""
MAX_SECRETS = 1024
_SECRET_NAME = r"(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|credential|private[_-]?key)"
_ENV_NAME = re.compile(rf"{_SECRET_NAME}|token|_key$|pgpassword", re.IGNORECASE)
FORMS = (
    (re.compile(r"penstock2\.[\w.-]{16,}"), f"penstock2.{HIDDEN}"),
    (re.compile(r"\b([sr]k-penstock-)\w{8,}"), rf"\1{HIDDEN}"),
    (
        re.compile(r"\b(sk|pk|rk|hf|gh[pousr]|glpat|xox[abprs]|npm)([_-])[\w-]{16,}"),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"\b(github_pat_|AIza|AKIA|ASIA|ya29\.)[\w-]{12,}"), rf"\1{HIDDEN}"),
    (  # looked at once for each run of its characters, or time would be the square of the run
        re.compile(
            r"(?<![\w-])(?=[\w-]{11,}\.[\w-]{8,}\.[\w-]{8,})([\w-]*?)"
            r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)[\s\S]*?(-----END|\Z)"),
        rf"\1{HIDDEN}\2",
    ),
    (
        re.compile(r"\b(bearer|basic)([\s:=\"'\\]{1,16})[\w.~+/=-]{8,}", re.IGNORECASE),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"(\w://[^\s/@:]{0,256}:)[^\s/@]{1,1024}@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            rf"({_SECRET_NAME}|token|authorization)"  # no quantifier before it: time stays linear
            r"([\"'\\]{0,8}\s{0,8}[=:]\s{0,8}b?[\"'\\]{0,8})[^\s\"'\\,;&<>{}()\[\]]{12,}",
            re.IGNORECASE,
        ),
        rf"\1\2{HIDDEN}",
    ),
)
"""A secret, and what is shown instead of it. The time for each is in proportion to the text."""
_FILL = "\x1f"
"""Keeps the place of what is hidden: white space, which no form reads over, and no line break."""
MAX_CUT_CHARS = 4096
"""A secret of so many characters is also hidden where a text is cut."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_known: dict[str, None] = {}


def register_secret(value: str) -> None:
    """Hide this value from now on, whatever form it has; the oldest is forgotten beyond a
    number."""
    value = value.strip()
    if len(value) >= MIN_SECRET_CHARS:
        _known.pop(value, None)
        _known[value] = None
        while len(_known) > MAX_SECRETS:
            del _known[next(iter(_known))]


def hide_known(text: str, fill: str = "") -> str:
    """The text without the values of secrets that this process was given. Exact, so also for text
    that a model reads, where whatever only looks like a secret must stay. `fill`: a character to
    keep the length with."""
    for value in (*_of_environment(), *_known):
        if value in text:
            text = text.replace(value, HIDDEN + fill * (len(value) - len(HIDDEN)))
    return text


def hide_secrets(text: str) -> str:
    """The text without secrets. For text of any length, see `excerpt`."""
    return _hide(text, "")


def excerpt(text: str, first: int = 3000, last: int = 1000) -> str:
    """The first and the last characters of a text, without secrets: for what others chose, of any
    length. Cut before it is searched, then again, so that no secret is parted by the cut."""
    if len(text) <= first + last + 2 * MAX_CUT_CHARS:
        text = hide_secrets(text)
        if len(text) <= first + last:
            return text
        begin, end = text[:first], text[len(text) - last :]
    else:
        begin = _hide(text[: first + MAX_CUT_CHARS], _FILL)[:first]
        end = _hide(text[len(text) - last - MAX_CUT_CHARS :], _FILL)
        end = end[len(end) - last :]
    return f"{begin} … {end}".replace(_FILL, "")


def _hide(text: str, fill: str) -> str:
    text = hide_known(text, fill)
    for form, shown in FORMS:
        text = form.sub(partial(_instead, shown=shown, fill=fill), text)
    return text


def _instead(found: re.Match[str], *, shown: str, fill: str) -> str:
    hidden = found.expand(shown)
    return hidden + fill * (found.end() - found.start() - len(hidden))


def printable(text: str) -> str:
    """Without control characters: what a model, an agent or a node wrote must not steer the
    terminal, nor turn the direction of text. Keeps tabs and line breaks."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """A name that others chose, for a page or a picture: one line of printable characters, of which
    none turns the direction of the text."""
    shown = " ".join(text.split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)


def for_people(text: str) -> str:
    """Text of others, safe to record and to show: without secrets and control characters."""
    return printable(hide_secrets(text))


@cache
def _of_environment() -> tuple[str, ...]:
    """Values of variables whose name says that they are secret, as this process was started."""
    return tuple(
        value
        for name, value in os.environ.items()
        if _ENV_NAME.search(name)
        and len(value) >= MIN_SECRET_CHARS
        and not os.path.isabs(value)
        and not value.isdecimal()
    )
