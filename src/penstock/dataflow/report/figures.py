# SPDX-License-Identifier: Apache-2.0
"""Input of a balance report: plain figures, from a service or a simulation.

Owns the report's vocabulary and the settings of its rule. Reads no clock and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.dataflow.report.shape import ZERO, ActionReport, Amount, WindowReport
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
"""Reasons for rejecting a group before it enters. Groups dropped for any other reason had entered
before, so that entered = consumed + queued + dropped later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Data flow from nodes to a trainer, counted at each gate."""

    produced: Amount = ZERO
    """Delivered by nodes, whatever the outcome."""
    entered: Amount = ZERO
    """Not rejected by group closing, pacing or a rule; includes data that becomes stale later."""
    consumed: Amount = ZERO
    """Sealed into a batch for the first time."""
    replayed: Amount = ZERO
    """Sealed into a batch again, by a replay rule."""
    wasted: Mapping[str, Amount] = field(default_factory=dict[str, Amount])
    """Never trained, by reason: a DropReason, or the outcome of a failed attempt."""

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
    def stale(self) -> Amount:
        return self.wasted.get(DropReason.STALE, ZERO)


class TrainerActivity(StrEnum):
    OFFLINE = "offline"
    """No trainer yet, or none between the last call of one and the start of the next."""
    STARTING = "starting"
    """Took over, has not requested a batch yet."""
    WAITING = "waiting"
    """Requested a batch that is not ready yet."""
    TRAINING = "training"
    """Got a batch, has not committed it: reading rows and computing."""
    PUBLISHING = "publishing"
    """Committed, not published."""
    EVALUATING = "evaluating"
    """As reported by the trainer in its commits."""
    OTHER = "other"
    """Published, has not requested the next batch: checkpoints and the rest."""


class NodeActivity(StrEnum):
    STARTING = "starting"
    """Joined, no engine live yet."""
    ROLLING_OUT = "rolling_out"
    """Holds at least one slot."""
    LOADING = "loading"
    """Holds no slot, and its live version is older than the newest published one."""
    WAITING = "waiting"
    """Holds no slot, ready for work."""
    PAUSED = "paused"
    """Generates nothing, because its resource trains or may not roll out."""
    DRAINING = "draining"
    SILENT = "silent"
    """No heartbeat for a full ttl, so its leases expired; counted from its last heartbeat."""


Account = Mapping[str, float]
"""Seconds by activity; their sum is the wall-clock time of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One step of a trainer, from the request for its batch to the request for the next one."""

    wait_s: float
    step_s: float
    """The full step including its wait, without evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    policy: PolicyName
    done: bool
    """Has trained all its steps; its waits no longer count."""
    num_versions: int
    """Batches committed in the window."""
    eval_s: float
    """Evaluation time in the window."""
    samples: tuple[StepTiming, ...]
    """Steps that ended in the window, without the first one after a start or an evaluation."""
    window: Flow
    total: Flow
    """Since the run started."""
    staleness: Mapping[int, Amount]
    """Rows consumed in the window, by staleness in versions."""
    issued: int
    """Groups in progress on nodes."""
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
    produced: Amount
    accepted: Amount
    """Both in the window."""
    account: Account
    """Since it joined."""
    window_account: Account
    left: bool = False
    """Left in this window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMemory:
    """State of the rule between windows."""

    low_windows: int = 0
    """Consecutive windows in the low zone, including the newest."""
    last_action: ActionReport | None = None
    cooldown_until: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All input of one balance report."""

    run: str
    since: float
    """When the service started; time accounts count from here."""
    window: WindowReport
    policies: tuple[PolicyFigures, ...]
    nodes: tuple[NodeFigures, ...]
    departed_time: Account
    """Time of nodes that left in earlier windows."""
    waiting_slots: int
    """Issued but not leased by any node."""
    start_s_p90: float
    """90th percentile of node start times, from joining to the first live engine."""
    memory: RuleMemory = RuleMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """Settings of the three-zone rule."""

    tau_low: float = 0.02
    """Scale down if trainers wait less than this share of their time."""
    tau_high: float = 0.05
    """Scale up if trainers wait more than this share of their time."""
    rho: float = 1.10
    """Headroom: the new size is this multiple of what the trainers need."""
    max_loading: float = 0.10
    """Hold if nodes spend more than this share of their time loading weights."""
    window_versions: int = 10
    min_gpus: int = 1
    max_gpus: int | None = None
    node_start_s: float = 0.0
    """Expected node start time; the measured one counts if it is longer."""
    cooldown_windows: float = 2.0
    """Minimum cooldown, in windows."""
    cooldown_starts: float = 1.5
    """Minimum cooldown, in node start times."""
    low_windows: int = 2
    """Consecutive windows in the low zone before scaling down."""
    max_step: float = 0.5
    """Largest change in one step, as a share of the pool."""
    suspect_s: float = 6.0
    """A node is suspect after this many seconds without a heartbeat."""
