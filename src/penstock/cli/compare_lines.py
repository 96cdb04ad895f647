# SPDX-License-Identifier: Apache-2.0
"""A comparison as tables, for a terminal and as Markdown. Computes no figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.eval_lines import interval, markdown_table, markdown_text, percent
from penstock.cli.output import format_duration, pluralise, printable, table
from penstock.runs.compare_plot import label, p_text

if TYPE_CHECKING:
    from penstock.evals.comparison import SuiteComparison
    from penstock.evals.figures import SuiteFigures
    from penstock.runs.compare import Comparison, Side

Rows = tuple[list[str], list[list[str]]]


def comparison_lines(found: Comparison, most: int) -> Iterator[str]:
    """Scores, flips, then training."""
    yield from (
        f"{name}  {printable(side.name)}" for name, side in (("A", found.a), ("B", found.b))
    )
    for suite in found.suites:
        yield ""
        yield from table(*_scores(found, suite))
        yield from _verdict(suite)
        yield from _flips(suite, most)
    headers, rows = _training(("A", found.a), ("B", found.b))
    if rows:
        yield ""
        yield from table(headers, rows, num_left_aligned=2)


def comparison_markdown(found: Comparison) -> str:
    names = [markdown_text(label(side)) for side in (found.a, found.b)]
    parts = [f"# {names[0]} and {names[1]}", ""]
    if found.suites:
        parts += [markdown_table(*_summary(found)), ""]
        for suite in found.suites:
            flips = f"{len(suite.gained)} gained, {len(suite.lost)} lost"
            parts += [f"{markdown_text(suite.suite)}: {flips} ({suite.test}).", ""]
    headers, rows = _training((label(found.a), found.a), (label(found.b), found.b))
    if rows:
        parts += [markdown_table(headers, rows)]
    return "\n".join(parts).rstrip()


def _scores(found: Comparison, suite: SuiteComparison) -> Rows:
    headers = [printable(suite.suite), "version", "score", "95 % interval", "pass@k"]
    headers += ["failed", "turns", "tokens"]
    sides = (("A", found.a, suite.a), ("B", found.b, suite.b))
    rows = [[name, printable(side.version(suite.suite)), *_cells(one)] for name, side, one in sides]
    return headers, rows


def _cells(one: SuiteFigures) -> list[str]:
    k = max(one.pass_at)
    return [
        percent(one.avg),
        interval(one.interval),
        f"{k}: {percent(one.pass_at[k])}",
        f"{one.failed:,}",
        f"{one.mean_turns:.1f}",
        f"{one.mean_tokens:,.0f}",
    ]


def _verdict(suite: SuiteComparison) -> Iterator[str]:
    chance = "significant" if suite.is_significant else "may be chance"
    yield f"B - A  {_difference(suite)}  {p_text(suite.p_value)}, {chance} ({suite.test})"


def _difference(suite: SuiteComparison) -> str:
    """In points of per cent: `+12.5 points (+3.2 … +20.2)`."""
    low, high = suite.interval
    return f"{100 * suite.difference:+.1f} points ({100 * low:+.1f} … {100 * high:+.1f})"


def _flips(suite: SuiteComparison, most: int) -> Iterator[str]:
    for name, questions in (("gained", suite.gained), ("lost", suite.lost)):
        if questions:
            shown = ", ".join(map(printable, questions[:most]))
            more = f", … {len(questions) - most:,} more" if len(questions) > most else ""
            yield f"{name:<6}  {pluralise(len(questions), 'question')}: {shown}{more}"


def _summary(found: Comparison) -> Rows:
    headers = ["suite", label(found.a), label(found.b), "difference", "p"]
    headers += ["gained / lost", "turns", "tokens"]
    rows = [
        [
            suite.suite,
            f"{percent(suite.a.avg)} ({interval(suite.a.interval)})",
            f"{percent(suite.b.avg)} ({interval(suite.b.interval)})",
            _difference(suite),
            p_text(suite.p_value).removeprefix("p = ").removeprefix("p "),
            f"{len(suite.gained)} / {len(suite.lost)}",
            f"{suite.a.mean_turns:.1f} → {suite.b.mean_turns:.1f}",
            f"{suite.a.mean_tokens:,.0f} → {suite.b.mean_tokens:,.0f}",
        ]
        for suite in found.suites
    ]
    return headers, rows


def _training(*sides: tuple[str, Side]) -> Rows:
    headers = ["training", "policy", "steps", "first reward", "last reward", "time per step"]
    return headers, [row for name, side in sides for row in _training_rows(name, side)]


def _training_rows(name: str, side: Side) -> Iterator[list[str]]:
    for one in side.training:
        pace = "" if one.step_s is None else format_duration(one.step_s)
        rewards = (f"{one.first_reward:.3f}", f"{one.reward:.3f}")
        yield [name, printable(one.policy), f"{one.steps:,}", *rewards, pace]
