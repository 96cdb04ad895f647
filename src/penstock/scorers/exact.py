# SPDX-License-Identifier: Apache-2.0
"""`exact`: the final answer is the expected text, apart from case, spacing, punctuation, accents
and articles; or any of several accepted texts.

Numbers stay whole: 1,000 is 1000, and 1.5 is not 15. An answer that names several is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penstock.scorers.final_answer import final_answer
from penstock.scorers.marks import without_marks

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|textit)\s*\{([^{}]*)\}")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PART = re.compile(r"-?\d+(?:\.\d+)?|[^\W_]+")


def normalise(text: str) -> str:
    """What two equal answers have in common."""
    text = _TEXT_COMMAND.sub(r"\1", text)
    plain = without_marks(text.replace("−", "-"))
    plain = _THOUSANDS.sub("", plain.replace("'", "").replace("’", ""))
    parts = _PART.findall(re.sub(r"(?<=\w)-", " ", plain))
    joined = " ".join(_shortest(part) for part in parts)
    return " ".join(_ARTICLES.sub(" ", joined).split()) or joined


def _shortest(part: str) -> str:
    """1.50 is 1.5, and 3.0 is 3."""
    return part.rstrip("0").rstrip(".") if "." in part else part


def score(answer: str, expected: str | Sequence[str]) -> float:
    """1.0 if the final answer is the expected text, or one of several."""
    wanted = {normalise(one) for one in ([expected] if isinstance(expected, str) else expected)}
    found = normalise(final_answer(answer))
    return float(bool(found) and found in wanted)


def reward(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """For `reward: penstock.scorers.exact:reward`; the task has the column `answer`."""
    return [score(text, _texts(one)) for text, one in zip(completions, answer, strict=True)]


def _texts(expected: Any) -> str | list[str]:
    if isinstance(expected, (list, tuple)):
        return [str(one) for one in expected]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return str(expected)
