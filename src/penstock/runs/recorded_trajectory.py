# SPDX-License-Identifier: Apache-2.0
"""A trajectory as a run recorded it: what it is, what became of it, and its text on demand.

Owns the shape that `open_run` returns. Reads nothing; `trajectories` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.runs.decoded import DecodedTurn, Decoder
from penstock.types import (
    GroupId,
    JsonObject,
    NodeId,
    OutcomeKind,
    RowId,
    Task,
    Trajectory,
    Turn,
)


class PayloadState(StrEnum):
    STORED = "stored"
    """Its turns can be read."""
    FREED = "freed"
    """Training needs it no longer and `dataflow.keep` did not keep it."""
    FORGOTTEN = "forgotten"
    """An operator erased its session."""
    UNREADABLE = "unreadable"
    """It should be there, but is damaged or missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingUse:
    """What one policy did with the trajectory's group."""

    policy: str
    fate: str
    """`admitted`, `sealed` or `dropped`."""
    reason: str
    """Why it was dropped."""
    rule: str
    """The rule that decided; may be empty."""
    batch: int
    """The last batch it was sealed into; 0 for none."""
    step: int | None
    """The step that trained this batch; None if it is not committed, or was skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrajectory:
    """One trajectory as a run recorded it."""

    row_id: RowId
    group_id: GroupId
    slot: int
    epoch: int
    node_id: NodeId
    source: str
    task: Task | None
    """The problem; None if its group is unknown."""
    reward: float | None
    outcome: OutcomeKind
    versions: tuple[str, ...]
    """The versions that sampled its trainable tokens, such as `policy@1.5`."""
    num_tokens: int
    """Trainable sampled tokens."""
    delivered_at: float
    uses: tuple[TrainingUse, ...]
    """One for each policy that judged its group; empty for a failed or cancelled attempt."""
    columns: Mapping[str, float | bytes]
    """Values that stages added."""
    state: PayloadState
    detail: str
    """Why the rollout failed, or why its payload cannot be read."""
    payload: Trajectory | None
    """The record as delivered; None unless `state` is stored."""
    decoder: Decoder = field(repr=False, compare=False)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that trained it, one for each policy."""
        return tuple(use.step for use in self.uses if use.step is not None)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Its model calls, with token ids and log-probs; empty if they were freed."""
        return () if self.payload is None else self.payload.turns

    def decode(self) -> tuple[DecodedTurn, ...]:
        """Its model calls as text. Needs `penstock-rl[tokens]`."""
        return () if self.payload is None else self.decoder.turns(self.payload)

    @property
    def text(self) -> str:
        """All of it as the model saw and wrote it."""
        return "".join(turn.prompt + turn.raw_answer for turn in self.decode())

    @property
    def task_payload(self) -> JsonObject:
        return {} if self.task is None else self.task.payload
