# SPDX-License-Identifier: Apache-2.0
"""A record that breaks the contract is refused by name, whatever a node claims."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.service.nodes.model_limits import (
    ExpertLimits,
    ModelLimits,
    read_model_limits,
)
from penstock.dataflow.service.nodes.validate import summarise
from penstock.errors import BadRequest
from penstock.types import (
    NO_CHOICE,
    ExpertChoices,
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import decode, encode

POLICY = PolicyName("p")
LONG = token_ids([1]) * 100_000


def span(start: int, end: int, number: int = 0, incarnation: int = 1) -> VersionSpan:
    return VersionSpan(start=start, end=end, incarnation=incarnation, number=number)


def turn(**changes: Any) -> Turn:
    sound = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([3, 4, 5]),
        logprobs=log_probs([-0.1, -0.2, 0.0]),
        spans=(span(0, 2, 1), span(2, 3, 2)),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )
    return replace(sound, **changes)


def trajectory(*turns: Turn, **changes: Any) -> Trajectory:
    sound = Trajectory(
        row_id=RowId("g.0.1"),
        group_id=GroupId("g"),
        slot=0,
        epoch=1,
        attempt=1,
        node_id=NodeId("n"),
        turns=turns or (turn(),),
        reward=1.0,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )
    return replace(sound, **changes)


def is_published(policy: PolicyName, incarnation: int, number: int) -> bool:
    return policy == POLICY and incarnation == 1 and number < 5


def test_a_sound_record_tells_tokens_and_age() -> None:
    later = turn(parent=0, spans=(span(0, 3, 4),))
    unread = turn(spans=(span(0, 3, 0),), reached_agent=False)
    assert summarise(trajectory(turn(), later, unread), "d", is_published) == RowSummary(
        row_id=RowId("g.0.1"),
        digest="d",
        reward=1.0,
        outcome=OutcomeKind.COMPLETED,
        sampled={POLICY: 6},
        versions={POLICY: ((1, 1), (1, 2), (1, 4))},
        compute_cost={POLICY: (10, 100)},
    )


def test_tokens_are_counted_by_role_only_where_one_is_named() -> None:
    other = PolicyName("judge")
    turns = [turn(role="solve"), turn(), turn(policy=other), turn(role="x", reached_agent=False)]

    def always(policy: PolicyName, incarnation: int, number: int) -> bool:
        return True

    verdict = summarise(trajectory(*turns), "d", always)
    assert isinstance(verdict, RowSummary)
    assert verdict.sampled == {POLICY: 6, other: 3}
    assert verdict.roles == {POLICY: {"solve": 3, "": 3}}
    assert verdict.compute_cost == {POLICY: (10, 50), other: (5, 25)}


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (trajectory(turn(role="r" * 65)), "at most 64"),
        (trajectory(reward=None), "needs a finite reward"),
        (trajectory(reward=float("nan")), "needs a finite reward"),
        (trajectory(outcome=Outcome(kind=OutcomeKind.FAILED)), "failure is not a reward"),
        (trajectory(turn(parent=0)), "does not come before"),
        (trajectory(turn(sampled_ids=token_ids([3, 4]))), "one float32 log-prob"),
        (trajectory(turn(prompt_ids=b"abc")), "4 bytes each"),
        (trajectory(turn(logprobs=log_probs([-0.1, 0.5, -1]))), "at most 0"),
        (trajectory(turn(logprobs=log_probs([-0.1, float("nan"), -1]))), "finite"),
        (trajectory(turn(logprobs=log_probs([-0.1, -1e38, -1]))), "at least"),
        (trajectory(reward=1e300), "finite reward"),
        (trajectory(turn(prompt_ids=LONG), *[turn(parent=0)] * 50), "unfold to"),
        (trajectory(turn(sampled_ids=token_ids([3, -4, 5]))), "negative"),
        (trajectory(turn(spans=(span(0, 1), span(2, 3)))), "without gap"),
        (trajectory(turn(spans=(span(0, 2), span(1, 3)))), "without gap"),
        (trajectory(turn(spans=(span(0, 2),))), "spans cover 2 of 3"),
        (trajectory(turn(spans=(span(0, 3, 7),))), "never published"),
        (trajectory(turn(policy=PolicyName("q"))), "never published"),
        (trajectory(role_rewards={"nobody": 1.0}), "names 'nobody'"),
        (trajectory(turn(role="a"), role_rewards={"a": float("nan")}), "role a must be a finite"),
        (trajectory(turn(role="a"), role_rewards={"": 1.0}), "names ''"),
        (trajectory(turn(reward=float("inf"))), "turn 0: its reward must be a finite"),
        (
            trajectory(turn(reward=1.0), reward=None, outcome=Outcome(kind=OutcomeKind.FAILED)),
            "failed trajectory has rewards of roles or turns",
        ),
    ],
)
def test_what_breaks_the_contract_is_named(record: Trajectory, complaint: str) -> None:
    verdict = summarise(record, "d", is_published)
    assert isinstance(verdict, str) and complaint in verdict


def test_rewards_of_roles_and_turns_become_values_of_the_row() -> None:
    """A role's turns earn their own, else the role's, else the row's; unusable ones count in
    nothing."""
    turns = [
        turn(role="a", reward=0.5),
        turn(role="a"),
        turn(role="a", reward=9.0, reached_agent=False),
        turn(role="b"),
        turn(reward=0.25),
        turn(),
    ]
    record = trajectory(*turns, reward=1.0, role_rewards={"a": 0.1, "idle": 0.7})
    found = summarise(record, "d", is_published, roles={"idle"})
    assert isinstance(found, RowSummary)
    assert found.values == pytest.approx(
        {"reward.a": 0.1, "reward.idle": 0.7, "turn_reward.a": 0.3, "turn_reward.": 0.625}
    )
    assert found.reward_for(POLICY, None) == pytest.approx((0.1 + 1.0 + 1.0) / 3)
    assert found.reward_for(POLICY, [(POLICY, "a")]) == 0.1
    assert found.role_rewards(POLICY, None) == pytest.approx({"a": 0.3, "b": 1.0, "": 0.625})


@pytest.mark.parametrize(
    "own", [{"role_rewards": {"a": 1.0}}, {"turns": (turn(role="a", reward=1.0),)}]
)
def test_only_who_gives_the_reward_gives_rewards_of_roles_and_turns(own: dict[str, Any]) -> None:
    """Nobody believes an untrusted node's; a stage of the trusted side scores its rows."""
    record = replace(trajectory(turn(role="a"), reward=None), **own)
    verdict = summarise(record, "d", is_published, is_scored=False)
    assert isinstance(verdict, str) and "deliver it without rewards" in verdict


def test_a_turn_without_tokens_cannot_name_a_policy_that_the_run_lacks() -> None:
    """It has no span that would name the version; whoever decodes the row looks up the policy."""
    empty = turn(policy=PolicyName("zzz"), sampled_ids=b"", logprobs=b"", spans=(), parent=0)
    verdict = summarise(trajectory(turn(), empty), "d", is_published, policies={POLICY})
    assert verdict == "turn 1: the run has no policy 'zzz'"
    same = replace(empty, policy=POLICY)
    assert not isinstance(
        summarise(trajectory(turn(), same), "d", is_published, policies={POLICY}), str
    )


def test_kept_keys_and_values_count_for_staleness() -> None:
    found = summarise(trajectory(turn(kv=(1, 0))), "d", is_published)
    assert isinstance(found, RowSummary)
    assert found.versions == {POLICY: ((1, 0), (1, 1), (1, 2))}
    verdict = summarise(trajectory(turn(kv=(1, 99))), "d", is_published)
    assert verdict == "turn 0: p@1.99 was never published"


# --- expert choices -------------------------------------------------------------------------------

MIXTURE = ModelLimits(
    experts={POLICY: ExpertLimits(max_layers=2, num_experts=8, num_chosen=2)},
)
CHOICES = ExpertChoices(num_layers=2, num_chosen=2, num_experts=8, choices=bytes([7, 0, 1, 2]) * 5)
"""Of the five tokens of `turn`."""


def refusal(experts: ExpertChoices, limits: ModelLimits = MIXTURE) -> str:
    found = summarise(trajectory(turn(experts=experts)), "d", is_published, limits=limits)
    return "" if isinstance(found, RowSummary) else found


def test_sound_expert_choices_are_accepted() -> None:
    assert refusal(CHOICES) == ""
    assert refusal(CHOICES, ModelLimits()) == "", "of a model that is not on this machine"
    missing = replace(CHOICES, choices=CHOICES.choices[:-4] + NO_CHOICE * 4)
    assert refusal(missing) == ""
    wide = ExpertChoices(
        num_layers=1, num_chosen=1, num_experts=300, choices=(299).to_bytes(2, "little") * 5
    )
    assert refusal(wide, ModelLimits()) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": CHOICES.choices[:-1]}, "experts has 19 bytes; 5 tokens"),
        ({"choices": b""}, "experts has 0 bytes"),
        ({"choices": bytes([8, 0, 1, 2]) * 5}, "not below 8"),
        ({"num_experts": 300, "choices": bytes(40)}, "2 of 300 in 2 layers; p chooses 2 of 8"),
        ({"num_chosen": 1, "choices": bytes(10)}, "1 of 8 in 2 layers"),
        ({"num_layers": 3, "choices": bytes(30)}, "2 of 8 in 3 layers"),
    ],
)
def test_broken_expert_choices_are_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(replace(CHOICES, **changes))


def test_experts_of_a_dense_model_are_refused() -> None:
    assert "not a mixture of experts" in refusal(CHOICES, ModelLimits(experts={POLICY: None}))


def test_the_bounds_of_expert_choices_are_on_the_message() -> None:
    """A node cannot send what would make the trainer reserve memory without end."""
    for wrong in ({"num_layers": 0}, {"num_chosen": 257}, {"num_experts": 1 << 16}):
        content = encode(trajectory(turn(experts=replace(CHOICES, **wrong))))
        with pytest.raises(BadRequest):
            decode(content, Trajectory)
    assert decode(encode(trajectory(turn(experts=CHOICES))), Trajectory).turns[0].experts == CHOICES


def test_limits_are_read_from_the_config_of_the_model(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "num_experts_per_tok": 2, "num_experts": 8}
    for name, content in (("mixture", config), ("dense", {"num_hidden_layers": 4})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        (tmp_path / name / "model.safetensors").touch()
    models = {name: str(tmp_path / name) for name in ("mixture", "dense", "absent")}
    assert read_model_limits(models).experts == {
        "mixture": ExpertLimits(max_layers=4, num_experts=8, num_chosen=2),
        "dense": None,
    }
