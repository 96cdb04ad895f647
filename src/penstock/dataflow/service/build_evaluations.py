# SPDX-License-Identifier: Apache-2.0
"""Builds the evaluations of a run from its config: suites as sources, and their share of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

from penstock.config import RunConfig
from penstock.config.evaluation import SuiteConfig
from penstock.dataflow.core.evaluations import SOURCE_PREFIX, EvaluationSpec
from penstock.dataflow.service.build_sources import workflow_text
from penstock.dataflow.service.nodes.messages import SourceInfo
from penstock.dataflow.sources import Source
from penstock.dataflow.sources.suites import Suite, open_suite
from penstock.types import JsonObject, PolicyName, SamplingSpec


def open_suites(config: RunConfig) -> tuple[Suite, ...]:
    """The suites of a run; relative files are in the working directory, as for sources."""
    suites = config.eval.suites if config.eval else ()
    return tuple(_opened(suite.model_dump_json()) for suite in suites)


@lru_cache
def _opened(suite: str) -> Suite:
    """Opened once, since several parts of a service need it."""
    return open_suite(SuiteConfig.model_validate_json(suite), Path())


def best_suite(config: RunConfig) -> str:
    """The suite whose score names the best version; empty without evaluations."""
    return "" if config.eval is None else config.eval.best or config.eval.suites[0].name


def evaluation_spec(config: RunConfig) -> EvaluationSpec | None:
    if config.eval is None or config.evaluated is None:
        return None
    like = config.source_like(config.evaluated)
    return EvaluationSpec(
        policy=PolicyName(config.evaluated),
        calls=frozenset(map(PolicyName, config.policies_of(like))),
        every=config.eval.every,
        samples=config.eval.samples,
        temperature=config.eval.temperature,
        suites=tuple((_source(suite), suite.digest) for suite in open_suites(config)),
        best=best_suite(config),
        workflow=workflow_text(config.workflow_of(like)),
        seed=config.seed,
    )


def _source(suite: Suite) -> Source:
    return Source(
        name=SOURCE_PREFIX + suite.name,
        weight=1.0,
        make=partial(_question, suite.tasks),
        limit=len(suite.tasks),
    )


def _question(tasks: Sequence[JsonObject], ordinal: int, seed: int) -> JsonObject:
    return tasks[ordinal]


def evaluation_share(config: RunConfig) -> float:
    """Share of a node that also trains; 0 if separate nodes evaluate."""
    return 0.0 if config.eval is None or config.eval.nodes else config.eval.max_share


def evaluation_calls(config: RunConfig) -> dict[str, frozenset[PolicyName]]:
    """Policies that the questions of each suite call."""
    if config.eval is None or config.evaluated is None:
        return {}
    called = frozenset(map(PolicyName, config.policies_of(config.source_like(config.evaluated))))
    return {SOURCE_PREFIX + suite.name: called for suite in config.eval.suites}


def evaluation_sources(config: RunConfig) -> Iterator[SourceInfo]:
    """What a node needs to know about each suite: the workflow of training, its own scorer and
    sampling."""
    if config.eval is None or config.evaluated is None:
        return
    like = config.source_like(config.evaluated)
    shared = config.sampling_of(like)
    sampling = SamplingSpec(
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        max_tokens=config.eval.max_tokens or shared.max_tokens,
    )
    for suite in open_suites(config):
        yield SourceInfo(
            name=SOURCE_PREFIX + suite.name,
            workflow=workflow_text(config.workflow_of(like)),
            reward=suite.reward or config.reward_of(like) or "",
            sampling=sampling,
            tools=like.tools,
            policies=tuple(map(PolicyName, config.policies_of(like))),
            is_evaluation=True,
        )
