# SPDX-License-Identifier: Apache-2.0
"""A step computed again: the ledger's record on one side, the trainer's arithmetic on the other."""

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
    from penstock.trainer.ranks.supervisor import Membership
    from penstock.trainer.replay import Committed, Replayed
    from penstock.types import Manifest, RowPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    policy: str
    step: int
    published: str
    """Digest of the weights as published."""
    done: Replayed
    tensor: str
    """The first that differs, empty for none."""

    @property
    def has_equal_weights(self) -> bool:
        return self.done.stored.weights_digest == self.published

    @property
    def is_equal(self) -> bool:
        has_reached = self.done.ended_at.number == self.step
        return self.has_equal_weights and has_reached and not self.done.differences


def ranks_of(folder: RunFolder, policy: str | None) -> int:
    """How many processes trained this policy: so many must compute a step again."""
    from penstock.cli.service_process import import_from, only_policy
    from penstock.trainer.pipeline.builtin import chain_of

    config = folder.read_config()
    import_from(folder.python_path())
    return chain_of(config, only_policy(config, policy)).num_ranks


def compute_again(
    folder: RunFolder, step: int, policy: str | None, member: Membership | None = None
) -> Comparison | None:
    """What came of it; in a rank that is not the first, nothing."""
    from penstock.cli.service_process import import_from, only_policy
    from penstock.dataflow.ledger.recorded import open_recorded
    from penstock.dataflow.ledger.sealed_batches import SealedBatches
    from penstock.trainer.device import own_device
    from penstock.trainer.service import form_team, replay_step
    from penstock.types import PolicyName

    config = folder.read_config()
    name = only_policy(config, policy)
    import_from(folder.python_path())
    recorded = open_recorded(folder.path / "ledger")
    try:
        batches = SealedBatches(recorded, folder.path / "ledger", PolicyName(name))
        published = batches.version(step)
        if published is None:
            if member is None or member.rank == 0:
                raise _never_published(batches, name, step)
            return None
        device = own_device(member.local_rank if member else 0)
        team = form_team(config, name, member, device)
        with tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch:
            record, where = _Record(batches), Path(scratch)
            done = replay_step(
                config,
                name,
                record,
                number=step,
                run_dir=folder.path,
                scratch=where,
                team=team,
                device=device,
            )
            if done is None:
                return None
            was = _tensors(folder.weights, published.manifest_digest)
            now = _tensors(where / "weights", done.stored.manifest_digest)
    finally:
        recorded.close()
    return Comparison(
        policy=name,
        step=step,
        published=published.weights_digest,
        done=done,
        tensor=next((name for name in now if was.get(name) != now[name]), ""),
    )


def _never_published(batches: SealedBatches, policy: str, step: int) -> StoreError:
    from penstock.errors import StoreError

    numbers = sorted({version.number for version in batches.lineage.versions()})
    return StoreError(
        f"{policy}: number {step} was never published on the surviving lineage, so nothing can be "
        f"compared (published: {', '.join(map(str, numbers[-20:])) or 'none'}; when "
        "publishing lags, numbers are left out)"
    )


def _tensors(store_root: Path, manifest_digest: str) -> dict[str, str]:
    """Digest by tensor; empty when the store has let the version go."""
    from penstock.errors import WeightsError
    from penstock.weights.manifest import parse_manifest
    from penstock.weights.store import DirectoryStore

    try:
        manifest = parse_manifest(DirectoryStore(store_root).read_manifest(manifest_digest))
    except (WeightsError, OSError):
        return {}
    return {tensor.name: tensor.digest for tensor in manifest.tensors}


class _Record:
    """The ledger's words in those of the trainer."""

    def __init__(self, batches: SealedBatches) -> None:
        self._batches = batches

    def manifest(self, seq: int) -> Manifest | None:
        return self._batches.manifest(seq)

    def rows(self, manifest: Manifest) -> Sequence[RowPayload]:
        return self._batches.rows(manifest)

    def committed(self, seq: int) -> Committed | None:
        from penstock.trainer.replay import Committed

        found = self._batches.commit(seq)
        if found is None:
            return None
        stats = self._batches.stats(found)
        return Committed(number=found.number, skipped=found.skipped, stats=stats)
