# SPDX-License-Identifier: Apache-2.0
"""How attempts end: each line of the table in `attempt.py`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import POLICY, facts, task
from tests.unit.rollout.snapshot_files import ALPHABET, write_snapshot

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RecordRequest, SourceInfo, ToolServerInfo
from penstock.errors import ConfigError, EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Generate, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.isolation import Isolation
from penstock.rollout.recorder import Recorder, TurnApi
from penstock.rollout.rewards.scorer import Failed
from penstock.rollout.tools.servers import open_tools
from penstock.rollout.workflows import find_workflow
from penstock.tasks import reverse
from penstock.types import (
    FailureKind,
    GroupId,
    NodeId,
    OutcomeKind,
    RowId,
    SamplingSpec,
    Task,
    Trajectory,
    Turn,
    Version,
    view_ids,
)
from penstock.wire.codec import decode, encode

WORKFLOWS = "tests.unit.rollout.user_workflows"
GRANT = Grant(group_id=GroupId("p0-7"), slot=2, epoch=3, attempt=1, task=0, seed=11)


class DirectScorer:
    """The reverse reward in this process; records what it scored."""

    def __init__(self, failure: Failed | None = None) -> None:
        self.seen: list[str] = []
        self.failure = failure

    async def score(self, completion: str, task: Task) -> float | Failed:
        self.seen.append(completion)
        if self.failure is not None:
            return self.failure
        return reverse.reward([completion], [task.payload["answer"]])[0]


class NoTurns:
    """A dataflow that keeps no turns."""

    async def record(self, body: RecordRequest) -> None:
        pass

    async def recorded(self, node_id: NodeId, row_id: RowId, secret: str) -> tuple[Turn, ...]:
        return ()


async def loaded_engine(snapshot: Path) -> ScriptedEngine:
    engine = ScriptedEngine()
    await engine.load(snapshot, Version(policy=POLICY, incarnation=1, number=0))
    return engine


async def attempt(
    snapshot: Path,
    name: str,
    *,
    scorer: DirectScorer | None = None,
    generate: Generate | None = None,
    start_to_close_s: float = 60.0,
    max_tokens: int = 3,
    given: Task | None = None,
    sources: tuple[SourceInfo, ...] = (),
    grant: Grant = GRANT,
    turn_api: TurnApi | None = None,
    **changes: object,
) -> Trajectory:
    is_named = name.startswith(("[", "{")) or ":" in name or name == "single_turn"
    workflow = name if is_named else f"{WORKFLOWS}:{name}"
    run_info = facts(
        workflow=workflow,
        start_to_close_s=start_to_close_s,
        sampling=SamplingSpec(max_tokens=max_tokens),
        sources=sources,
        **changes,
    )
    isolation = Isolation()
    servers = await open_tools(run_info, isolation)
    gateway = Gateway(generate or await loaded_engine(snapshot))
    for policy in run_info.policies:
        gateway.set_renderer(policy, Renderer.load(snapshot))
    endpoint = Endpoint(gateway)
    serving = asyncio.create_task(endpoint.run())
    try:
        recorder = Recorder(turn_api or NoTurns(), NodeId("n"))
        attempts = AttemptRunner(
            gateway, endpoint, recorder, scorer, run_info, NodeId("n"), isolation, servers
        )
        return await asyncio.wait_for(attempts.run(grant, given or task()), 60)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_single_turn_hands_the_answer_to_the_reward(snapshot: Path) -> None:
    scorer = DirectScorer()
    row = await attempt(snapshot, "single_turn", scorer=scorer)
    assert scorer.seen == [task().payload["answer"]]
    assert row.reward == 1.0 and row.outcome.kind is OutcomeKind.TRUNCATED
    assert (row.row_id, row.attempt, row.node_id) == ("p0-7.2.3", 1, "n")
    assert row.started_at <= row.turns[0].started_at <= row.turns[0].ended_at <= row.ended_at


def given(prompt: object) -> Task:
    return replace(task(), payload={**task().payload, "prompt": prompt})


async def test_single_turn_takes_a_list_of_messages(snapshot: Path) -> None:
    """As Arrow stores them: every message has the keys of all."""
    whole = task().payload["prompt"]
    prompt = [
        {"role": "system", "content": whole[:2], "tool_calls": None},
        {"role": "user", "content": whole[2:], "tool_calls": None},
    ]
    row = await attempt(snapshot, "single_turn", scorer=DirectScorer(), given=given(prompt))
    [turn] = row.turns
    assert tuple(view_ids(turn.prompt_ids)) == Renderer.load(snapshot).encode(whole)
    assert row.reward == 1.0


@pytest.mark.parametrize("prompt", [None, 3, [], ["a"], {"role": "user", "content": "a"}])
async def test_single_turn_refuses_another_prompt(snapshot: Path, prompt: object) -> None:
    row = await attempt(snapshot, "single_turn", scorer=DirectScorer(), given=given(prompt))
    assert row.outcome.reason == FailureKind.WORKFLOW
    assert "neither text nor a list of messages under 'prompt'" in row.outcome.detail


@pytest.mark.parametrize(("source", "max_tokens"), [("train", 2), ("other", 3)])
async def test_a_source_has_its_own_sampling(snapshot: Path, source: str, max_tokens: int) -> None:
    info = SourceInfo(
        name=source, workflow="single_turn", reward="", sampling=SamplingSpec(max_tokens=2)
    )
    row = await attempt(snapshot, "single_turn", scorer=DirectScorer(), sources=(info,))
    assert row.turns[0].sampling.max_tokens == max_tokens


async def test_an_unknown_workflow_of_a_source_ends_the_node_aloud(snapshot: Path) -> None:
    info = SourceInfo(name="b", workflow="singleturn", reward="", sampling=SamplingSpec())
    with pytest.raises(ConfigError, match='unknown workflow "singleturn"'):
        await attempt(snapshot, "single_turn", sources=(info,))


async def test_an_answer_that_ends_by_itself_is_completed(snapshot: Path) -> None:
    row = await attempt(snapshot, "single_turn", scorer=DirectScorer(), max_tokens=5)
    assert row.outcome.kind is OutcomeKind.COMPLETED and row.outcome.reason == ""


async def test_a_text_is_gone_on_with_as_it_is(snapshot: Path) -> None:
    """Without anything the chat template would add."""
    template = {"chat_template": "jj{% for m in messages %}{{ m.content }}{% endfor %}"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(template))
    row = await attempt(snapshot, "completes", scorer=DirectScorer())
    [turn] = row.turns
    assert tuple(view_ids(turn.prompt_ids)) == Renderer.load(snapshot).encode(
        task().payload["prompt"]
    )
    assert turn.sampling.max_tokens == len(view_ids(turn.sampled_ids)) == 2


async def test_none_means_the_text_of_the_last_answer(snapshot: Path) -> None:
    scorer = DirectScorer()
    row = await attempt(snapshot, "returns_none", scorer=scorer)
    assert scorer.seen == [task().payload["answer"]] and len(row.turns) == 2


async def test_text_that_cannot_be_encoded_is_mended_before_it_travels(snapshot: Path) -> None:
    scorer = DirectScorer()
    row = await attempt(snapshot, "returns_surrogates", scorer=scorer)
    assert scorer.seen == ["a?"] and row.outcome.has_reward


@pytest.mark.parametrize(("name", "reward"), [("returns_number", 0.25), ("sets_reward", 0.75)])
async def test_a_workflow_may_score_itself(snapshot: Path, name: str, reward: float) -> None:
    scorer = DirectScorer()
    row = await attempt(snapshot, name, scorer=scorer)
    assert row.reward == reward and scorer.seen == []


@pytest.mark.parametrize("has_function", [True, False])
async def test_roles_and_turns_may_have_rewards_of_their_own(
    snapshot: Path, has_function: bool
) -> None:
    """Without a reward function, the row earns the mean of its roles."""
    scorer = DirectScorer() if has_function else None
    row = await attempt(snapshot, "rewards_roles_and_turns", scorer=scorer)
    assert row.role_rewards == {"solver": 0.25, "verifier": 0.75}
    assert [(turn.role, turn.reward) for turn in row.turns] == [("solver", None), ("verifier", -1)]
    assert row.reward == (0.0 if has_function else 0.5)


async def test_who_does_not_score_rows_gives_no_reward_at_all(snapshot: Path) -> None:
    """Such as an untrusted node."""
    name = "rewards_roles_and_turns"
    row = await attempt(snapshot, name, scorer=DirectScorer(), is_scored=False)
    assert (row.reward, row.role_rewards) == (None, {})
    assert {turn.reward for turn in row.turns} == {None}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "my own mistake"),
        ("rewards_nobody", "ctx.reward(role='solvr'): no turn has this role"),
        ("rewards_no_turn", "there is no turn 1 yet"),
        ("exits", "SystemExit: goodbye"),
        ("calls_nobody", "without a model answer"),
        ("own_timeout", "of the user's own client"),
        ("returns_nonsense", "returned a dict"),
        ("bad_reward", "finite number"),
        ("awaits_cancelled", "CancelledError"),
        ("raises_surrogates", "half a character ?"),
    ],
)
async def test_what_goes_wrong_in_the_workflow_is_its_failure(
    snapshot: Path, name: str, says: str
) -> None:
    row = await attempt(snapshot, name, scorer=DirectScorer())
    assert row.outcome.kind is OutcomeKind.FAILED and row.outcome.reason == FailureKind.WORKFLOW
    assert row.reward is None
    assert says in row.outcome.detail and len(row.outcome.detail) <= 2000
    assert "rollout/attempt.py" not in row.outcome.detail
    assert encode(row)


async def test_the_users_traceback_stands_in_the_record(snapshot: Path) -> None:
    row = await attempt(snapshot, "raises", scorer=DirectScorer())
    assert "user_workflows.py" in row.outcome.detail and "in raises" in row.outcome.detail
    assert len(row.turns) == 1  # sampled tokens stay in the record


@pytest.mark.parametrize(
    ("name", "window", "kind", "reason"),
    [
        ("fills_the_window", 14, OutcomeKind.TRUNCATED, "length"),
        ("hides_the_full_window", 14, OutcomeKind.TRUNCATED, "length"),
        ("gives_way_then_fails", 14, OutcomeKind.FAILED, FailureKind.WORKFLOW),
        ("fills_the_window", 2, OutcomeKind.FAILED, FailureKind.WORKFLOW),
    ],
)
async def test_a_full_window_ends_an_attempt_as_cut_by_length(
    tmp_path: Path, name: str, window: int, kind: OutcomeKind, reason: str
) -> None:
    folder = write_snapshot(tmp_path)
    config = {"vocab_size": len(ALPHABET), "max_position_embeddings": window}
    (folder / "config.json").write_text(json.dumps(config))
    row = await attempt(folder, name, scorer=DirectScorer())
    assert (row.outcome.kind, row.outcome.reason) == (kind, reason)
    assert (row.reward is not None) == (kind is OutcomeKind.TRUNCATED)


async def test_an_engine_that_refuses_is_the_engines_failure(snapshot: Path) -> None:
    async def broken(request: GenerationRequest) -> object:
        raise EngineError("out of memory")

    row = await attempt(snapshot, "returns_text", generate=broken)  # type: ignore[arg-type]
    assert row.outcome.reason == FailureKind.ENGINE and "out of memory" in row.outcome.detail


async def test_time_that_is_up_truncates_if_there_is_an_answer(snapshot: Path) -> None:
    limit_s = 0.3
    while True:  # on a slow machine the answer takes longer
        scorer = DirectScorer()
        row = await attempt(snapshot, "answers_then_hangs", scorer=scorer, start_to_close_s=limit_s)
        if row.turns or limit_s > 10:
            break
        limit_s *= 10
    assert row.outcome.kind is OutcomeKind.TRUNCATED and row.outcome.reason == "deadline"
    assert row.reward == 1.0 and scorer.seen == [task().payload["answer"]]


async def test_time_that_is_up_fails_if_there_is_none(snapshot: Path) -> None:
    row = await attempt(snapshot, "hangs", scorer=DirectScorer(), start_to_close_s=0.3)
    assert row.outcome.kind is OutcomeKind.FAILED and row.outcome.reason == FailureKind.DEADLINE
    assert row.reward is None


async def test_a_reward_that_failed_is_no_reward(snapshot: Path) -> None:
    failure = Failed(kind=FailureKind.REWARD_DEADLINE, detail="took too long")
    row = await attempt(snapshot, "single_turn", scorer=DirectScorer(failure))
    assert row.reward is None
    assert row.outcome.reason == FailureKind.REWARD_DEADLINE
    assert row.outcome.detail == "took too long"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("single-turn", 'did you mean "single_turn"'),
        ("agent", r"use single_turn \| .* \| planner \| module:function"),
        ("no_such_module:run", "cannot import"),
        (f"{WORKFLOWS}:nothing", "has no function"),
        (f"{WORKFLOWS}:not_async", "not an async function"),
        ("[1, 2]", "list of strings"),
        ("[oops", "not a valid JSON"),
    ],
)
def test_a_workflow_that_cannot_be_found_is_refused_with_its_cure(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_workflow(name)


async def test_calls_of_tools_are_recorded_with_the_trajectory(snapshot: Path) -> None:
    servers = tuple(ToolServerInfo(name=name, builtin=name) for name in ("python", "files"))
    row = await attempt(snapshot, "calls_tools", tools=servers)
    assert 0 < row.sandbox_ms < 1000 * (row.ended_at - row.started_at)
    assert row.reward == 1.0, row.outcome
    uses = [(use.turn, use.name, use.is_error, use.agent) for use in row.tool_uses]
    assert uses == [
        (-1, "python", False, ""),
        (0, "write_file", False, ""),
        (0, "nope", True, "0.1"),
        (0, "python", False, ""),
    ]
    assert row.tool_uses[0].result == "42\n" and row.tool_uses[0].arguments == '{"code": "6 * 7"}'
    assert decode(encode(row), Trajectory).tool_uses == row.tool_uses
