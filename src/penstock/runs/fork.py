# SPDX-License-Identifier: Apache-2.0
"""Forks a run: a new run folder that starts from a step of another run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import RunConfig, load_stored
from penstock.errors import ConfigError
from penstock.fleet.run_folder import ForkOrigin, RunFolder
from penstock.observe.admin_log import AdminAction
from penstock.runs.stored_versions import published_version, stored_versions, write_version

if TYPE_CHECKING:
    from penstock.trainer.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightsOnly:
    """Weights of a policy at a step whose checkpoint is gone."""

    folder: Path
    """Temporary; an ordinary model folder."""
    damage: str
    """Why the checkpoint of that step is unusable; empty if there is none."""


def fork_run(
    parent: RunFolder,
    overrides: Sequence[str],
    step: int,
    name: str | None,
    *,
    by_another: bool = False,
    who: str | None = None,
    why: str = "",
) -> tuple[RunFolder, Mapping[str, str]]:
    """Create a run folder next to `parent` that starts from its step `step`.

    Returns the new folder, and the policies that start from weights only, each with the damage of
    its checkpoint (empty if it has none). Built in a hidden folder and renamed when complete.
    `by_another`: overrides and name come from a caller of this process, and take nothing from its
    environment. `who` and `why`: for the parent's log of operators' actions.
    """
    old = parent.read_config()
    runs_dir = parent.path.parent
    new_name = f"{old.name}-fork-{step}" if name is None else name
    given = [f"name={json.dumps(new_name)}", *overrides]
    loaded = load_stored(parent.config_file, given, by_another=by_another)
    if loaded.output_dir != old.output_dir:
        raise ConfigError(
            f"a fork is created next to its parent, in {runs_dir}: remove the output_dir override, "
            "and move the folder afterwards"
        )
    config = loaded.model_copy(update={"output_dir": str(runs_dir)})  # a path that YAML would parse
    folder = runs_dir / config.name
    if folder.exists():
        raise ConfigError(f"{folder} already exists; choose another name for the new run (--name)")
    with tempfile.TemporaryDirectory(prefix=".fork-", dir=runs_dir) as temporary:
        staging = RunFolder(Path(temporary) / "run")
        staging.path.mkdir()
        starts = {
            policy: _find_start(parent, old, policy, step, Path(temporary))
            for policy in old.trained
        }
        for policy, found in starts.items():
            _write_step_zero(config, policy, found, staging)
        weights_only = {
            name: found.damage for name, found in starts.items() if isinstance(found, _WeightsOnly)
        }
        staging.write_config(config)
        staging.write_parent(
            ForkOrigin(run=str(parent.path), step=step, weights_only=tuple(weights_only))
        )
        known = parent.endpoints()  # imports and paths of the parent, but its own addresses
        staging.allocate_endpoints(
            Path(known.work_dir), known.python_path, num_partitions=config.dataflow.partitions
        )
        staging.path.rename(folder)
    parent.admin_log.append(
        AdminAction.FORKED, who=who, fork=folder.name, step=step, overrides=list(overrides), why=why
    )
    return RunFolder(folder), weights_only


def _write_step_zero(
    config: RunConfig, policy: str, found: Checkpoint | _WeightsOnly, fork_folder: RunFolder
) -> None:
    """Write step 0 of the new run. The config still names the parent's initial model, from which a
    reference or critic starts here too."""
    from penstock.trainer.service import make_checkpoints, save_initial_checkpoint

    checkpoints = make_checkpoints(config, policy, fork_folder.path)
    if isinstance(found, _WeightsOnly):
        save_initial_checkpoint(config, policy, checkpoints, found.folder)
    else:
        checkpoints.fork_from(found)


def _find_start(
    parent: RunFolder, config: RunConfig, policy: str, step: int, temporary: Path
) -> Checkpoint | _WeightsOnly:
    """The checkpoint of this step, or else its published weights."""
    from penstock.trainer.checkpoint import format_unusable
    from penstock.trainer.service import make_checkpoints

    checkpoints = make_checkpoints(config, policy, parent.path)
    complete, unusable = checkpoints.scan()
    for found in complete:
        if found.cursor.number == step:
            return found
    available = stored_versions(parent, policy)
    published = published_version(parent, policy, step)
    for version in available:
        if published is not None and version.digest == published.manifest_digest:
            folder = write_version(parent, version, temporary / f"model-{policy}")
            damage = unusable.get(checkpoints.root / f"step_{step}", "")
            return _WeightsOnly(folder=folder, damage=damage)
    kept = ", ".join(str(found.cursor.number) for found in complete) or "none"
    weights = ", ".join(str(version.manifest.number) for version in available) or "none"
    raise ConfigError(
        f"no checkpoint or weights of {policy} at step {step} in {parent.path}. Available "
        f"checkpoints: {kept}; weights only: {weights}. Choose one of these steps (--at)"
        + (f"\n  unusable checkpoints:\n{format_unusable(unusable)}" if unusable else "")
    )
