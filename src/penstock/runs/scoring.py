# SPDX-License-Identifier: Apache-2.0
"""Runs the built-in stage `trusted-reward` of a run on this machine: scorer, decoder, spot checker.

Owns the wiring. The run folder must be here: tokenizer and configuration come from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from penstock.config import RunConfig
from penstock.config.models import is_reproducible
from penstock.config.trust import SCORE_STAGE
from penstock.dataflow.columns.origins import RowOrigin
from penstock.dataflow.service.build import run_info
from penstock.fleet.run_folder import RunFolder
from penstock.rollout.engine import Engine, EngineSettings
from penstock.rollout.engines import find_engine
from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.scorer import SourceScorers
from penstock.runs.decoded import Decoder
from penstock.runs.sandbox_settings import isolation_settings
from penstock.runs.score_stage import serve_scores
from penstock.runs.spot_checker import SpotChecker
from penstock.types import Trajectory
from penstock.wire.held_token import Token


async def run_score_stage(config: RunConfig, folder: RunFolder, token: Token) -> None:
    """Score and check rows until cancelled; raises if a reward function cannot be imported."""
    info, endpoints = run_info(config), folder.trusted_endpoints()
    terms = next(stage for stage in config.dataflow.stages if stage.name == SCORE_STAGE)
    isolation = Isolation(isolation_settings(config, folder.path))
    rewards = {source.name: source.reward for source in info.sources}
    scorer = SourceScorers(info.reward, rewards, isolation)
    on_untrusted: Callable[[Trajectory, RowOrigin, float], None] = _ignore
    decoder = Decoder(folder)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scorer.run(), name="score")
        if config.trust.accept_untrusted and config.trust.regenerate_share:
            checker = SpotChecker(
                info,
                partial(_make_engine, config, folder),
                isolation,
                share=config.trust.regenerate_share,
                is_reproducible=is_reproducible(info.engine),
            )
            on_untrusted = checker.offer
            cache = folder.nodes / SCORE_STAGE / "weights"
            checking = checker.run(endpoints.dataflow, endpoints.weights, token, cache, scorer)
            tasks.create_task(checking, name="check")
        urls = (endpoints.dataflow, *endpoints.partitions)
        await serve_scores(urls, token, terms, scorer, decoder.last_answer, on_untrusted)


def _ignore(trajectory: Trajectory, origin: RowOrigin, reward: float) -> None: ...


def _make_engine(config: RunConfig, folder: RunFolder) -> Engine:
    info, first = run_info(config), next(iter(config.models.values()))
    settings = EngineSettings(
        seed=config.seed,
        torch_threads=info.torch_threads,
        is_deterministic=info.is_deterministic,
        url=next(iter(first.engine_urls), ""),
        environment=first.vllm.environment or "",
        options=info.engine_options,
        state_dir=folder.nodes / SCORE_STAGE,
        num_policies=max((len(s.policies) for s in info.adapters), default=1),
        adapter_rank=max((s.rank for s in info.adapters), default=1),
    )
    return find_engine(info.engine).build(settings)
