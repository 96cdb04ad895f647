# SPDX-License-Identifier: Apache-2.0
"""`math`: the final answer equals the expected one as mathematics: 1/2, 0.5 and \\frac12.

math-verify (extra `rewards`) parses and compares. Owns what it is given: the final answer alone,
nothing whose evaluation could take forever, and what percentages mean. Text that cannot be parsed
must be equal as text."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.scorers.final_answer import final_answer, marked_answer

MAX_PARSED_CHARS = 1_000
MAX_DIGITS = 300
"""Longest number that is parsed."""
MAX_DEPTH = 30
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 1_000
MAX_CPU_S = 2.0
"""CPU time of an answer, over all comparisons of it. Only a main thread can be interrupted; reward
processes call their function there."""

_REASON = re.compile(
    r"[,;.]?(?<!\s)\s+(?:since|because|as|which|where|so that|when)\b.*", re.I | re.S
)
_ALTERNATIVE = re.compile(r"\b(?:or|either|maybe|perhaps)\b", re.I)
_VALUE = re.compile(r"\$[^$]+\$|\\\(.+?\\\)|-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?")
_FALSE_EQUATION = re.compile(r"\s*(-?[\d.]+)\s*=\s*(-?[\d.]+)\s*")
_DELIMITER = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s+")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textit)\s*\{([^{}]*)\}")
_SIZES = re.compile(r"\\(?:left|right|displaystyle|big|Big)(?![a-zA-Z])")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*(\{[^{}]*\}?|\([^()]*\)?|-?\w+)")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\([^()]*\^|(?:\d+|[a-z])\s*\^)")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_PERCENT = re.compile(r"\\?%")
_SCIENTIFIC = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\w.])")


def score(answer: str, expected: str | float) -> float:
    """1.0 if the final answer equals the expected one."""
    wanted = _prepared(str(expected))
    _library()  # its import is interrupted by nothing
    try:
        with _interrupted():
            return float(any(_is_right(wanted, _prepared(claim)) for claim in _claims(answer)))
    except _TooLong:
        return 0.0


def reward(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """For `reward: penstock.scorers.math:reward`; the task has the column `answer`."""
    return [score(text, one) for text, one in zip(completions, answer, strict=True)]


def _claims(answer: str) -> Iterator[str]:
    """The final answer; and in prose that marks none, the last number or formula in it."""
    final = final_answer(answer)
    yield _REASON.sub("", final).rstrip(" .,;:*")
    if marked_answer(answer) is None and not _ALTERNATIVE.search(final):
        yield from _VALUE.findall(_REASON.sub("", final))[-1:]


def _is_right(wanted: str, found: str) -> bool:
    return bool(found) and (_as_text(found) == _as_text(wanted) or _are_equal(wanted, found))


def _prepared(text: str) -> str:
    text = _DELIMITER.sub("", text).replace("−", "-").replace("∞", r"\infty").strip()
    text = text.removesuffix(".").replace("**", "^")
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


def _as_text(text: str) -> str:
    plain = _SIZES.sub("", _TEXT.sub(r"\1", text))
    return _SPACING.sub("", plain).casefold()


def _are_equal(wanted: str, found: str) -> bool:
    if is_costly(wanted) or is_costly(found):
        return False
    sides = _FALSE_EQUATION.fullmatch(found)
    if sides and sides[1] != sides[2]:
        return False  # 4 = 5 names both
    pairs = [(wanted, found)]
    if bool(_PERCENT.search(wanted)) != bool(_PERCENT.search(found)):
        pairs.append((_PERCENT.sub("", wanted), _PERCENT.sub("", found)))
        if _is_fraction(pairs[1][0]) and _PERCENT.search(found):
            pairs.pop()  # 0.5 % is not 0.5
    return any(_verify(*pair) for pair in pairs)


def _is_fraction(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[-+]?0?\.\d+\s*|.*(?:/|frac).*", text, re.S))


def is_costly(text: str) -> bool:
    """Whether its evaluation could take forever: long numbers, towers of powers, deep nesting."""
    if len(text) > MAX_PARSED_CHARS or re.search(rf"\d{{{MAX_DIGITS}}}", text):
        return True
    if _depth(text) > MAX_DEPTH or re.search(r"!\s*[)}\]]*\s*!", text):
        return True
    if any(int(number) > MAX_FACTORIAL for number in _FACTORIAL.findall(text)):
        return True
    if _TOWER.search(text):
        return True
    exponents = [re.sub(r"\D", "", one) for one in _EXPONENT.findall(text)]
    return any(one and int(one) > MAX_EXPONENT for one in exponents)


def _depth(text: str) -> int:
    deepest = depth = 0
    for sign in text:
        depth += (sign in "({[") - (sign in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _verify(wanted: str, found: str) -> bool:
    library = _library()
    golds, targets = _parse(library, wanted), _parse(library, found)
    if not (golds and targets):
        return False
    return bool(library.verify(golds, targets, timeout_seconds=None))


def _parse(library: Any, text: str) -> list[Any]:
    latex = library.LatexExtractionConfig(boxed_match_priority=0)
    configs = [latex, library.ExprExtractionConfig()]
    found = library.parse(f"\\boxed{{{text}}}", configs, parsing_timeout=None)
    return cast("list[Any]", found)


class _TooLong(BaseException):
    """Not an Exception: the library handles those and goes on."""


@contextmanager
def _interrupted() -> Generator[None]:
    """End the block with _TooLong when it has used its CPU time, however busy the machine is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@cache
def _library() -> Any:
    try:
        import math_verify  # pyright: ignore[reportMissingTypeStubs]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the scorer math needs {error.name}; run: pip install 'penstock-rl[rewards]'"
        ) from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # that we bound its time ourselves
    return math_verify
