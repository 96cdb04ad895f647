# SPDX-License-Identifier: Apache-2.0
"""A node says how many turns its rows have, in which roles, and what each earned. What the trainer
does for them grows as the turns do, and credit is what plain loops say."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.trainer.advantages.baselines import (
    Credit,
    batch_advantages,
    centred_advantages,
    group_advantages,
    group_then_batch_advantages,
    leave_one_out_advantages,
)
from penstock.trainer.advantages.credit import Turns, by_role
from penstock.trainer.advantages.own_rewards import TurnRewards, turn_credits
from penstock.trainer.arrays import Floats, Ints

BY_GROUP = (group_advantages, centred_advantages, leave_one_out_advantages)
BY_BATCH = (batch_advantages, group_then_batch_advantages)


def turn_by_turn(
    rewards_RP: Floats,
    rewards_R: Floats,
    groups_R: Ints,
    turns: Turns,
    earned: TurnRewards,
    fn: Credit,
) -> Floats:
    """One role and place after the other, each over all rows of the batch; no sub-agent of these
    has its own reward."""
    credits_Q = by_role(rewards_RP, groups_R, earned.roles_Q, turns, fn)
    rows, roles, own_Q = turns.rows_Q.tolist(), earned.roles_Q.tolist(), earned.own_Q
    num_before: dict[tuple[int, int], int] = {}
    turns_of: dict[tuple[int, int], list[int]] = {}
    for turn in np.flatnonzero(earned.agents_Q == 0).tolist():
        place = num_before.get((rows[turn], roles[turn]), 0)
        num_before[rows[turn], roles[turn]] = place + 1
        turns_of.setdefault((roles[turn], place), []).append(turn)
    for (role, _), same in turns_of.items():
        own_groups = {int(groups_R[rows[turn]]) for turn in same if np.isfinite(own_Q[turn])}
        compared = [turn for turn in same if int(groups_R[rows[turn]]) in own_groups]
        values_R = np.full(groups_R.size, np.nan)
        for turn in compared:
            if np.isfinite(rewards_R[rows[turn]]):
                has_own = np.isfinite(own_Q[turn])
                values_R[rows[turn]] = own_Q[turn] if has_own else rewards_RP[rows[turn], role]
        credits_R = fn(values_R, groups_R)
        for turn in compared:
            credits_Q[turn] = credits_R[rows[turn]]
    return credits_Q


@pytest.mark.parametrize("fn", [*BY_GROUP, *BY_BATCH])
@pytest.mark.parametrize("seed", range(20))
def test_credit_is_bit_for_bit_what_a_loop_over_the_batch_gives(fn: Credit, seed: int) -> None:
    draw = np.random.default_rng(seed)
    groups_R = np.repeat(np.arange(9), draw.integers(1, 9, 9))
    num, num_roles = groups_R.size, 3
    turns = Turns(nums_R=draw.integers(1, 12, num))
    size = turns.rows_Q.size
    agents_Q = (draw.random(size) < 0.2).astype(np.int64)
    has_own_Q = (agents_Q == 0) & (draw.random(size) < draw.choice([0.02, 0.5, 1.0]))
    rewards_R = np.where(draw.random(num) < 0.1, np.nan, draw.normal(size=num))
    rewards_RP = np.where(draw.random((num, num_roles)) < 0.1, np.nan, draw.normal(size=(num, 3)))
    earned = TurnRewards(
        roles_Q=draw.integers(0, num_roles, size),
        own_Q=np.where(has_own_Q, draw.normal(size=size).round(1), np.nan),
        agents_Q=agents_Q,
        spawners_Q=np.zeros(size, np.int64),
    )
    of_batch = rewards_RP, rewards_R, groups_R, turns, earned, fn
    want = turn_by_turn(*of_batch).tobytes()
    assert turn_credits(*of_batch).tobytes() == want
    if fn in BY_GROUP:
        assert turn_credits(*of_batch, is_by_group=True).tobytes() == want


def counted(fn: Credit, sizes: list[int]) -> Credit:
    def call(values: Floats, groups: Ints) -> Floats:
        sizes.append(values.size)
        return fn(values, groups)

    return call


@pytest.mark.parametrize("is_by_group", [False, True])
@pytest.mark.parametrize("num_roles", [1, 32], ids=["one role", "a role for each row"])
def test_turns_are_compared_in_time_that_grows_as_they_do(
    num_roles: int, is_by_group: bool
) -> None:
    """Each of 64,000 turns went over all 64,000: half a minute of the trainer for each batch."""
    num, size, sizes = 32, 32 * 256, list[int]()
    rewards_RP = np.full((num, num_roles), 1.0)
    roles_Q = np.repeat(np.arange(num) % num_roles, 256)
    earned = TurnRewards(
        roles_Q=roles_Q,
        own_Q=np.random.default_rng(0).random(size),
        agents_Q=np.zeros(size, np.int64),
        spawners_Q=np.zeros(size, np.int64),
    )
    turn_credits(
        rewards_RP,
        np.ones(num),
        np.repeat(np.arange(num // 4), 4),
        Turns(nums_R=np.full(num, 256)),
        earned,
        counted(group_advantages, sizes),
        is_by_group=is_by_group,
    )
    of_turns = sizes[num_roles:]
    assert sum(of_turns) == size, "no turn is looked at twice"
    assert len(of_turns) == (1 if is_by_group else 256 * num_roles)
