# SPDX-License-Identifier: Apache-2.0
"""The nouns of penstock. Any module may import this one; it imports only the standard library.

Arrays are little-endian bytes with typed views, never Python lists: a record of 8,000 tokens costs
microseconds to encode instead of milliseconds, and nothing in between can re-tokenise it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPayload:
    row_id: RowId
    payload: bytes | None
    """None: the row is gone, every rank sees it masked; or it lies at another partition."""
    at: str = ""
    """Where to fetch it: `POST {at}/v1/rows`."""
    columns: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Values of the further columns that the manifest names for it."""
    filler: bytes = b""
    """Means nothing: a row found damaged while its answer was under way is as long as announced."""


assert sys.byteorder == "little", "token arrays are little-endian on the wire and in memory"

PolicyName = NewType("PolicyName", str)
"""A model being trained, by name. Never a data rule."""
NodeId = NewType("NodeId", str)
"""One rollout process that joined the run; chosen by the node and kept over its restarts."""
GroupId = NewType("GroupId", str)
"""One issue of a task, `p{partition}-{issue}`; carries its partition for ever, so nothing is
ever re-hashed."""
RowId = NewType("RowId", str)
"""A trajectory by name, `{group_id}.{slot}.{epoch}`: the slot it answers and the lease it was
made under."""
TokenIds = NewType("TokenIds", bytes)
"""Token ids as little-endian int32."""
LogProbs = NewType("LogProbs", bytes)
"""One float32 per sampled token, little-endian, defined under the turn's sampling spec."""
JsonObject = dict[str, Any]


def token_ids(ids: Iterable[int]) -> TokenIds:
    return TokenIds(array("i", ids).tobytes())


def view_ids(ids: TokenIds) -> memoryview[int]:
    """The ids as integers, without a copy."""
    return memoryview(ids).cast("i")


def log_probs(values: Iterable[float]) -> LogProbs:
    return LogProbs(array("f", values).tobytes())


def view_log_probs(values: LogProbs) -> memoryview[float]:
    """The log-probabilities as floats, without a copy."""
    return memoryview(values).cast("f")


# --- versions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """One state of a policy's weights: `policy@incarnation.number`."""

    policy: PolicyName
    incarnation: int
    """Which life of the trainer made it; the ledger allocates these by compare-and-set."""
    number: int
    """How many batches changed the weights; 0 is the initial model."""

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of sampled tokens and the version that sampled them."""

    start: int
    end: int
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """A version a node should hold, with the proof of its content."""

    policy: PolicyName
    incarnation: int
    number: int
    manifest_digest: str
    """BLAKE3 of the manifest in the weight store; the manifest names every tensor's own digest."""


# --- work -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One immutable problem."""

    key: str
    """Content hash without epoch: the same problem has the same key in every pass and every run."""
    source: str
    ordinal: int
    """Position in its source; with the source it says which problem this is."""
    payload: JsonObject
    """What the workflow and the reward see."""
    workflow: str
    seed: int
    """Drawn from (run seed, source, ordinal); slots derive theirs from it, so no retry or node
    changes it."""
    tags: tuple[str, ...] = ()


SESSION_TAG = "session"
"""Tag of a node that serves agents from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens were drawn; a log-probability means nothing without it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Drops tokens less likely than this share of the likeliest one; 0 drops none."""
    max_tokens: int = 16
    seed: int = 0
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    """JSON of a schema that the answer must fit. Its tokens are drawn from what a grammar leaves of
    the distribution, which no trainer can compute again: such an answer is never trained."""


MAX_ROLE_CHARS = 64
"""Characters of a role: it is a name, and the ledger keeps it with the row."""


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its answer, or a stop string appeared."""
    LENGTH = "length"
    """`max_tokens` or the context window was reached."""
    ABORT = "abort"
    """The engine gave up; the turn is kept and never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call, exactly as the engine performed it."""

    policy: PolicyName
    parent: int
    """Index of the turn whose whole context this one extends, -1 for a fresh context.
    The full prompt is: context of the parent, then its sampled ids, then `prompt_ids`."""
    prompt_ids: TokenIds
    """Only the ids that follow the parent's context; a session costs memory by distinct tokens."""
    sampled_ids: TokenIds
    """Token ids exactly as the engine sampled them; never re-tokenised."""
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    """Which version sampled which of these tokens; several when weights changed in mid-answer."""
    sampling: SamplingSpec
    finish: FinishReason
    reached_agent: bool = True
    """An answer that never reached its agent stays in the tree untrained."""
    started_at: float = 0.0
    ended_at: float = 0.0
    role: str = ""
    """What the policy acted as, when the workflow says so; `route` rules may go by it. At most
    MAX_ROLE characters."""


def is_usable(turn: Turn) -> bool:
    """Whether anybody may learn from its answer: it was finished, it reached its agent, and its
    log-probs can be computed again."""
    return (
        turn.reached_agent
        and turn.finish is not FinishReason.ABORT
        and not turn.sampling.json_schema
    )


def is_trainable(turn: Turn) -> bool:
    """Whether a trainer that sees it has a gradient to take: a greedy choice has none under its own
    spec."""
    return is_usable(turn) and turn.sampling.temperature > 0 and bool(turn.sampled_ids)


class OutcomeKind(StrEnum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Cut by a declared limit; its tokens count."""
    FAILED = "failed"
    """Something around the model broke. Failure is not a reward: retried, then excluded, never
    0."""
    CANCELLED = "cancelled"
    """Abandoned on purpose: drained node, doomed group."""


class FailureKind(StrEnum):
    ENGINE = "engine"
    """The inference engine refused or died."""
    WORKFLOW = "workflow"
    """The workflow raised, or its program exited non-zero."""
    REWARD = "reward"
    """The reward function raised or returned something that is no finite number."""
    REWARD_DEADLINE = "reward_deadline"
    """The reward function was killed at its deadline."""
    DEADLINE = "deadline"
    """The attempt used up its start-to-close time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    kind: OutcomeKind
    reason: str = ""
    """`length | deadline` for truncated, a FailureKind for failed, free text for cancelled."""
    detail: str = ""
    """For people: the error with its place. Never a secret, never longer than 2,000 characters."""

    @property
    def has_reward(self) -> bool:
        return self.kind in (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout of one slot; immutable once delivered."""

    row_id: RowId
    group_id: GroupId
    slot: int
    epoch: int
    attempt: int
    node_id: NodeId
    turns: tuple[Turn, ...]
    reward: float | None
    outcome: Outcome
    started_at: float = 0.0
    ended_at: float = 0.0
    boot_id: str = ""
    """Which life of the node made it; empty where the node does not say."""


class DropReason(StrEnum):
    """Why a group was not trained; each is counted in tokens."""

    STALE = "stale"
    """Its oldest token fell behind `max_staleness` for every batch it could still enter."""
    FAILED_SLOTS = "failed_slots"
    """The closing policy found too few good members after all attempts."""
    ABSENT = "absent"
    """The policy has no token in it that its trainer sees: only others acted."""
    UNIFORM_REWARD = "uniform_reward"
    """Every member earned the same reward, so no advantage exists."""
    OUTPACED = "outpaced"
    """The policy already holds all the groups its staleness bound has room for."""
    REMAINDER = "remainder"
    """The run ended before a batch could use it."""
    COLUMN_FAILED = "column_failed"
    """A column its consumer requires failed or was overdue for too many of its rows."""
    OVERLONG = "overlong"
    """A rule found too many of its answers cut at the length limit."""
    OUTCOME = "outcome"
    """A rule refuses the outcomes of its rows."""
    REWARD_RANGE = "reward_range"
    """Its mean reward lies outside the range a rule accepts."""
    DUPLICATE = "duplicate"
    """The same task was admitted not long ago."""
    RULE = "rule"
    """A rule of the user's own refused it; the rule is named beside the reason."""
    OVERDUE = "overdue"
    """It waited or ran longer than its schedule-to-close limit."""
    PARTITION_LOST = "partition_lost"
    """Its partition was declared lost before the group was sealed."""
    FORGOTTEN = "forgotten"
    """Its space was cleared, or its owner asked for it to be forgotten."""


# --- batches ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """What home knows of a delivered row: about 100 bytes, never its tokens."""

    row_id: RowId
    digest: str
    """BLAKE3 of the payload as delivered."""
    reward: float | None
    """None until the stage that scores it has written the column."""
    outcome: OutcomeKind
    sampled: Mapping[PolicyName, int]
    """Trainable sampled tokens by policy."""
    versions: Mapping[PolicyName, tuple[tuple[int, int], ...]]
    """Every (incarnation, number) that sampled those tokens, by policy. Which is the oldest may
    change with a fork, so it is asked anew each time."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the further columns this consumer needs, by name."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Columns that are one number, by name: small enough to travel with the row."""
    roles: Mapping[PolicyName, Mapping[str, int]] = field(
        default_factory=dict[PolicyName, Mapping[str, int]]
    )
    """Of policies that acted in named roles, the same tokens by role."""
    compute_cost: Mapping[PolicyName, tuple[int, int]] = field(
        default_factory=dict[PolicyName, tuple[int, int]]
    )
    """What a trainer of the policy computes of the row, prompts and context included: tokens of the
    samples it is cut into, and the squares of their lengths, both summed. Empty where it trains
    nothing."""

    @property
    def parts(self) -> Iterable[tuple[tuple[PolicyName, str], int]]:
        """Its trainable tokens by the (policy, role) that sampled them."""
        for policy, tokens in self.sampled.items():
            for role, part in self.roles.get(policy, {"": tokens}).items():
                yield (policy, role), part

    def tokens_for(
        self, policy: PolicyName, visible_roles: Collection[tuple[PolicyName, str]] | None
    ) -> int:
        """Tokens that this policy's trainer sees: those of these pairs, or None for its own."""
        if visible_roles is None:
            return self.sampled.get(policy, 0)
        return sum(tokens for pair, tokens in self.parts if pair in visible_roles)

    def compute_cost_for(
        self, policy: PolicyName, visible_roles: Collection[tuple[PolicyName, str]] | None
    ) -> tuple[int, int]:
        """As `compute_cost`, for a trainer that sees this. Each policy that it sees counts as if
        seen alone and in all its roles: where it sees only some, or contexts are shared, it is too
        much. Of a row that does not say, its sampled tokens."""
        if not self.compute_cost:
            tokens = self.tokens_for(policy, visible_roles)
            return tokens, tokens**2
        seen = {policy}
        if visible_roles is not None:
            seen = {pair[0] for pair, _ in self.parts if pair in visible_roles}
        parts = [self.compute_cost[one] for one in seen if one in self.compute_cost]
        return sum(tokens for tokens, _ in parts), sum(squares for _, squares in parts)

    @property
    def score(self) -> float:
        """The reward of a row that rules or trainers see: by then it has one."""
        assert self.reward is not None, f"row {self.row_id} has no reward yet"
        return self.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedGroup:
    group_id: GroupId
    task_key: str
    rows: tuple[RowSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of one batch, fixed for ever; serving it again re-checks nothing."""

    consumer: str
    seq: int
    """1, 2, 3, … per consumer."""
    trains_from: int
    """Number of the version this batch trains from, as judged at sealing."""
    groups: tuple[SealedGroup, ...]
    visible_roles: tuple[tuple[PolicyName, str], ...] | None = None
    """The (policy, role) pairs whose turns its consumer trains; None: all turns of its own
    policy."""

    @property
    def rows(self) -> Iterable[RowSummary]:
        return (row for group in self.groups for row in group.rows)

    def tokens(self, row: RowSummary) -> int:
        """Tokens of this row that the consumer trains."""
        return row.tokens_for(PolicyName(self.consumer), self.visible_roles)

    def compute_cost(self, row: RowSummary) -> tuple[int, int]:
        """What the consumer computes of this row: tokens, and squared lengths of its samples."""
        return row.compute_cost_for(PolicyName(self.consumer), self.visible_roles)


# --- what rules see ---------------------------------------------------------------------------


class RandomDraw(Protocol):
    """Randomness as an argument: the next number in [0, 1). Derived from the run's seed and
    recorded, so a decision can be replayed."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """One source that still has tasks."""

    name: str
    weight: float
    served: int


class JudgedGroup(Protocol):
    """A closed group as rules judge it and learn from it, for one policy."""

    @property
    def group_id(self) -> GroupId: ...
    @property
    def task_key(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def policy(self) -> PolicyName: ...
    @property
    def number(self) -> int:
        """Committed version of the policy when it was judged."""
        ...

    @property
    def rows(self) -> Sequence[RowSummary]:
        """Members of which the policy's trainer sees any turn, each with a reward."""
        ...

    @property
    def rewards(self) -> Sequence[float]: ...


class Candidate(Protocol):
    """A group that may go into the next batch, fresh or from the replay pool."""

    @property
    def group_id(self) -> GroupId: ...
    @property
    def task_key(self) -> str: ...
    @property
    def oldest(self) -> int:
        """Oldest version of its tokens, on the surviving lineage."""
        ...

    @property
    def arrival(self) -> int:
        """Order in which it was admitted."""
        ...

    @property
    def tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def rewards(self) -> Sequence[float]: ...
    @property
    def uses(self) -> int:
        """Batches that it was in."""
        ...
