# SPDX-License-Identifier: Apache-2.0
"""Attempts at several slots of one group whose workflow makes a single call: one prompt for all,
and what ends together is scored and delivered together.

Gives the same rows as `attempt`, which still decides how an attempt ends and does everything out of
the ordinary: a call that cannot be prepared or that its engine refuses is made again by each
attempt alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.model_calls import Call
from penstock.gateway.shared_call import SharedCall
from penstock.rollout.activities import busy_with
from penstock.rollout.attempt import (
    COMPLETED,
    OUT_OF_TIME,
    AttemptRunner,
    encodable,
    failed,
    resolve_outcome,
    workflow_timeout_s,
)
from penstock.rollout.pinned_engines import OnTrajectory
from penstock.rollout.rewards.scorer import NO_REWARD, Failed, SourceScorers
from penstock.rollout.workflows import QUESTIONS
from penstock.types import FailureKind, FinishReason, Outcome, Task, Trajectory, Turn

_Future = asyncio.Future[Completion]


@dataclass(frozen=True, slots=True)
class _Asked:
    grant: Grant
    request: GenerationRequest
    is_second: bool = False
    """Started again, by a pool that has lost its answer once and now goes on until it has one."""


@dataclass(frozen=True, slots=True)
class _Answer:
    grant: Grant
    turn: Turn
    text: str
    """For the reward; empty where none is given here."""


@dataclass(slots=True)
class _Group:
    """The slots of a group that are attempted together."""

    task: Task
    done: OnTrajectory
    call: SharedCall
    started_at: float
    pending: dict[_Future, _Asked] = field(default_factory=dict[_Future, _Asked])


@dataclass(slots=True)
class GroupRunner:
    """Attempts, together where that is possible."""

    _runner: AttemptRunner
    _gateway: Gateway
    _scorer: SourceScorers | None
    _run_info: RunInfo

    async def run(self, grant: Grant, task: Task) -> Trajectory:
        return await self._runner.run(grant, task)

    async def close(self) -> None:
        await self._runner.close()

    def runs_together(self, grant: Grant, task: Task) -> bool:
        """Whether its workflow makes a single call, of which no earlier attempt has the answer."""
        if grant.num_recorded or self._workflow_of(task) not in QUESTIONS:
            return False
        return self._scorer is None or self._scorer.scores_together(task)

    async def run_together(self, grants: Sequence[Grant], task: Task, done: OnTrajectory) -> None:
        with self._runner.activities.attempting(f"group {grants[0].group_id}"):
            async with asyncio.TaskGroup() as tasks:
                group = await self._prepare(task, done)
                if group is None:
                    for grant in grants:
                        tasks.create_task(self._run_alone(grant, task, done))
                else:
                    await self._ask(group, grants, tasks)

    def _workflow_of(self, task: Task) -> str:
        return task.workflow or self._run_info.workflow

    async def _prepare(self, task: Task, done: OnTrajectory) -> _Group | None:
        """None if the call cannot be made: each attempt finds out why, and records it."""
        started_at = time.time()
        session = self._gateway.open(
            policies=self._runner.policies_of(task),
            sampling=self._runner.sampling_of(task),
            seed=0,
            roles=self._run_info.roles,
        )
        try:
            async with asyncio.timeout(workflow_timeout_s(self._run_info.start_to_close_s)):
                call = Call(messages=QUESTIONS[self._workflow_of(task)](task))
                shared = await SharedCall.prepare(session, call)
        except Exception:
            return None
        finally:
            self._gateway.close(session)
        return _Group(task, done, shared, started_at)

    async def _ask(
        self, group: _Group, grants: Sequence[Grant], scoring: asyncio.TaskGroup
    ) -> None:
        for grant in grants:
            request = group.call.request(grant.seed)
            group.pending[self._gateway.start(request)] = _Asked(grant, request)
        limit_s = workflow_timeout_s(self._run_info.start_to_close_s)
        try:
            async with asyncio.timeout(limit_s):
                with busy_with(f"engine of policy {group.call.policy}"):
                    while group.pending:
                        ended, _ = await asyncio.wait(
                            group.pending, return_when=asyncio.FIRST_COMPLETED
                        )
                        if answers := await self._take(group, ended, scoring):
                            scoring.create_task(self._score(group, answers))
        except TimeoutError:
            late = resolve_outcome(OUT_OF_TIME, ())
            for asked in group.pending.values():
                self._end(group, asked.grant, (), late, None)
        finally:
            for future in group.pending:
                future.cancel()

    async def _take(
        self, group: _Group, ended: set[_Future], others: asyncio.TaskGroup
    ) -> list[_Answer]:
        """The answers that have come; what was lost is started again."""
        answers: list[_Answer] = []
        for future in [future for future in group.pending if future in ended]:
            asked = group.pending.pop(future)
            error = future.exception()
            if error is None and (found := await future).finish is not FinishReason.ABORT:
                turn = group.call.turn(asked.request, found, group.started_at)
                try:
                    text = encodable(group.call.text(turn)) if self._is_scored else ""
                except Exception:  # of ids that no text has: the attempt alone records it
                    others.create_task(self._run_alone(asked.grant, group.task, group.done))
                    continue
                answers.append(_Answer(asked.grant, turn, text))
            elif not asked.is_second:
                again = self._gateway.start(asked.request, future)
                group.pending[again] = _Asked(asked.grant, asked.request, is_second=True)
            elif isinstance(error, EngineError):
                why = failed(FailureKind.ENGINE, str(error))
                self._end(group, asked.grant, (), why, None)
            else:
                others.create_task(self._run_alone(asked.grant, group.task, group.done))
        return answers

    async def _run_alone(self, grant: Grant, task: Task, done: OnTrajectory) -> None:
        done(grant, await self._runner.run(grant, task))

    @property
    def _is_scored(self) -> bool:
        return self._run_info.is_scored and self._scorer is not None

    async def _score(self, group: _Group, answers: Sequence[_Answer]) -> None:
        rewards: list[float | Failed] = [NO_REWARD] * len(answers)
        if self._is_scored and self._scorer is not None:
            texts = [answer.text for answer in answers]
            with busy_with(f"reward {self._runner.reward_of(group.task)}"):
                rewards = await self._scorer.score_all(texts, group.task)
        for answer, reward in zip(answers, rewards, strict=True):
            outcome = resolve_outcome(COMPLETED, (answer.turn,))
            if self._run_info.is_scored and isinstance(reward, Failed):
                outcome = failed(reward.kind, reward.detail)
            number = None if isinstance(reward, Failed) else reward
            self._end(group, answer.grant, (answer.turn,), outcome, number)

    def _end(
        self,
        group: _Group,
        grant: Grant,
        turns: tuple[Turn, ...],
        outcome: Outcome,
        reward: float | None,
    ) -> None:
        trajectory = self._runner.trajectory(
            grant,
            group.task,
            turns,
            outcome,
            started_at=group.started_at,
            reward=reward,
            role_rewards={},
        )
        group.done(grant, trajectory)
