# SPDX-License-Identifier: Apache-2.0
"""What the trainer's tests share: records made by hand, and a dataflow in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from transformers import PreTrainedModel

from penstock.config import RunConfig
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    IncarnationAnswer,
    IncarnationRequest,
    PolicyState,
    PublishRequest,
    QuarantineRequest,
    RowsAnswer,
    VersionInUse,
    VersionsInUse,
    VersionUser,
)
from penstock.errors import Conflict, Fenced, UnknownCommit
from penstock.trainer.actor import Actor
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.learner import Learner, Optimizer
from penstock.trainer.losses.aggregation import LossWeights
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.divergence import EntropyBonus
from penstock.trainer.losses.tokens import BudgetedObjective, Objective
from penstock.trainer.pipeline.credits import group_advantage
from penstock.trainer.pipeline.layout import Layout
from penstock.trainer.ranks.group import RankReductions, SingleRank
from penstock.trainer.schedules import Schedule
from penstock.trainer.updates import UpdateSpec
from penstock.types import (
    FinishReason,
    GroupId,
    Manifest,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    RowPayload,
    RowSummary,
    SamplingSpec,
    SealedGroup,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import encode

POLICY = PolicyName("policy")
VOCAB_SIZE = 16
CLIPPED = EntropyBonus(inner=ClippedLoss(), coef=0.01)


def make_learner(
    model: PreTrainedModel,
    *,
    objective: Objective | BudgetedObjective = CLIPPED,
    rate: float = 2e-3,
    weight_decay: float = 0.01,
    epochs: int = 1,
    minibatches: int = 1,
    micro_batch_tokens: int = 4096,
    ranks: RankReductions | None = None,
    bounds: tuple[float, float] | None = None,
    weights: LossWeights | None = None,
    is_offloaded: bool = False,
) -> Learner:
    return Learner(
        Actor(model, learns_entropy=True),
        objective,
        Optimizer(
            schedule=Schedule(peak=rate),
            weight_decay=weight_decay,
            epochs=epochs,
            is_offloaded=is_offloaded,
        ),
        update_spec=UpdateSpec(minibatches=minibatches, weights=weights or LossWeights()),
        forward_pass=ForwardPass(
            ranks=ranks or SingleRank(), micro_batch_tokens=micro_batch_tokens
        ),
        bounds=bounds,
    )


def settings(
    model_folder: Path,
    name: str,
    *,
    pipeline: Any = None,
    lora: Any = None,
    more: dict[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    """more: further keys of the algorithm."""
    algorithm: dict[str, Any] = {"name": name, "num_generations": 4, **(more or {})}
    if name == "opd":
        algorithm.setdefault("teacher", str(model_folder))
    return RunConfig.model_validate(
        {
            "name": "built",
            "models": {POLICY: {"init": str(model_folder), "lora": lora}},
            "sources": [{"name": "train", "task": "penstock.tasks.reverse"}],
            "algorithm": algorithm,
            "training": {"steps": 6, "learning_rate": 2e-3, "groups_per_batch": 4, **training},
            "pipeline": pipeline,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A batch as the ledger would serve it."""

    manifest: Manifest
    rows: tuple[RowPayload, ...]

    def assembled(self) -> Batch:
        return credited(assemble(self.manifest, self.rows, POLICY, VOCAB_SIZE))

    def cut(self, sizes: Sequence[int]) -> list[Sealed]:
        """Its instalments, with so many groups each."""
        assert sum(sizes) == len(self.manifest.groups)
        found: list[Sealed] = []
        groups, rows = self.manifest.groups, self.rows
        for size in sizes:
            manifest = replace(self.manifest, groups=groups[:size])
            num_rows = sum(len(group.rows) for group in groups[:size])
            found.append(Sealed(manifest=manifest, rows=rows[:num_rows]))
            groups, rows = groups[size:], rows[num_rows:]
        return found


def credited(batch: Batch) -> Batch:
    """As the pipeline's first stage does."""
    credit = group_advantage(Layout.of(batch), reward=batch.row_columns["reward"])
    return batch.with_columns(token_columns=credit)


def make_turn(
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    parent: int = -1,
    policy: PolicyName = POLICY,
    number: int = 0,
    sampling: SamplingSpec | None = None,
    finish: FinishReason = FinishReason.STOP,
    reached_agent: bool = True,
) -> Turn:
    values = [-0.5 - 0.25 * i for i in range(len(sampled))] if logprobs is None else logprobs
    span = VersionSpan(start=0, end=len(sampled), incarnation=1, number=number)
    return Turn(
        policy=policy,
        parent=parent,
        prompt_ids=token_ids(prompt),
        sampled_ids=token_ids(sampled),
        logprobs=log_probs(values),
        spans=(span,) if sampled else (),
        sampling=sampling or SamplingSpec(),
        finish=finish,
        reached_agent=reached_agent,
    )


def make_trajectory(
    *turns: Turn, name: str = "p0-0.0.1", reward: float = 0.0, node: str = "node"
) -> Trajectory:
    """`node` may be NODE/SESSION."""
    node_id, _, boot_id = node.partition("/")
    group, slot, epoch = name.split(".")
    return Trajectory(
        row_id=RowId(name),
        group_id=GroupId(group),
        slot=int(slot),
        epoch=int(epoch),
        attempt=1,
        node_id=NodeId(node_id),
        turns=turns,
        reward=reward,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
        boot_id=boot_id,
    )


_FSYNC = os.fsync


def die_at_sync(monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
    """From now on so many syncs succeed, and the process dies at the next."""
    left = num_before

    def dying(descriptor: int) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        _FSYNC(descriptor)

    monkeypatch.setattr(os, "fsync", dying)


def seal(
    groups: Sequence[Sequence[tuple[Turn, float]]],
    *,
    seq: int = 1,
    trains_from: int = 0,
    nodes: Sequence[str] = ("node",),
) -> Sealed:
    """A batch of one-turn rows, each with its reward; nodes make them in turns."""
    sealed: list[SealedGroup] = []
    rows: list[RowPayload] = []
    for index, members in enumerate(groups):
        summaries: list[RowSummary] = []
        for slot, (turn, reward) in enumerate(members):
            name = f"p0-{seq * 1000 + index}.{slot}.1"
            node = nodes[len(rows) % len(nodes)]
            payload = encode(make_trajectory(turn, name=name, reward=reward, node=node))
            num_tokens = (len(turn.prompt_ids) + len(turn.sampled_ids)) // 4
            rows.append(RowPayload(row_id=RowId(name), payload=payload))
            summaries.append(
                RowSummary(
                    row_id=RowId(name),
                    digest=blake3(payload).hexdigest(),
                    reward=reward,
                    outcome=OutcomeKind.COMPLETED,
                    sampled={POLICY: len(turn.sampled_ids) // 4},
                    versions={POLICY: ((1, turn.spans[0].number),)},
                    compute_cost={POLICY: (num_tokens, num_tokens**2)},
                )
            )
        group_id = GroupId(f"p0-{seq * 1000 + index}")
        sealed.append(SealedGroup(group_id=group_id, task_key="", rows=tuple(summaries)))
    manifest = Manifest(consumer=POLICY, seq=seq, trains_from=trains_from, groups=tuple(sealed))
    return Sealed(manifest=manifest, rows=tuple(rows))


def random_batch(
    seed: int, *, seq: int = 1, num_groups: int = 4, size: int = 4, spec: SamplingSpec | None = None
) -> Sealed:
    """Ragged rows of random tokens and rewards."""
    draw = np.random.default_rng([seed, seq])
    groups: list[list[tuple[Turn, float]]] = []
    for _ in range(num_groups):
        prompt = draw.integers(3, 14, draw.integers(1, 6)).tolist()
        members: list[tuple[Turn, float]] = []
        for _ in range(size):
            sampled = draw.integers(0, VOCAB_SIZE, draw.integers(1, 5)).tolist()
            logprobs = (-2.77 + 0.3 * draw.standard_normal(len(sampled))).tolist()
            turn = make_turn(prompt, sampled, logprobs=logprobs, number=seq - 1, sampling=spec)
            members.append((turn, float(draw.random())))
        groups.append(members)
    return seal(groups, seq=seq, trains_from=seq - 1)


@dataclass(slots=True)
class MemoryDataflow:
    """The trainer's side of the dataflow, with the ledger's rules and a log of every call."""

    batches: list[Sealed]
    incarnation: int = 0
    number: int = 0
    seq: int = 0
    published: list[PublishRequest] = field(default_factory=list[PublishRequest])
    commits: list[tuple[int, CommitRequest]] = field(
        default_factory=list[tuple[int, CommitRequest]]
    )
    retained: tuple[tuple[int, int], ...] = ()
    quarantined: list[tuple[NodeId, str]] = field(default_factory=list[tuple[NodeId, str]])
    calls: list[str] = field(default_factory=list[str])
    checkpoint_now: bool = False
    rivals: int = 0
    """So many other trainers take over between our look and our compare-and-set."""
    let_go: int = 0
    """Batches up to this one come no more."""
    die_after: str = ""
    """Stop as a crash would, once this call has succeeded, e.g. `commit 3`."""
    sizes: tuple[int, ...] = ()
    """Groups of each instalment, in batches that are streamed."""

    def state(self, policy: PolicyName) -> PolicyState:
        newest = max((p.number for p in self.published), default=-1)
        return PolicyState(
            policy=policy,
            incarnation=self.incarnation,
            number=self.number,
            seq=self.seq,
            published=newest,
            steps=len(self.batches),
        )

    def incarnate(self, policy: PolicyName, body: IncarnationRequest) -> IncarnationAnswer:
        if self.rivals:
            self.rivals -= 1
            self.incarnation += 1
        if body.expected != self.incarnation:
            raise Conflict(f"{policy} is at incarnation {self.incarnation}")
        if body.number > self.number or body.seq > self.seq:
            raise UnknownCommit("the fork lies ahead of what is committed")
        if body.seq < self.let_go:
            raise Conflict(f"batches before {self.let_go + 1} were let go; restore a younger one")
        self.incarnation += 1
        self.number, self.seq = body.number, body.seq
        self._done(f"incarnate {body.number} {body.seq}")
        return IncarnationAnswer(incarnation=self.incarnation, steps=len(self.batches))

    def batch(self, body: BatchRequest) -> BatchAnswer:
        self._require(body.incarnation)
        self._done(f"batch {body.seq}" + f"/{body.instalment}" * (body.instalment > 0))
        if body.seq > len(self.batches):
            return BatchAnswer(manifest=None, end=True)
        sealed = self.batches[body.seq - 1]
        if body.instalment:
            part = sealed.cut(self.sizes)[body.instalment - 1]
            is_last = body.instalment == len(self.sizes)
            return BatchAnswer(
                manifest=part.manifest, is_last=is_last, checkpoint_now=self.checkpoint_now
            )
        return BatchAnswer(manifest=sealed.manifest, checkpoint_now=self.checkpoint_now)

    def rows(
        self, policy: PolicyName, seq: int, indexes: Sequence[int] | None = None
    ) -> RowsAnswer:
        rows = self.batches[seq - 1].rows
        return RowsAnswer(rows=rows if indexes is None else tuple(rows[i] for i in indexes))

    def instalment_rows(self, policy: PolicyName, seq: int, instalment: int) -> RowsAnswer:
        return RowsAnswer(rows=self.batches[seq - 1].cut(self.sizes)[instalment - 1].rows)

    def commit(self, policy: PolicyName, seq: int, body: CommitRequest) -> None:
        self._require(body.incarnation)
        assert seq == self.seq + 1
        assert body.number == self.number + (0 if body.skipped else 1)
        self.number, self.seq = body.number, seq
        self.commits.append((seq, body))
        self._done(f"commit {seq}")

    def publish(self, policy: PolicyName, body: PublishRequest) -> None:
        self._require(body.incarnation)
        assert body.number <= self.number, "published before it was committed"
        self.published.append(body)
        self._done(f"publish {body.number}")

    def checkpoints(self, policy: PolicyName, body: CheckpointsRequest) -> None:
        self._require(body.incarnation)
        self.retained = body.retained
        self._done(f"checkpoints {body.retained}")

    def quarantine(self, node_id: NodeId, body: QuarantineRequest) -> None:
        self._require(body.incarnation)
        self.quarantined.append((node_id, body.boot_id))

    def versions_in_use(self) -> VersionsInUse:
        self._done("versions")
        return VersionsInUse(
            versions=tuple(
                VersionInUse(
                    policy=POLICY,
                    incarnation=body.incarnation,
                    number=body.number,
                    manifest_digest=body.manifest_digest,
                    by=VersionUser.NEWEST if body is self.published[-1] else VersionUser.ROWS,
                )
                for body in self.published
            )
        )

    def _require(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            raise Fenced(f"incarnation {incarnation} was replaced by {self.incarnation}")

    def _done(self, call: str) -> None:
        self.calls.append(call)
        if call == self.die_after:
            raise KeyboardInterrupt(call)
