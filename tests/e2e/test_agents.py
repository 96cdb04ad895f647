# SPDX-License-Identifier: Apache-2.0
"""Agents of recipes/agents, which know nothing of penstock, are trained in one run on a real
engine; their tool calls and results pass through.

In CI those that need nothing but Node and what the tests have anyway; `slow`, all four, each in its
own environment (recipes/agents/setup.sh).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from recipes.agents.make_model import make_model
from tests.e2e.system import PENSTOCK, penstock
from tests.e2e.test_openai_agent import recomputed, snapshots, trained_trajectories
from tests.unit.gateway.gateway_harness import GatewayHarness, running_gateway

from penstock.gateway.renderer import Renderer
from penstock.rollout.isolation import Isolation, IsolationSettings, Use
from penstock.rollout.programs import run_program
from penstock.types import Trajectory, view_ids

RECIPE = Path(__file__).parents[2] / "recipes" / "agents"
SCRIPTS = {
    "anthropic": RECIPE / "anthropic_agent.py",
    "openai-agents": RECIPE / "tool_agent.py",
    "openai": RECIPE.with_name("openai_agent") / "agent.py",
}
"""By package."""
NODE = ("node", str(RECIPE / "node_agent.mjs"))
WITH_TOOL = frozenset({"openai-agents", "node"})
MEMBERS = 2
RUN = """
name: agents
models:
  policy: {init: model, replicas: 1, capacity: 4}
sources:
  - {name: train, task: tasks.jsonl}
workflow: chosen:run
reward: chosen:reward
algorithm: {name: grpo}
sampling: {max_tokens: 16}
training: {learning_rate: 1.0e-3, steps: 1, max_staleness: 0}
"""
CHOSEN = """
import zlib

from penstock.rollout.workflows.command import command

async def run(task, ctx):
    return await command(task.payload["words"])(task, ctx)

def reward(completions, **columns):
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
"""
"""The task says which agent attempts it. No two answers are rewarded alike, so each is trained."""


def ours() -> dict[str, Sequence[str]]:
    """Agents that run wherever the tests do."""
    return {"anthropic": (sys.executable, str(SCRIPTS["anthropic"])), "node": NODE}


def own() -> dict[str, Sequence[str]]:
    """All four, each package in its own environment."""
    made = subprocess.run([RECIPE / "setup.sh"], capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stderr
    environments = Path(made.stdout.strip())
    agents = ours()
    for package, script in SCRIPTS.items():
        agents[package] = (str(environments / package / "bin" / "python"), str(script))
    return agents


# --- one run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", pytest.param("own", marks=pytest.mark.slow)])
def test_agents_of_all_kinds_are_trained_in_one_run(tmp_path: Path, kind: str) -> None:
    agents = ours() if kind == "ours" else own()
    run = run_agents(tmp_path, agents)
    audit = penstock("audit", str(run), "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    summary = json.loads(audit.stdout.splitlines()[-1])["summary"]
    assert (summary["steps"], summary["lost"], summary["trained_twice"]) == (1, 0, 0)
    rows = rows_by_agent(run, list(agents))
    renderer = Renderer.load(tmp_path / "model")
    for name, trajectories in rows.items():
        assert len({row.reward for row in trajectories}) == len(trajectories) == MEMBERS, name
        for trajectory in trajectories:
            check_turns(trajectory)
        if name in WITH_TOOL:
            assert any(called_its_tool(row, renderer) for row in trajectories), name
        else:
            assert all([turn.parent for turn in row.turns] == [-1, 0] for row in trajectories), name
    check_logprobs(run, itertools.chain(*rows.values()))


def run_agents(folder: Path, agents: Mapping[str, Sequence[str]]) -> Path:
    """One step on one batch: a group of each agent."""
    make_model(folder / "model")
    (folder / "chosen.py").write_text(CHOSEN)
    tasks = [{"prompt": "abc>", "words": words} for words in agents.values()]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = yaml.safe_load(RUN)
    config["algorithm"]["num_generations"] = MEMBERS
    config["training"]["groups_per_batch"] = len(agents)
    config["output_dir"] = str(folder)
    config["sandbox"] = {"workflow": {"env": ["AGENT_MAX_TOKENS"]}}
    folder.chmod(0o755)  # as root, a sandbox has a user of its own
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [*PENSTOCK, "run", "run.yaml", "--headless"],
        cwd=folder,
        env={**os.environ, "AGENT_MAX_TOKENS": "16"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder / "agents"


def rows_by_agent(run: Path, names: Sequence[str]) -> dict[str, list[Trajectory]]:
    """What was trained, by the agent that its task named."""
    rows: dict[str, list[Trajectory]] = {name: [] for name in names}
    with sqlite3.connect(run / "ledger" / "ledger.db") as database:
        issued = database.execute("SELECT group_id, ordinal FROM groups")
        ordinals: dict[str, int] = dict(issued.fetchall())
        for trajectory in trained_trajectories(database, run / "ledger"):
            rows[names[ordinals[trajectory.group_id] % len(names)]].append(trajectory)
    return rows


def check_turns(trajectory: Trajectory) -> None:
    """Every turn reached its agent, and its spans name the version of each of its tokens."""
    assert len(trajectory.turns) >= 1
    for turn in trajectory.turns:
        assert turn.reached_agent
        num_tokens = len(view_ids(turn.sampled_ids))
        assert num_tokens > 0
        spans = [(span.start, span.end, span.incarnation, span.number) for span in turn.spans]
        assert spans == [(0, num_tokens, 1, 0)]


def called_its_tool(trajectory: Trajectory, renderer: Renderer) -> bool:
    """A turn goes on from an answer with a call, and begins with what the tool returned. The model
    writes at random; with the seeds of this run it calls."""
    for turn in trajectory.turns:
        if turn.parent < 0:
            continue
        said = renderer.decode(view_ids(trajectory.turns[turn.parent].sampled_ids).tolist())
        heard = renderer.decode(view_ids(turn.prompt_ids).tolist()).removeprefix("<eos>")
        called: list[str] = re.findall('"text": "([a-j]*)"', said)
        if called and heard == "".join(text[::-1] + "<eos>" for text in called):
            return True
    return False


def check_logprobs(run: Path, trajectories: Iterable[Trajectory]) -> None:
    """What the engine recorded is what the trainer computes for the same tokens."""
    with sqlite3.connect(run / "ledger" / "ledger.db") as database:
        folders = snapshots(database, run / "weights", run / "snapshots")
    for trajectory in trajectories:
        trainers, recorded = recomputed(trajectory, folders[1, 0])
        assert float((trainers - recorded).abs().max()) < 1e-4


# --- one tool call ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["node", pytest.param("openai-agents", marks=pytest.mark.slow)])
async def test_a_tool_call_and_its_result_pass_through(tmp_path: Path, name: str) -> None:
    words = NODE if name == "node" else own()[name]
    async with running_gateway(tmp_path) as harness:
        harness.engine.lines = [
            '<tool_call>{"name": "backwards", "arguments": {"text":  "xyz"}}</tool_call>',
            "done",
        ]
        direct = Isolation(IsolationSettings(backend="none"))  # it calls the harness over TCP
        sandbox = await direct.open(Use.WORKFLOW, env=environment(harness))
        printed = await run_program(sandbox, words, timeout_s=500)
        assert printed == "done"
        assert '"backwards"' in harness.prompt(0)
        assert harness.prompt(1).endswith(
            "<|im_start|>tool\nzyx<|im_end|>\n<|im_start|>assistant\n"
        )
        assert [turn.parent for turn in harness.session.turns()] == [-1, 0]
        assert all(turn.reached_agent for turn in harness.session.turns())


def environment(harness: GatewayHarness) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": harness.url + "/v1",
        "OPENAI_API_KEY": harness.session.api_key,
        "PENSTOCK_TASK": json.dumps({"prompt": "xyz>"}),
    }
