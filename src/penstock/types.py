# SPDX-License-Identifier: Apache-2.0
"""The basic types of penstock. Any module may import this one; it imports only the standard
library, msgspec and `bounds`.

Arrays are little-endian bytes with typed views, never Python lists: encoding a record of 8,000
tokens takes microseconds instead of milliseconds, and nothing in between can re-tokenise it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, NewType, Protocol

import msgspec
from msgspec import Meta, Struct

from penstock.bounds import (
    MAX_AGENT_CHARS,
    MAX_ROW_ROLES,
    MAX_SANDBOX_MS,
    MAX_TOOL_CHARS,
    MAX_TOOL_USES,
    MAX_TURNS,
    Count,
    Digest,
    Finite,
    Int64,
    Label,
    Moment,
    Reward,
    Role,
    Seconds,
    Text,
    TokenCount,
    TokenSquares,
)

assert sys.byteorder == "little", "token arrays are little-endian on the wire and in memory"

# --- ids and arrays ---------------------------------------------------------------------------

PolicyName = NewType("PolicyName", str)
"""A model being trained, by name. Never a data rule."""
NodeId = NewType("NodeId", str)
"""A rollout node that joined the run; chosen by the node and kept across restarts. `SUBJECT` or
`SUBJECT.suffix`: a token for SUBJECT may act as these nodes and as no other. The name of a subject
contains no ".", so every record that names a node also names whose token it used."""
GroupId = NewType("GroupId", str)
"""One issue of a task, `p{partition}-{issue}`; nothing is ever re-hashed."""
RowId = NewType("RowId", str)
"""A trajectory, `{group_id}.{slot}.{epoch}`: its slot, and the epoch of its lease."""
TokenIds = NewType("TokenIds", bytes)
"""Token ids as little-endian int32."""
LogProbs = NewType("LogProbs", bytes)
"""One float32 per sampled token, little-endian, under the turn's sampling spec."""
JsonObject = dict[str, Any]


def subject_of_node(node_id: NodeId) -> str:
    """Whose token the node used."""
    return node_id.partition(".")[0]


def _bound(kind: Any, bound: Meta) -> None:
    """Bound a NewType wherever it is decoded; type checkers accept no Annotated in NewType."""
    kind.__supertype__ = Annotated[kind.__supertype__, bound]


_bound(PolicyName, Meta(max_length=128))
_bound(NodeId, Meta(max_length=128))
_bound(GroupId, Meta(max_length=128))
_bound(RowId, Meta(max_length=256))
_bound(TokenIds, Meta(max_length=256 << 20))
_bound(LogProbs, Meta(max_length=256 << 20))


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
    incarnation: Count
    """Which start of the trainer produced it; the ledger allocates these by compare-and-set."""
    number: Count
    """Batches that changed the weights so far; 0 is the initial model."""

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of sampled tokens and the version that sampled them."""

    start: Count
    end: Count
    incarnation: Count
    number: Count


KvAge = tuple[Count, Count]
"""Incarnation and number of the version that computed cached keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """A version that nodes should load, with the digest of its content."""

    policy: PolicyName
    incarnation: Count
    number: Count
    manifest_digest: Digest
    """BLAKE3 of the manifest in the weight store; the manifest has the digest of every tensor."""


# --- work -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One immutable problem."""

    key: str
    """Content hash: the same problem has the same key in every epoch and every run."""
    source: str
    """Name of its source."""
    ordinal: int
    """Position in its source; source and ordinal identify the problem."""
    payload: JsonObject
    """Input of the workflow and the reward."""
    workflow: str
    """What attempts it, as the run file names it."""
    seed: int
    """Derived from (run seed, source, ordinal). Slot seeds derive from it, so retries and nodes
    do not change them."""
    tags: tuple[str, ...] = ()
    """Labels; nothing in the dataflow reads them yet."""


EVALUATION_TAG = "evaluation"
"""Tag of a node that does nothing but evaluate."""
SESSION_TAG = "session"
"""Tag of a node that serves external agents."""
UNTRUSTED_TAG = "untrusted"
"""Tag that the dataflow gives a node with an untrusted credential."""
RESERVED_TAGS = (SESSION_TAG, EVALUATION_TAG, UNTRUSTED_TAG)
"""They say what a node is for and who vouches for it: its token and its command do."""

MIN_TEMPERATURE = 1e-3
"""Below this, dividing by the temperature leaves the range of float32 and gradients are NaN."""
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens were sampled; log-probabilities are only defined together with it."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] = 1.0
    """0 for greedy, else at least MIN_TEMPERATURE."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """0 keeps the full vocabulary."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Drops tokens less likely than `min_p` times the highest probability; 0 drops none."""
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] = 16
    seed: Int64 = 0
    stop: Annotated[tuple[Label, ...], Meta(max_length=16)] = ()
    json_schema: Annotated[str, Meta(max_length=64 << 10)] = ""
    """JSON schema that the answer must match. A grammar then restricts the distribution, which a
    trainer cannot recompute, so such an answer is never trained."""


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its answer, or a stop string appeared."""
    LENGTH = "length"
    """`max_tokens` or the context window was reached."""
    ABORT = "abort"
    """The engine aborted the request; the turn is kept but never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoices:
    """Which experts of a mixture an engine chose for each token, in every layer that has experts.

    A token that the engine did not compute, such as the last one of an answer, has no choice."""

    num_layers: Annotated[int, Meta(ge=1, le=1024)]
    """Layers with experts."""
    num_chosen: Annotated[int, Meta(ge=1, le=256)]
    """Experts per token and layer."""
    num_experts: Annotated[int, Meta(ge=1, lt=1 << 16)]
    """Experts per layer."""
    choices: Annotated[bytes, Meta(max_length=1 << 30)]
    """Tokens × layers × chosen experts: one byte each if there are fewer than 256 experts, else
    little-endian uint16. All bits set where there is no choice."""

    @property
    def item_bytes(self) -> int:
        return 1 if self.num_experts < 256 else 2

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.num_chosen * self.item_bytes

    def last(self, num_tokens: int) -> ExpertChoices:
        """Of this many tokens at the end; earlier ones without a choice if there are too few."""
        size = num_tokens * self.token_bytes
        known = self.choices[max(0, len(self.choices) - size) :]
        return replace(self, choices=known.rjust(size, NO_CHOICE))


NO_CHOICE = b"\xff"
"""Every byte of a token's choices if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call, exactly as the engine performed it."""

    policy: PolicyName
    """The policy that answered."""
    parent: Int64
    """Index of the turn whose full context this one extends; -1 for a new context. The full prompt
    is the parent's context, then its sampled ids, then `prompt_ids`."""
    prompt_ids: TokenIds
    """Only the ids after the parent's context, so shared tokens are stored once per session."""
    sampled_ids: TokenIds
    """Token ids exactly as the engine sampled them; never re-tokenised."""
    logprobs: LogProbs
    """One per sampled id, under exactly `sampling`."""
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=4096)]
    """Which version sampled which tokens; several if the weights changed during the answer."""
    sampling: SamplingSpec
    """How the tokens were drawn."""
    finish: FinishReason
    """Why the answer ended."""
    reached_agent: bool = True
    """False: the answer never reached its agent; it stays in the token tree but is not trained."""
    started_at: Moment = 0.0
    """Seconds since 1970, by the node's clock."""
    ended_at: Moment = 0.0
    """Seconds since 1970, by the node's clock."""
    role: Role = ""
    """The policy's role in the workflow, if it sets one; `route` rules can select by it. At most
    MAX_ROLE_CHARS characters."""
    reward: Reward | None = None
    """Its own reward, if the workflow gave one; it replaces its role's reward for this turn."""
    agent: Annotated[str, Meta(max_length=MAX_AGENT_CHARS)] = ""
    """The sub-agent that made the call, as a path of spawns like `0.2`; empty for the workflow."""
    kv: KvAge | None = None
    """With `kv: keep`: the oldest version whose keys and values its tokens may have attended to.
    It counts for staleness like a version that sampled tokens. None: all keys and values belong to
    the version that sampled the token."""
    experts: ExpertChoices | None = None
    """Expert choices of `prompt_ids` and then `sampled_ids`, if the engine records them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One call of a tool, for people: what the model saw of it is in the next turn's prompt."""

    turn: Int64
    """Index of the last turn before it; -1 for none."""
    name: Label
    arguments: Annotated[str, Meta(max_length=MAX_TOOL_CHARS)]
    """JSON, cut at MAX_TOOL_CHARS."""
    result: Annotated[str, Meta(max_length=MAX_TOOL_CHARS)]
    """Text or an error, cut at MAX_TOOL_CHARS."""
    is_error: bool = False
    seconds: Seconds = 0.0
    cost: Finite = 0.0
    """What the server says that it cost, in its own unit; 0 if it says nothing."""
    agent: Annotated[str, Meta(max_length=MAX_AGENT_CHARS)] = ""
    """As in Turn."""


def versions_of(turn: Turn) -> set[KvAge]:
    """Incarnation and number of all versions of weights, and of kept keys, that its tokens used."""
    found = {(span.incarnation, span.number) for span in turn.spans}
    return found if turn.kv is None else found | {turn.kv}


def is_usable(turn: Turn) -> bool:
    """Whether the answer may be used for training: it was finished and reached its agent, and its
    log-probs can be recomputed."""
    return (
        turn.reached_agent
        and turn.finish is not FinishReason.ABORT
        and not turn.sampling.json_schema
    )


def is_trainable(turn: Turn) -> bool:
    """Whether the turn has a gradient. Greedy sampling has none under its own sampling spec."""
    return is_usable(turn) and turn.sampling.temperature > 0 and bool(turn.sampled_ids)


class OutcomeKind(StrEnum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Stopped at a configured limit; its tokens count."""
    FAILED = "failed"
    """Something outside the model failed. Never scored as 0: retried, then excluded."""
    CANCELLED = "cancelled"
    """Cancelled on purpose: the node drains, or the group was dropped."""


class FailureKind(StrEnum):
    ENGINE = "engine"
    """The inference engine rejected the request or crashed."""
    WORKFLOW = "workflow"
    """The workflow raised, or its program exited with a non-zero status."""
    REWARD = "reward"
    """The reward function raised or did not return a finite number."""
    REWARD_DEADLINE = "reward_deadline"
    """The reward function was killed at its deadline."""
    DEADLINE = "deadline"
    """The attempt exceeded its start-to-close time."""
    SANDBOX = "sandbox"
    """The sandbox of a program, tool or reward failed: never the fault of an attempt."""
    ENVIRONMENT = "environment"
    """The environment hung, crashed, or returned what its protocol does not allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended. A failed or cancelled one has no reward."""

    kind: OutcomeKind
    reason: Text = ""
    """`length | deadline` for truncated, a FailureKind for failed, free text for cancelled."""
    detail: Text = ""
    """Error and location, for people. Never contains secrets; at most 2,000 characters."""

    @property
    def has_reward(self) -> bool:
        """Whether such a rollout is scored."""
        return self.kind in (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout of one slot; immutable once delivered."""

    row_id: RowId
    """GROUP.SLOT.EPOCH."""
    group_id: GroupId
    """The group it belongs to."""
    slot: Count
    """Its place in the group."""
    epoch: Count
    """The lease it was made under; a result under an older one is refused."""
    attempt: Count
    """Which try at the slot it is, counted from 1."""
    node_id: NodeId
    """The node that made it."""
    turns: Annotated[tuple[Turn, ...], Meta(max_length=MAX_TURNS)]
    """Its model calls, in order."""
    reward: Reward | None
    """Its score; None if it failed, was cancelled, or is scored later."""
    outcome: Outcome
    """How it ended."""
    started_at: Moment = 0.0
    """Seconds since 1970, by the node's clock."""
    ended_at: Moment = 0.0
    """Seconds since 1970, by the node's clock."""
    boot_id: Label = ""
    """Which start of the node process produced it; may be empty."""
    role_rewards: Annotated[Mapping[Role, Reward], Meta(max_length=MAX_ROW_ROLES)] = field(
        default_factory=dict[str, float]
    )
    """Rewards of roles that have their own; turns of any other role earn `reward`."""
    tool_uses: Annotated[tuple[ToolUse, ...], Meta(max_length=MAX_TOOL_USES)] = ()
    """Its tool calls, in order."""
    sandbox_ms: Annotated[int, Meta(ge=0, le=MAX_SANDBOX_MS)] = 0
    """How long sandboxes of its own were open, all together, by the node's clock."""


class DropReason(StrEnum):
    """Why a group was not trained; reports count the tokens of each."""

    STALE = "stale"
    """Its oldest token exceeds `max_staleness` for every batch it could still enter."""
    FAILED_SLOTS = "failed_slots"
    """Too few members have a result after all attempts to close the group."""
    ABSENT = "absent"
    """The group has no trainable turn of this policy: only other policies acted."""
    UNIFORM_REWARD = "uniform_reward"
    """Every member earned the same reward, so no advantage exists."""
    OUTPACED = "outpaced"
    """The policy already has as many groups as its staleness bound allows."""
    REMAINDER = "remainder"
    """The run ended before a batch could use it."""
    COLUMN_FAILED = "column_failed"
    """A required column failed or was overdue for too many of its rows."""
    OVERLONG = "overlong"
    """Too many of its answers were truncated at the length limit, by a rule's measure."""
    OUTCOME = "outcome"
    """A rule rejects the outcomes of its rows."""
    REWARD_RANGE = "reward_range"
    """Its mean reward is outside the range that a rule accepts."""
    PARTNER_LAG = "partner_lag"
    """Tokens of another policy in it exceed `max_partner_lag`, so they are not its partner now."""
    DUPLICATE = "duplicate"
    """The same task was admitted recently."""
    RULE = "rule"
    """A custom rule rejected it; the rule is recorded with the reason."""
    OVERDUE = "overdue"
    """It waited or ran longer than its schedule-to-close limit."""
    PARTITION_LOST = "partition_lost"
    """Its partition was declared lost before the group was sealed."""
    FORGOTTEN = "forgotten"
    """Deleted on request: its space was cleared, or its session forgotten."""


# --- batches ----------------------------------------------------------------------------------

SANDBOX_MS = "sandbox_ms"
"""Value of a row with own sandboxes: how long they were open, all together."""
ROLE_REWARD = "reward."
"""Prefix of the value of a row that holds the reward of a role; the role's name follows."""
TURN_REWARD = "turn_reward."
"""The same for the mean reward of a role's turns, of rows in which one of them has its own."""


class RowSummary(Struct, frozen=True, kw_only=True):
    """What the coordinator keeps of a delivered row: about 100 bytes, never its tokens. A Struct,
    because a step makes and reads thousands."""

    row_id: RowId
    digest: Label
    """BLAKE3 of the payload as delivered."""
    reward: Finite | None
    """None until the scoring stage has written it."""
    outcome: OutcomeKind
    sampled: Mapping[PolicyName, TokenCount]
    """Trainable sampled tokens by policy."""
    versions: Mapping[PolicyName, tuple[tuple[Count, Count], ...]]
    """Every (incarnation, number) that sampled those tokens, by policy. The oldest of them may
    change with a new incarnation, so it is computed on each use."""
    columns: Mapping[Label, Label] = msgspec.field(default_factory=dict[str, str])
    """Digests of the additional columns this consumer needs, by name."""
    values: Mapping[Label, Finite] = msgspec.field(default_factory=dict[str, float])
    """Scalar columns, by name; small enough to be sent with the row."""
    roles: Mapping[PolicyName, Mapping[Label, TokenCount]] = msgspec.field(
        default_factory=dict[PolicyName, Mapping[str, int]]
    )
    """The same tokens by role, for policies with named roles."""
    compute_cost: Mapping[PolicyName, tuple[TokenCount, TokenSquares]] = msgspec.field(
        default_factory=dict[PolicyName, tuple[int, int]]
    )
    """Cost of training on the row, by policy: the summed lengths of its samples (prompt and context
    included), and the sum of their squares. Empty if nothing is trainable."""

    @property
    def parts(self) -> Iterable[tuple[tuple[PolicyName, str], int]]:
        """Trainable tokens by the (policy, role) that sampled them."""
        for policy, tokens in self.sampled.items():
            for role, part in self.roles.get(policy, {"": tokens}).items():
                yield (policy, role), part

    def tokens_for(
        self, policy: PolicyName, visible_roles: Collection[tuple[PolicyName, str]] | None
    ) -> int:
        """Tokens that this policy's trainer trains: all with a (policy, role) in `visible_roles`,
        or the policy's own if None."""
        if visible_roles is None:
            return self.sampled.get(policy, 0)
        return sum(tokens for pair, tokens in self.parts if pair in visible_roles)

    def compute_cost_for(
        self, policy: PolicyName, visible_roles: Collection[tuple[PolicyName, str]] | None
    ) -> tuple[int, int]:
        """`compute_cost` for a trainer with these visible roles. An upper bound: every visible
        policy counts separately and with all its roles, even if contexts are shared. Falls back to
        the sampled tokens if the row has no cost."""
        if not self.compute_cost:
            tokens = self.tokens_for(policy, visible_roles)
            return tokens, tokens**2
        policies = {policy}
        if visible_roles is not None:
            policies = {pair[0] for pair, _ in self.parts if pair in visible_roles}
        parts = [self.compute_cost[one] for one in policies if one in self.compute_cost]
        return sum(tokens for tokens, _ in parts), sum(squares for _, squares in parts)

    @property
    def score(self) -> float:
        """The reward of a scored row; rules and trainers only get scored rows."""
        assert self.reward is not None, f"row {self.row_id} has no reward yet"
        return self.reward

    def role_reward(self, role: str) -> float:
        """The reward of a role: its own, or else the row's."""
        return self.values.get(ROLE_REWARD + role, self.score)

    def role_rewards(
        self, policy: PolicyName, visible_roles: Collection[tuple[PolicyName, str]] | None
    ) -> dict[str, float]:
        """By role that this policy's trainer sees in the row: the mean reward of its turns, each
        with its own or the role's."""
        roles = self._visible(policy, visible_roles)
        return {role: self.values.get(TURN_REWARD + role, self.role_reward(role)) for role in roles}

    def reward_for(
        self, policy: PolicyName, visible_roles: Collection[tuple[PolicyName, str]] | None
    ) -> float:
        """The reward of this policy in the row: the mean over its roles that its trainer sees."""
        if not self.values:
            return self.score
        rewards = [self.role_reward(role) for role in self._visible(policy, visible_roles)]
        return sum(rewards) / len(rewards) if rewards else self.score

    def _visible(
        self, policy: PolicyName, visible_roles: Collection[tuple[PolicyName, str]] | None
    ) -> list[str]:
        pairs = (pair for pair, _ in self.parts)
        if visible_roles is None:
            return [role for made_by, role in pairs if made_by == policy]
        return [role for made_by, role in pairs if (made_by, role) in visible_roles]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedGroup:
    """A group as part of a sealed batch."""

    group_id: GroupId
    task_key: str
    rows: tuple[RowSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The immutable content of one batch; serving it again re-checks nothing."""

    consumer: str
    seq: int
    """1, 2, 3, … per consumer."""
    trains_from: int
    """Number of the version that this batch trains from, as of sealing."""
    groups: tuple[SealedGroup, ...]
    visible_roles: tuple[tuple[PolicyName, str], ...] | None = None
    """The (policy, role) pairs whose turns the consumer trains; None for all turns of the
    consumer's policy."""

    @property
    def rows(self) -> Iterable[RowSummary]:
        return (row for group in self.groups for row in group.rows)

    def tokens(self, row: RowSummary) -> int:
        """Tokens of this row that the consumer trains."""
        return row.tokens_for(PolicyName(self.consumer), self.visible_roles)

    def reward(self, row: RowSummary) -> float:
        """The consumer's reward in this row."""
        return row.reward_for(PolicyName(self.consumer), self.visible_roles)

    def compute_cost(self, row: RowSummary) -> tuple[int, int]:
        """Cost of this row for the consumer: tokens, and squared lengths of its samples."""
        return row.compute_cost_for(PolicyName(self.consumer), self.visible_roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPayload:
    """A row as sent to a trainer."""

    row_id: RowId
    payload: bytes | None
    """None: the row is unavailable, so every rank masks it; or it is at another partition."""
    at: str = ""
    """URL of the partition to fetch it from: `POST {at}/v1/rows`."""
    columns: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Values of the additional columns that the manifest lists for it."""
    filler: bytes = b""
    """Padding without meaning: keeps the announced length if a row turns out to be damaged while
    the response is being sent."""


# --- input of rules ---------------------------------------------------------------------------


class RandomDraw(Protocol):
    """Returns the next random number in [0, 1). Derived from the run's seed and recorded, so a
    decision can be replayed."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """One source that still has tasks."""

    name: str
    weight: float
    served: int
    """Tasks issued from it so far."""


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
    def rewards(self) -> Sequence[float]:
        """The policy's reward in each row: the mean over its roles there."""
        ...

    @property
    def role_rewards(self) -> Mapping[str, Sequence[float]]:
        """By role that the policy's trainer sees: the mean reward of its turns in each row in which
        it took part. One entry with the rewards of the rows if no role has a name."""
        ...


class Hook(StrEnum):
    """The point at which a rule decides."""

    MIX = "mix"
    """Which source next?"""
    CURATE = "curate"
    """Is this task worth rolling out now?"""
    ADMIT = "admit"
    """May this closed group enter?"""
    SELECT = "select"
    """Which ready groups go into the next batch?"""
    REPLAY = "replay"
    """Which trained groups may be trained again?"""
    ROUTE = "route"
    """Which consumers see which turns?"""


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
