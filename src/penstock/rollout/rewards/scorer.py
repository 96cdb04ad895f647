# SPDX-License-Identifier: Apache-2.0
"""Scores completions in batches: a reward or `Failed` for each. The reward function may hang,
raise, crash or print.

A batch has a deadline, enforced by killing its process. If a batch of several fails, each of its
completions is retried alone, once, so only the culprits fail. A failure never becomes a number.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from penstock.errors import RewardError, SandboxError
from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.failed import Failed
from penstock.rollout.rewards.frames import ScoreAnswer, ScoreRequest
from penstock.rollout.rewards.graded import GradedScorer
from penstock.rollout.rewards.process import WorkerProcess
from penstock.rollout.user_errors import shorten
from penstock.scorers.code import REWARD as CODE_REWARD
from penstock.types import FailureKind, Task

MAX_BATCH = 256


NO_REWARD = Failed(
    kind=FailureKind.REWARD,
    detail="no reward: neither the run nor the task's source has a reward function, and the "
    "workflow neither returned a number nor called ctx.reward(); set `reward: module:function` or "
    "do either",
)
NO_FUNCTION = Failed(
    kind=FailureKind.REWARD,
    detail="ctx.score: neither the run nor the task's source has a reward function on this node; "
    "set `reward: module:function` in the run file",
)


class ScoringFailed(RewardError):
    """`ctx.score` got no number; the attempt fails as if the node had scored."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.detail)
        self.failed = failed


class RewardScorer(Protocol):
    async def score(self, completion: str, task: Task) -> float | Failed: ...


async def score_or_raise(scorer: RewardScorer | None, completion: str, task: Task | None) -> float:
    """The reward of a completion; raises ScoringFailed."""
    result: float | Failed = NO_FUNCTION
    if scorer is not None and task is not None:
        result = await scorer.score(completion.encode(errors="replace").decode(), task)
    if isinstance(result, Failed):
        raise ScoringFailed(NO_FUNCTION if result is NO_REWARD else result)
    return result


@dataclass(slots=True, kw_only=True, eq=False)
class _Item:
    completion: str
    task: Task
    result: asyncio.Future[float | Failed]


@dataclass(slots=True, kw_only=True)
class _Queue:
    fresh: deque[_Item] = field(default_factory=deque["_Item"])
    suspects: deque[_Item] = field(default_factory=deque["_Item"])
    """Members of a failed batch; each is retried alone."""
    is_suspects_turn: bool = False
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> list[_Item]:
        """The next batch: fresh completions and single suspects alternate, so neither starves."""
        use_suspect = bool(self.suspects) and (self.is_suspects_turn or not self.fresh)
        self.is_suspects_turn = not use_suspect
        if use_suspect:
            return [self.suspects.popleft()]
        return [self.fresh.popleft() for _ in range(min(MAX_BATCH, len(self.fresh)))]


@dataclass(slots=True)
class Scorer:
    """One reward function behind `num_workers` processes."""

    _function: str
    _isolation: Isolation = field(default_factory=Isolation)
    _: KW_ONLY
    num_workers: int = 1
    deadline_s: float = 30.0
    _queue: _Queue = field(default_factory=_Queue)

    async def score(self, completion: str, task: Task) -> float | Failed:
        return await self._put(completion, task)

    async def score_all(self, completions: Sequence[str], task: Task) -> list[float | Failed]:
        results = [self._put(completion, task) for completion in completions]
        return [await result for result in results]

    def _put(self, completion: str, task: Task) -> asyncio.Future[float | Failed]:
        result = asyncio.get_running_loop().create_future()
        self._queue.fresh.append(_Item(completion=completion, task=task, result=result))
        self._queue.filled.set()
        return result

    async def run(self) -> None:
        """Serve until cancelled. Raises if the function cannot be imported, which ends the node."""
        async with asyncio.TaskGroup() as workers:
            for number in range(self.num_workers):
                workers.create_task(self._worker_loop(), name=f"reward-{number}")

    async def _worker_loop(self) -> None:
        """consumes: completions · produces: the result of each
        waits for: a completion, then its worker or the deadline · woken by: `score()`"""
        worker = WorkerProcess(self._function, self._isolation)
        await worker.start()
        try:
            while True:
                await self._queue.filled.wait()
                await asyncio.sleep(0)  # include completions of the same event-loop iteration
                items = [item for item in self._queue.take() if not item.result.done()]
                if not (self._queue.fresh or self._queue.suspects):
                    self._queue.filled.clear()
                if items:
                    await self._score_batch(worker, items)
        finally:
            await worker.kill()

    async def _score_batch(self, worker: WorkerProcess, items: list[_Item]) -> None:
        request = ScoreRequest(
            completions=[item.completion for item in items],
            payloads=[item.task.payload for item in items],
        )
        try:
            answer = await worker.score(request, self.deadline_s)
        except TimeoutError:
            detail = f"exceeded its deadline of {self.deadline_s:g} s and was killed"
            self._fail(items, FailureKind.REWARD_DEADLINE, detail)
        except RewardError as error:
            self._fail(items, FailureKind.REWARD, str(error))
        except SandboxError as error:
            self._fail(items, FailureKind.SANDBOX, str(error))
        else:
            self._accept(items, answer)

    def _accept(self, items: list[_Item], answer: ScoreAnswer) -> None:
        if answer.error or len(answer.values) != len(items):
            why = answer.error or "returned results of another batch"
            return self._fail(items, FailureKind.REWARD, why)
        for item, value in zip(items, answer.values, strict=True):
            if isinstance(value, float) and math.isfinite(value):
                _resolve(item, value)
            else:
                what = f"returned {value}; return one finite number per completion"
                _resolve(item, self._failed(item, FailureKind.REWARD, what))

    def _fail(self, items: list[_Item], kind: FailureKind, detail: str) -> None:
        if len(items) == 1:
            return _resolve(items[0], self._failed(items[0], kind, detail))
        self._queue.suspects.extend(items)
        self._queue.filled.set()

    def _failed(self, item: _Item, kind: FailureKind, detail: str) -> Failed:
        where = f"reward {self._function}, task {item.task.key}"
        return Failed(kind=kind, detail=shorten(f"{where}: {detail}"))


class SourceScorers:
    """Scores a task with the reward function of its source, or else of the run; one Scorer for each
    function."""

    def __init__(self, shared: str, by_source: Mapping[str, str], isolation: Isolation) -> None:
        """Functions; empty where there is none."""
        self._shared = shared
        self._by_source = by_source
        functions = filter(None, (shared, *by_source.values()))
        self._scorers = {function: _make_scorer(function, isolation) for function in functions}

    def __bool__(self) -> bool:
        """Whether there is any reward function."""
        return bool(self._scorers)

    async def score(self, completion: str, task: Task) -> float | Failed:
        scorer = self._scorer_of(task)
        return NO_REWARD if scorer is None else await scorer.score(completion, task)

    def scores_together(self, task: Task) -> bool:
        """Whether completions of the task can be scored in one call. A grader opens sandboxes for
        each of them, whose time its row records."""
        return not isinstance(self._scorer_of(task), GradedScorer)

    async def score_all(self, completions: Sequence[str], task: Task) -> list[float | Failed]:
        """`score` for several completions of a task."""
        scorer = self._scorer_of(task)
        assert not isinstance(scorer, GradedScorer), "ask scores_together() first"
        if scorer is None:
            return [NO_REWARD] * len(completions)
        return await scorer.score_all(completions, task)

    def _scorer_of(self, task: Task) -> Scorer | GradedScorer | None:
        return self._scorers.get(self._by_source.get(task.source, self._shared))

    async def run(self) -> None:
        """Serve until cancelled. Raises if a function cannot be imported, which ends the node."""
        async with asyncio.TaskGroup() as scorers:
            for function, scorer in self._scorers.items():
                scorers.create_task(scorer.run(), name=f"reward {function}")


def _make_scorer(function: str, isolation: Isolation) -> Scorer | GradedScorer:
    return GradedScorer(isolation) if function == CODE_REWARD else Scorer(function, isolation)


def _resolve(item: _Item, result: float | Failed) -> None:
    if not item.result.done():  # the rollout may have been cancelled in the meantime
        item.result.set_result(result)
