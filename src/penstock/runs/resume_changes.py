# SPDX-License-Identifier: Apache-2.0
"""What changed since a run folder was started, of what makes it the same run.

Owns the comparison; `launch` refuses to resume by it, and `check` says so before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.config import RunConfig, identity, identity_changes
from penstock.dataflow.sources import are_same_tasks
from penstock.fleet.run_folder import RunFolder


def find_resume_changes(
    config: RunConfig, folder: RunFolder, sources: Mapping[str, str]
) -> list[str]:
    """One `key: old -> new` per change of config or tasks; empty for a new folder.

    sources: digests of the tasks of user-defined sources, where known."""
    if not folder.config_file.exists():
        return []
    known = folder.last_started_config() or folder.read_config()
    return [
        *identity_changes(identity(known), identity(config)),
        *_changed_sources(folder, sources),
    ]


def _changed_sources(folder: RunFolder, sources: Mapping[str, str]) -> Iterator[str]:
    known = folder.sources()
    for name, digest in sources.items():
        if not are_same_tasks(known.get(name, digest), digest):
            yield f"source {name}: its tasks differ from those the run started with"
