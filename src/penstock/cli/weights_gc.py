# SPDX-License-Identifier: Apache-2.0
"""`penstock weights gc`: delete what a run's weight store need not keep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.dataflow.service.trainers.messages import VersionInUse
    from penstock.fleet.run_folder import RunFolder


def gc(run: Path, /, *, dry_run: bool = False, json: bool = False) -> int:
    """Delete versions that no node, checkpoint or row refers to, and whole files that deltas lead
    to. A running trainer does so by itself.

    Parameters
    ----------
    run
        The run folder, or its config file; running or finished.
    dry_run
        Only tell what would be deleted.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.output import format_bytes, pluralise, print_json
    from penstock.dataflow.service.trainers.messages import VersionUser
    from penstock.errors import WeightsError
    from penstock.runs.target import find_run_folder
    from penstock.weights.retention import execute_plan, plan_deletion
    from penstock.weights.store import DirectoryStore

    folder = find_run_folder(run)
    config = folder.read_config()
    used = _in_use(folder, config)
    if not used:
        raise WeightsError(f"no version of {run} is published yet; there is nothing to delete")
    store = DirectoryStore(folder.weights)
    with store.deleting() as has_lock:
        if not has_lock:
            raise WeightsError(f"a trainer writes into {folder.weights} now; try again in a moment")
        found = plan_deletion(
            store,
            [version.manifest_digest for version in used],
            [version.manifest_digest for version in used if version.by is VersionUser.NEWEST],
            anchor_every=config.weights.anchor_every,
        )
        if not dry_run:
            execute_plan(store, found)
    if json:
        print_json(
            {
                "dry_run": dry_run,
                "versions_deleted": list(found.manifests),
                "blobs_deleted": [digest for digest, _ in found.blobs],
                "bytes_freed": found.freed_bytes,
                "versions_kept": found.num_versions,
                "bytes_kept": found.kept_bytes,
            }
        )
    else:
        verb = "would go" if dry_run else "deleted"
        print(
            f"{pluralise(len(found.manifests), 'version')} and "
            f"{pluralise(len(found.blobs), 'file')} "
            f"{verb}, {format_bytes(found.freed_bytes)}"
        )
        print(f"{pluralise(found.num_versions, 'version')} kept, {format_bytes(found.kept_bytes)}")
    return 0


def _in_use(folder: RunFolder, config: RunConfig) -> list[VersionInUse]:
    """As the service says, which knows the nodes; of a run that is over, as its ledger says."""
    from penstock.dataflow.client.dataflow import StatusClient
    from penstock.dataflow.ledger.recorded import open_recorded_run
    from penstock.dataflow.service.trainers.version_use import versions_in_use_on_disk
    from penstock.types import PolicyName
    from penstock.wire.auth import Role

    if folder.launcher_pid() is not None:
        token = folder.token(config.name, Role.READER, ttl_s=60.0)
        reader = StatusClient(folder.endpoints().dataflow, token)
        try:
            return list(reader.versions_in_use().versions)
        finally:
            reader.close()
    bounds = {
        PolicyName(name): config.for_policy(name).training.max_staleness for name in config.models
    }
    recorded = open_recorded_run(folder.path / "ledger")
    try:
        return list(versions_in_use_on_disk(recorded, bounds))
    finally:
        recorded.close()
