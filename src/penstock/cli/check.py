# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: find problems before a run starts."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import pluralise, print_json

if TYPE_CHECKING:
    from penstock.runs.preflight import RunSizes
    from penstock.runs.probe_process import ProbeResult
    from penstock.runs.target import RunTarget


def check(target: Path, /, *overrides: str, json: bool = False) -> int:
    """Check config, packages, your code and disk space without starting anything.

    Args:
        target: Config file, or run folder.
        overrides: Settings that override the file, such as training.steps=20.
        json: Print one JSON object as the last line.
    """
    from penstock.runs.preflight import derive_sizes, find_problems
    from penstock.runs.probe import run_probe
    from penstock.runs.target import read_target

    resolved = read_target(target, overrides)
    found = [*find_problems(resolved)]  # first: it downloads data sets, without a deadline
    probed = run_probe(resolved)
    found += probed.problems
    sizes = derive_sizes(resolved)
    if json:
        print_json({"ok": not found, "problems": found, **asdict(sizes)})
    elif not found:
        _print_summary(resolved, probed, sizes)
    for number, text in enumerate(found, 1):
        print(f"{number}. {text}", file=sys.stderr)
    if found:
        print(f"error: {pluralise(len(found), 'problem')} in {target}", file=sys.stderr)
    return 1 if found else 0


def _print_summary(target: RunTarget, probed: ProbeResult, sizes: RunSizes) -> None:
    config = target.config
    print(f"{config.name}: ready to run in {sizes.folder}")
    for name, policy in sizes.policies.items():
        model = config.models[name]
        print(
            f"  policy {name}: {model.init}, {pluralise(policy.nodes, f'{model.engine} node')}\n"
            f"    {pluralise(policy.steps, 'step')} of {policy.rows_per_batch:,} trajectories "
            f"({policy.trajectories:,} in total), "
            f"{pluralise(policy.updates_per_step, 'update')} per step"
        )
    for source, task in probed.tasks.items():
        print(f"  source {source}: first task {str(task)[:100]}")
    for reward, score in probed.rewards.items():
        print(f"  reward {reward}: an empty completion scores {score:g}")
