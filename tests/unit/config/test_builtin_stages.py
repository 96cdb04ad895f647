# SPDX-License-Identifier: Apache-2.0
"""Stages that run something of ours: what they write and their options, judged with the file."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.unit.config.conftest import LoadStages
from tests.unit.config.test_pipeline import (
    ADVANTAGE,
    GAE,
    TRAIN,
    TRAIN_CRITIC,
    VALUES,
    load_error,
)

from penstock.config.algorithms import builtin_algorithms
from penstock.config.builtin_stages import STAGE_FUNCTIONS_MODULE, builtin_functions

OVERLONG = (
    "{id: long, type: compute, role: overlong, reads: [reward, truncated], "
    "writes: [shaped_reward, excluded], options: {max_length: 9, margin: 3}}"
)
LIMITS = "max_length: 9, margin: 3"


def credit(name: str, options: str, reads: str = "reward") -> str:
    fn = f"fn: '{STAGE_FUNCTIONS_MODULE}:{name}', options: {options}, type"
    return ADVANTAGE.replace("type", fn, 1).replace("reads: [reward]", f"reads: [{reads}]")


@pytest.mark.parametrize(
    ("stage", "key", "expected_text"),
    [
        (credit("step_advantage", "{how: weight}", "reward, length"), "how",
         'is not one of weighted | return | shaping | min | outcome; did you mean "weighted"?'),
        (credit("group_advantage", "{std_ddof: one}"), "std_ddof", "expected an integer"),
        (ADVANTAGE.replace("type", "options: {std_ddof: 2}, type"), "std_ddof", "at most 1"),
        (credit("role_advantage", "{leave_one_ot: true}"), "leave_one_ot",
         'is not an option of the built-in stage (leave_one_out); did you mean "leave_one_out"?'),
        (credit("role_advantage", "{leave_one_out: 1}"), "leave_one_out", "true or false"),
        (credit("discounted_advantage", "{discount: x}"), "discount", "expected a number"),
        (credit("discounted_advantage", "{}"), "discount", "missing required key"),
        (OVERLONG.replace("9,", "9, how: maskk,"), "how", 'did you mean "mask"?'),
        (OVERLONG.replace("margin: 3", "margin: 10"), "margin", "must be within the 9"),
        (OVERLONG.replace("margin: 3", "margin: 0"), "margin", "must be greater than 0"),
        (OVERLONG.replace("margin: 3", "margin: '3'"), "margin", "; remove the quotes"),
    ],
)  # fmt: skip
def test_options_that_a_shipped_function_would_refuse_at_its_first_batch(
    load_stages: LoadStages, stage: str, key: str, expected_text: str
) -> None:
    message = load_error(load_stages, stage, TRAIN)
    assert (
        f"run.yaml:27: pipeline.stages[0].options.{key}: " in message and expected_text in message
    )


@pytest.mark.parametrize(
    ("rate", "expected_text"),
    [("fast", 'expected a number, got text ("fast")'), ("-1", "must be at least 0")],
)
def test_the_learning_rate_of_a_critic_is_a_number(
    load_stages: LoadStages, rate: str, expected_text: str
) -> None:
    critic = TRAIN_CRITIC.replace("type", f"options: {{learning_rate: {rate}}}, type")
    message = load_error(load_stages, VALUES, GAE, critic, TRAIN)
    assert (
        "run.yaml:29: pipeline.stages[2].options.learning_rate: " in message
        and expected_text in message
    )
    for good in ("0", "1.0e-5", "null"):
        assert load_stages(VALUES, GAE, critic.replace(f": {rate}}}", f": {good}}}"), TRAIN)


@pytest.mark.parametrize("how", ["punish", "both"])
def test_what_is_shipped_writes_all_its_columns(load_stages: LoadStages, how: str) -> None:
    long = OVERLONG.replace(LIMITS, f"{LIMITS}, how: {how}")
    advantage = ADVANTAGE.replace("[reward]", "[shaped_reward], rename: {shaped_reward: reward}")
    assert load_stages(long, advantage, TRAIN)
    message = load_error(load_stages, long.replace(", excluded", ""), advantage, TRAIN)
    assert (
        "run.yaml:27: pipeline.stages[0].writes: stage long: the built-in for it writes " in message
    )
    assert "set writes: [shaped_reward, excluded]" in message
    named = long.replace("role: overlong", f"role: own, fn: '{STAGE_FUNCTIONS_MODULE}:overlong'")
    assert "set writes: [shaped_reward, excluded]" in load_error(
        load_stages, named.replace(", excluded", ""), advantage, TRAIN
    )


# --- who compares the members of a group ----------------------------------------------------------

SINGLE_GENERATION = "algorithm={{name: {}, num_generations: 1, beta: 0.0}}"
NO_RULES = "dataflow.rules=[]"
PROXIMAL = "{id: look, type: infer, role: actor, reads: [turns], writes: [proximal_logprobs]}"


@pytest.mark.parametrize("name", ["ppo", "decoupled", "cispo", "grpo"])
def test_groups_of_one_with_a_critic_under_any_loss(load_stages: LoadStages, name: str) -> None:
    """The stage that makes the advantages says whether members are compared, not the loss."""
    train = TRAIN.replace("advantage]", "advantage, proximal_logprobs]")
    stages = (PROXIMAL, VALUES, GAE, TRAIN_CRITIC, train)
    told = (SINGLE_GENERATION.format(name), NO_RULES)
    assert load_stages(*stages, overrides=told).algorithm.num_generations == 1
    message = load_error(load_stages, PROXIMAL, ADVANTAGE, train, overrides=told)
    assert "algorithm.num_generations: stage advantage needs at least two generations" in message
    own = ADVANTAGE.replace("type", "fn: 'm:credit', type", 1)
    assert load_stages(PROXIMAL, own, train, overrides=told), "nothing is known of it"


def test_no_group_of_one_has_a_spread(load_stages: LoadStages) -> None:
    told = (SINGLE_GENERATION.format("ppo"),)
    message = load_error(load_stages, VALUES, GAE, TRAIN_CRITIC, TRAIN, overrides=told)
    assert "reward-spread needs at least two generations per group, got 1" in message


def test_sessions_with_stages_of_ones_own(load_stages: LoadStages) -> None:
    live = "sources=[{name: live, session: {reward_deadline_s: 60, default_reward: -1.0}}]"
    told = (live, NO_RULES, "algorithm={name: grpo}")
    assert load_stages(VALUES, GAE, TRAIN_CRITIC, TRAIN, overrides=told).session_source
    message = load_error(load_stages, ADVANTAGE, TRAIN, overrides=told)
    assert "stage advantage compares the members of a group, but a session is a group of" in message
    assert f"give it fn: {STAGE_FUNCTIONS_MODULE}:batch_advantage" in message
    assert load_stages(credit("batch_advantage", "{}"), TRAIN, overrides=told)


@pytest.mark.parametrize(
    "module", ["trainer.algorithms.gspo", "trainer.stage_functions.gae", "config"]
)
def test_built_ins_are_found_whatever_is_imported_first_and_without_torch(module: str) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers')))\n"
        f"import penstock.{module}\n"
        "from penstock.config.algorithms import builtin_algorithms\n"
        "from penstock.config.builtin_stages import builtin_functions\n"
        "print(*builtin_algorithms(), *builtin_functions())\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [*builtin_algorithms(), *builtin_functions()]
