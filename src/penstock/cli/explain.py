# SPDX-License-Identifier: Apache-2.0
"""`penstock explain`: why a task, group, row, batch or version was used or dropped."""

from __future__ import annotations

import shutil
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.dataflow.explain.explain import Explanation
    from penstock.runs.agent_tree import AgentNode
    from penstock.runs.samples import Sample

MAX_SAMPLES = 4
"""Trajectories of a group that are shown as text."""


def explain(run: Path, id: str, /, *, json: bool = False) -> int:
    """Explain from the ledger why something was skipped, dropped or trained, with its text.

    Args:
        run: Run folder, or its config file; running or finished.
        id: Task key or its prefix, group (p0-17), row (p0-17.2.1), batch (POLICY.5) or version
            (POLICY@1.5).
        json: Print one JSON object as the last line.
    """
    from dataclasses import asdict

    from penstock.cli.output import print_json, print_text
    from penstock.runs.explained import explain_with_text
    from penstock.runs.target import find_run_folder

    explanation, said = explain_with_text(find_run_folder(run), id)
    if json:
        trees = {one.row_id: tree for one, tree in _trees(said)}
        print_json({**asdict(explanation), "samples": said, "agents": trees})
    else:
        width = max(60, min(120, shutil.get_terminal_size().columns))
        print_text("\n".join(lines(explanation, width)))
        _print_samples(said, explanation.id)
    return 0


def _print_samples(said: list[Sample], id: str) -> None:
    from penstock.cli.output import print_note, print_text
    from penstock.cli.sample_lines import print_samples

    if said:
        print_text()
        _print_trees(said[:MAX_SAMPLES])
        print_samples(said[:MAX_SAMPLES])
    if len(said) > MAX_SAMPLES:
        print_note(f"… and {len(said) - MAX_SAMPLES:,} more; --json shows all of {id}")


def _trees(said: list[Sample]) -> Iterator[tuple[Sample, AgentNode]]:
    """The sub-agents of each trajectory that has some."""
    from penstock.runs.agent_tree import agent_tree

    for one in said:
        if (tree := agent_tree(one.turns)).children:
            yield one, tree


def _print_trees(said: list[Sample]) -> None:
    from penstock.cli.console import SafeConsole
    from penstock.cli.sample_lines import tree_lines

    console = SafeConsole(soft_wrap=True)
    for one, tree in _trees(said):
        console.print(f"{one.row_id}  {tree.num_agents - 1} sub-agents")
        for line in tree_lines(tree):
            console.print(line)
        console.print()


def lines(explanation: Explanation, width: int) -> list[str]:
    """As text: the summary, then the events that led to it, timed from the first one."""
    from penstock.cli.output import printable

    times = [step.at for step in explanation.steps if step.at]
    began_at = min(times, default=0.0)
    written = textwrap.wrap(printable(explanation.summary), width)
    if times:
        written += ["", f"  from {datetime.fromtimestamp(began_at, UTC):%Y-%m-%d %H:%M:%S} UTC"]
    for step in explanation.steps:
        when = f"+{step.at - began_at:.1f} s" if step.at else ""
        head = f"  {when:>10}  "
        written += textwrap.wrap(
            printable(step.text), width, initial_indent=head, subsequent_indent=" " * len(head)
        )
    if explanation.related:
        names = ", ".join(dict.fromkeys(explanation.related.values()))
        written += ["", *textwrap.wrap(f"see also: {names}", width, subsequent_indent="  ")]
    return written
