# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls that trainers make.

Owns shapes only. Every mutating call carries an id chosen by its caller; repeating it is a no-op.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from penstock.bounds import Count, Digest, Id, Int64, Label, Seconds, Text
from penstock.types import (
    Manifest,
    PolicyName,
    RowId,
    RowPayload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationRequest:
    """`POST /v1/policies/{policy}/incarnations`: become this policy's only trainer."""

    request_id: Id
    expected: Count
    """The current incarnation as the caller knows it (0 before the first); compare-and-set."""
    number: Count
    """Fork point: the version number of the checkpoint it restored, 0 for the initial model."""
    seq: Count
    """Fork point: the last batch inside that checkpoint, 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationAnswer:
    incarnation: int
    steps: int
    """Train until this version number, then expect `end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """`GET /v1/policies/{policy}`: the policy's state in the ledger."""

    policy: PolicyName
    incarnation: int
    number: int
    """Newest committed number on the surviving lineage."""
    seq: int
    published: int
    """Newest published number of this incarnation, -1 for none."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """`POST /v1/batches`: the sealed manifest number `seq`, or an instalment of it; held open until
    it exists."""

    consumer: PolicyName
    seq: Count
    incarnation: Count
    wait_s: Seconds = 20.0
    instalment: Count = 0
    """Which part of a batch that is streamed (`training.stream`): 1, 2, … until the last; 0 for the
    complete batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    manifest: Manifest | None
    """None with `end` unset: not sealed yet, repeat the request."""
    digest: str = ""
    end: bool = False
    """No batch will follow; the run is complete for this consumer."""
    checkpoint_now: bool = False
    is_last: bool = True
    """False: a further instalment of this batch follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRowsRequest:
    """`POST /v1/batches/{consumer}.{seq}/rows`: the rows of a sealed batch that one rank trains."""

    indexes: Annotated[tuple[Int64, ...], Meta(max_length=1_000_000)] | None = None
    """Positions of its rows in the manifest, counted from 0; None for all of them."""
    instalment: Count = 0
    """Rows of this instalment, and positions in its manifest; 0 for the complete batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAnswer:
    """Rows in the requested order."""

    rows: tuple[RowPayload, ...]
    columns: tuple[str, ...] = ()
    """Additional columns that the manifest names; request them for rows of other partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """`POST /v1/rows` at the partition that holds them."""

    row_ids: Annotated[tuple[RowId, ...], Meta(max_length=100_000)]
    columns: Annotated[tuple[Id, ...], Meta(max_length=1024)] = ()


MAX_STATS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """`POST /v1/batches/{consumer}.{seq}/commit`."""

    incarnation: Count
    number: Count
    """The version number after this batch: one more when trained, the same when skipped."""
    skipped: Text = ""
    """Reason, when the batch changed no weights."""
    stats: Annotated[dict[Label, float], Meta(max_length=MAX_STATS)] = field(
        default_factory=dict[str, float]
    )
    """Values that are not finite are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    """`POST /v1/policies/{policy}/versions`: compare-and-set; the store already holds every
    byte."""

    incarnation: Count
    number: Count
    manifest_digest: Digest
    weights_digest: Id
    """BLAKE3 over the tensors alone: versions with equal weights have equal digests,
    whichever process made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsRequest:
    """`PUT /v1/policies/{policy}/checkpoints`: the checkpoints the trainer can restore."""

    incarnation: Count
    retained: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=10_000)]
    """(number, seq) of each complete checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRequest:
    """`PUT /v1/policies/{policy}/progress`: a long step advances."""

    num_done: Count
    """Micro-batches that the trainer has finished since its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequest:
    """`POST /v1/nodes/{node_id}/quarantine`: this node's log-probs do not match its version. No
    node of the same credential gets work again."""

    policy: PolicyName
    incarnation: Count
    why: Text
    """Reason, for logs and status."""
    boot_id: Id = ""
    """The boot of the node that sampled the rows, as they state; for the log."""


class VersionUser(StrEnum):
    NEWEST = "newest"
    """Nodes are directed to serve it, or were a moment ago."""
    NODE = "node"
    CHECKPOINT = "checkpoint"
    ROWS = "rows"
    """Rows that may be trained, or trained again, were sampled from it."""
    EVALUATION = "evaluation"
    """It is or will be evaluated, or it is the best so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInUse:
    policy: PolicyName
    incarnation: int
    number: int
    manifest_digest: str
    by: VersionUser


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsInUse:
    """`GET /v1/versions`: versions in use, of all policies; a weight store may delete the
    others."""

    versions: tuple[VersionInUse, ...]
