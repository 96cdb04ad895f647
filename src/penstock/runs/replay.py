# SPDX-License-Identifier: Apache-2.0
"""Recomputes a training step from the ledger and compares it with the published version."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.ledger.sealed_batches import SealedBatches
from penstock.errors import StoreError, WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.service_process import add_import_paths, resolve_policy
from penstock.trainer.pipeline.builtin import chain_of
from penstock.types import PolicyName
from penstock.weights.manifest import parse_manifest
from penstock.weights.store import DirectoryStore

if TYPE_CHECKING:
    from penstock.trainer.ranks.supervisor import RankEnv
    from penstock.trainer.replay import RecordedCommit, ReplayResult


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
    config = folder.read_config()
    add_import_paths(folder.python_path())
    return chain_of(config, resolve_policy(config, policy)).num_ranks


def replay_and_compare(
    folder: RunFolder, step: int, policy: str | None, rank_env: RankEnv | None = None
) -> ReplayComparison | None:
    """Recompute `step` and compare it with the published version. None in ranks other than 0.

    rank_env: needed if the policy was trained by several ranks; call this once in each of them."""
    from penstock.trainer.device import select_device
    from penstock.trainer.service import joined_ranks, replay_step

    config = folder.read_config()
    name = resolve_policy(config, policy)
    add_import_paths(folder.python_path())
    ledger = folder.path / "ledger"
    with closing(open_recorded_run(ledger)) as recorded:
        batches = _RecordedBatches(recorded, ledger, PolicyName(name))
        published = batches.version(step)
        if published is None:
            if rank_env is None or rank_env.rank == 0:
                raise _not_published_error(batches, name, step)
            return None
        device = select_device(rank_env.local_rank if rank_env else 0)
        with (
            joined_ranks(config, name, rank_env, device) as ranks,
            tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch,
        ):
            replayed = replay_step(
                config,
                name,
                batches,
                number=step,
                run_dir=folder.path,
                scratch=Path(scratch),
                ranks=ranks,
                device=device,
            )
            if replayed is None:
                return None
            published_tensors = _tensors(folder.weights, published.manifest_digest)
            replayed_tensors = _tensors(Path(scratch) / "weights", replayed.stored.manifest_digest)
    differing = (n for n, digest in replayed_tensors.items() if published_tensors.get(n) != digest)
    return ReplayComparison(
        policy=name,
        step=step,
        published_digest=published.weights_digest,
        replayed=replayed,
        first_differing_tensor=next(differing, ""),
    )


def _not_published_error(batches: SealedBatches, policy: str, step: int) -> StoreError:
    numbers = sorted({version.number for version in batches.lineage.versions()})
    return StoreError(
        f"{policy}: step {step} was not published, so there is nothing to compare with. Published "
        f"steps: {', '.join(map(str, numbers[-20:])) or 'none'} (a slow trainer skips some)"
    )


def _tensors(store_root: Path, manifest_digest: str) -> dict[str, str]:
    """Digest by tensor name; empty if the store has deleted the version."""
    try:
        manifest = parse_manifest(DirectoryStore(store_root).read_manifest(manifest_digest))
    except (WeightsError, OSError):
        return {}
    return {tensor.name: tensor.digest for tensor in manifest.tensors}


class _RecordedBatches(SealedBatches):
    """Recorded batches as the trainer's replay reads them."""

    def committed(self, seq: int) -> RecordedCommit | None:
        from penstock.trainer.replay import RecordedCommit

        found = self.commit(seq)
        if found is None:
            return None
        return RecordedCommit(number=found.number, skipped=found.skipped, stats=self.stats(found))
