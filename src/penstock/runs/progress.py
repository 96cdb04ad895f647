# SPDX-License-Identifier: Apache-2.0
"""How far a run is, from its files: step, reward and skipped batches of each policy.

Reads the ledger; where it is not a file (PostgreSQL), the newest line of metrics.jsonl. Asks no
service and changes nothing."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.errors import StoreError
from penstock.runs.curves import REWARD, read_records

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.dataflow.ledger.recorded import RecordedRun
    from penstock.dataflow.service.operators.messages import Status
    from penstock.fleet.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProgress:
    """One policy at its newest commit."""

    policy: str
    step: int
    steps: int
    """Steps that the run is configured for."""
    reward: float | None
    """Mean reward of the newest batch; None before the first."""
    skipped: int
    """Batches that were not trained."""
    at: float
    """Unix time of the newest commit; 0 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    policies: tuple[PolicyProgress, ...]
    trajectories: int | None
    """None if only the service knows it."""

    @property
    def step(self) -> int:
        """The step that every policy has reached."""
        return min((policy.step for policy in self.policies), default=0)

    @property
    def steps(self) -> int:
        return max((policy.steps for policy in self.policies), default=0)

    @property
    def reward(self) -> float | None:
        """The reward of the only policy; None if there are several."""
        return self.policies[0].reward if len(self.policies) == 1 else None

    @property
    def is_complete(self) -> bool:
        return all(policy.step >= policy.steps for policy in self.policies)

    @property
    def at(self) -> float:
        return max((policy.at for policy in self.policies), default=0.0)


def read_progress(folder: RunFolder, config: RunConfig) -> RunProgress:
    """The progress that a run's files record; step 0 for one that never started."""
    try:
        recorded = open_recorded_run(folder.path / "ledger")
    except StoreError:
        return _from_metrics(folder, config)
    with closing(recorded):
        try:
            return RunProgress(
                policies=tuple(_from_ledger(recorded, config, policy) for policy in config.trained),
                trajectories=sum(
                    int(tables.scalar("SELECT count(*) FROM rows WHERE space = 'train'") or 0)
                    for tables in (recorded.coordinator, *recorded.partitions.values())
                ),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise StoreError(f"the ledger of {folder.path} is damaged: {error}") from None


def progress_of(status: Status, at: float) -> RunProgress:
    """The same, from the answer of the dataflow service at this time."""
    return RunProgress(
        policies=tuple(
            PolicyProgress(
                policy=policy.policy,
                step=policy.number,
                steps=policy.steps,
                reward=policy.reward_mean,
                skipped=policy.skipped,
                at=at,
            )
            for policy in status.policies
        ),
        trajectories=status.trajectories,
    )


def _from_ledger(recorded: RecordedRun, config: RunConfig, policy: str) -> PolicyProgress:
    """The newest commit of the newest incarnation, or the point where that one started."""
    tables = recorded.coordinator
    found = tables.rows(
        "SELECT number, seq, at, incarnation FROM incarnations WHERE policy = :policy "
        "ORDER BY incarnation DESC LIMIT 1",
        policy=policy,
    )
    number, seq, at, incarnation = found[0] if found else (0, 0, 0.0, 0)
    commits = tables.rows(
        "SELECT number, seq, at FROM commits WHERE consumer = :policy AND incarnation = :life "
        "ORDER BY seq DESC LIMIT 1",
        policy=policy,
        life=incarnation,
    )
    if commits:
        number, seq, at = commits[0]
    reward = tables.scalar(
        "SELECT reward_mean FROM batches WHERE consumer = :policy AND seq = :seq",
        policy=policy,
        seq=seq,
    )
    return PolicyProgress(
        policy=policy,
        step=int(number),
        steps=config.for_policy(policy).training.steps,
        reward=None if reward is None else float(reward),
        skipped=int(seq) - int(number),
        at=float(at),
    )


def _from_metrics(folder: RunFolder, config: RunConfig) -> RunProgress:
    newest = {record.policy: record for record in read_records(folder.metrics, (REWARD,))}
    finish = folder.finish()
    finished_step = finish.steps if finish else 0
    policies: list[PolicyProgress] = []
    for policy in config.trained:
        record = newest.get(policy)
        policies.append(
            PolicyProgress(
                policy=policy,
                step=record.number if record else finished_step,
                steps=config.for_policy(policy).training.steps,
                reward=record.values.get(REWARD) if record else None,
                skipped=record.seq - record.number if record else 0,
                at=record.time if record else 0.0,
            )
        )
    return RunProgress(
        policies=tuple(policies), trajectories=finish.trajectories if finish else None
    )
