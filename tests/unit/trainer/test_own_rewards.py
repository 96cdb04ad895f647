# SPDX-License-Identifier: Apache-2.0
"""Rewards of roles, turns and sub-agents, from the recorded row to the advantage of each token,
against plain loops over the rows, and against examples computed by hand."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, Sealed, make_trajectory
from tests.unit.trainer.oracles import grpo, rloo
from tests.unit.trainer.stage_makers import of, stage
from tests.unit.trainer.test_credits import (
    STAGE_FUNCTIONS_MODULE,
    TwoRanks,
    on_two_ranks,
    share,
    turn,
)

from penstock.dataflow.service.nodes.validate import summarise
from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.pipeline import credits
from penstock.trainer.pipeline.layout import Layout
from penstock.trainer.pipeline.run import bind
from penstock.types import (
    GroupId,
    Manifest,
    PolicyName,
    RowId,
    RowPayload,
    RowSummary,
    SealedGroup,
    Trajectory,
    Turn,
)
from penstock.wire.codec import encode

OTHER = PolicyName("other")
GRPO = f"{STAGE_FUNCTIONS_MODULE}:group_advantage"
Credit = dict[tuple[int, int], float]
"""By row and turn."""
Oracle = Callable[[Sequence[Sequence[float]]], list[float]]


def row(*turns: Turn, reward: float = 0.0, roles: Mapping[str, float] | None = None) -> Trajectory:
    return replace(make_trajectory(*turns), reward=reward, role_rewards=roles or {})


def seal(groups: Sequence[Sequence[Trajectory]]) -> Sealed:
    """As the door summarises the rows and the ledger seals them."""
    sealed: list[SealedGroup] = []
    payloads: list[RowPayload] = []
    for index, members in enumerate(groups):
        rows: list[RowSummary] = []
        for slot, record in enumerate(members):
            name = RowId(f"p0-{index}.{slot}.1")
            payload = encode(replace(record, row_id=name))
            digest = blake3(payload).hexdigest()
            found = summarise(replace(record, row_id=name), digest, lambda *_: True)
            assert isinstance(found, RowSummary), found
            rows.append(found)
            payloads.append(RowPayload(row_id=name, payload=payload))
        group = SealedGroup(group_id=GroupId(f"p0-{index}"), task_key="", rows=tuple(rows))
        sealed.append(group)
    manifest = Manifest(consumer=POLICY, seq=1, trains_from=0, groups=tuple(sealed))
    return Sealed(manifest=manifest, rows=tuple(payloads))


def opened(groups: Sequence[Sequence[Trajectory]]) -> Batch:
    sealed = seal(groups)
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


def credit_of(batch: Batch, advantages_T: Floats) -> Credit:
    """By row and turn; every trained token of a turn has the same, every other token none."""
    found: dict[tuple[int, int], set[float]] = {}
    samples = batch.samples
    for token in range(samples.ids_T.size):
        if samples.mask_T[token]:
            key = int(batch.rows_T[token]), int(samples.turns_T[token])
            found.setdefault(key, set()).add(float(advantages_T[token]))
        else:
            assert advantages_T[token] == 0.0
    assert all(len(values) == 1 for values in found.values())
    return {key: values.pop() for key, values in found.items()}


def advantage(batch: Batch, fn: str = "group_advantage", **options: Any) -> Credit:
    function = getattr(credits, fn)
    found = function(Layout.of(batch), reward=batch.row_columns["reward"], **options)
    return credit_of(batch, found["advantage"])


# --- the oracle -----------------------------------------------------------------------------------


def expected(
    groups: Sequence[Sequence[Trajectory]], oracle: Oracle, agents: str = "parent"
) -> Credit:
    """What every turn of POLICY should get, one turn at a time."""
    out = Credit()
    first = 0
    for rows in groups:
        for index, record in enumerate(rows):
            for number, one in enumerate(record.turns):
                if one.policy == POLICY:
                    value = of_turn(rows, index, number, oracle, agents)
                    out[first + index, number] = value
        first += len(rows)
    return out


def of_turn(
    rows: Sequence[Trajectory], index: int, number: int, oracle: Oracle, agents: str
) -> float:
    one = rows[index].turns[number]
    if one.agent and one.reward is not None:
        return of_agent(rows, index, one.agent, oracle, agents)
    place = same_role(rows[index], one.role).index(number) if not one.agent else -1
    peers = {
        at: same_role(record, one.role)[place]
        for at, record in enumerate(rows)
        if place >= 0 and len(same_role(record, one.role)) > place
    }
    if any(rows[at].turns[peer].reward is not None for at, peer in peers.items()):
        values = {at: earned(rows[at], peer) for at, peer in peers.items()}
    else:
        acted = [
            at for at, record in enumerate(rows) if any(is_of(t, one.role) for t in record.turns)
        ]
        values = {at: role_reward(rows[at], one.role) for at in acted}
    return dict(zip(values, oracle([list(values.values())]), strict=True))[index]


def of_agent(
    rows: Sequence[Trajectory], index: int, agent: str, oracle: Oracle, agents: str
) -> float:
    if agents == "siblings":
        parent = agent.rpartition(".")[0]
        turns = [t for t in rows[index].turns if t.policy == POLICY and t.reward is not None]
        paths = {t.agent for t in turns if t.agent}
        family = sorted(path for path in paths if path.rpartition(".")[0] == parent)
        values = [agent_reward(rows[index], path) for path in family]
        return oracle([values])[family.index(agent)]
    values = [record.reward or 0.0 for record in rows]
    values[index] = agent_reward(rows[index], agent)
    return oracle([values])[index]


def is_of(one: Turn, role: str) -> bool:
    return one.policy == POLICY and one.role == role


def same_role(record: Trajectory, role: str) -> list[int]:
    return [n for n, t in enumerate(record.turns) if is_of(t, role) and not t.agent]


def role_reward(record: Trajectory, role: str) -> float:
    assert record.reward is not None
    return record.role_rewards.get(role, record.reward)


def earned(record: Trajectory, number: int) -> float:
    one = record.turns[number]
    return role_reward(record, one.role) if one.reward is None else one.reward


def agent_reward(record: Trajectory, agent: str) -> float:
    turns = [t for t in record.turns if t.agent == agent and t.policy == POLICY]
    return statistics.fmean(t.reward for t in turns if t.reward is not None)


# --- random batches -------------------------------------------------------------------------------


def random_groups(seed: int, *, has_turn_rewards: bool) -> list[list[Trajectory]]:
    draw = random.Random(seed)

    def random_row() -> Trajectory:
        turns: list[Turn] = []
        for _ in range(draw.randint(1, 6)):
            agent = draw.choice(["", "", "0", "0.1", "0.2", "1"]) if has_turn_rewards else ""
            own = draw.random() if has_turn_rewards and draw.random() < 0.6 else None
            role = draw.choice(["solver", "verifier", ""])
            policy = OTHER if draw.random() < 0.2 else POLICY
            parent = draw.randint(-1, len(turns) - 1)
            more = {"policy": policy, "agent": agent, "reward": own}
            turns.append(turn(draw.randint(1, 3), role, parent, **more))
        played = {one.role for one in turns} - {""}
        roles = {role: draw.random() for role in sorted(played) if draw.random() < 0.7}
        turns.append(turn(2, "solver"))  # so that the policy is in every row
        return row(*turns, reward=draw.random(), roles=roles)

    return [[random_row() for _ in range(draw.randint(1, 5))] for _ in range(4)]


@pytest.mark.parametrize("agents", ["parent", "siblings"])
@pytest.mark.parametrize("has_turn_rewards", [False, True])
@pytest.mark.parametrize(
    ("fn", "oracle"), [("group_advantage", grpo), ("leave_one_out_advantage", rloo)]
)
def test_each_turn_is_compared_with_its_like(
    fn: str, oracle: Oracle, has_turn_rewards: bool, agents: str
) -> None:
    for seed in range(12):
        groups = random_groups(seed, has_turn_rewards=has_turn_rewards)
        found = advantage(opened(groups), fn, agents=agents)
        want = expected(groups, oracle, agents)
        assert found == pytest.approx(want, rel=1e-9, abs=1e-9), seed


@pytest.mark.parametrize("agents", ["parent", "siblings"])
def test_two_ranks_credit_as_one_does(agents: str) -> None:
    groups = random_groups(5, has_turn_rewards=True)
    sealed, want = seal(groups), expected(groups, grpo, agents)
    found: list[Credit] = []

    def of_rank(part: int, ranks: TwoRanks) -> None:
        own = assemble(sealed.manifest, share(sealed, part), POLICY, VOCAB_SIZE, ranks=ranks)
        layout = Layout.of(own, ranks.sum_over_ranks)
        reward = own.row_columns["reward"]
        columns = credits.group_advantage(layout, reward=reward, agents=agents)
        found.append(credit_of(own, columns["advantage"]))

    on_two_ranks(of_rank)
    assert found[0] | found[1] == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert not found[0].keys() & found[1].keys()


# --- by hand --------------------------------------------------------------------------------------


def test_a_role_with_its_own_reward_is_not_compared_with_the_other_role() -> None:
    """Solvers 1, 0; verifiers 0.5, 0.5: only the solvers' turns have credit."""
    groups = [
        [
            row(turn(2, "solver"), turn(1, "verifier"), roles={"solver": 1.0, "verifier": 0.5}),
            row(turn(2, "solver"), turn(1, "verifier"), roles={"solver": 0.0, "verifier": 0.5}),
        ]
    ]
    half = 0.5 / (math.sqrt(0.5) + 1e-5)
    assert advantage(opened(groups)) == pytest.approx(
        {(0, 0): half, (0, 1): 0.0, (1, 0): -half, (1, 1): 0.0}
    )


def tree() -> list[list[Trajectory]]:
    """Two rows: each workflow makes one call and spawns agents 0 and 1; agent 0 of the first row
    spawns 0.0 and 0.1, depth 2. Rewards of the rows: 1 and 0."""

    def agent(path: str, reward: float) -> Turn:
        return turn(2, "", agent=path, reward=reward)

    first = (turn(3), agent("0", 0.75), agent("1", 0.25), agent("0.0", 1.0), agent("0.1", 0.5))
    second = (turn(3), agent("0", 0.5), agent("1", 0.5))
    return [[row(*first, reward=1.0), row(*second, reward=0.0)]]


def test_credit_by_siblings() -> None:
    """0 and 1 are compared with each other in each row, 0.0 and 0.1 likewise."""
    found = advantage(opened(tree()), "centred_advantage", agents="siblings")
    agents = {(0, 1): 0.25, (0, 2): -0.25, (0, 3): 0.25, (0, 4): -0.25, (1, 1): 0.0, (1, 2): 0.0}
    assert {key: found[key] for key in agents} == pytest.approx(agents)


def test_credit_by_parent() -> None:
    """Each agent, in the place of its row, against the other row: agent 0 of the first row is
    0.75 against 0, so its baseline is 0.375."""
    found = advantage(opened(tree()), "centred_advantage")
    agents = {
        (0, 1): 0.375,
        (0, 2): 0.125,
        (0, 3): 0.5,
        (0, 4): 0.25,
        (1, 1): -0.25,
        (1, 2): -0.25,
    }
    assert {key: found[key] for key in agents} == pytest.approx(agents)


@pytest.mark.parametrize("agents", ["parent", "siblings"])
def test_the_workflow_of_a_tree_keeps_its_own_credit(agents: str) -> None:
    found = advantage(opened(tree()), "centred_advantage", agents=agents)
    assert (found[0, 0], found[1, 0]) == pytest.approx((0.5, -0.5))


def test_every_token_of_a_tree_is_trained_once() -> None:
    batch = opened(tree())
    assert batch.samples.num_trained == sum(
        len(t.sampled_ids) // 4 for r in tree()[0] for t in r.turns
    )


# --- what stages change, and what they do not -----------------------------------------------------


def test_a_penalty_counts_for_every_role_of_its_row() -> None:
    groups = [
        [
            row(turn(2, "solver"), turn(1, "verifier"), roles={"solver": 1.0, "verifier": 0.5}),
            row(turn(2, "solver"), turn(1, "verifier"), roles={"solver": 1.0, "verifier": 0.5}),
        ]
    ]
    batch = opened(groups)
    shaped_R = batch.row_columns["reward"] - np.array([0.0, 0.2])
    made = of("dapo")[1]
    changed = bind(made)(batch.with_columns(row_columns={"shaped_reward": shaped_R}))
    assert isinstance(changed, Batch)
    half = 0.1 / (math.sqrt(0.02) + 1e-5)
    assert credit_of(batch, changed.token_columns["advantage"]) == pytest.approx(
        {(0, 0): half, (0, 1): half, (1, 0): -half, (1, 1): -half}
    )


def test_whoever_compares_a_column_of_his_own_means_that_one() -> None:
    groups = [
        [
            row(turn(2, "solver"), turn(1, "verifier"), roles={"solver": 1.0}),
            row(turn(2, "solver"), turn(1, "verifier"), roles={"solver": 0.0}),
        ]
    ]
    batch = opened(groups).with_columns(row_columns={"style": np.array([0.0, 1.0])})
    found = bind(stage("a", "style", "advantage", fn=GRPO, rename={"style": "reward"}))(batch)
    assert isinstance(found, Batch)
    of_turns = credit_of(batch, found.token_columns["advantage"])
    assert of_turns[0, 0] == of_turns[0, 1] == -of_turns[1, 0] < 0


def test_a_batch_without_rewards_of_roles_is_compared_by_row() -> None:
    """Bit for bit as before: one number per row, whatever the roles."""
    batch = opened([[row(turn(2, "a"), turn(1, "b"), reward=r) for r in (0.1, 0.7, 0.3)]])
    assert batch.roles.own is None
    found = advantage(batch)
    assert {found[index, 0] - found[index, 1] for index in range(3)} == {0.0}


def test_the_reward_of_a_batch_is_that_of_its_policy() -> None:
    """The verifier of the other policy earned 0.25; the solver's rewards are the policy's."""
    judge = turn(1, "verifier", policy=OTHER)
    rows = [
        row(turn(2, "solver"), judge, reward=0.5, roles={"solver": reward, "verifier": 0.25})
        for reward in (1.0, 0.0)
    ]
    batch = opened([rows])
    assert batch.row_columns["reward"].tolist() == [1.0, 0.0]
    assert batch.row_columns["reward.verifier"].tolist() == [0.25, 0.25]
    assert batch.roles.figures(batch.row_columns["reward"]) == {"solver": (0.5, 4.0)}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "sapo", "cispo"])
def test_every_group_algorithm_compares_sub_agents_as_the_run_file_says(name: str) -> None:
    for agents in ("parent", "siblings"):
        [made] = [one for one in of(name, agents=agents) if one.role == "advantage"]
        batch = opened(tree())
        reward = {"shaped_reward": batch.row_columns["reward"]} if name == "dapo" else {}
        found = bind(made)(batch.with_columns(row_columns=reward))
        assert isinstance(found, Batch)
        credit = credit_of(batch, found.token_columns["advantage"])
        assert (credit[0, 2] < 0) == (agents == "siblings")
