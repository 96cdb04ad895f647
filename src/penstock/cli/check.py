# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: find problems before a run starts."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import pluralise, print_json, print_note, print_text

if TYPE_CHECKING:
    from penstock.runs.preflight import CheckReport, RunSizes
    from penstock.runs.target import RunTarget


def check(
    target: Path,
    /,
    *overrides: str,
    deadline: float | None = None,
    all_rows: bool = False,
    json: bool = False,
) -> int:
    """Check config, machine and your code without starting anything.

    Your code runs once in a separate process: rules, sources, the workflow on a scripted answer,
    the reward, and the training graph to a loss on a tiny batch.

    Args:
        target: Config file, or run folder.
        overrides: Settings that override the file, such as training.steps=20.
        deadline: Seconds that each step of your code may take; 30 if not given.
        all_rows: Compare all rows of data sets with the suites of `eval`; by default at most 50,000
            of a source, and for 20 seconds.
        json: Print one JSON object as the last line.
    """
    from penstock.runs.leakage_check import LeakBounds
    from penstock.runs.preflight import check_run, derive_sizes
    from penstock.runs.target import read_target

    resolved = read_target(target, overrides)
    progress = _Progress()
    bounds = LeakBounds(max_rows=None, budget_s=None) if all_rows else LeakBounds()
    report = check_run(resolved, deadline_s=deadline, on_step=progress.show, leak_bounds=bounds)
    print_note("")
    sizes = derive_sizes(resolved)
    if json:
        problems = [asdict(problem) for problem in report.problems]
        body = {"ok": not problems, "problems": problems, "notes": report.notes}
        print_json({**body, "losses": report.probed.losses, **asdict(sizes)})
    elif not report.problems:
        _print_summary(resolved, report, sizes)
    for note in report.notes:
        print_note(f"note: {note}")
    for number, problem in enumerate(report.problems, 1):
        print_note(f"{number}. {problem}")
    if report.problems:
        print_note(f"error: {pluralise(len(report.problems), 'problem')} in {target}")
    return 1 if report.problems else 0


class _Progress:
    """`checking: source train … workflow single_turn …`, on one line of stderr."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, step: str) -> None:
        if step == "penstock" or step in self._shown:
            return
        head = "" if self._shown else "checking: "
        text = "importing torch, which takes seconds" if step == "torch" else step
        print(f"{head}{text} … ", end="", file=sys.stderr, flush=True)
        self._shown.add(step)


def _print_summary(target: RunTarget, report: CheckReport, sizes: RunSizes) -> None:
    config, probed = target.config, report.probed
    print_text(f"{config.name}: ready to run in {sizes.folder}")
    for name, policy in sizes.policies.items():
        model = config.models[name]
        print_text(
            f"  policy {name}: {model.init}, {pluralise(policy.nodes, f'{model.engine} node')}\n"
            f"    {pluralise(policy.steps, 'step')} of {policy.rows_per_batch:,} trajectories "
            f"({policy.trajectories:,} in total), "
            f"{pluralise(policy.updates_per_step, 'update')} per step"
        )
    for source, task in probed.tasks.items():
        print_text(f"  source {source}: first task {str(task)[:100]}")
    for reward, score in probed.rewards.items():
        print_text(f"  reward {reward}: an empty completion scores {score:g}")
    for name, loss in probed.losses.items():
        stand_in = "" if config.models[name].init.startswith("builtin:") else " with a tiny model"
        print_text(f"  loss of {name}: {loss:.4g} on a tiny batch{stand_in}")
