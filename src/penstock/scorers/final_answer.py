# SPDX-License-Identifier: Apache-2.0
"""Finds the final answer in what a model wrote: `<answer>`, `\\boxed{}`, `####`, "the answer is".

Owns what counts as final: the last marked answer; without a mark, the last line. An answer
that lists several is judged by one of them. Compares nothing."""

from __future__ import annotations

import re

MAX_CHARS = 200_000
"""Only the end of a longer text is read."""
MAX_ANSWER_CHARS = 4_000
"""A longer final answer is none: it lists, or explains."""
MAX_BOXES = 64
"""Only so many at the end are read: each unclosed one costs a search for its brace."""
_THINK_END = "</think>"
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = re.compile(r"^#{4}[ \t]*(\S.*)$", re.MULTILINE)
_SAID = re.compile(
    r"\b(?:final\s+answer|correct\s+(?:answer|option|choice)|answer|solution)\b\W{0,6}?"
    r"(?:is|are|was|would be|=|:|：)[ \t:*]*(?P<rest>\S[^\n]*|\n+[^\n]+)",
    re.IGNORECASE,
)


def without_thinking(text: str) -> str:
    """What follows the last block of thinking; empty if one has begun and not ended."""
    text = text[-MAX_CHARS:]
    text = text.rpartition(_THINK_END)[2]
    return "" if "<think>" in text.lower() else text


def boxed_answers(text: str) -> list[str]:
    """The content of every `\\boxed{}` with matching braces, in order; the outer one of two."""
    found = list[str]()
    at = next(iter([match.start() for match in _BOXED.finditer(text)][-MAX_BOXES:]), len(text))
    while match := _BOXED.search(text, at):
        end = _closing_brace(text, match.end())
        if end is None:
            at = match.end()
            continue
        found.append(text[match.end() : end].strip())
        at = end
    return found


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for at in range(start, min(len(text), start + MAX_ANSWER_CHARS + 1)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
        if depth == 0:
            return at
    return None


def final_answer(text: str) -> str:
    """The final answer; empty if there is none."""
    found = marked_answer(text)
    if found is None:
        lines = [line for line in without_thinking(text).splitlines() if line.strip()]
        found = lines[-1] if lines else ""
    found = found.strip()
    return found if len(found) <= MAX_ANSWER_CHARS else ""


def marked_answer(text: str) -> str | None:
    """The last answer that is marked as one; None if none is."""
    text = without_thinking(text)
    if tagged := _TAGGED.findall(text):
        inside = tagged[-1]
        return (boxed_answers(inside) or [inside])[-1]
    if boxed := boxed_answers(text):
        return boxed[-1]
    if hashed := _HASHES.findall(text):
        return hashed[-1]
    said = list(_SAID.finditer(text))
    return _clean_said(said[-1]["rest"]) if said else None


def _clean_said(rest: str) -> str:
    """Without emphasis, and without the full stop of its sentence."""
    rest = rest.strip().strip("*").strip()
    return rest[:-1] if rest.endswith(".") and not rest.endswith("..") else rest
