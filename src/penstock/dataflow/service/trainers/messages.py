# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls that trainers make.

Owns shapes only. Every mutating call carries an id chosen by its caller; repeating it changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from penstock.types import (
    Manifest,
    PolicyName,
    RowId,
    RowPayload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationRequest:
    """`POST /v1/policies/{policy}/incarnations`: become this policy's one trainer."""

    request_id: str
    expected: int
    """The current incarnation as the caller knows it (0 before the first); compare-and-set."""
    number: int
    """Fork point: the version number of the checkpoint it restored, 0 for the initial model."""
    seq: int
    """Fork point: the last batch inside that checkpoint, 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationAnswer:
    incarnation: int
    steps: int
    """Train until this version number, then expect `end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """`GET /v1/policies/{policy}`: where the ledger says this policy stands."""

    policy: PolicyName
    incarnation: int
    number: int
    """Committed along the surviving lineage."""
    seq: int
    published: int
    """Newest published number of this incarnation, -1 for none."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """`POST /v1/batches`: the sealed manifest number `seq`; held open until it exists."""

    consumer: PolicyName
    seq: int
    incarnation: int
    wait_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    manifest: Manifest | None
    """None with `end` unset: not yet, ask again."""
    digest: str = ""
    end: bool = False
    """No batch will follow; the run is complete for this consumer."""
    checkpoint_now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRowsRequest:
    """`POST /v1/batches/{consumer}.{seq}/rows`: what one rank trains of a sealed batch."""

    indexes: tuple[int, ...] | None = None
    """Places of its rows in the manifest, counted from 0; None for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAnswer:
    """Rows in the order asked for."""

    rows: tuple[RowPayload, ...]
    columns: tuple[str, ...] = ()
    """Further columns that the manifest names; ask for them where a row lies elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """`POST /v1/rows` at the partition that holds them."""

    row_ids: tuple[RowId, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """`POST /v1/batches/{consumer}.{seq}/commit`."""

    incarnation: int
    number: int
    """The version number after this batch: one more when trained, the same when skipped."""
    skipped: str = ""
    """Reason, when the batch changed no weights."""
    stats: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    """`POST /v1/policies/{policy}/versions`: compare-and-set; the store already holds every
    byte."""

    incarnation: int
    number: int
    manifest_digest: str
    weights_digest: str
    """BLAKE3 over the tensors alone: versions with equal weights are one version, whoever made
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsRequest:
    """`PUT /v1/policies/{policy}/checkpoints`: what the trainer could restore from."""

    incarnation: int
    retained: tuple[tuple[int, int], ...]
    """(number, seq) of each complete checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequest:
    """`POST /v1/nodes/{node_id}/quarantine`: this node's log-probs are not those of its version."""

    policy: PolicyName
    incarnation: int
    why: str
    """For the log and for people."""
    boot_id: str = ""
    """The life of the node that made the rows, as they say; empty: the one that runs now."""


class VersionUser(StrEnum):
    NEWEST = "newest"
    """Nodes are told to serve it, or were a moment ago."""
    NODE = "node"
    CHECKPOINT = "checkpoint"
    ROWS = "rows"
    """Rows that may be trained, or trained again, were sampled from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInUse:
    policy: PolicyName
    incarnation: int
    number: int
    manifest_digest: str
    by: VersionUser


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsInUse:
    """`GET /v1/versions`: of all policies; a weight store may let go of the others."""

    versions: tuple[VersionInUse, ...]
