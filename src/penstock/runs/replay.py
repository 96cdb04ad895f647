# SPDX-License-Identifier: Apache-2.0
"""Recomputes a training step from the ledger and compares it with the published version."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.dataflow.ledger.sealed_batches import SealedBatches
    from penstock.errors import StoreError
    from penstock.fleet.run_folder import RunFolder
    from penstock.trainer.ranks.supervisor import RankEnv
    from penstock.trainer.replay import RecordedCommit, ReplayResult
    from penstock.types import Manifest, RowPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayComparison:
    policy: str
    step: int
    published_digest: str
    """Digest of the published weights."""
    replayed: ReplayResult
    first_differing_tensor: str
    """Empty if all tensors match."""

    @property
    def has_equal_weights(self) -> bool:
        return self.replayed.stored.weights_digest == self.published_digest

    @property
    def is_equal(self) -> bool:
        has_reached = self.replayed.ended_at.number == self.step
        return self.has_equal_weights and has_reached and not self.replayed.differences


def num_trainer_ranks(folder: RunFolder, policy: str | None) -> int:
    """Number of ranks that trained this policy; a replay needs the same number."""
    from penstock.runs.service_process import add_import_paths, resolve_policy
    from penstock.trainer.pipeline.builtin import chain_of

    config = folder.read_config()
    add_import_paths(folder.python_path())
    return chain_of(config, resolve_policy(config, policy)).num_ranks


def replay_and_compare(
    folder: RunFolder, step: int, policy: str | None, rank_env: RankEnv | None = None
) -> ReplayComparison | None:
    """Recompute `step` and compare it with the published version. None in ranks other than 0.

    rank_env: needed if the policy was trained by several ranks; call this once in each of them."""
    from penstock.dataflow.ledger.recorded import open_recorded_run
    from penstock.dataflow.ledger.sealed_batches import SealedBatches
    from penstock.runs.service_process import add_import_paths, resolve_policy
    from penstock.trainer.device import select_device
    from penstock.trainer.service import join_ranks, replay_step
    from penstock.types import PolicyName

    config = folder.read_config()
    name = resolve_policy(config, policy)
    add_import_paths(folder.python_path())
    recorded = open_recorded_run(folder.path / "ledger")
    try:
        batches = SealedBatches(recorded, folder.path / "ledger", PolicyName(name))
        published = batches.version(step)
        if published is None:
            if rank_env is None or rank_env.rank == 0:
                raise _not_published_error(batches, name, step)
            return None
        device = select_device(rank_env.local_rank if rank_env else 0)
        ranks = join_ranks(config, name, rank_env, device)
        with tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch:
            record, where = _LedgerBatches(batches), Path(scratch)
            replayed = replay_step(
                config,
                name,
                record,
                number=step,
                run_dir=folder.path,
                scratch=where,
                ranks=ranks,
                device=device,
            )
            if replayed is None:
                return None
            published_tensors = _tensors(folder.weights, published.manifest_digest)
            replayed_tensors = _tensors(where / "weights", replayed.stored.manifest_digest)
    finally:
        recorded.close()
    return ReplayComparison(
        policy=name,
        step=step,
        published_digest=published.weights_digest,
        replayed=replayed,
        first_differing_tensor=next(
            (
                name
                for name in replayed_tensors
                if published_tensors.get(name) != replayed_tensors[name]
            ),
            "",
        ),
    )


def _not_published_error(batches: SealedBatches, policy: str, step: int) -> StoreError:
    from penstock.errors import StoreError

    numbers = sorted({version.number for version in batches.lineage.versions()})
    return StoreError(
        f"{policy}: step {step} was not published, so there is nothing to compare with. Published "
        f"steps: {', '.join(map(str, numbers[-20:])) or 'none'} (a slow trainer skips some)"
    )


def _tensors(store_root: Path, manifest_digest: str) -> dict[str, str]:
    """Digest by tensor name; empty if the store has deleted the version."""
    from penstock.errors import WeightsError
    from penstock.weights.manifest import parse_manifest
    from penstock.weights.store import DirectoryStore

    try:
        manifest = parse_manifest(DirectoryStore(store_root).read_manifest(manifest_digest))
    except (WeightsError, OSError):
        return {}
    return {tensor.name: tensor.digest for tensor in manifest.tensors}


class _LedgerBatches:
    """Adapts recorded batches to the trainer's replay interface."""

    def __init__(self, batches: SealedBatches) -> None:
        self._batches = batches

    def manifest(self, seq: int) -> Manifest | None:
        return self._batches.manifest(seq)

    def rows(self, manifest: Manifest) -> Sequence[RowPayload]:
        return self._batches.rows(manifest)

    def committed(self, seq: int) -> RecordedCommit | None:
        from penstock.trainer.replay import RecordedCommit

        found = self._batches.commit(seq)
        if found is None:
            return None
        stats = self._batches.stats(found)
        return RecordedCommit(number=found.number, skipped=found.skipped, stats=stats)
