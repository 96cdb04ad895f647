# SPDX-License-Identifier: Apache-2.0
"""`choice`: the letter, or the text, of the right option of a question with several.

A final answer that names two letters is wrong. The words "A" and "I" count as letters only where
they stand alone or are marked, as in (A), A., option A."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penstock.scorers.exact import normalise
from penstock.scorers.final_answer import final_answer

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
_SIGNS = re.compile(r"[*_`$\"'“”‘’]")
_ALONE = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\].:]?")
_LEADING = re.compile(r"[(\[]?([A-Z])(?:[)\].:]|\s+[-–—]\s)\s*(.*)", re.DOTALL)
_REASON = re.compile(r"(?<=\w)[,;]?\s+(?:because|since)\b.*", re.DOTALL)
_LISTED = re.compile(
    r"\(([A-Z])\)|\[([A-Z])\]|\b(?:[Oo]ption|[Cc]hoice|[Ll]etter)\s+\(?([A-Z])\b|\b([B-HJ-Z])\b"
)


def letter_of(text: str, choices: Sequence[str] = ()) -> str | None:
    """The one letter that a text names; None if it names none or several."""
    text = _REASON.sub("", _SIGNS.sub("", _MARKUP.sub(r"\1", text)).strip())
    if alone := _ALONE.fullmatch(text):
        return alone[1].upper()
    if leading := _LEADING.fullmatch(text):
        own = _by_text(leading[2], choices)
        named = _named(leading[2], choices) | {leading[1]}
        return leading[1] if own == leading[1] or (own is None and len(named) == 1) else None
    if by_text := _by_text(text, choices):
        return by_text
    named = _named(text, choices)
    return named.pop() if len(named) == 1 else None


def _named(text: str, choices: Sequence[str]) -> set[str]:
    letters = LETTERS[: len(choices) or len(LETTERS)]
    found = {match[match.lastindex or 0] for match in _LISTED.finditer(text)}
    return {letter for letter in found if letter in letters}


def _by_text(text: str, choices: Sequence[str]) -> str | None:
    wanted = normalise(text)
    found = [LETTERS[at] for at, one in enumerate(choices[:26]) if normalise(one) == wanted]
    return found[0] if wanted and len(found) == 1 else None


def score(answer: str, expected: str | int, choices: Sequence[str] = ()) -> float:
    """1.0 if the final answer is the expected option. `expected`: its letter, its position from 0,
    or its text, which must then be one of `choices`."""
    wanted = _expected_letter(expected, choices)
    return float(letter_of(final_answer(answer), choices) == wanted)


def _expected_letter(expected: str | int, choices: Sequence[str]) -> str:
    if isinstance(expected, int):
        return LETTERS[expected]
    if re.fullmatch(r"[A-Za-z]", expected.strip()):
        return expected.strip().upper()
    found = _by_text(expected, choices)
    if found is None:
        raise ValueError(
            f"the expected answer {expected[:80]!r} is neither a letter nor one of the choices; "
            "write the letter into the column `answer`, or the options into `choices`"
        )
    return found


def reward(
    completions: Sequence[str],
    answer: Sequence[str | int],
    choices: Sequence[Sequence[str] | None] | None = None,
    **_: Any,
) -> list[float]:
    """For `reward: penstock.scorers.choice:reward`; the task has the columns `answer` and, for
    answers in words, `choices`."""
    options = choices or [None] * len(completions)
    rows = zip(completions, answer, options, strict=True)
    return [score(text, expected, own or ()) for text, expected, own in rows]
