# SPDX-License-Identifier: Apache-2.0
"""Reads what a run left behind: metrics, trajectories, batches and versions, from its files alone.

    run = open_run("outputs/my-run")
    for trajectory in run.trajectories(steps=(1, 5)):
        print(trajectory.reward, trajectory.text)

Works while the run is running, and after it was stopped, killed or finished. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from penstock.config import RunConfig
from penstock.config.dataflow import sample_share
from penstock.dataflow.core.names import EVAL, TRAIN
from penstock.dataflow.ledger.compaction import IS_STAGED
from penstock.dataflow.ledger.keeping import RELEASED, KeepSpec, current_kept
from penstock.dataflow.ledger.recorded import RecordedRun, open_recorded_run
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import BatchRecord, CommitRecord, VersionRecord
from penstock.errors import StoreError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.curves import read_lines
from penstock.runs.decoded import Decoder
from penstock.runs.recorded_trajectory import RecordedTrajectory
from penstock.runs.table import Records
from penstock.runs.target import find_run_folder
from penstock.runs.trajectories import (
    OLDEST,
    Selection,
    TrajectoryReader,
)
from penstock.types import Manifest, OutcomeKind, PolicyName, RowId
from penstock.wire.codec import decode, encode_json

PAGE_BATCHES = 16
Order = Literal["oldest", "newest", "best", "worst"]
TRAJECTORY_COLUMNS: Mapping[str, type[Any]] = {
    "row_id": str,
    "group_id": str,
    "slot": int,
    "node_id": str,
    "source": str,
    "task_key": str,
    "task": str,
    "reward": float,
    "outcome": str,
    "detail": str,
    "versions": str,
    "num_tokens": int,
    "num_turns": int,
    "delivered_at": float,
    "step": int,
    "batch": int,
    "fate": str,
    "state": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """A sealed batch, and the step that trained it."""

    policy: str
    batch: int
    """1, 2, 3, … for each policy."""
    step: int | None
    """The step that trained it; None if it is not committed, or was skipped."""
    skipped: str
    """Why the trainer skipped it; empty if it did not."""
    trains_from: int
    """Number of the version that it trains from."""
    num_groups: int
    num_rows: int
    num_replayed: int
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    sealed_at: float
    trained_at: float | None
    stats: Mapping[str, float]
    """What the trainer reported of the step."""
    row_ids: tuple[RowId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedVersion:
    """A published version."""

    policy: str
    incarnation: int
    number: int
    published_at: float
    manifest_digest: str
    weights_digest: str

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"


class Trajectories(Records[RecordedTrajectory]):
    """Trajectories that are read while you iterate."""

    def __init__(self, run: Run, selection: Selection) -> None:
        super().__init__(lambda: run.reader.read(selection), _trajectory_row, TRAJECTORY_COLUMNS)
        self._run = run

    @property
    def freed(self) -> int:
        """How many trajectories of the whole run were released and come without their turns, or
        will soon. `dataflow.keep` and `dataflow.keep_mb` decide."""
        return self._run.num_freed()


class Run:
    """The records of one run. Close it, or use it in a `with` block."""

    def __init__(self, folder: RunFolder, config: RunConfig, recorded: RecordedRun) -> None:
        self.folder = folder
        self.config = config
        self.recorded = recorded
        """The ledger itself."""
        self.policies: tuple[PolicyName, ...] = tuple(map(PolicyName, config.models))
        self.reader = TrajectoryReader(
            recorded,
            folder.path / "ledger",
            self.policies,
            config.dataflow.payload,
            Decoder(folder),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.recorded.close()

    # --- records ------------------------------------------------------------------------------

    def metrics(self) -> Records[Mapping[str, Any]]:
        """The lines of `metrics.jsonl`: one for each trained batch. A trainer that resumed from a
        checkpoint repeats steps; the later line counts."""
        return Records(lambda: read_lines(self.folder.metrics), lambda record: record)

    def trajectories(
        self,
        *,
        policy: str | None = None,
        steps: int | tuple[int | None, int | None] | None = None,
        outcome: OutcomeKind | str | None = None,
        group: str | None = None,
        node: str | None = None,
        order: Order = OLDEST,
        evaluations: bool = False,
    ) -> Trajectories:
        """Every delivered trajectory, also those that were dropped or failed.

        policy: only those with tokens of this policy · steps: only those that this step trained, or
        the steps of an inclusive range (None: open) · outcome: completed, truncated, failed or
        cancelled · group: one group id · node: of one node · order: by arrival, or by reward ·
        evaluations: instead of training, answers to questions of evaluations, which no step trained
        """
        self._policies(policy)  # raises for an unknown one
        first, last = (steps, steps) if isinstance(steps, int) else steps or (None, None)
        selection = Selection(
            policy=policy,
            first_step=first,
            last_step=last,
            outcome=None if outcome is None else OutcomeKind(outcome),
            group=group,
            node=node,
            order=order,
            space=EVAL if evaluations else TRAIN,
        )
        return Trajectories(self, selection)

    def batches(self, *, policy: str | None = None) -> Records[RecordedBatch]:
        """Every sealed batch, in order."""
        return Records(lambda: self._read_batches(policy), _batch_row)

    def versions(self, *, policy: str | None = None) -> Records[RecordedVersion]:
        """Every published version, in order. Its weights may be deleted; `penstock weights ls`
        shows those that are stored."""
        return Records(lambda: self._read_versions(policy), _version_row)

    # --- counts -------------------------------------------------------------------------------

    def num_trajectories(self) -> int:
        query = "SELECT count(*) FROM rows WHERE space = 'train'"
        return self.reader.count(lambda tables: int(tables.scalar(query)))

    def num_freed(self) -> int:
        """Trajectories whose payload was released."""
        flow = self.config.dataflow
        spec = KeepSpec(share=sample_share(flow.keep), max_bytes=0)
        stages = [stage.name for stage in flow.stages]
        query = (
            f"SELECT count(*) FROM rows WHERE space = 'train' AND {RELEASED} AND NOT {IS_STAGED}"
        )

        def count(tables: Tables) -> int:
            kept = current_kept(tables, None if flow.payload == "memory" else spec)
            return int(tables.scalar(query, since=kept.since, limit=kept.limit, stages=stages))

        return self.reader.count(count)

    @property
    def is_running(self) -> bool:
        return self.folder.launcher_pid() is not None

    # --- reading ------------------------------------------------------------------------------

    def _policies(self, policy: str | None) -> tuple[PolicyName, ...]:
        if policy is None:
            return self.policies
        if policy not in self.policies:
            raise StoreError(
                f"{self.folder.path} has no policy {policy!r}; it trains {', '.join(self.policies)}"
            )
        return (PolicyName(policy),)

    def _read_batches(self, policy: str | None) -> Iterator[RecordedBatch]:
        where = "consumer = :policy AND seq > :after ORDER BY seq LIMIT :num"
        for name in self._policies(policy):
            page: list[BatchRecord] = []
            after = 0
            while page or not after:
                values = {"policy": name, "after": after, "num": PAGE_BATCHES}
                page = self.recorded.coordinator.read(BatchRecord, where, **values)
                yield from map(self._batch, page)
                after = page[-1].seq if page else 1

    def _batch(self, record: BatchRecord) -> RecordedBatch:
        commits = self.recorded.commits(record.consumer, record.seq)
        commit: CommitRecord | None = commits[-1] if commits else None
        is_trained = commit is not None and not commit.skipped
        stats = {} if commit is None else msgspec.json.decode(commit.stats, type=dict[str, float])
        return RecordedBatch(
            policy=record.consumer,
            batch=record.seq,
            step=commit.number if commit is not None and is_trained else None,
            skipped="" if commit is None else commit.skipped,
            trains_from=record.trains_from,
            num_groups=record.num_groups,
            num_rows=record.num_rows,
            num_replayed=record.num_replayed,
            reward_mean=record.reward_mean,
            staleness_mean=record.staleness_mean,
            staleness_max=record.staleness_max,
            sealed_at=record.sealed_at,
            trained_at=None if commit is None else commit.at,
            stats=stats,
            row_ids=tuple(row.row_id for row in decode(record.manifest, Manifest).rows),
        )

    def _read_versions(self, policy: str | None) -> Iterator[RecordedVersion]:
        where = "policy = :policy ORDER BY incarnation, number"
        for name in self._policies(policy):
            for record in self.recorded.coordinator.read(VersionRecord, where, policy=name):
                yield RecordedVersion(
                    policy=record.policy,
                    incarnation=record.incarnation,
                    number=record.number,
                    published_at=record.at,
                    manifest_digest=record.manifest_digest,
                    weights_digest=record.weights_digest,
                )


def open_run(folder: str | Path) -> Run:
    """Open a run for reading: its folder, or its config file."""
    found = find_run_folder(Path(folder))
    config = found.read_config()
    if config.dataflow.store != "sqlite":
        raise StoreError(
            f"{found.path} keeps its ledger in PostgreSQL, and open_run reads ledgers in files "
            "only; while the run serves, `penstock report` and GET /v1/explain/ID answer from it"
        )
    return Run(found, config, open_recorded_run(found.path / "ledger"))


def _trajectory_row(one: RecordedTrajectory) -> dict[str, Any]:
    last = one.uses[-1] if one.uses else None
    return {
        "row_id": one.row_id,
        "group_id": one.group_id,
        "slot": one.slot,
        "node_id": one.node_id,
        "source": one.source,
        "task_key": "" if one.task is None else one.task.key,
        "task": encode_json(one.task_payload).decode(),
        "reward": one.reward,
        "outcome": one.outcome.value,
        "detail": one.detail,
        "versions": ", ".join(one.versions),
        "num_tokens": one.num_tokens,
        "num_turns": None if one.payload is None else len(one.turns),
        "delivered_at": one.delivered_at,
        "step": None if last is None else last.step,
        "batch": (last.batch or None) if last else None,
        "fate": "" if last is None else last.fate,
        "state": one.state.value,
    }


def _batch_row(one: RecordedBatch) -> dict[str, Any]:
    names = [name for name in RecordedBatch.__slots__ if name not in ("stats", "row_ids")]
    return {**{name: getattr(one, name) for name in names}, **one.stats}


def _version_row(one: RecordedVersion) -> dict[str, Any]:
    return {name: getattr(one, name) for name in RecordedVersion.__slots__}
