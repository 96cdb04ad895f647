# SPDX-License-Identifier: Apache-2.0
"""`penstock compare`: two runs, versions or files of results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runs.compare import Comparison

MAX_LISTED = 12


def compare(
    a: str,
    b: str,
    /,
    *,
    svg: Path | None = None,
    markdown: Path | None = None,
    json: bool = False,
) -> int:
    """Compare two runs, versions or files of results: scores, significance, rewards and time.

    Scores come from evaluations during training and from `penstock eval`. They are paired by
    question; the difference is B minus A.

    Args:
        a: Run folder, RUN@VERSION, or file of results: the one before.
        b: The one after.
        svg: File for a picture: .svg or .png.
        markdown: File for the tables in Markdown.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.compare_lines import comparison_lines, comparison_markdown
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.runs.compare import compare as compare_two

    found = compare_two(a, b)
    if svg is not None:
        from penstock.runs.compare_plot import write_comparison

        write_comparison(found, svg)
        print_note(f"wrote {svg}")
    if markdown is not None:
        markdown.write_text(comparison_markdown(found) + "\n")
        print_note(f"wrote {markdown}")
    if found.only_one:
        print_note(f"evaluated on one side only: {', '.join(found.only_one)}")
    if json:
        print_json(_report(found))
    else:
        print_text("\n".join(comparison_lines(found, MAX_LISTED)))
    return 0


def _report(found: Comparison) -> dict[str, object]:
    return {
        "a": {"name": found.a.name, "training": found.a.training},
        "b": {"name": found.b.name, "training": found.b.training},
        "suites": found.suites,
        "only_one": found.only_one,
    }
