# SPDX-License-Identifier: Apache-2.0
"""Seeded trajectories that use every field of the record."""

from __future__ import annotations

import random

from penstock.fleet.run_folder import RunFolder
from penstock.runs.decoded import Decoder
from penstock.runs.recorded_trajectory import PayloadState, RecordedTrajectory, TrainingUse
from penstock.types import (
    ExpertChoices,
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    Task,
    ToolUse,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)

ARGUMENTS = ('{"q": "a"}', "{}", "[1]", '{"cut": "te', "", '{"n": NaN}', '{"deep": {"x": [1, 2]}}')


def random_trajectory(draw: random.Random, number: int, num_ids: int) -> Trajectory:
    kind = draw.choice([*OutcomeKind])
    has_reward = kind in (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED) and draw.random() < 0.9
    turns = tuple(random_turn(draw, at, num_ids) for at in range(draw.randrange(6)))
    return Trajectory(
        row_id=RowId(f"p0-{number}.3.2"),
        group_id=GroupId(f"p0-{number}"),
        slot=3,
        epoch=2,
        attempt=draw.randrange(1, 4),
        node_id=NodeId("node.1"),
        turns=turns,
        reward=draw.uniform(-1, 1) if has_reward else None,
        outcome=Outcome(kind=kind, reason=draw.choice(["", "length"]), detail="a\n“b”\x00"),
        started_at=draw.uniform(0, 2e9),
        ended_at=draw.uniform(0, 2e9),
        boot_id=draw.choice(["", "boot"]),
        role_rewards={"solver": draw.random()} if draw.random() < 0.3 else {},
        tool_uses=tuple(
            random_tool_use(draw, len(turns)) for _ in range(draw.choice([0, 0, 1, 3]))
        ),
    )


def random_turn(draw: random.Random, at: int, num_ids: int) -> Turn:
    sampled = [draw.randrange(num_ids) for _ in range(draw.randrange(12))]
    cut = draw.randrange(len(sampled) + 1)
    spans = [(0, cut, 1, draw.randrange(9)), (cut, len(sampled), 2, draw.randrange(9))]
    return Turn(
        policy=PolicyName("policy"),
        parent=draw.choice([-1, *range(at)]),
        prompt_ids=token_ids(draw.randrange(num_ids) for _ in range(draw.randrange(20))),
        sampled_ids=token_ids(sampled),
        logprobs=log_probs(-draw.expovariate(0.1) for _ in sampled),
        spans=tuple(
            VersionSpan(start=start, end=end, incarnation=incarnation, number=number)
            for start, end, incarnation, number in spans
        ),
        sampling=SamplingSpec(
            temperature=draw.choice([0.0, 0.7, 1.0]),
            top_p=0.9,
            top_k=draw.choice([0, 20]),
            min_p=0.05,
            max_tokens=99,
            seed=draw.randrange(-(1 << 62), 1 << 62),
            stop=draw.choice([(), ("\n", "x")]),
            json_schema=draw.choice(["", "{}"]),
        ),
        finish=draw.choice([*FinishReason]),
        reached_agent=draw.random() < 0.9,
        started_at=draw.uniform(0, 2e9),
        ended_at=draw.choice([0.0, draw.uniform(0, 2e9)]),
        role=draw.choice(["", "solver"]),
        reward=draw.choice([None, 0.25]),
        agent=draw.choice(["", "0.2"]),
        kv=draw.choice([None, (1, 7)]),
        experts=draw.choice([None, random_experts(draw)]),
    )


def random_experts(draw: random.Random) -> ExpertChoices:
    return ExpertChoices(num_layers=2, num_chosen=2, num_experts=9, choices=draw.randbytes(8))


def random_tool_use(draw: random.Random, num_turns: int) -> ToolUse:
    return ToolUse(
        turn=draw.randrange(-1, num_turns),
        name="search",
        arguments=draw.choice(ARGUMENTS),
        result=draw.choice(["", "found “it”\n"]),
        is_error=draw.random() < 0.5,
        seconds=draw.random(),
        cost=draw.choice([0.0, 0.5]),
        agent=draw.choice(["", "0.2"]),
    )


def recorded(payload: Trajectory, folder: RunFolder) -> RecordedTrajectory:
    """As the reader of a run returns it."""
    task = Task(
        key="k", source="s", ordinal=1, payload={"prompt": "a"}, workflow="single_turn", seed=1
    )
    use = TrainingUse(policy="policy", fate="sealed", reason="", rule="", batch=3, step=2)
    return RecordedTrajectory(
        row_id=payload.row_id,
        group_id=payload.group_id,
        slot=payload.slot,
        epoch=payload.epoch,
        node_id=payload.node_id,
        source="s",
        task=task,
        reward=payload.reward,
        outcome=payload.outcome.kind,
        versions=("policy@1.5",),
        num_tokens=3,
        delivered_at=5.0,
        uses=(use,),
        columns={"quality": 0.5, "advantages": b"\x00"},
        state=PayloadState.STORED,
        detail="",
        payload=payload,
        decoder=Decoder(folder),
    )
