# SPDX-License-Identifier: Apache-2.0
"""What a spot check compares, and that no claim of a row keeps it from being compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.attacks.test_cheats import EVIL, untrusted_config
from tests.contract.dataflow_server import FakeTrainer, RunningDataflow, dataflow
from tests.unit.rollout.fake_dataflow import POLICY, facts, task
from tests.unit.rollout.snapshot_files import ALPHABET, write_snapshot
from tests.unit.rollout.test_attempt import DirectScorer

from penstock.config.stages import stage_subject
from penstock.config.trust import SCORE_STAGE
from penstock.dataflow.columns.origins import RowOrigin
from penstock.dataflow.core.spot_checks import CheckCounts
from penstock.dataflow.sources import slot_seeds
from penstock.gateway.gateway import Gateway
from penstock.gateway.renderer import Renderer
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.isolation import Isolation
from penstock.runs.local_rollouts import local_rollouts
from penstock.runs.spot_checker import CLEAR_AFTER, CheckChooser, SpotChecker, choose_versions
from penstock.types import (
    FinishReason,
    Outcome,
    OutcomeKind,
    PolicyName,
    PublishedVersion,
    ToolUse,
    Trajectory,
    Version,
    VersionSpan,
    token_ids,
    view_ids,
)
from penstock.wire.auth import Role

OTHER = PolicyName("other")
USE = ToolUse(turn=0, name="look", arguments='{"at": "a"}', result="seen", seconds=0.5, cost=2.0)


def version(incarnation: int, number: int = 0, policy: PolicyName = POLICY) -> Version:
    return Version(policy=policy, incarnation=incarnation, number=number)


# --- the whole checker ------------------------------------------------------------------------


class _Files:
    """The weights, without a server of them."""

    def __init__(self, folder: Path, *_: object) -> None:
        self._folder = folder

    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path:
        return self._folder

    def make_patch(self, base: Path, folder: Path) -> None:
        return None

    def prune_except(self, keep: Collection[str]) -> None: ...

    async def close(self) -> None: ...


@contextmanager
def _two_versions(tmp_path: Path) -> Generator[RunningDataflow]:
    """A run that has published versions 1.0 and 2.0."""
    with dataflow(tmp_path, untrusted_config()) as running:
        assert [FakeTrainer(running).incarnation for _ in range(2)] == [1, 2]
        yield running


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_snapshot(tmp_path / "snapshot")
    monkeypatch.setattr("penstock.runs.spot_checker.WeightServerFetcher", partial(_Files, folder))
    return folder


async def _honest(folder: Path) -> Trajectory:
    """A row as a node makes it, of the newest version."""
    engine = ScriptedEngine()
    await engine.load(folder, version(2))
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(folder))
    async with local_rollouts(facts(is_scored=False), gateway, None, Isolation()) as rollout:
        row = await rollout(task(), 1)
    assert row.outcome.kind is OutcomeKind.TRUNCATED
    return replace(row, node_id=EVIL)


@asynccontextmanager
async def _checking(running: RunningDataflow, tmp_path: Path) -> AsyncGenerator[SpotChecker]:
    checker = SpotChecker(facts(), ScriptedEngine, Isolation(), share=1.0, is_reproducible=True)
    token = running.token(Role.STAGE, subject=stage_subject(SCORE_STAGE))
    working = asyncio.create_task(
        checker.run(running.url, "", token, tmp_path / "cache", DirectScorer())
    )
    try:
        yield checker
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _counted(running: RunningDataflow, num_checks: int) -> CheckCounts:
    reader = running.reader()
    while True:
        status = await asyncio.to_thread(reader.status)
        if (found := status.checks.get(EVIL, CheckCounts())).num_checked >= num_checks:
            return found


async def _check(
    rows: list[Trajectory], running: RunningDataflow, tmp_path: Path, num_before: int = 0
) -> CheckCounts:
    [seed] = slot_seeds(task().seed, range(1, 2))
    origin = RowOrigin(task=task(), seed=seed, node_id=EVIL, is_trusted=False)
    async with _checking(running, tmp_path) as checker, asyncio.timeout(100):
        for row in rows:
            checker.offer(row, origin, 1.0)
        return await _counted(running, num_before + len(rows))


def _with_turn(row: Trajectory, **change: object) -> Trajectory:
    return replace(row, turns=(replace(row.turns[0], **change),))


def _of_two_versions(row: Trajectory) -> Trajectory:
    """The same tokens, of which it says that the weights changed after the first."""
    num = len(row.turns[0].sampled_ids) // 4
    spans = (
        VersionSpan(start=0, end=1, incarnation=1, number=0),
        VersionSpan(start=1, end=num, incarnation=2, number=0),
    )
    return _with_turn(row, spans=spans)


def _other_tokens(row: Trajectory) -> Trajectory:
    ids = [(token + 1) % len(ALPHABET) for token in view_ids(row.turns[0].sampled_ids)]
    return _with_turn(row, sampled_ids=token_ids(ids))


FORGERIES: dict[str, Callable[[Trajectory], Trajectory]] = {
    "other tokens": _other_tokens,
    "other tokens of two versions": lambda row: _of_two_versions(_other_tokens(row)),
    "another prompt of two versions": lambda row: _of_two_versions(
        _with_turn(row, prompt_ids=token_ids([1, 2, 3]))
    ),
    "a call less": lambda row: replace(row, turns=()),
    "a call more": lambda row: replace(row, turns=row.turns * 2),
    "another end": lambda row: _with_turn(row, finish=FinishReason.STOP),
    "another role": lambda row: _with_turn(row, role="judge"),
    "another sub-agent": lambda row: _with_turn(row, agent="0.1"),
    "an answer that is not trained": lambda row: _with_turn(row, reached_agent=False),
    "a tool that it never used": lambda row: replace(row, tool_uses=(USE,)),
    "another outcome": lambda row: replace(row, outcome=Outcome(kind=OutcomeKind.COMPLETED)),
}


async def test_every_forgery_is_compared_and_differs(files: Path, tmp_path: Path) -> None:
    """Also where the row says that it has two versions, which had kept it from being compared."""
    honest = await _honest(files)
    with _two_versions(tmp_path) as running:
        for num, (name, forge) in enumerate(FORGERIES.items(), 1):
            counts = await _check([forge(honest)], running, tmp_path, num - 1)
            assert (counts.num_compared, counts.num_different) == (num, num), name


async def test_honest_rows_agree_also_with_two_versions(files: Path, tmp_path: Path) -> None:
    honest = await _honest(files)
    with _two_versions(tmp_path) as running:
        counts = await _check([honest, _of_two_versions(honest)] * 4, running, tmp_path)
    assert (counts.num_compared, counts.num_different) == (8, 0)
    assert (counts.num_better, counts.num_worse) == (0, 0)


# --- one version at a time --------------------------------------------------------------------


def test_every_version_that_a_row_names_may_be_checked() -> None:
    named = [version(1, 3), version(1, 4)]
    chosen = [
        choose_versions(named, named, {POLICY: None}, lambda found, at=at: found[at])
        for at in range(2)
    ]
    assert chosen == [{POLICY: one} for one in named]


def test_a_version_that_is_gone_hides_no_other() -> None:
    loaded = {POLICY: None}
    assert choose_versions([version(1, 3), version(1, 4)], [version(1, 4)], loaded) == {
        POLICY: version(1, 4)
    }
    assert choose_versions([version(1, 3)], [version(1, 4)], loaded) is None
    assert choose_versions([version(1, 3)], [], {POLICY: version(1, 3)}) == {POLICY: version(1, 3)}


def test_a_policy_that_a_row_leaves_out_can_answer() -> None:
    """Its repetition calls it: without a version it would fail, and the row stay unchecked."""
    of_other = [version(1, number, OTHER) for number in (1, 2)]
    loaded = {OTHER: None, POLICY: None}
    in_use = [*of_other, version(1)]
    assert choose_versions([version(1)], in_use, loaded) == {
        POLICY: version(1),
        OTHER: of_other[1],
    }
    assert choose_versions([], in_use, {OTHER: of_other[0]}) == {OTHER: of_other[0]}
    gone = replace(of_other[0], number=99)
    assert choose_versions([version(1), gone], in_use, loaded) == {
        POLICY: version(1),
        OTHER: of_other[1],
    }, "a version of one policy that is gone does not keep the other's tokens from their check"


# --- who is checked ---------------------------------------------------------------------------


def test_a_credential_is_cleared_by_rows_that_agree_alone() -> None:
    chooser = CheckChooser(share=0.0)
    assert not chooser.is_chosen("evil")
    chooser.checked("evil", agrees=False)
    for _ in range(CLEAR_AFTER - 1):
        chooser.checked("evil", agrees=True)
    assert chooser.is_chosen("evil") and not chooser.is_chosen("good")
    chooser.checked("evil", agrees=False)
    for _ in range(CLEAR_AFTER):
        assert chooser.is_chosen("evil")
        chooser.checked("evil", agrees=True)
    assert not chooser.is_chosen("evil")
