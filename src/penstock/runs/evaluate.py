# SPDX-License-Identifier: Apache-2.0
"""Evaluates one model on suites in this process: a version of a run, a model folder, or a server.

Owns the plan (which questions, samples and seeds) and what is left of it: an answer that is stored
is not asked again, unless an engine or a sandbox failed. The seed of an answer depends only on
suite, question and sample. Computes no figure and prints nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.config.evaluation import SuiteConfig
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.nodes.messages import RunInfo, SourceInfo
from penstock.dataflow.sources import derive_seed, slot_seeds
from penstock.dataflow.sources.suites import Suite, open_suite
from penstock.evals.results import Answer, Evaluation, SuiteResult
from penstock.runs.chosen_weights import ChosenWeights
from penstock.runs.local_gateway import (
    TextServerAddress,
    cancel,
    open_gateway,
    open_rollouts,
    wait_or_raise,
)
from penstock.runs.local_rollouts import Rollout
from penstock.runs.logged_gateway import LoggedGateway
from penstock.runs.result_files import StoredResults
from penstock.runs.service_process import add_import_paths
from penstock.runs.target import RunTarget
from penstock.types import FailureKind, Task, Trajectory, view_ids

MAX_CONCURRENT = 16
STORE_EVERY_S = 2.0
"""An interrupted evaluation loses at most the answers of this many seconds."""
ASKED_AGAIN = (FailureKind.ENGINE.value, FailureKind.SANDBOX.value)
"""Failures that say nothing about the model."""
SEED = 0
"""The same questions have the same seeds in every run, so that versions are compared alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is evaluated, and how."""

    target: RunTarget
    """Its workflow, tools and engine are used."""
    model: str
    """What is evaluated, for people: a run, a folder, or a model behind a URL."""
    policy: str
    version: int
    suites: tuple[Suite, ...]
    samples: int
    temperature: float
    top_p: float
    max_tokens: int | None
    """Most tokens of one turn; None: as in training."""
    weights: ChosenWeights | None = None
    server: TextServerAddress | None = None
    """Answers instead of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """An evaluation at one moment."""

    suite: str
    done: int
    """Answers of all suites so far, stored ones included."""
    total: int
    failed: int


@dataclass(frozen=True, slots=True)
class _Item:
    suite: Suite
    task: Task
    question: str
    sample: int


@dataclass(slots=True)
class _Answers:
    """Answers so far, by suite, question and sample."""

    found: dict[tuple[str, str, int], Answer] = field(
        default_factory=dict[tuple[str, str, int], Answer]
    )

    def keep(self, stored: Mapping[str, SuiteResult], plan: EvaluationPlan) -> None:
        for suite in plan.suites:
            result = stored.get(suite.name)
            for answer in result.answers if result else ():
                if answer.failure not in ASKED_AGAIN and answer.sample < plan.samples:
                    self.found[suite.name, answer.question, answer.sample] = answer

    def evaluation(self, plan: EvaluationPlan) -> Evaluation:
        return Evaluation(
            model=plan.model,
            step=plan.version,
            suites=tuple(self._result(plan, suite) for suite in plan.suites),
        )

    def _result(self, plan: EvaluationPlan, suite: Suite) -> SuiteResult:
        keys = [(suite.name, item.question, item.sample) for item in _items(plan, suite)]
        return SuiteResult(
            suite=suite.name,
            scorer=suite.scorer,
            suite_digest=suite.digest,
            policy=plan.policy,
            version=plan.version,
            samples=plan.samples,
            temperature=plan.temperature,
            answers=tuple(self.found[key] for key in keys if key in self.found),
        )


def open_suites(
    names: tuple[str, ...], *, scorer: str | None, reward: str | None, limit: int | None
) -> tuple[Suite, ...]:
    """The suites of a command line: names of known ones, or files of questions."""
    found: list[Suite] = []
    for name in names:
        is_file = Path(name).exists() or Path(name).suffix in (".jsonl", ".parquet", ".csv")
        where = {"name": Path(name).stem, "file": name} if is_file else {"name": name}
        config = SuiteConfig(**where, scorer=scorer, reward=reward, limit=limit)
        found.append(open_suite(config, Path()))
    return tuple(found)


async def evaluate(plan: EvaluationPlan, results: StoredResults) -> AsyncGenerator[Progress]:
    """Ask what is not stored yet; yields after each answer. The results are complete when it
    ends."""
    add_import_paths(plan.target.python_path)
    answers = _Answers()
    answers.keep(results.read(plan.suites, plan.samples, plan.temperature), plan)
    items = [item for suite in plan.suites for item in _items(plan, suite)]
    missing = [i for i in items if (i.suite.name, i.question, i.sample) not in answers.found]
    stored_at = time.monotonic()
    try:
        if missing:
            async for item, answer in _ask(plan, missing):
                answers.found[item.suite.name, item.question, item.sample] = answer
                if time.monotonic() - stored_at > STORE_EVERY_S:
                    results.write(answers.evaluation(plan))
                    stored_at = time.monotonic()
                yield Progress(
                    suite=item.suite.name,
                    done=len(answers.found),
                    total=len(items),
                    failed=sum(one.score is None for one in answers.found.values()),
                )
    finally:
        if answers.found:
            results.write(answers.evaluation(plan))


def _items(plan: EvaluationPlan, suite: Suite) -> Iterator[_Item]:
    source = _source_name(suite)
    for ordinal, payload in enumerate(suite.tasks):
        question = str(payload["question"])
        task = Task(
            key=question,
            source=source,
            ordinal=ordinal,
            payload=payload,
            workflow="",
            seed=derive_seed(SEED, suite.name, question),
        )
        for sample in range(plan.samples):
            yield _Item(suite, task, question, sample)


def _source_name(suite: Suite) -> str:
    return f"eval.{suite.name}"


async def _ask(plan: EvaluationPlan, items: list[_Item]) -> AsyncGenerator[tuple[_Item, Answer]]:
    """The answers in the order of the items."""
    info = _eval_info(plan)
    weights = {plan.policy: plan.weights} if plan.weights is not None else {}
    async with AsyncExitStack() as resources:
        opened = open_gateway(plan.target, info, plan.server, weights=weights)
        gateway = await resources.enter_async_context(opened)
        rollouts = open_rollouts(plan.target, info, gateway)
        rollout, scoring = await resources.enter_async_context(rollouts)
        limit = asyncio.Semaphore(MAX_CONCURRENT)
        attempts = [asyncio.create_task(_attempt(rollout, gateway, item, limit)) for item in items]
        resources.push_async_callback(cancel, *attempts)
        for item, attempt in zip(items, attempts, strict=True):
            await wait_or_raise(attempt, scoring)
            yield item, await attempt


async def _attempt(
    rollout: Rollout, gateway: LoggedGateway, item: _Item, limit: asyncio.Semaphore
) -> Answer:
    async with limit:
        trajectory = await rollout(item.task, item.sample)
    [seed] = slot_seeds(item.task.seed, range(item.sample, item.sample + 1))
    session = gateway.sessions.pop(seed)
    outcome = trajectory.outcome
    return Answer(
        question=item.question,
        sample=item.sample,
        seed=seed,
        score=trajectory.reward,
        failure="" if trajectory.reward is not None else str(outcome.reason or outcome.kind),
        turns=len(trajectory.turns),
        tokens=_num_tokens(trajectory)
        or sum(answer.usage.completion_tokens for _, answer in session.calls),
    )


def _num_tokens(trajectory: Trajectory) -> int:
    return sum(len(view_ids(turn.sampled_ids)) for turn in trajectory.turns)


def _eval_info(plan: EvaluationPlan) -> RunInfo:
    """The run as its nodes know it, with a source for each suite."""
    info = run_info(plan.target.config)
    sampling = replace(info.sampling, temperature=plan.temperature, top_p=plan.top_p)
    if plan.max_tokens is not None:
        sampling = replace(sampling, max_tokens=plan.max_tokens)
    sources = tuple(
        SourceInfo(
            name=_source_name(suite),
            workflow=info.workflow,
            reward=suite.reward,
            sampling=sampling,
        )
        for suite in plan.suites
    )
    return replace(info, sources=(*info.sources, *sources), is_scored=True)
