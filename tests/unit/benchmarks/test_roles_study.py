# SPDX-License-Identifier: Apache-2.0
"""The roles study at a small size: what the arms share, and what each role earns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.lagged_training import NUM_GENERATIONS, Answers
from benchmarks.roles_study import (
    ARMS,
    WORKFLOWS,
    Players,
    Revise,
    Setting,
    Turns,
    Verify,
    play,
    team,
    train,
)

TASKS = [("ab", "ba"), ("cd", "dc")]


@pytest.mark.parametrize("name", WORKFLOWS)
@pytest.mark.parametrize("said", ["", "a", ">"])
def test_prompts_of_both_roles_are_of_one_length_and_differ(name: str, said: str) -> None:
    workflow = WORKFLOWS[name]()
    first, second = workflow.first_prompt("ab"), workflow.second_prompt("ab", said)
    assert len(first) == len(second) and first != second


def test_each_role_earns_its_own() -> None:
    assert Revise().rewards("ba", "bc", "ba") == (0.5, 1.0)
    assert Revise().rewards("ba", "", "xa") == (0.0, 0.5)
    assert Verify().rewards("c", "c", "a") == (1.0, 1.0)
    assert Verify().rewards("c", "d", "b") == (0.0, 1.0)
    assert Verify().rewards("c", "d", "a") == (0.0, 0.0)


def test_the_reward_of_a_team_is_the_mean_and_changes_nothing_else() -> None:
    empty = Answers(
        ids_RG=np.zeros((2, 1), np.int64),
        logprobs_RG=np.zeros((2, 1), np.float32),
        lengths_R=np.ones(2, np.int64),
    )
    prompts = np.zeros((2, 3), np.int64)
    first = Turns(prompts_RP=prompts, answers=empty, rewards_R=np.array([1.0, 0.0]))
    second = Turns(prompts_RP=prompts, answers=empty, rewards_R=np.array([1.0, 1.0]))
    for turns in team(first, second):
        assert turns.rewards_R.tolist() == [1.0, 0.5] and turns.answers is empty


def test_all_arms_generate_as_much(tmp_path: Path) -> None:
    """As many rows of each role, whoever plays it."""
    sizes = list[tuple[int, int]]()
    for at, arm in enumerate(ARMS.values()):
        players = Players(arm, 0, tmp_path / str(at))
        first, second = play(Revise(), players, TASKS)
        sizes.append((len(first.rewards_R), len(second.rewards_R)))
    assert sizes == [(2 * NUM_GENERATIONS, 2 * NUM_GENERATIONS)] * len(ARMS)


def test_a_run_has_a_curve_for_each_role(tmp_path: Path) -> None:
    curve = train(
        Verify(), ARMS["one model, role rewards"], 0, Setting(steps=2, num_groups=2), tmp_path
    )
    assert len(curve.first) == len(curve.second) == 2
    assert curve.both(-1) == pytest.approx((curve.first[1] + curve.second[1]) / 2)
