# SPDX-License-Identifier: Apache-2.0
"""Roles, sub-agents and their budgets, in whole attempts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.fake_dataflow import POLICY, task
from tests.unit.rollout.test_attempt import GRANT, DirectScorer, attempt

from penstock.dataflow.service.nodes.messages import RecordRequest
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.rewards.scorer import Failed
from penstock.trainer.samples import make_samples
from penstock.types import (
    FailureKind,
    FinishReason,
    NodeId,
    OutcomeKind,
    PolicyName,
    RowId,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
)

AGENTS = "tests.unit.rollout.agent_workflows"
SMALL = PolicyName("small")
ROLES = {"solver": POLICY, "verifier": SMALL}


class SeededEngine:
    """Answers with letters that depend on the seed alone, so that a repeated seed shows."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.num_calls += 1
        seed, num = request.sampling.seed, request.sampling.max_tokens
        ids = [seed // 10**at % 10 for at in range(num)]
        return Completion(
            sampled_ids=token_ids(ids),
            logprobs=log_probs([-0.5] * num),
            spans=(VersionSpan(start=0, end=num, incarnation=1, number=0),),
            finish=FinishReason.STOP,
        )


class KeptTurns:
    """A dataflow that kept these turns of an earlier attempt."""

    def __init__(self, *turns: Turn) -> None:
        self._turns = turns

    async def record(self, body: RecordRequest) -> None:
        pass

    async def recorded(self, node_id: NodeId, row_id: RowId, secret: str) -> tuple[Turn, ...]:
        return self._turns


def given(**payload: Any) -> Task:
    return replace(task(), payload={**task().payload, **payload})


async def played(snapshot: Path, name: str, **changes: Any) -> Trajectory:
    changes.setdefault("scorer", DirectScorer())
    changes.setdefault("generate", SeededEngine())
    return await attempt(snapshot, f"{AGENTS}:{name}", **changes)


def by_agent(row: Trajectory) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for turn in row.turns:
        found.setdefault(turn.agent, []).append(turn.sampled_ids)
    return found


# --- roles --------------------------------------------------------------------------------------


async def test_a_role_finds_its_policy_and_labels_its_turns(snapshot: Path) -> None:
    row = await played(snapshot, "roles", policies=(POLICY, SMALL), roles=ROLES)
    assert [(turn.policy, turn.role) for turn in row.turns] == [
        (POLICY, "solver"),
        (SMALL, "verifier"),
        (POLICY, ""),
        (POLICY, "critic"),
        (POLICY, ""),
    ]


async def test_an_unknown_role_is_refused_with_those_that_exist(snapshot: Path) -> None:
    row = await played(snapshot, "unknown_role", policies=(POLICY, SMALL), roles=ROLES)
    assert row.outcome.reason == FailureKind.WORKFLOW
    assert "'solvr'; this session has: solver, verifier, policy, small" in row.outcome.detail


async def test_agents_over_http_name_their_role(snapshot: Path) -> None:
    row = await played(snapshot, "over_http", policies=(POLICY, SMALL), roles=ROLES)
    assert row.outcome.kind is OutcomeKind.COMPLETED, row.outcome
    assert [(turn.agent, turn.policy, turn.role) for turn in row.turns] == [
        ("0", POLICY, "solver"),
        ("1", SMALL, "verifier"),
        ("", SMALL, "verifier"),
        ("", POLICY, ""),
    ]


# --- sub-agents ---------------------------------------------------------------------------------


async def test_sub_agents_at_once_are_those_in_turn(snapshot: Path) -> None:
    """Their seeds depend on the order of spawns, not on that of calls."""
    at_once = by_agent(await played(snapshot, "pair"))
    assert at_once == by_agent(await played(snapshot, "pair_in_turn"))
    assert set(at_once) == {"0", "1"} and all(len(turns) == 2 for turns in at_once.values())
    assert len({ids for turns in at_once.values() for ids in turns}) == 4, "each has its own seed"


async def test_the_turns_of_sub_agents_form_trees_of_their_own(snapshot: Path) -> None:
    """They ask and are told the same; still none continues the conversation of another."""
    row = await played(snapshot, "pair", generate=None)
    for turn in row.turns:
        assert turn.parent == -1 or row.turns[turn.parent].agent == turn.agent


async def test_every_token_at_depth_two_is_trained_once(snapshot: Path) -> None:
    row = await played(snapshot, "recursive")
    assert Counter(turn.agent for turn in row.turns) == {
        "": 2,
        **dict.fromkeys(("0", "1", "0.0", "0.1", "1.0", "1.1"), 2),
    }
    samples = make_samples([(0, row)], POLICY)
    trained: Counter[int] = Counter(samples.sampled_T[samples.mask_T].tolist())
    num_sampled = sum(len(view_ids(turn.sampled_ids)) for turn in row.turns)
    assert trained == Counter(range(num_sampled))


async def test_a_sub_agent_may_continue_its_parents_conversation(snapshot: Path) -> None:
    row = await played(snapshot, "hands_on")
    assert [(turn.agent, turn.parent) for turn in row.turns] == [("", -1), ("0", 0)]
    samples = make_samples([(0, row)], POLICY)
    assert len(samples.starts_S) == 1 and samples.num_trained == 6


async def test_none_is_the_last_answer_of_the_sub_agent(snapshot: Path) -> None:
    scorer = DirectScorer()
    row = await played(snapshot, "returns_none", scorer=scorer, generate=None)
    assert scorer.seen == ["cba"] and [turn.agent for turn in row.turns] == ["", "0"]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("numbered", {"": {None}, "0": {0.25}}),
        (
            "recursive",
            {
                "": {None},
                "0": {0.5},
                "1": {0.5},
                **{f"{a}.{b}": {None} for a in "01" for b in "01"},
            },
        ),
    ],
)
async def test_the_reward_of_a_sub_agent_is_that_of_its_own_turns(
    snapshot: Path, name: str, rewards: dict[str, set[float | None]]
) -> None:
    row = await played(snapshot, name)
    found: dict[str, set[float | None]] = {}
    for turn in row.turns:
        found.setdefault(turn.agent, set()).add(turn.reward)
    assert found == rewards and row.reward is not None


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "num_turns"), [("tokens", 4), ("calls", 3), ("depth", 4), ("time", 2)]
)
async def test_a_parent_catches_what_a_sub_agent_may_not_use(
    snapshot: Path, limit: str, num_turns: int
) -> None:
    row = await played(snapshot, "overspends", given=given(limit=limit))
    assert row.outcome.kind is OutcomeKind.COMPLETED, row.outcome
    assert len(row.turns) == num_turns
    if limit == "tokens":
        assert [len(view_ids(turn.sampled_ids)) for turn in row.turns] == [3, 3, 1, 3]


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("tokens", "length"), ("calls", "length"), ("depth", "length"), ("time", "deadline")],
)
async def test_a_limit_that_nobody_catches_cuts_the_attempt(
    snapshot: Path, limit: str, reason: str
) -> None:
    row = await played(snapshot, "overspends_aloud", given=given(limit=limit))
    assert (row.outcome.kind, row.outcome.reason) == (OutcomeKind.TRUNCATED, reason)
    assert row.reward is not None


async def test_a_budget_includes_the_sub_agents_below(snapshot: Path) -> None:
    scorer = DirectScorer()
    row = await played(snapshot, "shares_a_budget", scorer=scorer)
    assert [turn.agent for turn in row.turns] == ["0.0", "0.0", "0.1"]
    assert "sub-agent 0 has used its budget of calls (max_calls=3)" in scorer.seen[0]


# --- salvage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pair", "recursive"])
async def test_a_retry_with_kept_turns_gives_the_same_row(snapshot: Path, name: str) -> None:
    """Whatever was kept: no sub-agent takes the answer of another, or gets one twice."""
    whole = by_agent(await played(snapshot, name))
    undisturbed = await played(snapshot, name)
    roots = [turn for turn in undisturbed.turns if turn.parent == -1]
    for kept in ((), undisturbed.turns[:2], roots[-1:], undisturbed.turns):
        engine = SeededEngine()
        grant = replace_grant(len(kept))
        again = await played(
            snapshot, name, generate=engine, grant=grant, turn_api=KeptTurns(*kept)
        )
        assert by_agent(again) == whole
        assert engine.num_calls == len(undisturbed.turns) - len(kept)


def replace_grant(num_recorded: int) -> Any:
    import msgspec

    return msgspec.structs.replace(GRANT, num_recorded=num_recorded)


# --- scores and options -------------------------------------------------------------------------


async def test_a_workflow_may_ask_for_the_runs_reward(snapshot: Path) -> None:
    row = await played(snapshot, "scores", generate=None)
    assert row.reward == 10.0


@pytest.mark.parametrize(
    ("scorer", "says"),
    [
        (None, "neither the run nor the task's source has a reward function"),
        (DirectScorer(Failed(kind=FailureKind.REWARD, detail="it broke")), "it broke"),
    ],
)
async def test_a_reward_that_fails_inside_the_workflow_is_the_rewards_failure(
    snapshot: Path, scorer: DirectScorer | None, says: str
) -> None:
    row = await played(snapshot, "scores", scorer=scorer)
    assert row.outcome.reason == FailureKind.REWARD and says in row.outcome.detail


async def test_options_of_the_run_file_are_keyword_arguments(snapshot: Path) -> None:
    name = f'{{"name": "{AGENTS}:configured", "times": 3}}'
    row = await attempt(snapshot, name, scorer=DirectScorer(), generate=SeededEngine())
    assert len(row.turns) == 3
