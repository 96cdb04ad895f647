# SPDX-License-Identifier: Apache-2.0
"""Attempts at Harbor tasks as a node makes them: agents with plain clients call the model in
training, and the verifier's word is the reward of the row."""

from __future__ import annotations

import asyncio
import json
import string
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import POLICY, facts
from tests.unit.rollout.fake_dataflow import task as plain_task
from tests.unit.rollout.harbor_trials import TASKS, task, with_test
from tests.unit.rollout.test_attempt import GRANT, NoTurns
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from penstock.gateway.gateway import Gateway
from penstock.gateway.renderer import Renderer
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.recorder import Recorder
from penstock.tasks.harbor import KEY, HarborTask
from penstock.types import (
    FailureKind,
    NodeId,
    OutcomeKind,
    SamplingSpec,
    Task,
    Trajectory,
    Version,
)

URLLIB_AGENT = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read()}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as response:
    text = json.load(response)["choices"][0]["message"]["content"]
open("hello.txt", "w").write(text)
"""
OPENAI_AGENT = """
import sys
from openai import OpenAI
messages = [{"role": "user", "content": sys.stdin.read()}]
answer = OpenAI().chat.completions.create(model="policy", messages=messages)
open("hello.txt", "w").write(answer.choices[0].message.content)
"""


def write_snapshot(folder: Path) -> Path:
    """A token per printable character."""
    folder.mkdir()
    vocab = {letter: index for index, letter in enumerate(string.printable)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocab)}))
    return folder


async def attempt(
    snapshot: Path, given: HarborTask, argv: Sequence[str], answers: Sequence[str]
) -> Trajectory:
    script = [[string.printable.index(letter) for letter in answer] for answer in answers]
    engine = ScriptedEngine(script)
    await engine.load(snapshot, Version(policy=POLICY, incarnation=1, number=0))
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(snapshot))
    endpoint = Endpoint(gateway)
    serving = asyncio.create_task(endpoint.run())
    workflow = json.dumps({KEY: list(argv)})
    run_info = facts(workflow=workflow, sampling=SamplingSpec(max_tokens=500))
    recorder = Recorder(NoTurns(), NodeId("n"))
    runner = AttemptRunner(gateway, endpoint, recorder, None, run_info, NodeId("n"))
    try:
        return await asyncio.wait_for(runner.run(GRANT, harbor_task(given, workflow)), 100)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def harbor_task(given: HarborTask, workflow: str) -> Task:
    payload = {"prompt": "Say hello.\n", KEY: json.loads(json.dumps(asdict(given)))}
    return replace(plain_task(), payload=payload, workflow=workflow)


@pytest.fixture
def text_snapshot(tmp_path: Path) -> Path:
    return write_snapshot(tmp_path / "text")


@pytest.mark.parametrize(
    "agent", [URLLIB_AGENT, pytest.param(OPENAI_AGENT, marks=pytest.mark.slow)]
)
async def test_an_unmodified_agent_inside_calls_the_model_in_training(
    text_snapshot: Path, tmp_path: Path, agent: str
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(agent)
    argv = [sys.executable, str(program)]
    row = await attempt(text_snapshot, task("hello-file"), argv, ["hello"])
    assert (row.reward, row.outcome.kind) == (1.0, OutcomeKind.COMPLETED), row.outcome
    assert len(row.turns) == 1 and len(row.turns[0].sampled_ids) == 4 * len("hello")
    wrong = await attempt(text_snapshot, task("hello-file"), argv, ["hullo"])
    assert (wrong.reward, wrong.outcome.kind) == (0.0, OutcomeKind.COMPLETED)


async def test_the_built_in_agent_runs_what_the_model_writes(text_snapshot: Path) -> None:
    solution = (TASKS / "sort-lines" / "solution" / "solve.sh").read_text()
    answers = ["Look:\n```sh\nls\n```", f"```bash\n{solution}```", "Done."]
    row = await attempt(text_snapshot, task("sort-lines"), [], answers)
    assert (row.reward, row.outcome.kind) == (1.0, OutcomeKind.COMPLETED), row.outcome
    assert len(row.turns) == 3


async def test_failures_are_typed_and_have_no_reward(text_snapshot: Path) -> None:
    broken = with_test(task("hello-file"), "#!/bin/sh\ntrue")
    row = await attempt(text_snapshot, broken, [], ["Done."])
    assert row.reward is None and row.outcome.reason == FailureKind.REWARD
    slow = with_test(task("hello-file", verifier_timeout_s=0.5), "#!/bin/sh\nsleep 600")
    row = await attempt(text_snapshot, slow, [], ["Done."])
    assert row.reward is None and row.outcome.reason == FailureKind.REWARD_DEADLINE
    rootless = task("hello-file", root=str(text_snapshot))
    row = await attempt(text_snapshot, rootless, [], ["Done."])
    assert row.reward is None and row.outcome.reason == FailureKind.SANDBOX
    row = await attempt(text_snapshot, task("hello-file"), ["sh", "-c", "exit 4"], [])
    assert row.reward is None and row.outcome.reason == FailureKind.WORKFLOW
    assert "code 4" in row.outcome.detail
