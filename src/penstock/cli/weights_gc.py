# SPDX-License-Identifier: Apache-2.0
"""`penstock weights gc`: delete unreferenced versions from a run's weight store."""

from __future__ import annotations

from pathlib import Path


def gc(run: Path, /, *, dry_run: bool = False, json: bool = False) -> int:
    """Delete unreferenced versions, and full files that deltas can rebuild.

    A version is referenced by nodes, checkpoints and rows. A running trainer cleans up by itself.

    Args:
        run: Run folder, or its config file; running or finished.
        dry_run: Only print what would be deleted.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import format_bytes, pluralise, print_json
    from penstock.dataflow.service.trainers.messages import VersionUser
    from penstock.errors import WeightsError
    from penstock.runs.control import versions_in_use
    from penstock.runs.target import find_run_folder
    from penstock.weights.retention import execute_plan, plan_deletion
    from penstock.weights.store import DirectoryStore

    folder = find_run_folder(run)
    config = folder.read_config()
    used = versions_in_use(folder, config)
    if not used:
        raise WeightsError(f"nothing to delete: {run} has not published a version yet")
    store = DirectoryStore(folder.weights)
    with store.deleting() as has_lock:
        if not has_lock:
            raise WeightsError(f"a trainer is writing to {folder.weights}; try again in a moment")
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
        verb = "would be deleted" if dry_run else "deleted"
        print(
            f"{pluralise(len(found.manifests), 'version')} and "
            f"{pluralise(len(found.blobs), 'file')} "
            f"{verb}, {format_bytes(found.freed_bytes)}"
        )
        print(f"{pluralise(found.num_versions, 'version')} kept, {format_bytes(found.kept_bytes)}")
    return 0
