# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: what will fail, in seconds, before it costs hours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runs.probe_process import ProbeResult
    from penstock.runs.target import RunTarget


def check(target: Path, /, *overrides: str, json: bool = False) -> int:
    """Find what will fail before anything is started: config, packages, your own code, disk.

    Parameters
    ----------
    target
        A config file, or a run folder.
    overrides
        Settings that win over the file, like training.steps=20.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.output import pluralise, print_json
    from penstock.runs.preflight import problems
    from penstock.runs.probe import run_probe
    from penstock.runs.target import read_target

    resolved = read_target(target, overrides)
    probed = run_probe(resolved)
    found = [*problems(resolved), *probed.problems]
    facts = derived_sizes(resolved)
    if json:
        print_json({"ok": not found, "problems": found, **facts})
    elif not found:
        _print_summary(resolved, probed, facts)
    for number, text in enumerate(found, 1):
        print(f"{number}. {text}", file=sys.stderr)
    if found:
        print(f"error: {pluralise(len(found), 'problem')} in {target}", file=sys.stderr)
    return 1 if found else 0


def ensure_startable(target: RunTarget) -> dict[str, str]:
    """What `run` asks before it starts anything; the built-in tasks need no trying. Digests of the
    tasks of each source that was tried."""
    from penstock.errors import ConfigError
    from penstock.runs.preflight import problems
    from penstock.runs.probe import run_probe, user_stages, user_workflow

    config = target.config
    workflow = user_workflow(config.workflow)
    named = [*(source.task for source in config.sources), config.reward, workflow]
    named += [str(stage["fn"]) for stage in user_stages(config) if stage["fn"]]
    has_user_code = any(name and not name.startswith("penstock.") for name in named)
    probed = run_probe(target) if has_user_code else None
    found = [*problems(target), *(probed.problems if probed else ())]
    if found:
        raise ConfigError("this run cannot start:\n" + "\n".join(f"  - {text}" for text in found))
    return probed.digests if probed else {}


def derived_sizes(target: RunTarget) -> dict[str, object]:
    """What follows from the config: sizes that nobody wants to compute by hand."""
    config = target.config
    policies: dict[str, dict[str, int]] = {}
    for name in config.models:
        policy = config.for_policy(name)
        has_tasks = any(source.task for source in config.sources)
        num_members = policy.algorithm.num_generations if has_tasks else 1
        rows = policy.training.groups_per_batch * num_members
        updates = policy.training.minibatches * policy.training.epochs
        policies[name] = {
            "steps": policy.training.steps,
            "rows_per_batch": rows,
            "trajectories": rows * policy.training.steps,
            "updates_per_step": updates,
            "nodes": policy.model.replicas,
        }
    return {"run": config.name, "folder": str(target.folder.path), "policies": policies}


def _print_summary(target: RunTarget, probed: ProbeResult, facts: dict[str, object]) -> None:
    from typing import cast

    from penstock.cli.output import pluralise

    config = target.config
    print(f"{config.name}: ready to run in {target.folder.path}")
    for name, numbers in cast("dict[str, dict[str, int]]", facts["policies"]).items():
        model = config.models[name]
        print(
            f"  policy {name}: {model.init}, "
            f"{pluralise(numbers['nodes'], f'{model.engine} node')}\n"
            f"    {pluralise(numbers['steps'], 'step')} of {numbers['rows_per_batch']:,} "
            f"trajectories ({numbers['trajectories']:,} in all), "
            f"{pluralise(numbers['updates_per_step'], 'update')} each"
        )
    for source, task in probed.tasks.items():
        print(f"  source {source}: first task {str(task)[:100]}")
    if config.reward:
        print(f"  reward {config.reward}: an empty answer earns {probed.reward:g}")
