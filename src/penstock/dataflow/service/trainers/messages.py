# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls that trainers make.

Owns shapes only. Every mutating call carries an id chosen by its caller; repeating it is a no-op.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from penstock.types import Manifest, PolicyName, RowId, RowPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationRequest:
    """`POST /v1/policies/{policy}/incarnations`: become this policy's only trainer."""

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
    """`POST /v1/batches`: the sealed manifest number `seq`; held open until it exists."""

    consumer: PolicyName
    seq: int
    incarnation: int
    wait_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    manifest: Manifest | None
    """None with `end` unset: not sealed yet, repeat the request."""
    digest: str = ""
    end: bool = False
    """No batch will follow; the run is complete for this consumer."""
    checkpoint_now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRowsRequest:
    """`POST /v1/batches/{consumer}.{seq}/rows`: the rows of a sealed batch that one rank trains."""

    indexes: tuple[int, ...] | None = None
    """Positions of its rows in the manifest, counted from 0; None for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAnswer:
    """Rows in the requested order."""

    rows: tuple[RowPayload, ...]
    columns: tuple[str, ...] = ()
    """Additional columns that the manifest names; request them for rows of other partitions."""


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
    """BLAKE3 over the tensors alone: versions with equal weights have equal digests,
    whichever process made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsRequest:
    """`PUT /v1/policies/{policy}/checkpoints`: the checkpoints the trainer can restore."""

    incarnation: int
    retained: tuple[tuple[int, int], ...]
    """(number, seq) of each complete checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequest:
    """`POST /v1/nodes/{node_id}/quarantine`: this node's log-probs do not match its version. No
    node of the same credential gets work again."""

    policy: PolicyName
    incarnation: int
    why: str
    """Reason, for logs and status."""
    boot_id: str = ""
    """The boot of the node that sampled the rows, as they state; for the log."""


class VersionUser(StrEnum):
    NEWEST = "newest"
    """Nodes are directed to serve it, or were a moment ago."""
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
    """`GET /v1/versions`: versions in use, of all policies; a weight store may delete the
    others."""

    versions: tuple[VersionInUse, ...]
