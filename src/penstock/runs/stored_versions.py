# SPDX-License-Identifier: Apache-2.0
"""Versions of a run whose weights are stored: which there are, and their files as a model folder.

Reads the ledger and the weight store, during a run or after it. Changes neither.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.ledger.sealed_batches import SealedBatches
from penstock.dataflow.records import VersionRecord
from penstock.durable import copy_regular
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.types import PolicyName
from penstock.weights.catalog import CatalogVersion, deletion_paused, full_file, read_catalog
from penstock.weights.manifest import file_digest
from penstock.weights.store import DirectoryStore


def stored_versions(run: RunFolder, policy: str) -> list[CatalogVersion]:
    """Versions of this policy that can be read, oldest first."""
    return [
        version
        for version in read_catalog(DirectoryStore(run.weights)).versions
        if version.manifest.policy == policy and version.is_available
    ]


def published_version(run: RunFolder, policy: str, step: int) -> VersionRecord | None:
    """The version published at this step, on the surviving lineage."""
    ledger = run.path / "ledger"
    with closing(open_recorded_run(ledger)) as recorded:
        return SealedBatches(recorded, ledger, PolicyName(policy)).version(step)


def write_version(run: RunFolder, version: CatalogVersion, folder: Path) -> Path:
    """Write its files into a new folder: an ordinary Hugging Face model folder."""
    folder.mkdir()
    store = DirectoryStore(run.weights)
    with deletion_paused(store):
        for kept in version.files:
            with full_file(store, kept.entry.blob, folder) as path:
                copy_regular(path, folder / kept.entry.name, kept.entry.bytes)
            if file_digest(folder / kept.entry.name) != kept.entry.blob:
                raise ConfigError(
                    f"{kept.entry.name} of {version.name} in {run.path} is damaged; "
                    f"`penstock weights verify {run.path}` shows what is, and how to repair it"
                )
    return folder
