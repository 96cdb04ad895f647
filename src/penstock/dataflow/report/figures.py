# SPDX-License-Identifier: Apache-2.0
"""What goes into a balance report: plain figures that a service fills and a simulator makes up.

Owns the words of the report and the thresholds of its rule. Reads no clock and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.types import DropReason, NodeId, PolicyName

REFUSAL_REASONS = frozenset(
    {
        DropReason.FAILED_SLOTS,
        DropReason.ABSENT,
        DropReason.UNIFORM_REWARD,
        DropReason.OUTPACED,
        DropReason.OVERLONG,
        DropReason.OUTCOME,
        DropReason.REWARD_RANGE,
        DropReason.DUPLICATE,
        DropReason.RULE,
        DropReason.OVERDUE,
    }
)
"""Reasons by which closing, pacing or a rule keeps a group out. Every other reason takes away what
had entered, so that entered = consumed + queued + lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Trajectories and their sampled tokens, of one policy. A trajectory with turns of two
    policies counts once for each."""

    sequences: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(sequences=self.sequences + other.sequences, tokens=self.tokens + other.tokens)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(sequences=self.sequences - other.sequences, tokens=self.tokens - other.tokens)


ZERO = Counts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What went past the gates between node and trainer."""

    produced: Counts = ZERO
    """Delivered by nodes, whatever the outcome."""
    entered: Counts = ZERO
    """Refused neither by closing, nor by pacing, nor by a rule; counted before any of it
    expires."""
    consumed: Counts = ZERO
    """Sealed into a batch for the first time."""
    replayed: Counts = ZERO
    """Sealed into batches again."""
    wasted: Mapping[str, Counts] = field(default_factory=dict[str, Counts])
    """Never trained, by reason: a DropReason, or the outcome of an attempt that came to nothing."""

    def __sub__(self, before: Flow) -> Flow:
        wasted = {why: n - before.wasted.get(why, ZERO) for why, n in self.wasted.items()}
        return Flow(
            produced=self.produced - before.produced,
            entered=self.entered - before.entered,
            consumed=self.consumed - before.consumed,
            replayed=self.replayed - before.replayed,
            wasted={why: counts for why, counts in wasted.items() if counts != ZERO},
        )

    @property
    def stale(self) -> Counts:
        return self.wasted.get(DropReason.STALE, ZERO)


class ScalingBranch(StrEnum):
    SCALE_UP = "scale_up"
    HOLD = "hold"
    SCALE_DOWN = "scale_down"


class TrainerActivity(StrEnum):
    OFFLINE = "offline"
    """No trainer has taken over yet, or its successor had to: nobody was there."""
    STARTING = "starting"
    """Took over, has not asked for a batch yet."""
    WAITING = "waiting"
    """Asked for a batch that was not served yet."""
    TRAINING = "training"
    """Served, not committed: reading rows and computing."""
    PUBLISHING = "publishing"
    """Committed, not published."""
    EVALUATING = "evaluating"
    """As told by the trainer, in its commits."""
    OTHER = "other"
    """Published, and has not asked again: checkpoints and the rest."""


class NodeActivity(StrEnum):
    STARTING = "starting"
    """Joined, no engine live yet."""
    ROLLING_OUT = "rolling_out"
    """Held at least one slot."""
    LOADING = "loading"
    """Held nothing, and served an older version than the newest published one."""
    WAITING = "waiting"
    """Held nothing, ready for work."""
    DRAINING = "draining"
    SILENT = "silent"
    """Unheard for so long that its leases were given to others; counted from its last word."""


Account = Mapping[str, float]
"""Seconds by activity; their sum is the wall clock of whoever it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One step of a trainer, from the moment it asked for its batch to the moment it asked for
    the next one."""

    wait_s: float
    step_s: float
    """The whole step, its wait included; evaluation is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The stretch of the run that a report judges: some K versions."""

    index: int
    """0, 1, 2, … in this life of the service."""
    opened_at: float
    closed_at: float
    complete: bool
    """False: the first window, as far as it got; it decides nothing."""

    @property
    def wall_s(self) -> float:
        return max(0.0, self.closed_at - self.opened_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    policy: PolicyName
    done: bool
    """Has trained all its steps: its waits say nothing any more."""
    num_versions: int
    """Batches committed in the window."""
    eval_s: float
    """Evaluation in the window."""
    samples: tuple[StepTiming, ...]
    """Steps that ended in the window, without the first one after a start or an evaluation."""
    window: Flow
    total: Flow
    """Since the run began."""
    staleness: Mapping[int, Counts]
    """Rows consumed in the window, by staleness in versions."""
    issued: int
    """Groups out with nodes."""
    ready: int
    """Groups admitted, not sealed."""
    sealed: int
    """Batches sealed, not committed."""
    account: Account


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    node_id: NodeId
    activity: NodeActivity
    silent_s: float
    gpus: int
    cost_per_hour: float
    num_leases: int
    capacity: int
    produced: Counts
    accepted: Counts
    """Both in the window."""
    account: Account
    """Since it joined."""
    window_account: Account
    left: bool = False
    """Took its leave in this window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingAction:
    """A change of the pool that was recommended."""

    branch: ScalingBranch
    at: float
    gpus_before: int
    target_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMemory:
    """What the rule must remember from window to window."""

    low_windows: int = 0
    """Consecutive windows in the low zone, the newest included."""
    last_action: ScalingAction | None = None
    cooldown_until: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    run: str
    since: float
    """When this life of the service began; time accounts count from here."""
    window: Window
    policies: tuple[PolicyFigures, ...]
    nodes: tuple[NodeFigures, ...]
    departed_time: Account
    """Time of nodes that left in earlier windows."""
    waiting_slots: int
    """Issued, held by no node."""
    start_s_p90: float
    """Of node starts: from joining to the first live engine."""
    memory: RuleMemory = RuleMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """Thresholds of the three-zone rule."""

    tau_low: float = 0.05
    tau_high: float = 0.10
    rho: float = 1.10
    window_versions: int = 10
    min_gpus: int = 1
    max_gpus: int | None = None
    node_start_s: float = 0.0
    cooldown_windows: float = 2.0
    cooldown_starts: float = 1.5
    low_windows: int = 2
    max_step: float = 0.5
    suspect_s: float = 6.0
