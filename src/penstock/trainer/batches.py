# SPDX-License-Identifier: Apache-2.0
"""A sealed batch as the learner takes it: its rows verified, cut into samples, and credited.

Owns the check that what was served is what was sealed. Group statistics come from the manifest, so
a row that is gone, or not of this model's vocabulary, changes nobody else's advantage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog
from blake3 import blake3

from penstock.dataflow.protocol import RowPayload
from penstock.errors import StoreError
from penstock.trainer.advantages import Credit, group_advantages
from penstock.trainer.samples import Samples, cut
from penstock.types import Manifest, PolicyName, Trajectory
from penstock.wire.codec import decode

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """R = rows of the manifest, in its order."""

    seq: int
    trains_from: int
    """Number of the version these rows were judged for."""
    samples: Samples
    rewards_R: Floats
    advantages_R: Floats
    groups_R: Ints
    """Which group of the manifest a row belongs to; never falls."""
    staleness_R: Ints

    @property
    def num_groups(self) -> int:
        return int(self.groups_R[-1]) + 1 if self.groups_R.size else 0


def assemble(
    manifest: Manifest,
    rows: Sequence[RowPayload],
    policy: PolicyName,
    vocab_size: int,
    credit: Credit = group_advantages,
) -> Batch:
    """The batch of this manifest from its rows as they were served."""
    rewards_R = np.array([row.score for row in manifest.rows], np.float64)
    sizes = [len(group.rows) for group in manifest.groups]
    groups_R = np.repeat(np.arange(len(sizes)), np.array(sizes, np.int64))
    samples = cut(_trajectories(manifest, rows), policy, manifest.sees)
    return Batch(
        seq=manifest.seq,
        trains_from=manifest.trains_from,
        samples=_within_vocabulary(samples, vocab_size, manifest.seq),
        rewards_R=rewards_R,
        advantages_R=credit(rewards_R, groups_R),
        groups_R=groups_R,
        staleness_R=_staleness(manifest, policy),
    )


def _trajectories(
    manifest: Manifest, rows: Sequence[RowPayload]
) -> Iterator[tuple[int, Trajectory]]:
    sealed = list(manifest.rows)
    batch = f"batch {manifest.consumer}.{manifest.seq}"
    if len(rows) != len(sealed):
        raise StoreError(f"{batch}: {len(rows)} rows were served, {len(sealed)} are sealed")
    for index, (summary, row) in enumerate(zip(sealed, rows, strict=True)):
        if row.payload is None:
            continue
        if row.row_id != summary.row_id or blake3(row.payload).hexdigest() != summary.digest:
            raise StoreError(
                f"{batch}, row {index}: {row.row_id} was served, but other bytes than those of "
                f"{summary.row_id} as sealed; the ledger's segments may be damaged"
            )
        yield index, decode(row.payload, Trajectory)


def _within_vocabulary(samples: Samples, vocab_size: int, seq: int) -> Samples:
    """Leave out samples with ids this model does not have: only here is its vocabulary known."""
    if samples.ids_T.size == 0 or int(samples.ids_T.max()) < vocab_size:
        return samples
    is_known_S = np.maximum.reduceat(samples.ids_T, samples.starts_S) < vocab_size
    rows = samples.rows_S[~is_known_S]
    _log.warning("rows with foreign token ids left out", seq=seq, rows=rows.tolist())
    mask_T = samples.mask_T.copy()
    for start, end in zip(samples.starts_S[~is_known_S], samples.ends_S[~is_known_S], strict=True):
        mask_T[start:end] = False
    return replace(
        samples,
        mask_T=mask_T,
        starts_S=samples.starts_S[is_known_S],
        ends_S=samples.ends_S[is_known_S],
        rows_S=samples.rows_S[is_known_S],
    )


def _staleness(manifest: Manifest, policy: PolicyName) -> Ints:
    versions = (row.versions.get(policy, ()) for row in manifest.rows)
    oldest = (min(number for _, number in made_by) for made_by in versions if made_by)
    lags = [manifest.trains_from - number for number in oldest]
    return np.maximum(np.array(lags, np.int64), 0)
