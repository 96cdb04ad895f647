# SPDX-License-Identifier: Apache-2.0
"""The making of a fork: a run folder that begins with what a step of another one left."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.fleet.run_folder import RunFolder
    from penstock.trainer.checkpoint import Checkpoint
    from penstock.weights.catalog import KeptVersion
    from penstock.weights.store import DirectoryStore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """All that is left of a policy at some step."""

    folder: Path
    """Temporary; an ordinary model folder."""
    damage: str
    """Why the checkpoint of that step cannot be used; empty where there is none."""


def make_fork(
    parent: RunFolder, overrides: Sequence[str], step: int, name: str | None
) -> tuple[RunFolder, Mapping[str, str]]:
    """The new folder, and the policies of which only weights were left, with what is wrong with
    their checkpoints, if they have one; made in a hidden folder that is renamed when all of it is
    there."""
    from penstock.config import load
    from penstock.errors import ConfigError
    from penstock.fleet.run_folder import Parent, RunFolder

    old = parent.read_config()
    beside = parent.path.parent
    new_name = f"{old.name}-fork-{step}" if name is None else name
    given = load(parent.config_file, [f"name={json.dumps(new_name)}", *overrides])
    if given.output_dir != old.output_dir:
        raise ConfigError(
            f"a fork is made beside its parent, in {beside}; leave output_dir out, and move the "
            "folder afterwards"
        )
    config = given.model_copy(update={"output_dir": str(beside)})  # it may hold what YAML reads
    folder = beside / config.name
    if folder.exists():
        raise ConfigError(f"{folder} exists; give the new run another name with --name")
    with tempfile.TemporaryDirectory(prefix=".fork-", dir=beside) as temporary:
        hidden = RunFolder(Path(temporary) / "run")
        hidden.path.mkdir()
        taken = {policy: _take(parent, old, policy, step, Path(temporary)) for policy in old.models}
        for policy, found in taken.items():
            _begin(config, policy, found, hidden)
        bare = {name: found.damage for name, found in taken.items() if isinstance(found, _Weights)}
        hidden.write_config(config)
        hidden.write_parent(Parent(run=str(parent.path), step=step, weights_only=tuple(bare)))
        _keep_modules(parent, hidden, config)
        hidden.path.rename(folder)
    return RunFolder(folder), bare


def _keep_modules(parent: RunFolder, made: RunFolder, config: RunConfig) -> None:
    """The user's modules and relative paths are those of the parent; addresses are its own."""
    known = parent.endpoints()
    made.choose_endpoints(
        Path(known.work_dir), known.python_path, num_partitions=config.dataflow.partitions
    )


def _begin(config: RunConfig, policy: str, found: Checkpoint | _Weights, made: RunFolder) -> None:
    """Number 0 of the new run. Its config names the model that the parent began with, which is what
    a reference or a critic begins with here too."""
    from penstock.trainer.service import begin_with, make_checkpoints

    checkpoints = make_checkpoints(config, policy, made.path)
    if isinstance(found, _Weights):
        begin_with(config, policy, checkpoints, found.folder)
    else:
        checkpoints.begin_from(found)


def _take(
    parent: RunFolder, config: RunConfig, policy: str, step: int, temporary: Path
) -> Checkpoint | _Weights:
    """The checkpoint of this step, or the weights of that number."""
    from penstock.errors import ConfigError
    from penstock.trainer.checkpoint import listed
    from penstock.trainer.service import make_checkpoints
    from penstock.weights.catalog import read_catalog
    from penstock.weights.store import DirectoryStore

    checkpoints = make_checkpoints(config, policy, parent.path)
    complete, unusable = checkpoints.look()
    for found in complete:
        if found.cursor.number == step:
            return found
    store = DirectoryStore(parent.weights)
    there = [
        version
        for version in read_catalog(store).versions
        if version.manifest.policy == policy and version.is_there
    ]
    published = _published(parent, policy, step)
    for version in there:
        if version.digest == published:
            folder = _write_snapshot(store, version, temporary / f"model-{policy}")
            damage = unusable.get(checkpoints.root / f"step_{step}", "")
            return _Weights(folder=folder, damage=damage)
    kept = ", ".join(str(found.cursor.number) for found in complete) or "none"
    weights = ", ".join(str(version.manifest.number) for version in there) or "none"
    raise ConfigError(
        f"{parent.path} keeps nothing of {policy} at step {step}: checkpoints {kept}; weights "
        f"alone {weights}. Choose one of these with --at"
        + (f"\n  these checkpoints cannot be used:\n{listed(unusable)}" if unusable else "")
    )


def _published(parent: RunFolder, policy: str, step: int) -> str:
    """Digest of the manifest under this number on the surviving lineage; empty for none."""
    from penstock.dataflow.ledger.recorded import open_recorded
    from penstock.dataflow.ledger.sealed_batches import SealedBatches
    from penstock.types import PolicyName

    recorded = open_recorded(parent.path / "ledger")
    try:
        batches = SealedBatches(recorded, parent.path / "ledger", PolicyName(policy))
        version = batches.version(step)
    finally:
        recorded.close()
    return "" if version is None else version.manifest_digest


def _write_snapshot(store: DirectoryStore, version: KeptVersion, folder: Path) -> Path:
    from penstock.weights.catalog import undisturbed, whole_file

    folder.mkdir()
    with undisturbed(store):
        for kept in version.files:
            with whole_file(store, kept.entry.blob, folder) as path:
                shutil.copyfile(path, folder / kept.entry.name)
    return folder
