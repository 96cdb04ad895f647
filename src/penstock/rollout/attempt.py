# SPDX-License-Identifier: Apache-2.0
"""One attempt at one slot: run the workflow, score it, return the trajectory. A failed rollout is
data, not a crash.

Outcomes, in order of precedence:
- the engine failed                       → failed(engine)
- a sandbox failed                        → failed(sandbox)
- `ctx.score` got no reward               → failed(reward | reward_deadline | sandbox)
- the verifier of a Harbor task failed    → failed(reward | reward_deadline)
- a sub-agent's budget was exceeded       → truncated(length), or truncated(deadline) for its time
- the environment failed                  → failed(environment), also if the workflow went on
- the workflow raised                     → failed(workflow), with the user's frames in `detail`
  … because the context window was full   → truncated(length) if it had received an answer
- the workflow received no model answer   → failed(workflow)
- the time limit was reached              → truncated(deadline) if it had received an answer,
                                            else failed(deadline)
- the last answer hit `max_tokens`        → truncated(length)
- otherwise                               → completed
Completed and truncated attempts are scored. A reward from `ctx.reward()` or a returned number takes
precedence; otherwise the reward function scores the completion (at the time limit: the text of the
last answer); without one, the row earns the mean of its roles' rewards. If scoring fails, the
outcome is failed(reward | reward_deadline | sandbox).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

import structlog

from penstock.bounds import MAX_SANDBOX_MS
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.errors import (
    BudgetExceeded,
    EngineError,
    RewardError,
    RewardTimeout,
    SandboxError,
    WorkflowError,
)
from penstock.gateway.gateway import Gateway, Session
from penstock.rollout.activities import Activities, busy_with
from penstock.rollout.context import Context
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.environments.environments import Environments
from penstock.rollout.isolation import Isolation
from penstock.rollout.prompt_templates import PromptTemplate, parse_prompt
from penstock.rollout.recorder import Recorder
from penstock.rollout.rewards.scorer import NO_REWARD, Failed, RewardScorer, ScoringFailed
from penstock.rollout.sandbox_time import counting_sandboxes
from penstock.rollout.tools.servers import ToolServers
from penstock.rollout.user_errors import shorten, user_traceback
from penstock.rollout.workflows import find_workflow
from penstock.scorers import BUILT_IN_PREFIX, SCORER_COLUMNS
from penstock.types import (
    FailureKind,
    FinishReason,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    Task,
    ToolUse,
    Trajectory,
    Turn,
    view_ids,
)

log = structlog.get_logger(__name__)

COMPLETED = Outcome(kind=OutcomeKind.COMPLETED)
OUT_OF_TIME = Outcome(kind=OutcomeKind.TRUNCATED, reason="deadline")
OUT_OF_TOKENS = Outcome(kind=OutcomeKind.TRUNCATED, reason="length")


def workflow_timeout_s(start_to_close_s: float) -> float:
    """Time limit for the workflow. The slot's limit counts from the grant and includes scoring, so
    some of it is reserved."""
    return start_to_close_s - min(5.0, 0.1 * start_to_close_s)


@dataclass(slots=True)
class AttemptRunner:
    _gateway: Gateway
    _endpoint: Endpoint
    _recorder: Recorder
    _scorer: RewardScorer | None
    _run_info: RunInfo
    _node_id: NodeId
    _isolation: Isolation = field(default_factory=Isolation)
    _tools: ToolServers = field(default_factory=ToolServers)
    _num_failed: int = 0
    _sampling: dict[str, SamplingSpec] = field(default_factory=dict[str, SamplingSpec])
    """By source, where it differs from the run's."""
    _prompts: dict[str, PromptTemplate] = field(default_factory=dict[str, PromptTemplate])
    _environments: Environments = field(init=False)
    _policies: dict[str, tuple[PolicyName, ...]] = field(
        default_factory=dict[str, tuple[PolicyName, ...]]
    )
    """By source, where it does not call all of the run."""
    activities: Activities = field(default_factory=Activities)
    """Where its waits are shown."""
    boot_id: str = ""
    """Of this process of the node; rows name it."""

    def __post_init__(self) -> None:
        self._prompts = {
            name: parse_prompt(name, text) for name, text in self._run_info.prompts.items()
        }
        sources = self._run_info.sources
        self._environments = Environments(sources, self._isolation, self._endpoint)
        for info in (self._run_info, *self._run_info.sources):
            find_workflow(info.workflow)  # a wrong name ends the node at its start
        self._sampling = {source.name: source.sampling for source in self._run_info.sources}
        self._policies = {source.name: source.policies for source in self._run_info.sources}

    async def close(self) -> None:
        """End what the environments of this node run."""
        await self._environments.close()

    async def run(self, grant: Grant, task: Task) -> Trajectory:
        """Run one attempt. Always returns a trajectory; only cancellation is raised."""
        row_id = grant.row_id
        with self.activities.attempting(f"row {row_id}"), counting_sandboxes() as sandboxes:
            trajectory = await self._run(grant, row_id, task)
        if not (sandbox_ms := sandboxes.total_ms):
            return trajectory
        return replace(trajectory, sandbox_ms=min(sandbox_ms, MAX_SANDBOX_MS))

    async def _run(self, grant: Grant, row_id: RowId, task: Task) -> Trajectory:
        started_at = time.time()
        policies = self.policies_of(task)
        recording = self._recorder.track(grant)
        async with recording as (salvaged_turns, on_turn):
            session = self._gateway.open(
                policies=policies,
                sampling=self.sampling_of(task),
                seed=grant.seed,
                salvaged_turns=salvaged_turns,
                on_turn=on_turn,
                roles=self._run_info.roles,
            )
            tools = self._tools.lease(task.source, row_id, session)
            env = self._environments.session(
                task,
                name=row_id,
                api_key=session.api_key,
                policy=policies[0],
            )
            ctx = Context(
                session,
                self._endpoint,
                seed=grant.seed,
                isolation=self._isolation,
                row_id=row_id,
                task=task,
                scorer=self._scorer,
                prompts=self._prompts,
                find_workflow=find_workflow,
                tools=tools,
                env=env,
            )
            try:
                completion, outcome = await self._run_workflow(task, ctx)
                if env is not None and env.failure is not None:
                    outcome = failed(FailureKind.ENVIRONMENT, str(env.failure))
            finally:
                await ctx.close()
                turns = self._gateway.close(session)
        outcome = resolve_outcome(outcome, turns, is_window_full=session.has_overflowed)
        reward = None
        if outcome.has_reward and self._run_info.is_scored:
            if completion is None:
                completion = last_answer_text(session, turns)
            reward, outcome = await self._score(completion, task, ctx, outcome)
        is_rewarded = reward is not None
        return self.trajectory(
            grant,
            task,
            with_rewards(turns, ctx.turn_rewards) if is_rewarded else turns,
            outcome,
            started_at=started_at,
            reward=reward,
            role_rewards=ctx.role_rewards if is_rewarded else {},
            tool_uses=tools.uses,
        )

    def policies_of(self, task: Task) -> tuple[PolicyName, ...]:
        return self._policies.get(task.source) or self._run_info.policies

    def sampling_of(self, task: Task) -> SamplingSpec:
        return self._sampling.get(task.source, self._run_info.sampling)

    def trajectory(
        self,
        grant: Grant,
        task: Task,
        turns: tuple[Turn, ...],
        outcome: Outcome,
        *,
        started_at: float,
        reward: float | None,
        role_rewards: Mapping[str, float],
        tool_uses: tuple[ToolUse, ...] = (),
    ) -> Trajectory:
        """The record of an attempt that has ended."""
        if outcome.kind is OutcomeKind.FAILED:
            self._report(outcome, task)
        return Trajectory(
            row_id=grant.row_id,
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            attempt=grant.attempt,
            node_id=self._node_id,
            boot_id=self.boot_id,
            turns=turns,
            tool_uses=tool_uses,
            reward=reward,
            outcome=outcome,
            started_at=started_at,
            ended_at=time.time(),
            role_rewards=role_rewards,
        )

    def reward_of(self, task: Task) -> str:
        own = {source.name: source.reward for source in self._run_info.sources}
        return own.get(task.source) or self._run_info.reward

    def _without_key(self, task: Task) -> Task:
        """The task as a program gets it: without what only a built-in scorer reads. A model that
        runs commands in it would find the right answer."""
        if not self.reward_of(task).startswith(BUILT_IN_PREFIX):
            return task
        shown = {key: value for key, value in task.payload.items() if key not in SCORER_COLUMNS}
        return replace(task, payload=shown)

    async def _run_workflow(self, task: Task, ctx: Context) -> tuple[str | None, Outcome]:
        """The completion (None: use the last answer's text) and the workflow's outcome."""
        limit = asyncio.timeout(workflow_timeout_s(self._run_info.start_to_close_s))
        try:
            name = task.workflow or self._run_info.workflow
            shown = self._without_key(task) if name.startswith("[") else task
            async with limit:
                with busy_with(f"workflow {name}"):
                    returned: Any = await find_workflow(name)(shown, ctx)
            return _completion(returned, ctx), COMPLETED
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if limit.expired():
                return None, OUT_OF_TIME
            if isinstance(error, EngineError):
                return None, failed(FailureKind.ENGINE, str(error))
            if isinstance(error, SandboxError):
                return None, failed(FailureKind.SANDBOX, str(error))
            if isinstance(error, ScoringFailed):
                return None, failed(error.failed.kind, error.failed.detail)
            if isinstance(error, RewardError):
                return None, failed(reward_failure(error), str(error))
            if isinstance(error, BudgetExceeded):
                return None, OUT_OF_TIME if error.limit == "time" else OUT_OF_TOKENS
            is_ours = isinstance(error, WorkflowError)
            detail = str(error) if is_ours else user_traceback(error)
            return None, failed(FailureKind.WORKFLOW, detail)

    async def _score(
        self, completion: str, task: Task, ctx: Context, outcome: Outcome
    ) -> tuple[float | None, Outcome]:
        if unplayed := ctx.unplayed_roles(self._run_info.roles):
            text = f"ctx.reward(role={unplayed[0]!r}): no turn has this role; call "
            text += f"ctx.policy(…, role={unplayed[0]!r}), or name it under `roles` in the run file"
            return None, failed(FailureKind.WORKFLOW, text)
        if ctx.explicit_reward is not None:
            return ctx.explicit_reward, outcome
        result: float | Failed = NO_REWARD
        if self._scorer is not None:
            with busy_with(f"reward {self.reward_of(task)}"):
                result = await self._scorer.score(completion, task)
        if result is NO_REWARD and ctx.role_rewards:
            return sum(ctx.role_rewards.values()) / len(ctx.role_rewards), outcome
        if not isinstance(result, Failed):
            return result, outcome
        return None, failed(result.kind, result.detail)

    def _report(self, outcome: Outcome, task: Task) -> None:
        self._num_failed += 1
        if self._num_failed & (self._num_failed - 1) == 0:  # log only 1, 2, 4, 8, …
            log.warning(
                "rollout failed",
                task=task.key,
                reason=outcome.reason,
                detail=outcome.detail,
                num_failed=self._num_failed,
            )


def _is_cancelled() -> bool:
    """Whether this attempt was cancelled, and not just something its workflow awaits."""
    attempt = asyncio.current_task()
    return attempt is not None and attempt.cancelling() > 0


def reward_failure(error: RewardError) -> FailureKind:
    is_late = isinstance(error, RewardTimeout)
    return FailureKind.REWARD_DEADLINE if is_late else FailureKind.REWARD


def failed(kind: FailureKind, detail: str) -> Outcome:
    return Outcome(kind=OutcomeKind.FAILED, reason=kind, detail=shorten(detail))


def resolve_outcome(
    outcome: Outcome, turns: Sequence[Turn], *, is_window_full: bool = False
) -> Outcome:
    """The final outcome, given the turns. `is_window_full`: the last call left no room for an
    answer; that counts as the cause of a workflow failure, whatever error the SDK or program
    raised."""
    reached = [turn for turn in turns if turn.reached_agent]
    if is_window_full and reached and outcome.reason == FailureKind.WORKFLOW:
        return OUT_OF_TOKENS
    if not outcome.has_reward:
        return outcome
    if not reached:
        if outcome is OUT_OF_TIME:
            return failed(FailureKind.DEADLINE, "time limit reached before the first model answer")
        return failed(FailureKind.WORKFLOW, "the workflow ended without a model answer")
    if outcome is COMPLETED and reached[-1].finish is FinishReason.LENGTH:
        return OUT_OF_TOKENS
    return outcome


def with_rewards(turns: tuple[Turn, ...], rewards: Mapping[int, float]) -> tuple[Turn, ...]:
    """The turns, with the rewards that the workflow gave to some of them."""
    if not rewards:
        return turns
    return tuple(
        replace(turn, reward=rewards[index]) if index in rewards else turn
        for index, turn in enumerate(turns)
    )


def last_answer_text(session: Session, turns: Sequence[Turn]) -> str:
    """Text of the last answer that the workflow received, through any API."""
    turn = next(turn for turn in reversed(turns) if turn.reached_agent)
    return session.renderer(turn.policy).decode_visible(view_ids(turn.sampled_ids).tolist())


def encodable(text: str) -> str:
    """Lone surrogates cannot be encoded."""
    return text.encode(errors="replace").decode()


def _completion(returned: Any, ctx: Context) -> str | None:
    if returned is None:
        return None
    if isinstance(returned, str):
        return encodable(returned)
    if isinstance(returned, SupportsFloat):
        ctx.reward(float(returned))
        return None
    raise WorkflowError(
        f"the workflow returned a {type(returned).__name__}; return the completion as text, "
        "a number as the reward, or None"
    )
