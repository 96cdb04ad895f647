# SPDX-License-Identifier: Apache-2.0
"""Generates a share of the rows of untrusted nodes again, from the same seed and version, and
reports whether tokens and reward agree.

Owns the choice of rows, which a node cannot predict, and a separate engine. The dataflow decides
what a disagreement means. Of a row of several versions, one that it names by lot is checked. A row
whose versions are all gone, which is too stale to be trained, and a row that waits behind too many
others are not checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from penstock.dataflow.columns.origins import RowOrigin
from penstock.dataflow.core.spot_checks import SpotCheck
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.dataflow.service.trainers.messages import VersionsInUse
from penstock.errors import EngineError, WeightsError, WireError
from penstock.gateway.gateway import Gateway
from penstock.gateway.template_probe import load_probed
from penstock.rollout.engine import Engine
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.scorer import RewardScorer
from penstock.rollout.weight_loader import WeightServerFetcher
from penstock.runs.local_rollouts import Rollout, local_rollouts
from penstock.runs.redrawn_answers import RedrawnAnswers, version_of_span
from penstock.types import (
    PolicyName,
    PublishedVersion,
    ToolUse,
    Trajectory,
    Turn,
    Version,
    subject_of_node,
)
from penstock.wire.client import AsyncServiceClient
from penstock.wire.held_token import Token

MAX_WAITING = 256
"""Rows that wait for their check; more are not checked."""
CLEAR_AFTER = 10
"""Rows in a row that must agree before a credential is checked by share again."""
_random = random.SystemRandom()
_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class CheckChooser:
    """Which rows are checked: a share, and all after one that differs."""

    share: float
    draw: Callable[[], float] = field(default_factory=lambda: _random.random)
    _suspects: dict[str, int] = field(default_factory=dict[str, int])

    def is_chosen(self, subject: str) -> bool:
        return subject in self._suspects or self.draw() < self.share

    def checked(self, subject: str, *, agrees: bool) -> None:
        if not agrees:
            self._suspects[subject] = CLEAR_AFTER
        elif subject in self._suspects:
            self._suspects[subject] -= 1
            if not self._suspects[subject]:
                del self._suspects[subject]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    trajectory: Trajectory
    origin: RowOrigin
    reward: float


def versions_of(trajectory: Trajectory) -> set[Version]:
    """Every version that sampled a token of it, as its node says."""
    turns = trajectory.turns
    return {version_of_span(turn.policy, span) for turn in turns for span in turn.spans}


def has_same_tokens(trajectory: Trajectory, again: Trajectory) -> bool:
    """Whether both ended alike, after the same calls with the same prompts and answers, and the
    same uses of tools. The time and the price of a tool may differ."""

    def calls(one: Trajectory) -> list[tuple[object, ...]]:
        return [
            (
                t.policy,
                t.role,
                t.agent,
                t.parent,
                t.prompt_ids,
                t.sampled_ids,
                t.finish,
                t.reached_agent,
            )
            for t in one.turns
        ]

    def uses(one: Trajectory) -> list[ToolUse]:
        return [replace(use, seconds=0.0, cost=0.0) for use in one.tool_uses]

    return (
        trajectory.outcome.kind is again.outcome.kind
        and calls(trajectory) == calls(again)
        and uses(trajectory) == uses(again)
    )


def begins_alike(trajectory: Trajectory, again: Trajectory) -> bool:
    """Whether its first call is one with which the repetition began, too. No sampled token comes
    before it, so it is the same with an engine that does not repeat itself. Calls that a workflow
    makes at once may be recorded in any order."""

    def start(turn: Turn) -> tuple[object, ...]:
        return turn.policy, turn.role, turn.agent, turn.parent, turn.prompt_ids

    known = [start(turn) for turn in again.turns if turn.parent == -1]
    return all(start(turn) in known for turn in trajectory.turns[:1])


def choose_versions(
    named: Collection[Version],
    in_use: Collection[Version],
    loaded: Mapping[PolicyName, Version | None],
    choose: Callable[[Sequence[Version]], Version] = _random.choice,
) -> dict[PolicyName, Version] | None:
    """The version of each policy to check: of those that the row named, by lot, so that every lie
    about a version may meet its check. A policy that the row did not name may be called by the
    repetition, and one whose named versions are all gone is taken from the row: any version does.
    None if all versions that the row named are gone. `loaded`: what the engine of each policy
    serves."""
    chosen: dict[PolicyName, Version] = {}
    for policy, live in loaded.items():
        claimed = sorted(version for version in named if version.policy == policy)
        usable = [version for version in claimed if version in in_use or version == live]
        others = sorted(version for version in in_use if version.policy == policy)
        if any_of := usable or ([live] if live else others[-1:]):
            chosen[policy] = choose(any_of)
    return chosen if not named or any(version in named for version in chosen.values()) else None


class SpotChecker:
    def __init__(
        self,
        info: RunInfo,
        make_engine: Callable[[], Engine],
        isolation: Isolation,
        *,
        share: float,
        is_reproducible: bool,
    ) -> None:
        """`is_reproducible`: the engine gives the same tokens for the same seed."""
        self._info = info
        self._engines = EnginePools(info.policies, make_engine)
        self._answers = RedrawnAnswers(self._engines)
        self._gateway = Gateway(self._answers if is_reproducible else self._engines)
        self._isolation = isolation
        self._is_reproducible = is_reproducible
        self._chooser = CheckChooser(share=share)
        self._waiting = asyncio.Queue[_Check](MAX_WAITING)
        self._loaded: dict[PolicyName, Version] = {}

    def offer(self, trajectory: Trajectory, origin: RowOrigin, reward: float) -> None:
        """Check this row, if it is chosen and there is room."""
        if not self._waiting.full() and self._chooser.is_chosen(
            subject_of_node(trajectory.node_id)
        ):
            self._waiting.put_nowait(_Check(trajectory=trajectory, origin=origin, reward=reward))

    async def run(
        self, url: str, weights_url: str, token: Token, cache: Path, scorer: RewardScorer
    ) -> None:
        """consumes: chosen rows · produces: reports to the dataflow
        waits for: a row, its version, the engine · woken by: `offer()`"""
        async with self._connected(url, token, cache) as (caller, fetch):
            info = replace(self._info, is_scored=True)
            rollouts = local_rollouts(info, self._gateway, scorer, self._isolation)
            async with rollouts as rollout:
                while True:
                    check = await self._waiting.get()
                    try:
                        checked = await self._load(check, caller, fetch, weights_url)
                        if checked is not None:
                            self._answers.expect(check.trajectory, checked)
                            await self._repeat(check, rollout, caller)
                    except EngineError as error:  # perhaps the fault of this row
                        self._not_checked(check, str(error))
                    except (WeightsError, WireError) as error:
                        row = check.trajectory.row_id
                        _log.warning("row not checked", row=row, why=str(error))

    @asynccontextmanager
    async def _connected(
        self, url: str, token: Token, cache: Path
    ) -> AsyncGenerator[tuple[AsyncServiceClient, WeightServerFetcher]]:
        caller, fetch = AsyncServiceClient(url, token), WeightServerFetcher(token, cache)
        try:
            yield caller, fetch
        finally:
            await fetch.close()
            await caller.close()
            await self._engines.close()

    async def _load(
        self,
        check: _Check,
        caller: AsyncServiceClient,
        fetch: WeightServerFetcher,
        weights_url: str,
    ) -> dict[PolicyName, Version] | None:
        """Serve a version of every policy, one that sampled the row where there is any; None if all
        that a policy named are gone."""
        answer = await caller.call("GET", "/v1/versions", None, VersionsInUse)
        digests = {
            Version(policy=one.policy, incarnation=one.incarnation, number=one.number): (
                one.manifest_digest
            )
            for one in answer.versions
        }
        loaded = {policy: self._loaded.get(policy) for policy in sorted(self._engines.policies)}
        chosen = choose_versions(versions_of(check.trajectory), digests, loaded)
        if chosen is None:
            return None
        for version in chosen.values():
            if self._loaded.get(version.policy) != version:
                target = PublishedVersion(
                    policy=version.policy,
                    incarnation=version.incarnation,
                    number=version.number,
                    manifest_digest=digests[version],
                )
                await self._serve(await fetch(weights_url, target), version)
                await asyncio.to_thread(fetch.prune_except, [target.manifest_digest])
        return chosen

    async def _serve(self, folder: Path, version: Version) -> None:
        if version.policy not in self._loaded:
            renderer = await asyncio.to_thread(load_probed, folder)
            self._gateway.set_renderer(version.policy, renderer)
        await self._engines.load(folder, version)
        self._loaded[version.policy] = version

    def _not_checked(self, check: _Check, why: str) -> None:
        """Its repetition failed: more rows of its credential are checked from now on."""
        self._chooser.checked(subject_of_node(check.trajectory.node_id), agrees=False)
        _log.warning("row not checked", row=check.trajectory.row_id, why=why)

    async def _repeat(self, check: _Check, rollout: Rollout, caller: AsyncServiceClient) -> None:
        trajectory, started = check.trajectory, time.perf_counter()
        again = await rollout(check.origin.task, trajectory.slot)
        if again.reward is None:
            self._not_checked(check, again.outcome.detail)
            return
        compare = has_same_tokens if self._is_reproducible else begins_alike
        same = compare(trajectory, again)
        subject = subject_of_node(trajectory.node_id)
        self._chooser.checked(subject, agrees=same)
        report = SpotCheck(
            has_same_tokens=same,
            reward_change=check.reward - again.reward,
            num_tokens=sum(len(turn.sampled_ids) // 4 for turn in again.turns),
            seconds=time.perf_counter() - started,
        )
        await caller.call("POST", f"/v1/nodes/{subject}/checks", report, Ack)
        if not same:
            _log.warning("row differs when generated again", row=trajectory.row_id, node=subject)
