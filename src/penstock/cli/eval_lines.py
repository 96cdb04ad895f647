# SPDX-License-Identifier: Apache-2.0
"""Figures of evaluations and comparisons as lines of text or Markdown. Computes none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.cli.output import pluralise, printable, table
from penstock.redaction import one_line

if TYPE_CHECKING:
    from penstock.evals.figures import SuiteFigures
    from penstock.evals.results import SuiteResult


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def interval(bounds: tuple[float, float]) -> str:
    """`41.0 … 58.8 %`."""
    low, high = bounds
    return f"{100 * low:.1f} … {100 * high:.1f} %"


def figure_lines(found: Mapping[str, SuiteFigures]) -> list[str]:
    """A table with a line for each suite."""
    headers = (
        "suite",
        "questions",
        "score",
        "95 % interval",
        "pass@k",
        "failed",
        "turns",
        "tokens",
    )
    rows = [
        (
            printable(name),
            f"{one.questions:,} x {one.samples}",
            percent(one.avg),
            interval(one.interval),
            _pass_at(one),
            f"{one.failed:,}",
            f"{one.mean_turns:.1f}",
            f"{one.mean_tokens:,.0f}",
        )
        for name, one in found.items()
    ]
    return table(headers, rows)


def _pass_at(one: SuiteFigures) -> str:
    """The largest k: `4: 71.2 %`."""
    k = max(one.pass_at)
    return f"{k}: {percent(one.pass_at[k])}"


def failure_lines(result: SuiteResult, most: int) -> Iterator[str]:
    """What failed, and why: those attempts count as wrong."""
    failed = [answer for answer in result.answers if answer.score is None]
    if not failed:
        return
    kinds = Counter(answer.failure for answer in failed)
    why = ", ".join(f"{number:,} {printable(kind)}" for kind, number in kinds.most_common())
    attempts = pluralise(len(failed), "attempt")
    yield f"\n{printable(result.suite)}: {attempts} failed and count as wrong: {why}"
    for answer in failed[:most]:
        yield f"  {printable(answer.question)}, sample {answer.sample}: {printable(answer.failure)}"
    if len(failed) > most:
        yield f"  … and {len(failed) - most:,} more, in the file"
    yield ""


_MARKUP = re.compile(r"([\\`*_\[\]|#~!])")


def markdown_text(text: str) -> str:
    """Text of others in Markdown: neither markup nor HTML in it counts."""
    return _MARKUP.sub(r"\\\1", escape(one_line(text), quote=False))


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[markdown_text(cell) for cell in row] for row in (headers, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|" + "---|" * len(headers))
    return "\n".join(lines)
