# SPDX-License-Identifier: Apache-2.0
"""Versions of the weights: which were published, how each is stored, and who serves it now."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.records import VersionRecord
from penstock.weights.catalog import CatalogVersion, read_catalog
from penstock.weights.store import DirectoryStore

MAX_VERSIONS = 200


def read_versions(run: ShownRun) -> dict[str, Any]:
    """The newest versions, newest first."""
    where = "TRUE ORDER BY at DESC LIMIT :num"
    published = run.recorded.coordinator.read(VersionRecord, where, num=MAX_VERSIONS)
    catalog = read_catalog(DirectoryStore(run.folder.weights))
    stored = {version.digest: version for version in catalog.versions}
    serving = _serving(run)
    return {
        "versions": [
            {
                "policy": one.policy,
                "incarnation": one.incarnation,
                "number": one.number,
                "at": one.at,
                "digest": one.weights_digest[:12],
                "served_by": serving.get((one.policy, one.incarnation, one.number), []),
                **_kept(stored.get(one.manifest_digest)),
            }
            for one in published
        ],
        "num_stored": len(stored),
        "damaged": catalog.damaged,
    }


def _kept(version: CatalogVersion | None) -> dict[str, Any]:
    if version is None:
        return {"kept": "deleted", "bytes": None, "delta_bytes": None, "density": None}
    kept = "whole" if version.is_full else "deltas" if version.is_available else "incomplete"
    share = version.delta_bytes / version.num_bytes if version.delta_bytes else None
    return {
        "kept": kept,
        "bytes": version.num_bytes,
        "delta_bytes": version.delta_bytes or None,
        "density": share,
    }


def _serving(run: ShownRun) -> dict[tuple[str, int, int], list[str]]:
    found: defaultdict[tuple[str, int, int], list[str]] = defaultdict(list)
    status = run.summary().status
    for node in () if status is None else status.nodes:
        for live in node.live:
            found[live.policy, live.incarnation, live.number].append(node.node_id)
    return found
