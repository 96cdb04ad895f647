# SPDX-License-Identifier: Apache-2.0
"""The calls with which a custom training loop makes the versions of a policy.

Owns the order of calls that makes training exactly-once, and the bodies of these calls. Trains
nothing and imports no torch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.dataflow.client.dataflow import TrainerClient
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.trainer.samples import Samples, make_samples
from penstock.types import Manifest, PolicyName, RowPayload, Trajectory
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.wire.codec import decode
from penstock.wire.held_token import Token

WAIT_S = 20.0
"""How long the service holds one request for a batch open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One sealed batch."""

    seq: int
    """1, 2, 3, …"""
    rewards: tuple[tuple[float, ...], ...]
    """By group, the rewards of its rows; a row's index counts through all groups."""
    samples: Samples
    """Token sequences, each with its row, the tokens to train and their log-probs as sampled. A row
    that is no longer available has none, and keeps its reward."""


class VersionsClient:
    """Makes the versions of one policy: takes its batches, and publishes what you train on them.

        with VersionsClient(url, token, policy="policy", store=Path("RUN/weights")) as versions:
            versions.incarnate(number=0, seq=0)
            versions.publish(folder, number=0)
            while (batch := versions.batch(seq + 1)) is not None: ...

    Calls are retried while the service is away. `Fenced` says that another trainer took over."""

    def __init__(self, url: str, token: Token, *, policy: str, store: Path) -> None:
        """`url`: the run's dataflow. `token`: one of role trainer. `store`: the run's weights."""
        self._calls = TrainerClient(url, token)
        self._policy = PolicyName(policy)
        self._store = store
        self._incarnation = 0
        self._stored: StoredVersion | None = None

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
        """Close the connections."""
        self._calls.close()

    def incarnate(self, *, number: int, seq: int) -> int:
        """Become the only trainer of the policy, from this restore point; an earlier one is locked
        out. Returns the number of the last version to train.

        `number`, `seq`: the version and the last batch in your checkpoint; 0 and 0 for none."""
        known = self._calls.state(self._policy).incarnation
        body = IncarnationRequest(
            request_id=secrets.token_hex(8), expected=known, number=number, seq=seq
        )
        answer = self._calls.incarnate(self._policy, body)
        self._incarnation = answer.incarnation
        return answer.steps

    def published(self) -> int:
        """Number of the newest version that the policy's last trainer published; -1 for none."""
        return self._calls.state(self._policy).published

    def batch(self, seq: int) -> TrainingBatch | None:
        """The batch of this number, once it is sealed; None if the run has ended. Asked for again,
        it is the same."""
        body = BatchRequest(
            consumer=self._policy, seq=seq, incarnation=self._incarnation, wait_s=WAIT_S
        )
        while True:
            answer = self._calls.batch(body)
            if answer.manifest is not None:
                return self._fetch(answer.manifest)
            if answer.end:
                return None

    def _fetch(self, manifest: Manifest) -> TrainingBatch:
        rows = self._calls.rows(self._policy, manifest.seq).rows
        return TrainingBatch(
            seq=manifest.seq,
            rewards=tuple(tuple(row.score for row in group.rows) for group in manifest.groups),
            samples=make_samples(_available(rows), self._policy, manifest.visible_roles),
        )

    def commit(
        self, seq: int, *, number: int, stats: Mapping[str, float], skipped: str = ""
    ) -> None:
        """Record that this batch is trained; `number` is one more than before. If it changed no
        weights, `number` stays the same and `skipped` says why. `stats` become metrics."""
        body = CommitRequest(
            incarnation=self._incarnation,
            number=number,
            skipped=skipped,
            stats=dict(stats),
        )
        self._calls.commit(self._policy, seq, body)

    def publish(self, folder: Path, *, number: int) -> None:
        """Store the model in this Hugging Face folder as version `number`; nodes load it next."""
        stored = put_snapshot(
            self._store, folder, policy=self._policy, number=number, after=self._stored
        )
        body = PublishRequest(
            incarnation=self._incarnation,
            number=number,
            manifest_digest=stored.manifest_digest,
            weights_digest=stored.weights_digest,
        )
        self._calls.publish(self._policy, body)
        self._stored = stored

    def checkpoints(self, retained: Iterable[tuple[int, int]]) -> None:
        """Report every checkpoint that you can restore, as (number, seq); rows after the oldest one
        are kept."""
        body = CheckpointsRequest(incarnation=self._incarnation, retained=tuple(retained))
        self._calls.checkpoints(self._policy, body)


def _available(rows: Iterable[RowPayload]) -> Iterator[tuple[int, Trajectory]]:
    """The rows that still exist, with their indexes."""
    for index, row in enumerate(rows):
        if row.payload is not None:
            yield index, decode(row.payload, Trajectory)
